"""Caches of codes of 8 and 4 bits with a scale for each key and head, on the CPU."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cache_cases import CacheCase, references, run
from cases import DTYPES
from quantised import KINDS, calls, options_of, quantised
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash.cpu import decode
from cupy_flash.cpu.decode.append import quantise
from cupy_flash.cpu.decode.keys import Keys

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PAGED = CacheCase((5, 61), 3, None, 64, 8, 4, 2, 16, 12)
CASES = {
    "paged": PAGED,
    "contiguous": replace(PAGED, page=None, leftpad=(2, 0), batch_idx=(2, 0), causal=False),
    "bhsd": replace(PAGED, layout="bhsd", dtype="float16", page=48, capacity=96),
    "packed": replace(PAGED, packed=(2, 4), window=(20, 0), softcap=4.0, sink=True, split_size=64),
    "float64": replace(PAGED, dtype="float64", alibi="h"),
    "latent": replace(PAGED, shared=True, kv_heads=1, dtype="bfloat16"),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def check(case, kind, scale_dtype="float32"):
    """Compare a call on a cache that is quantised by hand with the formula on the numbers that it stores."""
    call, on_numbers = calls(case, kind, scale_dtype)
    dtype = DTYPES[case.dtype]
    exact, low = references(on_numbers, dtype)
    for name, actual, of in zip(("out", "lse"), run(call)[:2], (dtype, None), strict=True):
        n = ("out", "lse").index(name)
        assert_matches_reference(actual, exact[n], low[n], of or actual.dtype, f"{name} of {case}")


@EACH
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_on_the_stored_numbers(case, kind):
    check(case, kind, "float16" if case.dtype == "float16" else "float32")


def appended(case, kind, scale_dtype="float32", change=lambda k, v: None):
    """Return (cache, scale, zero) of k and of v, after an append to caches of garbage, and the call that appended."""
    call = case.call()
    k, v = call.options["k"], call.options.get("v")
    change(k, v)
    rng = np.random.default_rng(4)
    pools = {}
    for name, cache in (("k", call.k_cache), ("v", call.v_cache)):
        if cache is not None:
            of = quantised(rng.normal(size=cache.shape), kind, scale_dtype)
            pools[name] = of
    options = options_of(pools["k"], pools.get("v"))
    caches = [pools[name].codes if name in pools else None for name in "kv"]
    names = ("cache_seqlens", "slots", "block_table", "rotary_cos", "rotary_sin", "rotary_interleaved", "layout")
    given = {name: call.options[name] for name in names if name in call.options} | options
    if "slots" in given:
        del given["cache_seqlens"], given["block_table"]
    cupy_flash.append_to_kv_cache(k, v, *caches, **given)
    return pools, call, given


APPENDS = {
    "paged": (replace(PAGED, appended=3), "float32"),
    "float16-scales": (replace(PAGED, appended=3, page=None, layout="bhsd"), "float16"),
    "float16-rows": (replace(PAGED, appended=3, slots=True, dtype="float16"), "float32"),
    "values-inside-keys": (replace(PAGED, appended=3, page=3, capacity=66, kv_heads=1, shared=True), "float32"),
}


@EACH
@pytest.mark.parametrize(("case", "scale_dtype"), APPENDS.values(), ids=APPENDS)
def test_an_append_writes_the_bits_of_the_formula(case, scale_dtype, kind):
    """Rows that it does not write keep theirs; a read then has the bits of one on the cache by hand."""
    pools, call, _ = appended(case, kind, scale_dtype)
    rng = np.random.default_rng(4)
    expected = {
        name: quantised(rng.normal(size=cache.shape), kind, scale_dtype)
        for name, cache in (("k", call.k_cache), ("v", call.v_cache))
        if cache is not None
    }
    for name, of in expected.items():
        of_rows = quantised(call.options[name], kind, scale_dtype)
        for pool, rows in zip(of, of_rows, strict=True):
            if pool is None:
                continue
            view, new = (x.swapaxes(1, 2) if case.layout == "bhsd" else x for x in (pool, rows))
            for b, length in enumerate(case.lengths):
                for i in range(case.appended):
                    j = length + i
                    table = call.options.get("block_table")
                    place = (b, j) if table is None else (table[b, j // case.page], j % case.page)
                    view[place] = new[b, i]
        for pool, by_hand in zip(pools[name], of, strict=True):
            assert pool is None or pool.tobytes() == by_hand.tobytes()
    lengths = np.array(case.lengths, np.int32) + case.appended
    names = ("block_table", "layout", "head_dim_v")
    others = {name: call.options[name] for name in names if name in call.options}
    read = partial(cupy_flash.attention_with_kv_cache, call.q, cache_seqlens=lengths, **others)
    a, b = (
        read(x["k"].codes, x["v"].codes if "v" in x else None, **options_of(x["k"], x.get("v")))
        for x in (pools, expected)
    )
    assert a.tobytes() == b.tobytes() and np.isfinite(a.astype("f4")).all()


@EACH
def test_keys_are_rotated_before_they_are_quantised(kind):
    case = replace(PAGED, appended=3, rotary=(8, True), page=None)
    pools, call, _ = appended(case, kind)
    rotated = case.call()
    cupy_flash.append_to_kv_cache(
        call.options["k"], call.options["v"], *rotated[1:3],
        **{name: call.options[name] for name in ("cache_seqlens", "rotary_cos", "rotary_sin")},
    )  # fmt: skip
    by_hand = quantised(rotated.k_cache[0, 5:8], kind)
    for pool, expected in zip(pools["k"], by_hand, strict=True):
        assert pool is None or pool[0, 5:8].tobytes() == expected.tobytes()


@EACH
@pytest.mark.parametrize("scale_dtype", ["float16", "float32"])
def test_special_rows(kind, scale_dtype):
    """A NaN, zeros, an infinity, a constant, scales that are subnormal or infinite in fp16, and a code that ties."""
    rows = np.random.default_rng(3).normal(size=(8, 16)).astype(np.float32)
    rows[0, 3], rows[1], rows[2, 5], rows[3] = np.nan, 0, -np.inf, -2.5
    rows[4] *= 1e-7
    rows[5] *= 1e9
    rows[6, :3] = 127, 0.5, -1.5
    rows[7] = -0.0
    caches = np.full((2, 1, 8, 1, 16 // (1 + (kind == "uint8"))), 7, np.uint8).view(KINDS[kind])
    names = ("k_scale", "v_scale", "k_zero", "v_zero")[: 4 if kind == "uint8" else 2]
    scales = {name: np.ones((1, 8, 1), scale_dtype) for name in names}
    k = rows[None, :, None]
    cupy_flash.append_to_kv_cache(k, k, *caches, cache_seqlens=0, **scales)
    by_hand = quantised(rows, kind, scale_dtype)
    finite = [n for n in range(8) if n != 2]
    assert caches[0, 0, finite, 0].tobytes() == by_hand.codes[finite].tobytes()
    assert scales["v_scale"][0, :, 0].tobytes() == by_hand.scale.tobytes()
    if kind == "uint8":
        assert scales["k_zero"][0, finite, 0].tobytes() == by_hand.zero[finite].tobytes()
    assert not caches[:, 0, 0].view(np.uint8).any() and not caches[0, 0, 2, 0].astype(np.float32).any()
    assert np.isnan(scales["k_scale"][0, 0, 0]) and np.isinf(scales["k_scale"][0, 2, 0])
    assert scales["k_scale"][0, 1, 0] == 1


def test_zeros_of_float16_rows_are_finite():
    """A row of two adjacent fp16 numbers has the largest zero point: 15 * 2048, or more as its scale is rounded."""
    bits = np.arange(0x7BFF, dtype=np.uint16)
    pairs = np.stack([bits, bits + 1], -1).view(np.float16).astype(np.float32)
    for rows in (pairs, -pairs):
        zeros = quantise(rows, np.dtype(np.uint8), np.dtype(np.float16)).zero
        assert np.abs(zeros.astype(np.float32)).max() <= 2**15
    with np.errstate(over="ignore"):
        row = np.float32([[1000, 1000.1]])
        assert np.isinf(quantise(row, np.dtype(np.uint8), np.dtype(np.float16)).zero)


@EACH
def test_numbers_of_no_key_are_not_read(kind):
    """NaN scales past the length, and of hidden keys, have no effect; pages may be in any order."""
    call, _ = calls(PAGED, kind)
    out = run(call)[0]
    assert np.isfinite(out).all()
    table = call.options["block_table"]
    order = np.random.default_rng(1).permutation(call.k_cache.shape[0])
    places = np.argsort(order).astype(np.int32)
    scales = {name: x[order] for name, x in call.options.items() if name.endswith(("_scale", "_zero"))}
    moved = {"block_table": np.where(table < 0, table, places[table])} | scales
    shuffled = call._replace(k_cache=call.k_cache[order], v_cache=call.v_cache[order], options=call.options | moved)
    assert run(shuffled)[0].tobytes() == out.tobytes()
    hidden, _ = calls(replace(PAGED, page=None, window=(2, 0)), kind)
    before = run(hidden)[0]
    for name in scales:
        hidden.options[name][1, :40] = np.nan
    assert run(hidden)[0].tobytes() == before.tobytes()


@EACH
def test_bits_do_not_depend_on_the_batch(kind):
    call, _ = calls(replace(PAGED, split_size=64, capacity=128, lengths=(70, 61, 128)), kind)
    whole = run(call)
    for b in range(3):
        own = {
            "cache_seqlens": call.options["cache_seqlens"][b : b + 1],
            "block_table": call.options["block_table"][b : b + 1],
        }
        alone = run(call._replace(q=call.q[b : b + 1], options=call.options | own))
        assert alone[0].tobytes() == whole[0][b : b + 1].tobytes()


@EACH
def test_the_error_is_bounded(kind):
    """With one key, lse is its score and out its value: the errors of both are those of a row of codes."""
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(3, 64, 1, 1, 16)).astype(np.float32) * rng.lognormal(size=(64, 1, 1, 1)).astype("f4")
    caches = np.zeros((2, 64, 1, 1, 16 // (1 + (kind == "uint8"))), KINDS[kind])
    names = ("k_scale", "v_scale", "k_zero", "v_zero")[: 4 if kind == "uint8" else 2]
    scales = {name: np.zeros((64, 1, 1), np.float32) for name in names}
    out, lse = cupy_flash.attention_with_kv_cache(
        q, *caches, k=k, v=v, cache_seqlens=0, scale=0.25, return_lse=True, **scales
    )
    exact = 0.25 * (q.astype("f8") * k).sum(-1)[..., 0]
    if kind.startswith("float8"):  # half a unit in the last place of 3 or 2 bits, or half a subnormal
        relative, subnormal = {"float8_e4m3fn": (2**-4, 2**-10), "float8_e5m2": (2**-3, 2**-17)}[kind]
        of_k, of_v = (
            np.maximum(relative * abs(x), subnormal * scales[name][..., None])
            for x, name in ((k, "k_scale"), (v, "v_scale"))
        )
        bound = 0.25 * (abs(q) * of_k).sum(-1)[..., 0]
    else:
        bound, of_v = 0.125 * abs(q).sum(-1)[..., 0] * scales["k_scale"][..., 0], scales["v_scale"][..., None] / 2
    rounding = 1e-5 * (1 + abs(exact))
    assert (abs(lse - exact.reshape(lse.shape)) <= bound.reshape(lse.shape) + rounding.reshape(lse.shape)).all()
    assert (abs(out - v) <= of_v * 1.0001 + 1e-5 * abs(v)).all()


def test_scales_inside_the_rows_of_the_cache():
    """vLLM's layout: a scale behind the codes of its key."""
    pool = np.zeros((2, 8, 8, 2, 20), np.int8)
    k_cache, v_cache = pool[..., :16]
    k_scale, v_scale = (x[..., 16:].view(np.float32)[..., 0] for x in pool)
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 2, 9, 2, 16)).astype(np.float32)
    table = rng.permutation(8).reshape(2, 4).astype(np.int32)
    q = rng.normal(size=(2, 9, 4, 16)).astype(np.float32)
    attend = partial(cupy_flash.attention_with_kv_cache, q, k=k, v=v, block_table=table, cache_seqlens=0)
    out = attend(k_cache, v_cache, k_scale=k_scale, v_scale=v_scale)
    own = np.zeros((2, 8, 8, 2), np.float32)
    apart = np.zeros((2, 8, 8, 2, 16), np.int8)
    assert attend(*apart, k_scale=own[0], v_scale=own[1]).tobytes() == out.tobytes()
    assert (apart[0] == k_cache).all() and (own[1] == v_scale).all()


