// Which tiles of queries a block computes, in what order.
//
// PERSISTENT: there are as many blocks as multiprocessors. Each begins with the tile of its own number and draws
// others, one after the other, from a counter that all share: whoever is done first has the next, and its keys are on
// their way while the last result leaves. Else a block has one tile, that of its place in the grid (tiles, heads,
// sequences).
#pragma once
#include "../sequence.cuh"

// Keys whose K and V take a good half of the second-level cache, which the heads in flight have to share.
constexpr int CACHED_KEYS = (32 << 20) / (2 * (HEAD_DIM + HEAD_DIM_V));

// A tile of queries of one head of one sequence.
struct TileScheduler {
  int tile;  // below 0: none
  int head;
  Sequence sequence;

  // The first of this block.
  __device__ TileScheduler(const Params& p) : sequence(p, PERSISTENT ? 0 : blockIdx.z) {
    if constexpr (PERSISTENT)
      decode(p, blockIdx.x);
    else
      assign(p, blockIdx.x, blockIdx.y, blockIdx.z);
  }

  // The next of this block.
  __device__ void next(const Params& p) {
    if constexpr (PERSISTENT)
      decode(p, gridDim.x + atomicAdd(p.drawn, 1));
    else
      tile = -1;
  }

  // The tiles of a sequence from the last, which sees most keys under a causal mask.
  __device__ void assign(const Params& p, int from_last, int q_head, int batch) {
    sequence = Sequence(p, batch);
    tile = (sequence.q_rows + BLOCK_Q - 1) / BLOCK_Q - 1 - from_last;
    head = q_head;
  }

  // Tile `number` of all; numbers that stand for none are passed over, and each of them is drawn.
  __device__ void decode(const Params& p, int number) {
    for (;; number = gridDim.x + atomicAdd(p.drawn, 1)) {
      if constexpr (PACKED) {
        // A packed sequence begins with a place of its own, whatever row it begins with.
        int slots = p.q_len / BLOCK_Q + p.batch + 1, slot = number % slots;
        if (number / slots >= p.heads) break;
        int batch = 0;
        for (int last = p.batch; batch < last;) {
          int middle = (batch + last + 1) / 2;
          if (first_slot(p, middle) <= slot)
            batch = middle;
          else
            last = middle - 1;
        }
        assign(p, slot - first_slot(p, batch), number / slots, batch);
        if (tile >= 0) return;
      } else {
        // The longest of so many heads as the cache has room for, then the longest but one of each ..
        int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q, heads = p.batch * p.heads;
        if (number >= tiles * heads) break;
        int concurrent = min(max(CACHED_KEYS / p.kv_len, 1) * p.group, heads);
        int first = number / (concurrent * tiles) * concurrent, slot = number % (concurrent * tiles);
        concurrent = min(concurrent, heads - first);
        int global_head = first + slot % concurrent;
        return assign(p, slot / concurrent, global_head % p.heads, global_head / p.heads);
      }
    }
    tile = -1;
  }
  __device__ static int first_slot(const Params& p, int batch) { return p.cu_seqlens_q[batch] / BLOCK_Q + batch; }
};
