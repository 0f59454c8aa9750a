// V^T, the workspace of fp8: products of e4m3 want the keys along the rows. Of each head Dv rows, of keys as many as
// whole tiles have, zeros after a sequence's last.
//
// In each 16 they stand as fragments of P have them, two columns of each of two fragments side by side to a lane: keys
// 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15.
#pragma once
#include "../sequence.cuh"

// The column of a sequence's first key. Packed sequences begin with a tile of their own, whatever row they begin with.
__device__ inline int vt_start(const Sequence& sequence) {
  return PACKED ? (sequence.kv_start / BLOCK_KV + sequence.batch) * BLOCK_KV : 0;
}
