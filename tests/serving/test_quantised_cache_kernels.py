"""Quantised caches in the kernels on the simulator: appends with the bits of the CPU, and decodes."""

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cache_cases import CacheCall, CacheCase, posed, references, run_kernels
from cases import DTYPES
from planting import change, planted, skip
from quantised import calls, options_of, quantised
from tiers import exhaustive, in_tiers
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import device
from cupy_flash.gpu import ahead
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import SimulationError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL = CacheCase((5, 61), 3, 3, 72, 8, 4, 2, 32, 24, "float16")
SPECIAL = np.array([np.nan, 0, -0.0, np.inf, -np.inf, 6e4, -3e-8, 127, 0.5, -1.5, 2.5, 448, 17])


def appended(case, kind, scale_dtype, monkeypatch, backend):
    """Return the bytes of caches, scales and zeros after an append of rows with special numbers."""
    call = case.call()
    given = {name: call.options[name] for name in ("cache_seqlens", "block_table", "rotary_cos", "rotary_sin", "layout")
             if name in call.options}  # fmt: skip
    rows = [call.options[name] for name in "kv" if name in call.options]
    for x in rows:
        flat = x.reshape(-1, x.shape[-1])
        for n, number in enumerate(SPECIAL[: len(flat)]):
            flat[n, n] = number
        flat[1], flat[2], flat[3, 8:] = 0, -0.0, 1e-6
    pools = [quantised(np.ones(x.shape), kind, scale_dtype) for x in call[1:3] if x is not None]
    monkeypatch.setenv("CUPY_FLASH_BACKEND", backend)
    v_cache = None if case.shared else pools[1].codes
    scales = options_of(pools[0], None if case.shared else pools[1])
    cupy_flash.append_to_kv_cache(rows[0], None if case.shared else rows[1], pools[0].codes, v_cache, **given, **scales)
    return [x.tobytes() for of in pools for x in of if x is not None]


CASES = {
    "int8": (replace(SMALL, rotary=(8, True)), "int8", "float16"),
    "e4m3": (replace(SMALL, page=None, layout="bhsd"), "float8_e4m3fn", "float32"),
    "e5m2": (replace(SMALL, dtype="bfloat16"), "float8_e5m2", "float32"),
    "uint8": (replace(SMALL, page=48, capacity=96), "uint8", "float16"),
    "latent": (replace(SMALL, shared=True, kv_heads=1), "uint8", "float32"),
}


@pytest.mark.parametrize(("case", "kind", "scale_dtype"), CASES.values(), ids=CASES)
def test_an_append_writes_the_bits_of_the_cpu(case, kind, scale_dtype, monkeypatch):
    on = [appended(case, kind, scale_dtype, monkeypatch, backend) for backend in ("cpu", "simulator")]
    assert on[0] == on[1]


def test_scales_behind_the_codes_of_their_keys():
    """Kernels write and read them where they are, in vLLM's layout."""
    pool = np.zeros((2, 6, 8, 2, 48), np.int8)
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 2, 9, 2, 32)).astype(np.float16)
    table, q = rng.permutation(6).reshape(2, 3).astype(np.int32), rng.normal(size=(2, 9, 4, 32)).astype(np.float16)
    how = dict(block_table=table, cache_seqlens=0, backend="simulator", engine="mma_decode")
    attend = functools.partial(cupy_flash.attention_with_kv_cache, q, k=k, v=v, **how)
    k_scale, v_scale = (x[..., 32:].view(np.float32)[..., 0] for x in pool)
    out = attend(*pool[..., :32], k_scale=k_scale, v_scale=v_scale)
    own, apart = np.zeros((2, 6, 8, 2), np.float32), np.zeros((2, 6, 8, 2, 32), np.int8)
    assert attend(*apart, k_scale=own[0], v_scale=own[1]).tobytes() == out.tobytes()
    assert (apart == pool[..., :32]).all() and (own[0] == k_scale).all() and (own[1] == v_scale).all()


