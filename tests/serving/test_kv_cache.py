"""Attention on a KV cache against the formula on the gathered keys, for every option and layout."""

from dataclasses import replace

import numpy as np
import pytest
from cache_cases import CacheCall, CacheCase, check, run
from cases import Case, references
from tiers import exhaustive
from tolerance import assert_matches_reference

import cupy_flash
import cupy_flash.reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES = {
    "plain": CacheCase(),
    "one-length": CacheCase(lengths=(7, 7), one_length=True),
    "full": CacheCase(lengths=(40, 40)),
    "empty": CacheCase(lengths=(0, 0, 3)),
    "empty-sink": CacheCase(lengths=(0, 9), sink=True),
    "more-queries-than-keys": CacheCase(lengths=(2, 9), q_len=5),
    "several-queries": CacheCase(q_len=4),
    "not-causal": CacheCase(q_len=4, causal=False),
    "append": CacheCase(appended=1),
    "append-several": CacheCase(appended=4, q_len=4),
    "append-fewer-than-queries": CacheCase(appended=2, q_len=4),
    "append-more-than-queries": CacheCase(appended=5, q_len=2),
    "append-to-empty": CacheCase(lengths=(0, 0), appended=3, q_len=3),
    "append-to-the-end": CacheCase(lengths=(37, 20), appended=3, q_len=1),
    "no-queries": CacheCase(q_len=0, appended=2),
    "no-batch": CacheCase(lengths=(), appended=1),
    "bhsd": CacheCase(layout="bhsd", appended=2, q_len=2),
    "interleaved": CacheCase(pool="interleaved", appended=2),
    "paged": CacheCase(page=8, appended=1),
    "paged-holes": CacheCase(page=4, hole=2**31 - 1, appended=3, q_len=3),
    "paged-of-six": CacheCase(page=6, appended=3, q_len=3),
    "paged-bhsd": CacheCase(page=8, layout="bhsd", appended=2, q_len=2),
    "paged-interleaved": CacheCase(page=16, pool="interleaved", appended=2),
    "paged-interleaved-bhsd": CacheCase(page=4, pool="interleaved", layout="bhsd", q_len=3),
    "batch-idx": CacheCase(batch_idx=(3, 1), appended=2),
    "leftpad": CacheCase(leftpad=(2, 9), q_len=2),
    "leftpad-hides-all": CacheCase(leftpad=(30, 0), lengths=(20, 10)),
    "slots": CacheCase(slots=True, appended=2, q_len=2),
    "slots-paged": CacheCase(slots=True, appended=3, q_len=2, page=4),
    "slots-rotary": CacheCase(slots=True, appended=3, q_len=2, page=4, rotary=(8, True)),
    "packed": CacheCase(packed=(3, 1), appended=0),
    "packed-zero-rows": CacheCase(lengths=(4, 9, 11), packed=(0, 5, 1), appended=0, page=8),
    "packed-reads": CacheCase(lengths=(9, 30), packed=(4, 2)),
    "packed-slots": CacheCase(lengths=(9, 30), packed=(4, 2), appended=0, slots=True, page=16, rotary=(16, False)),
    "packed-bhsd": CacheCase(packed=(3, 1), appended=0, layout="bhsd"),
    "packed-options": CacheCase(packed=(3, 1), window=(6, None), alibi="bh", sink=True, softcap=1.5),
    "rotary-interleaved": CacheCase(rotary=(16, True), appended=2, q_len=2),
    "rotary-halves": CacheCase(rotary=(16, False), appended=2, q_len=2),
    "rotary-some-dimensions": CacheCase(rotary=(6, False), appended=1, q_len=3),
    "rotary-not-causal": CacheCase(rotary=(8, True), appended=3, q_len=3, causal=False),
    "rotary-empty": CacheCase(rotary=(8, True), lengths=(0, 4)),
    "rotary-positions": CacheCase(rotary=(8, True), appended=3, q_len=3, positions=True),
    "rotary-positions-packed": CacheCase(rotary=(8, True), packed=(2, 3), appended=0, positions=True, page=8),
    "rotary-bfloat16": CacheCase(rotary=(16, True), appended=2, q_len=2, dtype="bfloat16"),
    "window": CacheCase(window=(6, None), q_len=3),
    "window-not-causal": CacheCase(window=(6, 1), q_len=5, causal=False),
    "scale": CacheCase(scale=-2.5),
    "softcap": CacheCase(softcap=1.5, scale=1.0),
    "alibi": CacheCase(alibi="h", q_len=3),
    "alibi-per-sequence": CacheCase(alibi="bh", q_len=2, causal=False),
    "sink": CacheCase(sink=True, q_len=2),
    "tree": CacheCase(mask="bhqs", q_len=3, appended=3, causal=False, rotary=(8, True), positions=True),
    "tree-without-rotary": CacheCase(mask="bhqs", q_len=3, appended=3, causal=False, positions=True, page=8),
    "mask-shared": CacheCase(mask="11qs", q_len=2, page=8),
    "mask-longer-than-keys": CacheCase(mask="b1qs", q_len=2, lengths=(1, 2), sink=True),
    "one-head": CacheCase(heads=1, kv_heads=1, appended=1),
    "many-heads": CacheCase(heads=40, kv_heads=1, q_len=5),
    "wide-values": CacheCase(head_dim_v=40, appended=1, page=8),
    "odd-dims": CacheCase(head_dim=7, head_dim_v=3, rotary=(6, True), appended=1),
    "float16": CacheCase(dtype="float16", appended=1, q_len=3),
    "bfloat16": CacheCase(dtype="bfloat16", appended=1, page=8),
    "float64": CacheCase(dtype="float64", appended=1, alibi="h", softcap=2.0),
    "fp8": CacheCase(dtype="bfloat16", cache_dtype="float8_e4m3fn", appended=2),
    "fp8-descales": CacheCase(dtype="float16", cache_dtype="float8_e4m3fn", appended=1, descales=True, page=4),
    "long": CacheCase(lengths=(2900, 300), capacity=3000, q_len=2, appended=1, sink=True, head_dim=8, head_dim_v=8),
    "long-paged": CacheCase(lengths=(2900, 300), capacity=3072, page=512, appended=1, head_dim=8, head_dim_v=8),
    "long-window": CacheCase(lengths=(2900, 300), capacity=3000, window=(400, None), q_len=3, head_dim=8, head_dim_v=8),
    "long-chunk": CacheCase(lengths=(290, 500), capacity=800, q_len=200, appended=200, head_dim=8, head_dim_v=8),
}  # fmt: skip
IDS = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@IDS
def test_the_formula(case):
    check(case)


