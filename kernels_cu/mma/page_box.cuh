// The TMA boxes of a tile of keys of a cache.
#pragma once
#include "parts.cuh"

// This lane's box of each tile of a part: the keys of one page, whose number it looks up one tile ahead.
struct PageBox {
  const Blocks& blocks;
  Range keys;  // of the part
  int size;    // keys of a box
  int row;     // its first row of the tile

  __device__ PageBox(const Part& part)
      : blocks(part.sequence.blocks),
        keys(part.keys),
        size(PAGED ? min(1 << blocks.page_log2, BLOCK_KV) : BLOCK_KV),
        row(lane_id() * size) {}
  // False in the lanes that a tile with fewer pages leaves idle.
  __device__ bool exists() const { return row < BLOCK_KV; }
  // The page, or the contiguous sequence, that has the keys of the tile at `start`. A page that does not exist, or
  // holds no key of the part, gets a number out of bounds, for which TMA writes zeros.
  __device__ int look_up(int start) const {
    int key = start + row;
    bool needed = exists() && key < keys.end && key + size > keys.begin;  // @look-up-page
    return needed ? blocks.block_of(key) : -1;
  }
  __device__ int row_in_block(int start) const { return blocks.row_in_block(start + row); }  // @row-in-page-of-box
};
