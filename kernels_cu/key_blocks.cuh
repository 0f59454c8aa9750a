// The blocks of a backward of one key tile each, and the order in which they add to dQ (kernels of Hopper and
// Blackwell):
//
//   BlockIndex   the keys of a block; BlockTiles: an iterator over its tiles of keys
#pragma once
#if LONGEST_FIRST
#include "tile_counts.cuh"
#endif
#include "sequence.cuh"

// @GROUP_BLOCKS
constexpr int GROUP_BLOCKS = 256;  // DQ_IN_ORDER: blocks of a group of heads, twice as many as a GPU has SMs

// The work of a block: key tile number `tile` of a key/value head of a sequence. If the grid has fewer blocks than the
// sequence has tiles, BlockTiles gives a block several tiles.
struct BlockIndex {
  int tile;
  int kv_head;
  int batch;

  // DQ_IN_ORDER: a block draws a number from a counter. The last keys of a head have the lowest numbers, and a block
  // adds to dQ after the blocks of higher keys. So it waits only for blocks with lower numbers, which have started
  // before it. Of the running blocks, the one with the lowest number waits for none, so there is no deadlock, whatever
  // the order in which the GPU starts blocks and however few run at a time.
  //
  // Under a causal mask or a window, a block with higher keys starts at a higher query, so it has usually added to a
  // tile of dQ before a block with lower keys reaches that tile. The heads of a group alternate, so that few blocks
  // wait for each other at the same time. The groups follow each other, so that Q, dO and dQ of the heads that are
  // computed stay in the L2 cache.
  __device__ BlockIndex(int tile_counter) : tile(blockIdx.x), kv_head(blockIdx.y), batch(blockIdx.z) {
    if constexpr (DQ_IN_ORDER) {  // @draw-number
      int number = __shfl_sync(0xFFFFFFFF, tile_counter, 0), tiles = gridDim.x, heads = gridDim.y * gridDim.z;
      int group = max(GROUP_BLOCKS / tiles, 1);
      int first = number / (group * tiles) * group, size = min(group, heads - first);
      number -= first * tiles;
      int head = first + number % size;
      tile = number / size, kv_head = head % gridDim.y, batch = head / gridDim.y;
    }
  }

#if LONGEST_FIRST
  // Blocks start in the order of their indices in the grid. The sequences with the most tiles come first, so that no
  // long block starts when the others end. Of a sequence the first keys come first: under a causal mask the most
  // queries see them. As many heads alternate as a GPU has SMs for, so that their Q, dO and dQ stay in the L2 cache.
  // The blocks that no sequence needs have the rows past the last one, or a tile that is not below gridDim.x: no work.
  __device__ BlockIndex(const Params& p) : tile(blockIdx.x), kv_head(blockIdx.y), batch(blockIdx.z) {
    if (p.batch > TileCounts::SEQUENCES) return;
    int number = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), heads = gridDim.y;
    TileCounts counts(p, gridDim.x);
    int tiles = counts.of_place(number / heads);  // @tiles-of-number
    number -= counts.of_longer(tiles) * heads;
    if (tiles == 0) {
      batch = p.batch, tile = number / heads, kv_head = number % heads;  // @past-the-last-sequence
      return;
    }
    batch = counts.sequence(tiles, number / (tiles * heads));  // @sequence-of-number
    number %= tiles * heads;
    int group = max(GROUP_BLOCKS / 2 / tiles, 1), first = number / (group * tiles) * group;
    int size = min(group, heads - first);
    number -= first * tiles;
    tile = number / size, kv_head = first + number % size;  // @tile-of-number
  }
#endif
};

// Iterator over the tiles of keys of a block: every gridDim.x-th tile. DQ_IN_ORDER: consecutive tiles in descending
// order of keys, so that a block with several tiles also waits only for blocks of lower numbers.
struct BlockTiles {
  int kv_start;
  int end;

  __device__ BlockTiles(const Sequence& sequence, int tile) : kv_start(tile * BLOCK_KV), end(sequence.kv_rows) {
    if constexpr (DQ_IN_ORDER) {
      int tiles = (sequence.kv_rows + BLOCK_KV - 1) / BLOCK_KV, per_block = (tiles + gridDim.x - 1) / gridDim.x;
      kv_start = (tiles - 1 - tile * per_block) * BLOCK_KV;  // @first-keys-of-block
      end = max(kv_start - per_block * BLOCK_KV, -1);
    }
  }
  __device__ bool valid() const { return DQ_IN_ORDER ? kv_start > end : kv_start < end; }
  __device__ void next() { kv_start += DQ_IN_ORDER ? -BLOCK_KV : (int)gridDim.x * BLOCK_KV; }
};