@IDS
def test_split_size(case):
    check(replace(case, split_size=64))


@pytest.mark.parametrize("backend", ["cpu", "simulator"])
@pytest.mark.parametrize("sizes", [{}, dict(positions=True), dict(cache_dtype="float8_e4m3fn", descales=True)])
def test_packed_rows_past_the_last_sequence_are_appended_by_their_slots(sizes, backend):
    """Such rows are rotated by position 0, and have no descale."""
    case = CacheCase(packed=(3, 1), appended=0, slots=True, rotary=(8, True), dtype="float16", **sizes)
    call = case.call()
    call.options["slots"][-2:] = case.capacity - 1, 2 * case.capacity - 2
    check(case, call=call, backend=backend)


@pytest.mark.parametrize("page", [1, 2, 8, 16, 64, 256])
@pytest.mark.parametrize("split_size", [None, 128])
def test_every_page_size(page, split_size):
    """Lengths are just below, at and above the ends of pages, and the appended rows cross them."""
    lengths = tuple({0, 1, page - 1, page, page + 1, 300 - 2})
    check(CacheCase(lengths=lengths, page=page, capacity=-(-300 // page) * page, appended=2, q_len=2,
                    split_size=split_size, heads=2, kv_heads=1, head_dim=8, head_dim_v=8))  # fmt: skip


def test_the_capacity_changes_no_bit():
    """Caches of different capacity with the same lengths give the same bits, so pieces do not depend on the
    capacity.
    """
    case = CacheCase(lengths=(300, 1200), capacity=1300, head_dim=8, head_dim_v=8)
    one, longer = run(case.call()), run(replace(case, capacity=9000).call())
    for a, b in zip(one[:2], longer[:2], strict=True):
        np.testing.assert_array_equal(a, b)


def test_tokens_in_steps_of_any_size():
    """Any number of tokens per step gives the same results up to rounding, and bitwise the same cache."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 12, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    results = []
    for steps in ([1] * 12, [5, 4, 3], [12]):
        caches, outs, done = np.full((2, 2, 20, 2, 8), np.nan, np.float32), [], 0
        for step in steps:
            here = slice(done, done + step)
            call = CacheCall(q[:, here], *caches, dict(k=k[:, here], v=v[:, here], cache_seqlens=done))
            outs.append(cupy_flash.attention_with_kv_cache(*call[:3], **call.options))
            done += step
        results.append((np.concatenate(outs, axis=1), caches))
    expected, _ = cupy_flash.reference.attention(q, k, v, causal=True)
    for out, caches in results:
        np.testing.assert_array_equal(caches, results[0][1])
        np.testing.assert_allclose(out, expected, atol=2e-6)


BACKENDS = pytest.mark.parametrize(("backend", "dtype"), [("cpu", "float32"), exhaustive("simulator", "float16")])


@BACKENDS
def test_halves_of_the_keys_merge_to_the_whole(backend, dtype):
    """Two calls on disjoint keys are merged; one sequence has no keys in the second half."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, 2, 4, 16)).astype(dtype)
    caches, lengths = rng.normal(size=(2, 3, 90, 2, 16)).astype(dtype), np.array([90, 40, 61], np.int32)

    def attend(first, last):
        counts = np.clip(lengths, first, last) - np.int32(first)
        options = dict(causal=False, return_lse=True, backend=backend)
        return cupy_flash.attention_with_kv_cache(q, *caches[:, :, first:last], cache_seqlens=counts, **options)

    out, lse = cupy_flash.merge(*attend(0, 45), *attend(45, 90))
    expected, expected_lse = attend(0, 90)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6 if dtype == "float32" else 2e-5)
    np.testing.assert_allclose(out.astype("f4"), expected.astype("f4"), atol=2e-6 if dtype == "float32" else 4e-3)


