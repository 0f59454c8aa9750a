"""float8 KV caches in the decode kernels on the simulator: conversions, products, appends, and global traffic."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cache_cases import (
    CacheCall,
    CacheCase,
    assert_append_writes_the_bits_of_the_cpu,
    check,
    posed,
    run,
    run_kernels,
)
from planting import change, planted, skip
from test_decode_kernels import EVERYTHING, PACKED
from tiers import exhaustive, in_tiers

from cupy_flash import device
from cupy_flash.gpu import ahead
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import SimulationError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
SMALL = CacheCase(lengths=(70, 3), capacity=80, q_len=3, dtype="float16", cache_dtype=FP8.name, descales=True,
                  appended=2, head_dim=40, head_dim_v=80)  # fmt: skip
CASES = {
    "everything": replace(EVERYTHING, cache_dtype=FP8.name, descales=True),
    "packed-everything": replace(PACKED, cache_dtype=FP8.name, descales=True),
    "small": SMALL,
    "unaligned": replace(SMALL, head_dim=7, head_dim_v=3),
    "paged-interleaved-pool": replace(SMALL, page=8, pool="interleaved", head_dim=64, head_dim_v=64),
    "bhsd-more-rows": replace(SMALL, layout="bhsd", q_len=40),
    "rows-in-no-sequence": replace(SMALL, packed=(2, 3), appended=0, slots=True),
}


@pytest.mark.parametrize("case", in_tiers(CASES, ("everything",)))
def test_the_formula(case):
    check(case, backend="simulator")


def test_rows_of_no_sequence_on_the_cpu():
    """Packed rows past the last sequence have slots but belong to no sequence, so they have no descale."""
    check(CASES["rows-in-no-sequence"], backend="cpu")


@pytest.mark.parametrize("case", in_tiers(CASES, ()))
def test_pieces(case):
    check(replace(case, split_size=64), backend="simulator")


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [1, 2, 8, 16, 64, 256])
def test_every_page_size(page):
    lengths = tuple({0, 1, page - 1, page, page + 1, 298})
    check(replace(SMALL, lengths=lengths, page=page, capacity=-(-300 // page) * page), backend="simulator")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arch", "dtype", "dims"),
    [("sm_75", "float16", (64, 64)), ("sm_80", "bfloat16", (128, 128)), ("sm_89", "float16", (192, 128)),
     ("sm_90a", "bfloat16", (256, 256)), ("sm_90a", "float16", (128, 64)), ("sm_120", "bfloat16", (96, 96))],
    ids=str,
)  # fmt: skip
def test_any_gpu_and_head_dimension(arch, dtype, dims):
    case = replace(CASES["everything"], dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], q_len=5)
    check(case, run_kernels(case.call(), arch=arch))


CONVERSIONS = [("sm_90a", "float16"), *(exhaustive(*x) for x in (
    ("sm_75", "float16"), ("sm_86", "bfloat16"), ("sm_89", "bfloat16")))]  # fmt: skip


@pytest.mark.parametrize(("arch", "dtype"), CONVERSIONS)
def test_every_code_is_converted_exactly(arch, dtype):
    """The key and the value of one cache slot contain all 256 codes: with unit queries lse shows the key, and out the
    value.
    """
    dim = 256 if arch != "sm_75" else 128  # larger head dimensions exceed the registers of sm_75
    for half in range(256 // dim):
        codes = np.arange(half * dim, (half + 1) * dim, dtype=np.uint8).view(FP8)
        cache, finite = codes.reshape(1, 1, 1, dim), codes.astype(np.float64)
        unit = np.eye(dim).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        keys = np.where(np.isnan(finite), FP8.type(0), codes).reshape(cache.shape)
        options = dict(cache_seqlens=1, causal=False, scale=1.0)
        out, lse = run_kernels(CacheCall(unit[None, :, None], keys, cache, options), arch=arch)[:2]
        # tight enough, as neighbouring codes differ by 6 %
        np.testing.assert_allclose(lse[0, 0], np.nan_to_num(finite, nan=0), rtol=1e-6)
        np.testing.assert_array_equal(out[0, 0, 0].astype(np.float64), finite)


@pytest.mark.parametrize("case", in_tiers(
    {"rotary": replace(SMALL, rotary=(8, True), page=4), "slots": replace(SMALL, slots=True, page=8),
     "packed": replace(SMALL, packed=(3, 1), appended=0, dtype="bfloat16"), "plain": replace(SMALL, descales=False)},
    ("rotary",),
))  # fmt: skip
def test_append_writes_the_bits_of_the_cpu(case, monkeypatch):
    """The rows contain ties, subnormals, NaN, and numbers above the largest code."""
    call = case.call()
    names = ("cache_seqlens", "slots", "block_table", "rotary_cos", "rotary_sin", "k_descale", "v_descale")
    options = {name: call.options[name] for name in names if name in call.options}
    if case.slots:
        del options["cache_seqlens"], options["block_table"]
    if case.packed:
        options["cu_seqlens"] = call.options["cu_seqlens_q"]
    for x in (call.options["k"], call.options["v"]):
        flat = x.reshape(-1)
        flat[:13] = [0, -0.0, 447, 464, -470, 6e4, np.inf, -np.inf, np.nan, 2.0**-10, 3 * 2.0**-10, 17, 19]
        flat[13:80] = np.ldexp(np.linspace(-2, 2, 67), -7)
    assert_append_writes_the_bits_of_the_cpu(call, options, monkeypatch)


def test_descales_of_zero_make_all_keys_equal():
    call = replace(SMALL, appended=None).call()
    call.options["k_descale"][:] = 0
    for a, b in zip(run_kernels(call)[:2], run(call)[:2], strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2e-3, atol=2e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("page", "dim"), [(16, 64), (None, 128), (16, 128), (64, 256)])
def test_every_byte_is_read_once(page, dim, watch):
    """The bytes read are those of an 8-bit cache, and there are no bank conflicts in loads, fragments or the
    epilogue.
    """
    case = CacheCase(lengths=(1024, 800), capacity=1024, page=page, heads=8, kv_heads=1, head_dim=dim, head_dim_v=dim,
                     dtype="float16", cache_dtype=FP8.name, descales=True)  # fmt: skip
    run_kernels(case.call(), blocks=3, start=watch.start)
    keys = sum(case.lengths) * case.kv_heads * 2 * dim
    # Two sequences in three blocks have four parts. A part reads its queries and, in every thread, both descales. These
    # are read before the mainloop and again in the epilogue, because registers that keep them would spill.
    parts = 4
    others = parts * (case.heads * 2 * dim + 128 * 2 * 2 * 4)
    assert keys <= watch.counters["decode"].global_bytes_read <= 1.02 * keys + others
    for counters in watch.counters.values():
        assert not counters.conflicting()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compile_covers_calls(dtype):
    on = device.named("sm_90a", "cuda")
    built = {
        x.text_key for x in ahead.launches(on, dtype=dtype, head_dim=64, group=4, cache=True, kv_dtype="float8_e4m3fn")
    }
    for page, q_len in ((None, 1), (16, 4), (16, 600)):
        case = CacheCase(lengths=(), capacity=4096, page=page, q_len=q_len, appended=1, heads=8, head_dim=64,
                         head_dim_v=64, dtype=dtype, cache_dtype=FP8.name)  # fmt: skip
        problem = posed(case.call())[0]._replace(batch=2, device="cuda:0")
        assert {x.text_key for x in plan(problem, on).launches} <= built


def test_kv_dtype_is_checked():
    on = device.named("sm_90a", "cuda")
    with pytest.raises(TypeError, match="kv_dtype must be float32, or float8_e4m3fn beside a q of 16 bit, not float8"):
        ahead.launches(on, dtype="float32", head_dim=64, cache=True, kv_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="kv_dtype, .*, rotary and rotary_dim are for a KV cache"):
        ahead.launches(on, dtype="float16", head_dim=64, kv_dtype="float8_e4m3fn")


# Planted bugs


LONG = CacheCase(lengths=(90, 319), capacity=320, q_len=4, heads=8, head_dim=40, head_dim_v=80, dtype="float16",
                 cache_dtype=FP8.name, descales=True, appended=1)  # fmt: skip
BUGS = {
    "q-not-arranged": skip("arrange-Q"),
    "odd-columns-first": change("convert-columns", "0x7531 : 0x6420", "0x6420 : 0x7531"),
    "columns-of-the-other-key": change("word-of-columns", "2 * n + k % 2", "n + k % 2 * 2"),
    "keys-not-descaled": change("descaled-scale", "* qk", ""),
    "values-not-descaled": change("decode.descale-O", "* descales.v", ""),
    "lse-not-descaled": change("scale-of-lse", "SCALE_IN_EXPONENT ? scale", "SCALE_IN_EXPONENT ? (float)p.scale"),
    "appended-without-descale": change("descale-appended", ", descale)", ", 1)"),
    "bytes-of-16-bit-rows": change("bytes-of-row", "DIM * sizeof(Number)", "2 * DIM"),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS, ()))
def test_planted_bugs_are_found(bug, monkeypatch):
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        check(LONG, run_kernels(LONG.call(), blocks=3))


CODE_BUGS = {
    "nan-is-480": ("sm_86", change("fp8-nan", "magnitude + 0x00800080 & 0x40004000", "0")),
    "bias-not-multiplied": ("sm_86", change("fp8-exponent-bias", "0x5C005C00", "0x3C003C00")),
}


@pytest.mark.parametrize("bug", in_tiers(CODE_BUGS, ()))
def test_planted_bugs_of_the_conversion_are_found(bug, monkeypatch):
    arch, bug = bug
    with planted(monkeypatch, bug), pytest.raises(AssertionError):
        test_every_code_is_converted_exactly(arch, "float16")


ROUNDING_BUGS = {
    "ties-away": change("round-to-even", "(__float_as_uint(z) >> 20 & 1)", "1"),
    "no-subnormals": change("fp8-code", "__float2uint_rn(z * 0x1p9f)", "0"),
    "not-saturated": change("saturate", "min(__uint_as_float(magnitude), 448.0f)", "__uint_as_float(magnitude)"),
}


@pytest.mark.parametrize("bug", in_tiers(ROUNDING_BUGS, ()))
def test_planted_bugs_of_the_rounding_are_found(bug, monkeypatch):
    with planted(monkeypatch, bug), pytest.raises(AssertionError):
        test_append_writes_the_bits_of_the_cpu(replace(SMALL, descales=False), monkeypatch)
