// Steps of a forward with its derivative in one direction (JVP).
//
// The tangent of lse is mu, the mean of the score tangents tS under P, which is known only after the last key. The sum
// T = (P (tS - mu)) V + P tV uses the mu of the keys so far: where mu grows by x, x O is subtracted from T. If mu O
// were subtracted from (P tS) V only at the end, the two would cancel in a row in which one key has nearly all of P.
#pragma once
#include "../mean.cuh"
#include "../softmax.cuh"
#include "steps.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;
constexpr int SUMS = columns_of(HEAD_DIM_V);

// Offsets, in elements of type real.
struct SharedMemory {
  static constexpr int Q = 0;                                         // [BLOCK_Q][HEAD_DIM]
  static constexpr int tQ = Q + BLOCK_Q * row_stride(HEAD_DIM);       // [BLOCK_Q][HEAD_DIM]
  static constexpr int X = tQ + TQ * BLOCK_Q * row_stride(HEAD_DIM);  // [BLOCK_KV][]: K, tK, V, then tV
  static constexpr int P = X + BLOCK_KV * row_stride(MAX_DIM);        // [BLOCK_Q][BLOCK_KV]
  static constexpr int tP = P + BLOCK_Q * p_stride(BLOCK_KV);         // SCORES_MOVE: [BLOCK_Q][BLOCK_KV], P (tS - mu)
  static constexpr int BYTES = sizeof(real) * (tP + SCORES_MOVE * BLOCK_Q * p_stride(BLOCK_KV));
};

// Turns q.k and its tangent into scores and their tangents; keys that a query does not see get -inf.
template <bool MASKED>
__device__ void modify(real (&S)[ROWS][COLS], real (&tS)[ROWS][COLS], const Score& score, const Band& band, int q_start,
                       int kv_start) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int i = q_start + row_y() + r * ROW_THREADS, j = kv_start + lane_x() + c * LANES;
      Score::Moved x = {-infinity()};
      if (sees<MASKED>(score, band, i, j)) x = score.moved(S[r][c], tS[r][c], i, j);
      S[r][c] = x.score, tS[r][c] = x.tangent;
    }
}

// Online-softmax step: rescales O, T and l to the new row max, moves T to the new mu, and replaces S and tS by the
// weights of V in both sums. SELECTED: before dropout, because neither rows nor keys of a tile are equidistant.
__device__ void update(real (&S)[ROWS][COLS], real (&tS)[ROWS][COLS], Softmax (&softmax)[ROWS], Mean (&mean)[ROWS],
                       real (&O)[ROWS][SUMS], real (&T)[ROWS][SUMS]
#if !SELECTED
                       ,
                       const Dropout& dropout, int q_start, int kv_start
#endif
) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    real largest = -infinity(), sum = 0, moving = 0;
#pragma unroll
    for (int c = 0; c < COLS; ++c) largest = max(largest, S[r][c]);
    real rescale = softmax[r].rescale(row_max(largest));
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      sum += S[r][c] = softmax[r].probability(S[r][c]);
      if (S[r][c] == 0) tS[r][c] = 0;  // the tangent of a hidden score may be NaN
      moving += S[r][c] * tS[r][c];    // @simt.sum-tangent
    }
    softmax[r].l = softmax[r].l * rescale + row_sum(sum);
    real change = SCORES_MOVE ? mean[r].update(rescale, row_sum(moving), softmax[r].l) : 0;  // @simt.update-lse-tangent
#pragma unroll
    for (int n = 0; n < SUMS; ++n) {
      O[r][n] *= rescale;
      T[r][n] = T[r][n] * rescale - change * O[r][n];  // @simt.rescale-T
    }
#if SELECTED
#pragma unroll
    for (int c = 0; c < COLS; ++c) tS[r][c] = S[r][c] * (tS[r][c] - mean[r].lse_tangent);  // @simt.weigh-tangent
#else
    Kept kept;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int i = q_start + row_y() + r * ROW_THREADS, j = kv_start + lane_x() + c * LANES;
      tS[r][c] = S[r][c] * (tS[r][c] - mean[r].lse_tangent);  // @simt.weigh-tangent
      if constexpr (DROPOUT) {
        real factor = kept.factor(dropout, c, i, j);
        S[r][c] *= factor, tS[r][c] *= factor;  // @simt.drop-tangent
      }
    }
#endif
  }
}

// Adds Q K^T of a tile of keys to S, and its tangent tQ K^T + Q tK^T to tS. rows(x) has the addresses of the keys in x.
template <typename Rows, typename Exists>
__device__ void add_scores(real (&S)[ROWS][COLS], real (&tS)[ROWS][COLS], real* smem, const Params& p, Rows rows,
                           Exists exists) {
  real *Q_smem = smem + SharedMemory::Q, *X_smem = smem + SharedMemory::X;
  load_tile<BLOCK_KV, HEAD_DIM>(X_smem, rows(p.k), exists);
  __syncthreads();
  scores<ROWS, COLS, HEAD_DIM>(S, Q_smem, X_smem);
  if constexpr (TQ) scores<ROWS, COLS, HEAD_DIM>(tS, smem + SharedMemory::tQ, X_smem);
  if constexpr (TK) {
    __syncthreads();
    load_tile<BLOCK_KV, HEAD_DIM>(X_smem, rows(p.tk), exists);  // @simt.load-tK
    __syncthreads();
    scores<ROWS, COLS, HEAD_DIM>(tS, Q_smem, X_smem);
  }
}

// Adds P V to O, and tP V + P tV to T. After its first barrier, V may be read.
template <typename Rows, typename Exists>
__device__ void add_values(real (&O)[ROWS][SUMS], real (&T)[ROWS][SUMS], const real (&P)[ROWS][COLS],
                           const real (&tP)[ROWS][COLS], real* smem, const Params& p, Rows rows, Exists exists) {
  real *X_smem = smem + SharedMemory::X, *P_smem = smem + SharedMemory::P, *tP_smem = smem + SharedMemory::tP;
  store_p(P_smem, P);
  if constexpr (SCORES_MOVE) store_p(tP_smem, tP);
  __syncthreads();
  accumulate<ROWS, BLOCK_KV, HEAD_DIM_V>(O, P_smem, X_smem);
  if constexpr (SCORES_MOVE) accumulate<ROWS, BLOCK_KV, HEAD_DIM_V>(T, tP_smem, X_smem);
  if constexpr (TV) {
    __syncthreads();
    load_tile<BLOCK_KV, HEAD_DIM_V>(X_smem, rows(p.tv), exists);
    __syncthreads();
    accumulate<ROWS, BLOCK_KV, HEAD_DIM_V>(T, P_smem, X_smem);
  }
}

// Stores the results of query i.
__device__ void store_query(const Params& p, const Sequence& sequence, int head, int i, const Softmax& softmax,
                            const Mean& mean, const real (&O)[SUMS], const real (&T)[SUMS]) {
  real factor = softmax.inverse_sum();
  store_row<HEAD_DIM_V>(sequence.queries<element>(p.out, head) + i * p.out.row, O, factor);
  store_row<HEAD_DIM_V>(sequence.queries<element>(p.tout, head) + i * p.tout.row, T, factor);
  if (lane_x() > 0) return;
  bool exists = i < sequence.q_len;
  sequence.queries<real>(p.lse, head)[i * p.lse.row] = exists ? softmax.lse() : -infinity();
  sequence.queries<real>(p.tlse, head)[i * p.tlse.row] = exists ? mean.lse_tangent : 0;
}
