// V^T, the workspace of fp8: wgmma with e4m3 needs keys along the rows. A head has Dv rows. Along a row, each
// sequence takes whole tiles of keys; zeros fill its last tile.
//
// Every 16 keys are in the order of P's fragments, in which a lane has two columns of each of two adjacent fragments:
// keys 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15.
#pragma once
#include "../sequence.cuh"

// The column of a sequence's first key. A packed sequence starts at a new tile, so that no tile holds keys of two
// sequences.
__device__ inline int vt_start(const Sequence& sequence) {
  return PACKED ? (sequence.kv_start / BLOCK_KV + sequence.batch) * BLOCK_KV : 0;  // @tile-of-sequence
}