def test_weights_of_a_quantised_cache():
    call, on_numbers = calls(PAGED, "uint8")
    options = {name: x for name, x in call.options.items() if name not in ("v_scale", "v_zero", "split_size")}
    lse = run(call)[1]
    weights = cupy_flash.attention_weights_with_kv_cache(call.q, call.k_cache, lse, **options)
    options = {name: x for name, x in options.items() if not name.endswith(("_scale", "_zero"))}
    k_cache = np.nan_to_num(on_numbers.k_cache).astype(np.float32)
    expected = cupy_flash.attention_weights_with_kv_cache(call.q, k_cache, lse, **options)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)


ONES = np.ones((2, 40, 2), np.float32)
CACHES = {
    name: dict(zip(("k_cache", "v_cache"), np.zeros((2, 2, 40, 2, 16 // (1 + (name == "uint8"))), dtype), strict=True))
    for name, dtype in KINDS.items()
}
SCALED = CACHES["int8"] | dict(k_scale=ONES, v_scale=ONES.copy())
OVERLAPPING = np.zeros((2, 40, 2, 20), np.int8)
WRONG = {
    "no-scale": (CACHES["int8"], ValueError, "caches of int8 need k_scale, v_scale"),
    "one-scale": (CACHES["float8_e5m2"] | dict(k_scale=ONES), ValueError, "caches of float8_e5m2 need v_scale"),
    "no-zero": (CACHES["uint8"] | dict(k_scale=ONES, v_scale=ONES), ValueError, "uint8 need k_zero, v_zero"),
    "zero": (SCALED | dict(k_zero=ONES), ValueError, "k_zero: for caches of uint8"),
    "plain": (dict(k_scale=ONES, v_scale=ONES), TypeError, "for caches of int8, .*, uint8, not float32"),
    "dtypes": (SCALED | dict(v_scale=ONES.astype("f2")), TypeError, "k_scale, v_scale must have one dtype"),
    "dtype": (SCALED | dict(k_scale=ONES.astype("f8")), TypeError, "k_scale must be float16 or float32, not float64"),
    "shape": (SCALED | dict(k_scale=ONES[:, :5]), ValueError, r"k_scale must be \(2, 40, 2\), one number per key"),
    "layout": (SCALED | dict(k_scale=ONES.swapaxes(1, 2)), ValueError, "k_scale must be"),
    "descale": (CACHES["float8_e4m3fn"] | dict(k_scale=ONES, v_scale=ONES, k_descale=np.ones((2, 2), "f4")), ValueError,
                "k_descale is per sequence and k_scale per key"),
    "repeated": (SCALED | dict(v_scale=np.lib.stride_tricks.as_strided(ONES.copy(), strides=(320, 8, 0))), ValueError,
                 "v_scale repeats its elements"),
    "read-only": (SCALED | dict(v_scale=np.broadcast_to(ONES, ONES.shape)), ValueError, "v_scale is read-only"),
    "overlapping": (SCALED | dict(k_cache=OVERLAPPING[..., :16],
                                  k_scale=OVERLAPPING[..., 12:16].view("f4")[..., 0]), ValueError,
                    "k_scale overlaps k_cache"),
    "one-for-both": (SCALED | dict(v_scale=ONES), ValueError, "v_scale overlaps k_scale"),
    "odd": (CACHES["uint8"] | dict(v_cache=None, v=None, k_scale=ONES, k_zero=ONES.copy(), head_dim_v=5), ValueError,
            "head_dim_v must be even"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_changes_nothing(changes, error, text):
    call = CacheCase(appended=2, q_len=2).call()
    given = call.options | {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache} | changes
    before = {name: x.tobytes() for name, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error, match=text):
        cupy_flash.attention_with_kv_cache(given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), **given)
    assert {name: x.tobytes() for name, x in (call.options | changes).items() if name in before and name in given} == {
        name: x for name, x in before.items() if name in given
    }


@pytest.mark.parametrize("engine", ["simt", "wgmma"])
def test_an_engine_without_such_caches_is_named(engine):
    call, _ = calls(replace(PAGED, dtype="float16"), "float8_e5m2")
    with pytest.raises(cupy_flash.UnsupportedError, match="k_scale|reads no KV cache"):
        run(call, engine=engine, backend="simulator")


def test_the_scale_of_the_neighbouring_token_is_found(monkeypatch):
    scales = Keys.scales

    def neighbours(keys, start, stop):
        return type(of := scales(keys, start, stop))(*(None if x is None else np.roll(x, 1, 1) for x in of))

    monkeypatch.setattr(Keys, "scales", neighbours)
    with pytest.raises(AssertionError):
        check(PAGED, "int8")


def test_a_zero_point_that_is_subtracted_twice_is_found(monkeypatch):
    scale_products = decode.scale_products

    def twice(S, Q, scales):
        S -= Q.sum(2, keepdims=True) * scales.k_zero[:, None]
        scale_products(S, Q, scales)

    monkeypatch.setattr(decode, "scale_products", twice)
    with pytest.raises(AssertionError):
        check(PAGED, "uint8")
