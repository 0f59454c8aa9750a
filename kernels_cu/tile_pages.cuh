// Page numbers of tiles of keys, for the loads of K and V from a paged cache.
#pragma once
#include "sequence.cuh"

// The page numbers of two tiles in shared memory. While a tile is computed, the pages of the next tile are looked up,
// each by one thread. Without pages this struct compiles to nothing.
struct TilePages {
  static constexpr int EACH = (BLOCK_KV + THREADS - 1) / THREADS;  // pages that a thread looks up

  const Sequence& sequence;
  int (&smem)[2][BLOCK_KV];
  int looked_up[EACH];
  int slot = 0;  // slot for the pages that are looked up next

  // Looks up the pages of the tile at `start`; -1, without a look-up, if no key of a page is in `keys`.
  __device__ void look_up(int start, Range keys) {
#if KV_CACHE
    const Blocks& blocks = sequence.blocks;
#pragma unroll
    for (int n = 0; PAGED && n < EACH; ++n) {
      // The keys of this tile on the page: [key, end).
#if PAGE_DIVISION
      long long first = (blocks.page_of(start) + threadIdx.x + n * THREADS) * (long long)blocks.page_keys;
      long long key = max(first, (long long)start);
      long long end = min(first + blocks.page_keys, (long long)start + BLOCK_KV);
#else
      long long key = start + ((long long)(threadIdx.x + n * THREADS) << blocks.page_log2);
      long long end = min(key + (1LL << blocks.page_log2), (long long)start + BLOCK_KV);  // @pages-of-tile
#endif
      bool needed = max(key, (long long)keys.begin) < min(end, (long long)keys.end);
      looked_up[n] = needed ? blocks.block_of(key) : -1;
    }
#endif
  }
  // Stores the page numbers that were looked up. After a barrier, stored() returns them; their memory is overwritten
  // only by the pages of the tile after the next.
  __device__ void store() {
#pragma unroll
    for (int n = 0; PAGED && n < EACH; ++n)
      if (threadIdx.x + n * THREADS < BLOCK_KV) smem[slot][threadIdx.x + n * THREADS] = looked_up[n];
    slot ^= 1;  // @next-slot-of-pages
  }
  __device__ const int* stored() const { return smem[slot ^ 1]; }  // @stored-pages
};
