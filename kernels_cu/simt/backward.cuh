// The products of a backward from a tile of queries and a tile of keys, for the loops of mainloop.cuh.
#pragma once
#if WEIGHTS
#include "../result_gradient.cuh"
#endif
#include "operands.cuh"

// The matrix products of a tile, which `differentiate` replaces by its probabilities and gradients. TRANSPOSED: rows
// are keys, columns are queries. QK_GRADIENT: the gradients are those of scale * q.k, else those of the bias or of the
// elements that score_mod reads.
template <int ROWS, int COLS, bool TRANSPOSED, bool QK_GRADIENT>
struct Gradients {
  real P[ROWS][COLS] = {};   // Q K^T, then P after dropout
  real dS[ROWS][COLS] = {};  // dO V^T, then dS
#if WEIGHTS
  real sums[ROWS] = {};  // of P dP over the columns, without the weight of a row
#endif

  __device__ Gradients(const QueryTile& queries, const KeyTile& keys) {
    scores<ROWS, COLS, HEAD_DIM>(P, TRANSPOSED ? keys.K : queries.Q, TRANSPOSED ? queries.Q : keys.K);
#if !WEIGHTS
    scores<ROWS, COLS, HEAD_DIM_V>(dS, TRANSPOSED ? keys.V : queries.dO, TRANSPOSED ? queries.dO : keys.V);
#endif
  }

  template <bool MASKED>
  __device__ void differentiate(const Score& score, const Band& band, const Dropout& dropout, const QueryTile& queries,
                                int2 start) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      Kept kept;
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        int row = row_y() + r * ROW_THREADS, column = lane_x() + c * LANES;
        int query = TRANSPOSED ? column : row, i = start.x + query, j = start.y + (TRANSPOSED ? row : column);
        real derivative = 0;
        real s = sees<MASKED>(score, band, i, j) ? score.apply<!QK_GRADIENT>(P[r][c], i, j, derivative) : -infinity();
#if WEIGHTS
        ResultGradient gradient(score);
        real probability = s == -infinity() ? 0 : exp(s - queries.lse[query]), factor = 1, ds = 0;
        if (probability != 0) ds = probability * gradient(i, j);
        sums[r] += ds;
        if (GRADIENT_OF == 2 && ds != 0) ds *= gradient.weight(i);  // @weights.weight-of-gradient
#else
        real probability = exp(s - queries.lse[query]);
        real factor = DROPOUT ? kept.factor(dropout, c, i, j) : 1;
        real ds = probability * (dS[r][c] * factor - queries.delta[query]);
#endif
#if DSTATISTICS
        ds += queries.statistics().of_score(query, j, probability, s - queries.lse[query]);
#endif
        P[r][c] = probability * factor;
        dS[r][c] = QK_GRADIENT || SCORE_MOD ? score.gradient(ds, derivative) : ds;
      }
    }
  }

  // Adds the tile's part of dQ, or of dK and dV.
  __device__ void add_to(real (&dQ)[ROWS][columns_of(HEAD_DIM)], const KeyTile& keys, real* P_smem) const {
    add_product<HEAD_DIM>(dQ, dS, P_smem, keys.K);
  }
  __device__ void add_to(real (&dK)[ROWS][columns_of(HEAD_DIM)], real (&dV)[ROWS][columns_of(HEAD_DIM_V)],
                         const QueryTile& queries, real* P_smem) const {
#if !WEIGHTS
    add_product<HEAD_DIM_V>(dV, P, P_smem, queries.dO);
    __syncthreads();
#endif
    add_product<HEAD_DIM>(dK, dS, P_smem, queries.Q);
  }
};
