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

// Loads dO of the queries of a tile that are in `queries`. A row that sees no key must not contribute: it loads zeros.
__device__ inline void load_dO(real* dO_smem, const Params& p, const Sequence& sequence, int head, int q_start,
                               Range queries) {
  const real* lse = sequence.queries<real>(p.lse, head);
  load_tile<BLOCK_Q, HEAD_DIM_V>(dO_smem, sequence.query_rows<element>(p.dout, head).tile(q_start),
                                 [&](int i) { return queries(i) && lse[i * p.lse.row] != -infinity(); });
}

// Loads lse and delta of a tile. A row that sees no key gets lse +inf, so that exp(s - lse) is 0, and delta 0.
__device__ inline void load_rows(real* lse_smem, real* delta_smem, const Params& p, const Sequence& sequence, int head,
                                 int q_start) {
  const real* lse = sequence.queries<real>(p.lse, head);
  const real* delta = sequence.queries<real>(p.delta, head);
  for (int row = threadIdx.x; row < BLOCK_Q; row += THREADS) {
    int i = q_start + row;
    real x = i < sequence.q_len ? lse[i * p.lse.row] : -infinity();
    lse_smem[row] = x == -infinity() ? infinity() : x;  // @lse-of-no-key
    delta_smem[row] = x == -infinity() ? 0 : delta[i * p.delta.row];
  }
}

// Turns Q K^T and dO V^T of a tile into P (after dropout) and dS, in place. TRANSPOSED: rows are keys, columns are
// queries. QK_GRADIENT: dS is the gradient of scale * q.k, else that of the score.
template <bool MASKED, bool TRANSPOSED, bool QK_GRADIENT, int ROWS, int COLS>
__device__ void differentiate(real (&S)[ROWS][COLS], real (&dP)[ROWS][COLS], const Score& score, const Band& band,
                              const Dropout& dropout, const real* lse_smem, const real* delta_smem, int2 start) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    Kept kept;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int row = row_y() + r * ROW_THREADS, column = lane_x() + c * LANES;
      int query = TRANSPOSED ? column : row, i = start.x + query, j = start.y + (TRANSPOSED ? row : column);
      real derivative = 0;
      real s = sees<MASKED>(score, band, i, j) ? score.apply<!QK_GRADIENT>(S[r][c], i, j, derivative) : -infinity();
      real probability = exp(s - lse_smem[query]);
      real factor = DROPOUT ? kept.factor(dropout, c, i, j) : 1;
      real ds = probability * (dP[r][c] * factor - delta_smem[query]);
      S[r][c] = probability * factor;
      dP[r][c] = QK_GRADIENT || SCORE_MOD ? score.gradient(ds, derivative) : ds;
    }
  }
}