READ = replace(SMALL, appended=None)
READS = {
    "int8": (READ, "int8", "float16"),
    "e4m3": (replace(READ, page=None, layout="bhsd", softcap=5.0), "float8_e4m3fn", "float32"),
    "e5m2": (replace(READ, dtype="bfloat16", q_len=1), "float8_e5m2", "float32"),
    "uint8": (replace(READ, page=48, capacity=96, head_dim=64), "uint8", "float16"),
    "latent": (replace(READ, shared=True, kv_heads=1, dtype="bfloat16"), "uint8", "float32"),
}


def check(case, kind, scale_dtype, **options):
    """Compare the kernels on a cache that is quantised by hand with the formula on the numbers that it stores."""
    call, on_numbers = calls(case, kind, scale_dtype)
    dtype = DTYPES[case.dtype]
    exact, low = references(on_numbers, dtype)
    out, lse = run_kernels(call, **options)[:2]
    assert_matches_reference(out, exact[0], low[0], dtype, f"out of {case}")
    assert_matches_reference(lse, exact[1], low[1], np.float32, f"lse of {case}")


@pytest.mark.parametrize("case", in_tiers(READS, ("int8", "uint8")))
def test_a_decode(case):
    check(*case)


PROMPT = replace(READ, lengths=(70, 33), q_len=20, capacity=80)
PROMPTS = {
    "int8": (PROMPT, "int8", "float16"),
    "e4m3": (replace(PROMPT, page=None, layout="bhsd", softcap=5.0), "float8_e4m3fn", "float32"),
    "e5m2": (replace(PROMPT, dtype="bfloat16", window=(40, None), head_dim=40), "float8_e5m2", "float32"),
    "uint8": (replace(PROMPT, page=48, capacity=96, head_dim=48), "uint8", "float16"),
    "wide": (replace(PROMPT, head_dim=256, head_dim_v=320, dtype="bfloat16"), "uint8", "float16"),
}


@pytest.mark.parametrize("case", in_tiers(PROMPTS, ("e5m2", "uint8")))
def test_a_prompt(case):
    """By the forward of mma, which converts the codes of a tile once for all rows of a block."""
    check(*case, engine="mma")


CONVERSIONS = [
    ("sm_80", "float16", "int8", "mma_decode"),
    ("sm_80", "bfloat16", "int8", "mma_decode"),
    ("sm_80", "bfloat16", "float8_e4m3fn", "mma_decode"),
    ("sm_80", "float16", "uint8", "mma"),
    *(
        exhaustive(*x)
        for x in (
            ("sm_75", "float16", "int8", "mma_decode"),
            ("sm_75", "float16", "uint8", "mma_decode"),
            ("sm_80", "float16", "float8_e4m3fn", "mma_decode"),
            ("sm_80", "float16", "float8_e5m2", "mma_decode"),
            ("sm_80", "bfloat16", "float8_e5m2", "mma"),
            ("sm_80", "bfloat16", "uint8", "mma_decode"),
            ("sm_80", "bfloat16", "int8", "mma"),
            ("sm_80", "float16", "float8_e4m3fn", "mma"),
            ("sm_90a", "float16", "float8_e4m3fn", "mma_decode"),
            ("sm_90a", "bfloat16", "float8_e4m3fn", "mma"),
        )
    ),
]