@BACKENDS
def test_a_cascade_equals_one_call(backend, dtype):
    """All queries attend to a shared prefix, then each sequence to its own keys; the results are merged."""
    rng = np.random.default_rng(1)
    batch, shared, lengths = 3, 50, np.array([3, 40, 17], np.int32)
    q = rng.normal(size=(batch, 1, 4, 16)).astype(dtype)
    prefix, own = (rng.normal(size=(2, *sizes, 2, 16)).astype(dtype) for sizes in ((1, shared), (batch, 40)))
    options = dict(return_lse=True, backend=backend)
    first, first_lse = cupy_flash.attention_with_kv_cache(q.reshape(1, batch, 4, 16), *prefix, causal=False, **options)
    second = cupy_flash.attention_with_kv_cache(q, *own, cache_seqlens=lengths, **options)
    out, lse = cupy_flash.merge(first.reshape(q.shape), np.swapaxes(first_lse, 0, 2), *second)
    whole = np.concatenate([np.repeat(prefix, batch, axis=1), own], axis=2)
    expected, expected_lse = cupy_flash.attention_with_kv_cache(q, *whole, cache_seqlens=lengths + shared, **options)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6 if dtype == "float32" else 2e-5)
    np.testing.assert_allclose(out.astype("f4"), expected.astype("f4"), atol=2e-6 if dtype == "float32" else 4e-3)


ATTENTION = {
    "one-query": dict(q_len=1),
    "few-queries": dict(q_len=8, causal=True),
    "top-left": dict(q_len=3, causal="top_left", window=(2, 1)),
    "window-alibi-sink": dict(q_len=3, window=(50, 4), alibi="bh", sink=True),
    "softcap-scale": dict(q_len=2, softcap=1.5, scale=-2.0),
    "mask": dict(q_len=3, mask="b1qk"),
    "mask-shared": dict(q_len=3, mask="k"),
    "lengths": dict(q_len=5, q_lengths=(5, 0), kv_lengths=(0, 130), causal=True),
    "packed": dict(batch=3, q_len=5, q_lengths=(5, 0, 2), kv_lengths=(130, 9, 66), packed=True, causal=True),
    "bhsd-grouped": dict(q_len=2, layout="bhsd", heads=6, kv_heads=2, head_dim_v=40),
    "bfloat16": dict(q_len=2, dtype="bfloat16", causal=True),
    "float16": dict(q_len=1, dtype="float16"),
    "float64": dict(q_len=1, dtype="float64"),
    "huge": dict(q_len=2, scores="huge"),
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_of_few_queries(options):
    """The engine cpu_decode also serves plain attention."""
    case = Case(**dict(kv_len=130) | options)
    call = case.call()
    function = cupy_flash.attention if call.packed is None else cupy_flash.attention_varlen
    packed = () if call.packed is None else call.packed
    for engine in (None, "cpu_decode"):
        out, lse = function(*call[:3], *packed, **call.options, engine=engine, return_lse=True)
        exact, low = references(case, gradients=False)
        assert_matches_reference(out, exact.out, low.out, out.dtype, f"out of {case}")
        assert_matches_reference(lse, exact.lse, low.lse, lse.dtype, f"lse of {case}")


def test_attention_of_few_queries_chooses_cpu_decode():
    call = Case(q_len=1, kv_len=130).call()
    assert "engine     cpu_decode" in cupy_flash.explain(*call[:3], softcap=3.0)  # which aten refuses
    short = Case(q_len=1, kv_len=30).call()
    assert "not cpu_decode without a KV cache it takes at least 64 keys" in cupy_flash.explain(*short[:3])


def test_positions_without_rotary_tables_and_mods_have_no_effect():
    """A model that rotates q and k itself passes the positions of a tree of drafts beside its mask."""
    case = CacheCase(mask="bhqs", q_len=3, appended=3, causal=False)
    beyond_the_capacity = np.full((2, 3), 10**6, np.int32)
    expected = run(case.call())
    for actual, wanted in zip(run(case.call(), positions=beyond_the_capacity), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)
    _, k_cache, v_cache, options = case.call()
    rows = {name: options[name] for name in ("k", "v", "cache_seqlens")}
    cupy_flash.append_to_kv_cache(k_cache=k_cache, v_cache=v_cache, positions=beyond_the_capacity, **rows)
    np.testing.assert_array_equal(k_cache, expected[2])


def test_nan_reaches_only_rows_that_see_it():
    """A causal mask, a window and leftpad hide NaN and infinity in keys and values."""
    case = CacheCase(lengths=(90, 90), capacity=90, q_len=3, window=(40, None))
    call = case.call()
    expected = run(call)[0]
    for cache in call[1:3]:
        cache[0, 89], cache[1, :40] = np.nan, np.inf
    out = run(call)[0]
    assert np.isnan(out[0, 2]).all()
    np.testing.assert_array_equal(out[0, :2], expected[0, :2])
    np.testing.assert_array_equal(out[1], expected[1])
