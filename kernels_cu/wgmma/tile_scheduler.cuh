// Tile scheduler: which tiles of queries a block computes, in which order.
//
// PERSISTENT: the grid has one block per SM. A block starts with the tile of its index; the next K and V load while the
// last O is stored. If tiles differ in cost, blocks draw them from a global counter (DRAWS_TILES), so that blocks that
// finish early compute more tiles. If all tiles cost the same, a block takes every gridDim.x-th tile, which needs no
// counter. Not PERSISTENT: a block has one tile, given by its index in the grid (tiles, heads, sequences).
#pragma once
#include "../sequence.cuh"
#include "tile.cuh"

// Number of keys whose K and V fill a good half of the L2 cache, which the heads in flight share.
constexpr int CACHED_KEYS = (32 << 20) / (2 * (HEAD_DIM + HEAD_DIM_V));  // @L2-bytes

// Iterator over the tiles of queries of a block. The producer passes a copy of it to the consumers as the tile record.
struct TileScheduler {
  int tile;  // negative: no tile is left
  int head;
  int number;  // PERSISTENT: index of the tile in scheduling order
  Sequence sequence;

  // The first tile of this block.
  __device__ TileScheduler(const Params& p) : sequence(p, PERSISTENT ? 0 : blockIdx.z) {
    number = blockIdx.x;
    if constexpr (PERSISTENT)
      decode(p);
    else
      assign(p, blockIdx.x, blockIdx.y, blockIdx.z);
  }

  // The next tile of this block.
  __device__ void next(const Params& p) {
    if constexpr (PERSISTENT) {
      advance(p);
      decode(p);
    } else
      tile = -1;
  }

  // Moves to the next number. With DRAWS_TILES it comes from a counter in global memory; if the whole producer warp
  // runs the scheduler, one lane increments the counter for all.
  __device__ void advance(const Params& p) {
    if constexpr (!DRAWS_TILES) {
      number += gridDim.x;  // @next-tile
    } else if constexpr (!PRODUCER_WARP) {
      number = gridDim.x + atomicAdd(p.tile_counter, 1);
    } else {
      int tile_counter = 0;
      if (threadIdx.x % 32 == 0) tile_counter = atomicAdd(p.tile_counter, 1);  // @draw-tile
      number = gridDim.x + __shfl_sync(0xFFFFFFFF, tile_counter, 0);
    }
  }

  // Sets the tile: `from_last` counts from the last tile of the sequence, which sees the most keys under a causal mask.
  __device__ void assign(const Params& p, int from_last, int q_head, int batch) {
    sequence = Sequence(p, batch);
    tile = (sequence.q_rows + BLOCK_Q - 1) / BLOCK_Q - 1 - from_last;
    head = q_head;
  }

  // Sets the tile of the current number. Numbers without a tile are skipped.
  __device__ void decode(const Params& p) {
    for (;; advance(p)) {
      if constexpr (PACKED) {
        // Numbers of a head are slots. Those of sequence b start at cu_seqlens[b] / BLOCK_Q + b, so that each of its
        // tiles has a slot; some slots have no tile.
        int slots = p.q_len / BLOCK_Q + p.batch + 1, slot = number % slots;
        if (number / slots >= p.heads) break;
        int batch = 0;
        for (int last = p.batch; batch < last;) {
          int middle = (batch + last + 1) / 2;
          if (first_slot(p, middle) <= slot)
            batch = middle;  // @sequence-of-slot
          else
            last = middle - 1;
        }
        assign(p, slot - first_slot(p, batch), number / slots, batch);
        if (tile >= 0) return;  // @has-tile
      } else {
        // The scheduler processes as many whole GQA groups at a time as fit in L2: first the longest tile of each of
        // their heads, then the next tile of each, and so on.
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