def check_conversions(arch, dtype, kind, engine):
    """Compare every code in the keys and in the values of a slot of each sequence.

    All scales are 1, all zeros 0 and the queries units, so lse is the key, and out the value.
    """
    dim, of_4_bits = 128, kind == "uint8"
    codes = np.arange(256, dtype=np.uint8).reshape(-1, dim // (1 + of_4_bits)).view(getattr(ml_dtypes, kind, kind))
    numbers = np.stack([codes & 15, codes >> 4], -1).reshape(-1, dim) if of_4_bits else codes
    numbers = numbers.astype(np.float64)
    keys = codes if of_4_bits else np.where(np.isfinite(numbers), codes, np.zeros_like(codes))
    units = np.broadcast_to(np.eye(dim, dtype=DTYPES[dtype])[:, None], (len(codes), dim, 1, dim))
    one = np.ones((len(codes), 1, 1), np.float32)
    own = dict(k_scale=one, v_scale=one) | (dict(k_zero=0 * one, v_zero=0 * one) if of_4_bits else {})
    slots = (x[:, None, None] for x in (keys, codes))
    call = CacheCall(units, *slots, dict(cache_seqlens=1, causal=False, scale=1.0) | own)
    out, lse = run_kernels(call, arch=arch, engine=engine)[:2]
    np.testing.assert_array_equal(out[:, :, 0].astype(np.float64), numbers[:, None].repeat(dim, 1))
    # rtol: log2(e) of the largest codes; neighbours differ by 0.8 % at least
    np.testing.assert_allclose(lse[:, 0], np.where(np.isfinite(numbers), numbers, 0), rtol=1e-6)


@pytest.mark.parametrize(("arch", "dtype", "kind", "engine"), CONVERSIONS)
def test_every_code_is_converted_exactly(arch, dtype, kind, engine):
    check_conversions(arch, dtype, kind, engine)


OF_CONVERSIONS = {
    "the-other-column": (change("column-of-codes", "column, column + 2", "column ^ 1, (column ^ 1) + 2"), "int8"),
    "nan-is-480": (change("nan-of-e4m3", ", nan)", ", 0)"), "float8_e4m3fn"),
    "negative-codes-without-sign": (change("sign-of-int8", "offset)", "0xC300C300)"), "int8"),
}


@pytest.mark.parametrize("planted_bug", in_tiers(OF_CONVERSIONS, ("negative-codes-without-sign",)))
def test_a_bug_in_a_conversion_is_found(planted_bug, monkeypatch):
    bug, kind = planted_bug
    with planted(monkeypatch, bug), pytest.raises(AssertionError):
        check_conversions("sm_80", "bfloat16", kind, "mma_decode")


def test_long_prompts_choose_the_forward():
    case = CacheCase((3,), 16, 16, 64, None, 8, 2, 128, 128, "float16")
    problem = posed(calls(case, "int8", "float16")[0])[0]._replace(device="cuda:0", kv_len=2**15)
    assert plan(problem, device.named("sm_80", "cuda")).engine == "mma_decode"
    assert plan(problem._replace(q_len=2048), device.named("sm_80", "cuda")).engine == "mma"


@pytest.mark.parametrize(
    ("arch", "case", "kind"),
    [exhaustive("sm_75", READ, "uint8"), exhaustive("sm_80", replace(READ, head_dim=256, head_dim_v=256), "uint8"),
     exhaustive("sm_90a", replace(READ, head_dim=128, head_dim_v=128), "uint8"),
     exhaustive("sm_120", replace(READ, dtype="bfloat16", head_dim=64, head_dim_v=64, q_len=20), "int8"),
     exhaustive("sm_89", replace(READ, lengths=(300, 0), capacity=320, page=None), "float8_e5m2")],
)  # fmt: skip
def test_other_gpus(arch, case, kind):
    check(case, kind, "float16", arch=arch)


@pytest.mark.parametrize("kind", ["uint8", *(exhaustive(x) for x in ("int8", "float8_e5m2"))])
def test_bits_do_not_depend_on_the_batch(kind):
    """Under split_size, although the values of hidden keys have other scales, which change the unit of O."""
    case = replace(READ, split_size=64, capacity=128, lengths=(128, 70), head_dim_v=16, kv_heads=1, heads=1, q_len=2)
    call, _ = calls(case, kind)
    call.options["v_scale"][:, ::3] *= np.float32(2.0**-9)
    whole = run_kernels(call)
    own = {name: call.options[name][1:] for name in ("cache_seqlens", "block_table")}
    last = run_kernels(call._replace(q=call.q[1:, 1:], options=call.options | own))
    assert last[0].tobytes() == whole[0][1:, 1:].tobytes() and last[1].tobytes() == whole[1][1:, :, 1:].tobytes()


BUGS = {
    "scale-of-the-neighbouring-token": (change("scale-of-key", "*tile(row)", "*tile(row ^ 1)"), "int8"),
    "zero-of-keys-twice": (change("subtract-zero", "Q_sums[m][e / 2]", "2 * Q_sums[m][e / 2]"), "uint8"),
    "zero-of-values-twice": (change("sum-zeros", "low_of(pair) *", "2 * low_of(pair) *"), "uint8"),
    "unit-of-O": (skip("unit-of-O"), "int8"),
    "columns-of-Q": (change("arrange-Q-of-nibbles", "chunk + 2 * h + f", "chunk + 2 * f + h"), "uint8"),
}


@pytest.mark.parametrize("planted_bug", in_tiers(BUGS, ("zero-of-keys-twice",)))
def test_a_bug_in_a_read_is_found(planted_bug, monkeypatch):
    bug, kind = planted_bug
    with planted(monkeypatch, bug), pytest.raises(AssertionError):
        check(replace(READ, lengths=(3, 70), capacity=80), kind, "float32")


OF_PROMPTS = {
    "half-of-the-numbers": (
        change("store-numbers", "to + Tile<DIM>::at(row, at)", "to + Tile<DIM>::at(row, at ^ 1)"),
        "int8",
    ),
    "zeros-of-an-older-maximum": (skip("rescale-zeros"), "uint8"),
    "numbers-before-their-barrier": (skip("barrier-after-conversion"), "int8"),
}


@pytest.mark.parametrize("planted_bug", in_tiers(OF_PROMPTS, ("half-of-the-numbers",)))
def test_a_bug_in_a_prompt_is_found(planted_bug, monkeypatch):
    bug, kind = planted_bug
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        check(replace(PROMPT, lengths=(150, 33), capacity=176, scale=2.0), kind, "float32", engine="mma")


def test_an_append_beside_the_scale_of_another_token_is_found(monkeypatch):
    bug = change("place-of-scale", "place.row * x.row", "(place.row ^ 1) * x.row")
    case = CASES["e4m3"]
    with planted(monkeypatch, bug):
        on = [appended(*case, monkeypatch, backend) for backend in ("cpu", "simulator")]
    assert on[0] != on[1]


@pytest.mark.parametrize("page", [None, 16, 48])
def test_compile_covers_calls(page):
    on = device.named("sm_80", "cuda")
    built = ahead.launches(
        on, dtype="float16", head_dim=32, group=2, cache=True, kv_dtype="int8", kv_scale="float16", page=page
    )
    for q_len in (1, 100):
        case = CacheCase((3,), q_len, 1, 4096 if page != 48 else 4800, page, 4, 2, 32, 32, "float16")
        problem = posed(calls(case, "int8", "float16")[0])[0]._replace(device="cuda:0", batch=2)
        assert {x.text_key for x in plan(problem, on).launches} <= {x.text_key for x in built}


WRONG = {
    "no-scale": (dict(kv_dtype="int8"), ValueError, "caches of int8 need kv_scale"),
    "dtype-of-scale": (dict(kv_dtype="int8", kv_scale="float64"), TypeError, "kv_scale must be float16 or float32"),
    "no-codes": (dict(kv_scale="float16"), TypeError, "kv_scale is for caches of int8"),
    "no-cache": (dict(cache=False, page=48), ValueError, "page, prefixes, .* are for a KV cache"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), WRONG.values(), ids=WRONG)
def test_compile_refuses_wrong_options(options, error, text):
    with pytest.raises(error, match=text):
        ahead.launches(device.named("sm_80", "cuda"), dtype="float16", head_dim=32, **{"cache": True} | options)
