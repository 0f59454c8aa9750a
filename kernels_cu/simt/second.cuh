// The products of a double backward from a tile of queries and a tile of keys, for the loops of mainloop.cuh.
#pragma once
#include "../second_gradients.cuh"
#include "operands.cuh"

// Returns, from dO V^T and dO tV^T, the gradients of score x and of its tangent, and the weight of dO in dV.
__device__ inline PairGradients score_gradients(const Score::Moved& x, real dP, real dtP, real factor,
                                                const QueryTile& queries, int query) {
  // A hidden score has P = 0 even where lse is NaN. Its tangent and slopes may be NaN, so they are not used.
  real probability = x.score == -infinity() ? 0 : exp(x.score - queries.lse[query]);
  if (probability == 0) return {};
  return pair_gradients(probability, x.tangent, dP, dtP, factor, queries.lse_tangent[query], queries.delta[query],
                        queries.delta_tangent[query]);
}

// The matrix products of a tile, which `differentiate` replaces by its gradients. TRANSPOSED: rows are keys, columns
// are queries. QK_GRADIENT: gradients are those of scale * q.k, else those of the bias or of the elements that
// score_mod reads.
template <int ROWS, int COLS, bool TRANSPOSED, bool QK_GRADIENT>
struct Gradients {
  real dS[ROWS][COLS] = {};   // Q K^T, then dS
  real dtS[ROWS][COLS] = {};  // the tangent of Q K^T, then dtS
  real W[ROWS][COLS] = {};    // dO V^T, then W
  real dtP[ROWS][COLS] = {};  // dO tV^T

  template <int DIM>
  __device__ static void product(real (&X)[ROWS][COLS], const real* by_query, const real* by_key) {
    scores<ROWS, COLS, DIM>(X, TRANSPOSED ? by_key : by_query, TRANSPOSED ? by_query : by_key);
  }

  __device__ Gradients(const QueryTile& queries, const KeyTile& keys) {
    product<HEAD_DIM>(dS, queries.Q, keys.K);
    if constexpr (TQ) product<HEAD_DIM>(dtS, queries.tQ, keys.K);
    if constexpr (TK) product<HEAD_DIM>(dtS, queries.Q, keys.tK);
    product<HEAD_DIM_V>(W, queries.dO, keys.V);
    if constexpr (TV) product<HEAD_DIM_V>(dtP, queries.dO, keys.tV);
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
        Score::Moved x = {-infinity()};
        if (sees<MASKED>(score, band, i, j)) x = score.moved<!QK_GRADIENT>(dS[r][c], dtS[r][c], i, j);
        real factor = DROPOUT ? kept.factor(dropout, c, i, j) : 1;
        PairGradients gradients = score_gradients(x, W[r][c], dtP[r][c], factor, queries, query);
        if constexpr (QK_GRADIENT || SCORE_MOD) score.second_gradient(gradients.dS, gradients.dtS, x);
        dS[r][c] = gradients.dS, dtS[r][c] = gradients.dtS, W[r][c] = gradients.W;
      }
    }
  }

  // Adds the tile's part of dQ, or of dK and dV.
  __device__ void add_to(real (&dQ)[ROWS][columns_of(HEAD_DIM)], const KeyTile& keys, real* P_smem) const {
    add_product<HEAD_DIM>(dQ, dS, P_smem, keys.K);
    if constexpr (TK) {  // @dtP-of-tK
      __syncthreads();
      add_product<HEAD_DIM>(dQ, dtS, P_smem, keys.tK);
    }
  }
  __device__ void add_to(real (&dK)[ROWS][columns_of(HEAD_DIM)], real (&dV)[ROWS][columns_of(HEAD_DIM_V)],
                         const QueryTile& queries, real* P_smem) const {
    if constexpr (SCORES_MOVE) {
      add_product<HEAD_DIM_V>(dV, W, P_smem, queries.dO);
      __syncthreads();
    }
    add_product<HEAD_DIM>(dK, dS, P_smem, queries.Q);
    if constexpr (TQ) {  // @dtP-of-tQ
      __syncthreads();
      add_product<HEAD_DIM>(dK, dtS, P_smem, queries.tQ);
    }
  }
};
