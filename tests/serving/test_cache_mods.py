"""score_mod and mask_mod with a KV cache: positions, pages, captured arrays, and bitwise equality with split_size."""

from dataclasses import replace

import numpy as np
import pytest
from cache_cases import CacheCase, check, run
from test_cache_errors import failure
from test_invariance import assert_bits, at
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash import UnsupportedError

CAPACITY = CacheCase().capacity
TABLE = np.random.default_rng(5).normal(size=(4, CAPACITY)).astype(np.float32)
OFFSET = np.random.default_rng(6).normal(size=CAPACITY).astype(np.float32)


def by_position(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, kv_idx] + OFFSET[q_idx] - 0.1 * abs(q_idx - kv_idx) + 0.3 * b


def strided(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 3 != 1) | (kv_idx < 2)


MODS = dict(score_mod=by_position, mask_mod=strided)
CASES = {
    "one-query": CacheCase(),
    "paged": CacheCase(lengths=(5, 23), page=4, q_len=3, appended=3),
    "split-size": CacheCase(lengths=(5, 23), page=4, q_len=3, appended=3, split_size=64),
    "more-queries-than-keys": CacheCase(lengths=(0, 2), q_len=4, causal=False),
    "packed": CacheCase(lengths=(5, 9), packed=(2, 3), appended=0),
    "positions": CacheCase(lengths=(5, 9), q_len=2, positions=True),
    "positions-rotary": CacheCase(lengths=(5, 9), q_len=2, positions=True, rotary=(8, True), appended=2),
    "other-options": CacheCase(q_len=2, sink=True, alibi="h", mask="bhqs", softcap=1.0, scale=2.0, layout="bhsd"),
    "leftpad": CacheCase(leftpad=(2, 9), window=(9, 0)),
    "float16": CacheCase(dtype="float16", page=8),
    "float8": CacheCase(dtype="float16", cache_dtype="float8_e4m3fn", descales=True),
}


def with_mods(case, **mods):
    call = case.call()
    return call._replace(options=call.options | (mods or MODS))


@pytest.mark.parametrize("case", in_tiers(CASES, ("one-query", "paged", "split-size", "more-queries-than-keys")))
def test_the_formula(case):
    check(case, call=with_mods(case))


def test_decode_steps_equal_attention_on_all_tokens():
    """Decoding token by token gives the rows of attention on the whole sequence with the same mods."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 20, 4, 16)).astype(np.float32)
    whole = cupy_flash.attention(q, k, v, causal=True, **MODS)
    caches = np.full((2, 1, CAPACITY, 4, 16), np.nan, np.float32)
    for i in range(20):
        here = slice(i, i + 1)
        step = cupy_flash.attention_with_kv_cache(
            q[:, here], *caches, k=k[:, here], v=v[:, here], cache_seqlens=i, **MODS
        )
        np.testing.assert_allclose(step, whole[:, here], atol=2e-6)


def test_a_band_as_a_mask_mod_equals_the_built_in_options():
    def window(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= 7)

    case = CacheCase(lengths=(30, 12), q_len=3, page=8)
    out, lse, *_ = run(with_mods(replace(case, causal=False), mask_mod=window))
    expected = run(replace(case, window=(7, 0)).call())
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], atol=1e-6)


@pytest.mark.exhaustive
def test_the_batch_and_pages_change_no_bit():
    case = CacheCase(lengths=(200, 330, 7), capacity=384, q_len=2, appended=2, split_size=64)
    table = np.random.default_rng(5).normal(size=(4, 384)).astype(np.float32)
    mods = dict(score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx], mask_mod=strided)
    call = case.call()
    expected = run(call, **mods)
    for rows in ([1], [2, 0, 1]):
        assert_bits(run(at(call, rows), **mods), expected, rows)


TORCH_CASES = [{}, exhaustive(dict(page=8, appended=2, q_len=2))]


@pytest.mark.parametrize("options", TORCH_CASES)
def test_torch(options):
    import torch

    table = torch.from_numpy(TABLE)

    def biased(score, b, h, q_idx, kv_idx):
        return score + table[h, kv_idx]

    call = CacheCase(**options).call()
    expected = run(call, score_mod=lambda score, b, h, q_idx, kv_idx: score + TABLE[h, kv_idx], mask_mod=strided)
    ours = call.copied().map(torch.from_numpy)
    ours = ours._replace(options=ours.options | dict(score_mod=biased, mask_mod=strided))
    result = cupy_flash.attention_with_kv_cache(*ours[:3], **ours.options, return_lse=True)
    for tensor, array in zip((*result, *ours[1:3]), expected, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert ours.k_cache._version == (1 if "appended" in options else 0)
    compiled = torch.compile(cupy_flash.attention_with_kv_cache, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="score_mod and mask_mod under torch.compile"):
        compiled(*ours[:3], **ours.options)


def test_captured_tensors_that_require_grad_are_refused():
    import torch

    table = torch.zeros(CAPACITY, requires_grad=True)
    call = CacheCase().call().map(torch.from_numpy)
    mod = dict(score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])
    with pytest.raises(ValueError, match="array0 require grad, and a KV cache records no gradients"):
        cupy_flash.attention_with_kv_cache(*call[:3], **call.options, **mod)
    with torch.no_grad():
        cupy_flash.attention_with_kv_cache(*call[:3], **call.options, **mod)


def wrong(**options):
    return failure(ValueError, CacheCase().call(), **options)


def test_captured_arrays_reach_up_to_the_capacity():
    """Lengths grow and the host may not be able to read them, so captured arrays must reach up to the capacity."""
    short = np.zeros(24, np.float32)
    text = wrong(score_mod=lambda score, b, h, q_idx, kv_idx: score + short[kv_idx])
    assert "array0 (24,) is indexed by kv_idx in dimension 0, and there are 40 keys" in text
    assert "is indexed by q_idx" in wrong(mask_mod=lambda b, h, q_idx, kv_idx: short[q_idx] > 0)
    text = wrong(mask_mod=strided, positions=np.full((2, 1), 40, np.int32))
    assert "positions[0] is 40 and must be in [0, 39]" in text


def test_jax_refuses_mods():
    call = with_mods(CacheCase())
    jax = pytest.importorskip("jax")
    from cupy_flash.adapters import jax as adapter

    arrays = call.map(jax.numpy.asarray)
    with pytest.raises(UnsupportedError, match="score_mod and mask_mod with a KV cache in jax"):
        adapter.attention_with_kv_cache(*arrays[:3], **arrays.options)
