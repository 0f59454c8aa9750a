"""Pools of more than 2^31 elements, and the memory that steps of a decode allocate and free."""

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from tiers import exhaustive

import cupy_flash

PAGE, KV_HEADS, DIM = 16, 2, 64
PAGES = 2**31 // (PAGE * KV_HEADS * DIM) + 8  # the last pages start past 2^31 elements


@pytest.fixture(params=["numpy", "torch"])
def huge_pool(request):
    """Return pools of K and V pages, (PAGES, PAGE, KV_HEADS, DIM) float16.

    np.zeros only reserves the memory, of which a test touches little.
    """
    shape = (PAGES, PAGE, KV_HEADS, DIM)
    pools = [np.zeros(shape, np.float16) for _ in range(2)]
    return [torch.from_numpy(x) for x in pools] if request.param == "torch" else pools


def test_pages_past_two_to_the_31_elements(huge_pool):
    """The last pages of the huge pool, written by slots and read by a block table, give the results of a small pool."""
    rng = np.random.default_rng(0)
    last = PAGES - 4 + rng.permutation(4).reshape(2, 2)
    small = [np.zeros((PAGES - last.min(), PAGE, KV_HEADS, DIM), np.float16) for _ in range(2)]
    is_torch = isinstance(huge_pool[0], torch.Tensor)
    as_ours = torch.from_numpy if is_torch else np.asarray
    results = []
    for pool, first in ((huge_pool, 0), (small, last.min())):
        generator = np.random.default_rng(1)
        convert = as_ours if pool is huge_pool else np.asarray
        table = (last - first).astype(np.int32)
        k, v = generator.normal(size=(2, 2, 20, KV_HEADS, DIM)).astype(np.float16)
        slots = table[:, :1].astype(np.int64) * PAGE + np.arange(12)
        # the call itself appends keys 12 to 17
        slots = np.concatenate([slots, table[:, 1:] * PAGE + np.arange(8)], axis=1)
        slots = np.where(np.arange(20) < 12, slots, -1)
        cupy_flash.append_to_kv_cache(*map(convert, (k, v)), *pool, slots=convert(slots.ravel()))
        q = generator.normal(size=(2, 6, 4, DIM)).astype(np.float16)
        out = cupy_flash.attention_with_kv_cache(
            convert(q), *pool, k=convert(k[:, 12:18].copy()), v=convert(v[:, 12:18].copy()),
            cache_seqlens=convert(np.array([12, 12], np.int32)), block_table=convert(table),
        )  # fmt: skip
        assert np.abs(np.asarray(pool[0][int(table[0, 1])][:2])).max() > 0  # keys 16 and 17 are on the second page
        results.append(np.asarray(out))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("split_size", [None, exhaustive(64)])
def test_steps_keep_no_memory(split_size):
    """A further 700 steps of a growing sequence leave no memory in use, because no cache has an entry per length."""
    rng = np.random.default_rng(0)
    caches = [np.zeros((1, 1024, KV_HEADS, 16), np.float32) for _ in range(2)]
    q, k, v = (rng.normal(size=(1, 1, heads, 16)).astype(np.float32) for heads in (4, KV_HEADS, KV_HEADS))

    def memory_after(steps):
        for length in steps:
            lengths = np.array([length], np.int32)
            cupy_flash.attention_with_kv_cache(
                q, *caches, k=k, v=v, cache_seqlens=lengths, split_size=split_size, return_lse=True
            )
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    memory_after(range(100))
    tracemalloc.start()
    try:
        before = memory_after(range(100, 300))
        after = memory_after(range(300, 1000))
    finally:
        tracemalloc.stop()
    assert after - before < 700 * 32, "an entry per step would take more than 32 bytes"
