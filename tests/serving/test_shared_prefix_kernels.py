"""Prefixes that sequences share in the kernels on the simulator: the unshared call, with each prefix read once."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cache_cases import posed, references, run_kernels
from cases import DTYPES
from planting import change, planted, skip
from quantised import options_of, quantised
from shared_prefixes import CASES, KV_HEADS, calls, pools_after
from tiers import in_tiers
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import device
from cupy_flash.gpu import ahead
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HALF = {"float16": "mma_decode", "bfloat16": "mma_decode", "float32": "simt"}
SIZES = ([70, 9], [5, 0, 17], 2, [0, 1, 0])
PACKED = ([9, 0, 70], [5, 0, 17, 3], (3, 1, 0, 2), [2, 0, -1, 2])


def check(dtype, *sizes, blocks=None, **options):
    call, unshared = calls(*sizes, dtype=dtype, **options)
    exact, low = references(unshared, DTYPES[dtype])
    results = run_kernels(call, engine=HALF[dtype], blocks=blocks)
    for name, actual, expected, approximate in zip(("out", "lse"), results, exact, low, strict=False):
        of = np.float32 if name == "lse" else DTYPES[dtype]
        assert_matches_reference(actual, expected, approximate, of, name)


@pytest.mark.parametrize("options", in_tiers(CASES, ("alibi-and-mask", "mods")))
def test_simt(options):
    check("float32", *SIZES, **options)


@pytest.mark.parametrize("options", in_tiers(CASES, ("window", "mods")))
def test_mma_decode(options):
    check("float16", *SIZES, **options)


@pytest.mark.parametrize(("dtype", "blocks"), [("float32", None), ("bfloat16", 3)])
def test_a_packed_batch(dtype, blocks):
    """With a sequence without queries, a prefix without keys, and one that no sequence has."""
    check(dtype, *PACKED, page=6, blocks=blocks)


LATENT = dict(dim=32, head_dim_v=16)  # values inside keys


@pytest.mark.parametrize("options", in_tiers(CASES, ("window",)))
def test_values_inside_keys(options):
    """Both passes read a tile once for both products."""
    check("float16", *SIZES, **LATENT | options)


@pytest.mark.parametrize("sizes", [{}, LATENT], ids=["values", "inside-keys"])
def test_the_bits_of_the_unshared_call(sizes):
    """Under split_size, if the lengths of prefixes are multiples of it; also the statistics of rows.

    Rows are appended to their own pages alone.
    """
    shared, unshared = calls([64, 128], [70, 5, 0], 2, [1, 0, 1], dtype="float16", split_size=64, **sizes)
    asked = {"statistics": ("argmax", "entropy"), "return_lse": True}
    results = [run_kernels(call._replace(options=call.options | asked)) for call in (shared, unshared)]
    for a, b in zip(*((x[0], x[1], *x[4:]) for x in results), strict=True):
        assert a.tobytes() == b.tobytes()
    caches = [x for x in results[0][2:4] if x is not None]
    for a, b in zip(caches, pools_after(shared), strict=True):
        assert a.tobytes() == b.tobytes()


def test_statistics_of_fp32():
    call, unshared = calls(*SIZES)
    run = partial(cupy_flash.attention_with_kv_cache, statistics=("max", "argmax", "entropy"), return_lse=True)
    kernels = run(*call.copied()[:3], **call.options, backend="simulator", engine="simt")[2]
    for a, b in zip(kernels, run(*unshared[:3], **unshared.options)[2], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_quantised_caches():
    call, _ = calls(*SIZES, dtype="float16")
    codes = [quantised(x, "int8", "float16") for x in call[1:3]]
    own = call._replace(k_cache=codes[0].codes, v_cache=codes[1].codes, options=call.options | options_of(*codes))
    out, lse = cupy_flash.attention_with_kv_cache(*own.copied()[:3], **own.options, return_lse=True)
    results = run_kernels(own)
    np.testing.assert_allclose(results[0].astype("f4"), out.astype("f4"), atol=2e-3)
    np.testing.assert_allclose(results[1], lse, atol=2e-3)


@pytest.mark.parametrize("inside_keys", [False, True])
def test_a_prefix_is_read_once(inside_keys):
    """By a tile of up to 64 rows; the rest are queries, and the numbers of pages and sequences."""
    dim, counters = 128, []
    sizes = dict(head_dim_v=dim) if inside_keys else {}
    call, _ = calls([512], [5] * 16, 1, [0] * 16, dim=dim, dtype="float16", **sizes)
    run_kernels(call, blocks=2, start=lambda work: counters.extend(start(work)))
    (on_prefix, _) = (x for x in counters if x.function.name == "decode")
    keys, queries = 512 * KV_HEADS * 2 * dim * (1 if inside_keys else 2), call.q.nbytes
    assert keys <= on_prefix.global_bytes_read - 2 * queries <= 1.1 * keys


def test_contents_out_of_bounds_are_not_read():
    """Groups that do not exist, and lengths of prefixes past their tables."""

    def spoil(operands):
        operands.cache.prefix_group.numpy()[...] = (-7, 2**30, 1)
        operands.cache.prefix_lengths.numpy()[...] = (-(2**31), 2**31 - 1)
        operands.cache.prefix_table.numpy()[1, -1] = 2**30

    for dtype, engine in (("float32", "simt"), ("float16", "mma_decode")):
        call, _ = calls(*SIZES, dtype=dtype)
        run_kernels(call, engine=engine, spoil=spoil)


def test_descales_beside_prefixes_are_refused():
    call, _ = calls(*SIZES, dtype="float16")
    pools = [x.astype("float8_e4m3fn") for x in call[1:3]]
    options = call.options | {"k_descale": np.ones((3, KV_HEADS), np.float32), "backend": "simulator"}
    with pytest.raises(cupy_flash.UnsupportedError, match="it takes no k_descale beside shared prefixes"):
        cupy_flash.attention_with_kv_cache(call.q, *pools, **options)


BUGS = {
    "simt-only-own-keys": (change("keys-of-prefix", "own.on_prefix(p)", "own"), "float32", {}),
    "prefix-of-group-0": (change("table-of-group", "max(group, 0)", "0"), "float32", {}),
    "offset-of-own-keys": (skip("offset-on-prefix"), "float32", CASES["window"]),
    "mask-of-own-keys": (skip("mask-on-prefix"), "float32", CASES["alibi-and-mask"] | {"causal": False}),
    "position-of-query": (skip("query-position-after-prefix"), "float32", CASES["mods"]),
    "rotated-from-own-keys": (skip("position-after-prefix"), "float32", CASES["rotary"]),
    "query-of-the-first-sequence": (skip("place-of-next-sequence"), "float16", {}),
    "row-of-another-sequence": (change("row-of-sequence", "p.prefix_places[b]", "part.first_query"), "float16", {}),
    "mask-of-the-first-sequence": (skip("sequence-of-row"), "float16", CASES["window"]),
    "results-overwritten": (change("result-beside-prefix", "tile + block", "tile"), "float16", dict(blocks=3)),
    "unmasked-by-one": (skip("unmasked-by-group"), "float16", {"window": (100, 0)}),
    "row-on-prefix": (change("row-on-prefix", "row % PREFIX_BLOCK_Q", "0"), "float16", {}),
    "own-keys-alone": (skip("merge-with-prefix"), "float16", {}),
    "latent-row-of-another-sequence": (
        change("row-of-sequence", "p.prefix_places[b]", "part.first_query"),
        "float16",
        LATENT,
    ),
    "latent-mask-of-the-first-sequence": (skip("sequence-of-row"), "float16", LATENT | CASES["window"]),
    "latent-lse-of-own-keys": (change("store-lse-of-prefix", "p.prefix_lse", "p.part_lse"), "float16", LATENT),
}


@pytest.mark.parametrize("planted_bug", in_tiers(BUGS, ("prefix-of-group-0", "row-of-another-sequence")))
def test_a_bug_is_found(planted_bug, monkeypatch):
    bug, dtype, options = planted_bug
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        check(dtype, [150, 9], [5, 0, 17], 2, [0, 1, 0], **options)


def test_the_key_of_a_maximum_without_its_prefix_is_found(monkeypatch):
    with planted(monkeypatch, skip("key-after-prefix")), pytest.raises(AssertionError):
        test_the_bits_of_the_unshared_call({})


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_compile_covers_calls(dtype):
    """For every batch size: it decides the rows of a tile in the pass over prefixes."""
    on = device.named("sm_80", "cuda")
    built = {x.text_key for x in ahead.launches(on, dtype=dtype, head_dim=16, group=2, cache=True, prefixes=True)}
    for own, rows in (([5], 1), ([5] * 16, 1), ([5] * 40, 1), ([5, 0], 9), ([1, 2], 40)):
        call, _ = calls([70], own, rows, [0] * len(own), dtype=dtype)
        problem = posed(call)[0]._replace(device="cuda:0", kv_len=2**12)
        assert {x.text_key for x in plan(problem, on).launches} <= built
