// Steps that the kernels of the simt engine share, on the elements of a tile.
#pragma once
#include "../dropout.cuh"
#include "../score.cuh"
#include "../tile_pages.cuh"
#include "../walk.cuh"
#include "tile.cuh"

constexpr int MAX_DIM = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;

template <bool MASKED>
__device__ bool sees(const Score& score, const Band& band, int i, int j) {
  bool seen = !MASKED || band.sees(i, j);
  if constexpr (MASKED && MASK_MOD) seen = seen && band.mod_sees(score.head, i, j);
  // The dense mask has no elements outside the sequence.
  if constexpr (DENSE_MASK) seen = seen && DenseMask::sees(score.p, band, score.batch, score.head, i, j);
  return seen;
}

// Dropout factors along the columns of one row. Columns c and c + 1, which are LANES apart, share their random bits,
// except in a shard, whose first position is arbitrary.
struct Kept {
  Philox bits;

  __device__ real factor(const Dropout& dropout, int c, int i, int j) {
    if (SHARD || c % 2 == 0) bits = dropout.bits(i, j);
    return dropout.keeps(bits, i, j) ? (real)dropout.keep_scale : 0;
  }
};

// Stores this thread's part of P or dS to shared memory.
template <int ROWS, int COLS>
__device__ void store_p(real* P_smem, const real (&P)[ROWS][COLS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < COLS; ++c)
      P_smem[(row_y() + r * ROW_THREADS) * p_stride(COLS * LANES) + lane_x() + c * LANES] = P[r][c];
}

// Calls visit(r, row) for this thread's rows of a tile from `start` that are below `end`.
template <int ROWS, typename Visit>
__device__ void for_each_row(int start, int end, Visit visit) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int row = start + row_y() + r * ROW_THREADS;
    if (row < end) visit(r, row);
  }
}
