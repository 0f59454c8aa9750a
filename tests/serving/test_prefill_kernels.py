"""Prefill on a KV cache: the forward kernels of mma and simt read tiles of keys from a contiguous or paged cache."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from cache_cases import (
    CacheCall,
    CacheCase,
    assert_append_writes_the_bits_of_the_cpu,
    check,
    posed,
    run_kernels,
)
from planting import change, planted, skip
from test_decode_kernels import EVERYTHING, PACKED, assert_other_sequences_keep_their_bits
from test_invariance import assert_bits
from test_kv_cache import CASES
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash import UnsupportedError, dispatch
from cupy_flash.gpu import run_plan
from cupy_flash.plan.plan import candidates
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OWN_DTYPE = {name: case for name, case in CASES.items() if case.cache_dtype is None}
ROWS = {"everything": EVERYTHING, "packed-everything": PACKED, **OWN_DTYPE}
CHUNK = CacheCase(
    lengths=(200, 0, 130), q_len=150, appended=150, capacity=352, page=16, heads=2, kv_heads=1, head_dim=32,
    head_dim_v=48, dtype="float16",
)  # fmt: skip


@pytest.mark.parametrize("case", in_tiers(ROWS, ("everything",)))
@pytest.mark.parametrize("engine", ["mma", exhaustive("simt")])
def test_the_formula(case, engine):
    half = case if case.dtype == "bfloat16" else replace(case, dtype="float16")
    check(half, backend="simulator", engine=engine)


@pytest.mark.parametrize("case", in_tiers(ROWS, ("everything", "packed-everything")))
@pytest.mark.parametrize("dtype", ["float32", exhaustive("float64")])
def test_the_formula_in_full_precision(case, dtype):
    """Only simt serves float32 and float64; some cases append rows, others do not."""
    check(replace(case, dtype=dtype), backend="simulator")


@pytest.mark.parametrize("page", in_tiers({str(n): n for n in (None, 1, 2, 8, 16, 64, 256)}, ()))
@pytest.mark.parametrize("engine", ["mma", "simt"])
def test_every_page_size(page, engine):
    """A chunk of several query tiles is appended across pages, from lengths around the ends of pages and of the cache.

    Cache slots that hold no key are NaN, pages that belong to no sequence too, and unused table entries are -1.
    """
    rows = 70
    ends = {0, 1, 300 - rows} if page is None else {0, 1, page - 1, page, page + 1, 300 - rows}
    lengths = tuple(sorted(n for n in ends if n + rows <= 300))
    case = replace(CHUNK, lengths=lengths, q_len=rows, appended=rows, page=page, capacity=320)
    check(case, run_kernels(case.call(), engine=engine))


@pytest.mark.parametrize(
    ("arch", "dim", "dim_v"),
    [exhaustive(*row) for row in (
        ("sm_75", 64, 64), ("sm_75", 256, 256), ("sm_80", 40, 80), ("sm_80", 128, 128), ("sm_80", 192, 128),
        ("sm_80", 512, 512), ("sm_90a", 64, 64), ("sm_120", 256, 256),
    )],
)  # fmt: skip
def test_any_gpu_and_head_dimension(arch, dim, dim_v):
    case = replace(CHUNK, head_dim=dim, head_dim_v=dim_v, lengths=(40, 0), q_len=70, appended=70, capacity=112)
    check(case, run_kernels(case.call(), arch=arch, engine="mma"))


def planned(case):
    """Return the plan of a case on sm_80 by mma."""
    return dispatch.plan_for(posed(case.call(), backend="simulator", engine="mma")[0])


@pytest.mark.exhaustive
def test_every_tile_with_pages_of_one_key():
    """With pages of one key, each thread of a tile with few threads looks up several pages."""
    case = replace(CHUNK, page=1, lengths=(70, 3), q_len=70, appended=70, capacity=144)
    for _, each in candidates(planned(case), "mma"):
        problem, operands = posed(case.call(), backend="simulator", engine="mma")
        out, lse = run_plan.forward(each._replace(problem=problem), operands, start)
        check(case, (out.numpy(), lse.numpy(), operands.k.numpy(), operands.v.numpy()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["mma", "simt"])
def test_pages_change_no_bit(engine):
    """A contiguous cache, a paged one, and attention on the keys themselves give the same bits."""
    case = replace(CHUNK, page=None, appended=None, lengths=(350, 150, 280), capacity=384)
    call = case.call()
    expected = run_kernels(call, engine=engine)
    for page in (1, 16, 128):
        order = np.random.default_rng(page).permutation(3 * 384 // page)
        pools = [x.reshape(-1, page, *x.shape[2:])[order] for x in call[1:3]]
        table = np.argsort(order).reshape(3, -1).astype(np.int32)
        paged = CacheCall(call.q, *pools, call.options | {"block_table": table})
        assert_bits(run_kernels(paged, engine=engine), expected, slice(None))
    k, v = (np.nan_to_num(x) for x in call[1:3])
    lengths = call.options["cache_seqlens"]
    plain = cupy_flash.attention(call.q, k, v, causal=True, kv_lengths=lengths, return_lse=True, backend="simulator",
                                 engine=engine)  # fmt: skip
    assert_bits(plain, expected, slice(None))


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [None, 1, 16])
def test_keys_are_read_once_per_query_tile(page, watch):
    """The bytes read, including tables, exceed the bytes of the keys that each query tile sees by at most 5 %."""
    case = CacheCase(lengths=(512,), capacity=512, q_len=128, page=page, heads=1, kv_heads=1, head_dim=64,
                     head_dim_v=64, dtype="float16")  # fmt: skip
    run_kernels(case.call(), engine="mma", start=watch.start)
    rows = planned(case).block_q
    keys = sum(min(512 - case.q_len + start + rows, 512) for start in range(0, case.q_len, rows)) * 2 * 2 * 64
    queries = case.q_len * 2 * 64
    counters = watch.counters["forward"]
    assert keys + queries <= counters.global_bytes_read <= 1.05 * (keys + queries)
    assert not counters.conflicting()


# Plans


@pytest.mark.parametrize(("dtype", "q_len", "engine"), [
    ("float16", 1, "mma_decode"), ("float16", 16, "mma_decode"), ("float16", 512, "mma"), ("bfloat16", 2048, "mma"),
    ("float32", 1, "simt"), ("float32", 512, "simt"),
])  # fmt: skip
def test_the_number_of_queries_chooses_the_kernel(dtype, q_len, engine):
    for page in (None, 16):
        case = CacheCase(lengths=(3000, 500), capacity=8192, page=page, q_len=q_len, heads=16, kv_heads=4, dtype=dtype,
                         head_dim=64, head_dim_v=64)  # fmt: skip
        problem, _ = posed(case.call(), backend="simulator")
        chosen = dispatch.plan_for(problem)
        assert chosen.engine == engine
        steps = [x.kernel for x in chosen.launches]
        assert steps == (["mma/decode", "merge"] if engine == "mma_decode" else [f"{engine}/forward"])
        assert f"engine     {engine}" in chosen.explain()


def test_one_row_tile_is_decoded_even_if_mma_is_predicted_to_be_faster():
    problem, _ = posed(CacheCase(lengths=(5,), capacity=40, dtype="float16").call(), backend="simulator")
    text = dispatch.plan_for(problem).explain()
    assert "not mma    its smallest predicted time is" in text
    assert "one tile of mma_decode has all 2 rows of a group, and reads each key once" in text


REFUSED = {
    "pieces": (dict(split_size=64), "mma", "it does not compute the keys in pieces of split_size"),
    "pieces-fp32": (dict(split_size=64, dtype="float32"), None, "it does not compute the keys in pieces"),
    "fp8": (dict(cache_dtype="float8_e4m3fn"), "mma", "it reads no caches of float8_e4m3fn, as mma_decode does"),
    "wgmma": (dict(), "wgmma", "it reads no KV cache in this version"),
}


@pytest.mark.parametrize(("options", "engine", "reason"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, engine, reason):
    call = CacheCase(**dict(dtype="float16") | options).call()
    with pytest.raises(UnsupportedError, match=reason):
        cupy_flash.attention_with_kv_cache(*call[:3], **call.options, backend="simulator", engine=engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_append_alone_writes_the_same_bits_as_the_cpu(dtype, monkeypatch):
    call = CacheCase(page=4, appended=3, rotary=(8, True), dtype=dtype).call()
    names = ("cache_seqlens", "block_table", "rotary_cos", "rotary_sin", "layout")
    options = {name: call.options[name] for name in names if name in call.options}
    assert_append_writes_the_bits_of_the_cpu(call, options, monkeypatch)


# Planted bugs


READS = replace(CHUNK, appended=None, lengths=(200, 150, 130))
BIG_PAGES = replace(READS, page=256, capacity=512)
EITHER = (AssertionError, SimulationError)
LEFTPAD = CacheCase(lengths=(60, 70), q_len=2, capacity=80, leftpad=(3, 20), dtype="float16")
BUGS = {
    "page-of-another-key": (change("page-of-key", "table[key >> page_log2]", "table[0]"), READS, AssertionError),
    "missing-page-is-read": (change("readable-rows", "&& rows.has(position)", ""), "pages", SimulationError),
    "pages-of-the-tile-before": (change("stored-pages", "slot ^ 1", "slot"), READS, EITHER),
    "one-slot-of-pages": (skip("next-slot-of-pages"), READS, EITHER),
    "no-barrier-after-a-look-up": (skip("barrier-after-pages"), READS, EITHER),
    "pages-of-other-tiles": (
        change("pages-of-tile", "(long long)start + BLOCK_KV", "key + (1LL << blocks.page_log2)"),
        BIG_PAGES,
        SimulationError,
    ),
    "keys-before-the-padding-are-seen": (change("after-padding", "max(j, leftpad)", "j"), LEFTPAD, AssertionError),
    "last-keys-mask-not-shifted": (skip("shift-mask"), EVERYTHING, EITHER),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS, ("page-of-another-key",)))
def test_planted_bugs_are_found(bug, monkeypatch):
    bug, case, error = bug
    with planted(monkeypatch, bug), pytest.raises(error):
        if isinstance(case, str):
            assert_other_sequences_keep_their_bits(case, functools.partial(run_kernels, engine="mma"))
        else:
            check(case, run_kernels(case.call(), engine="mma"))
