// Operands and steps that the double backward kernels of the simt engine share.
#pragma once
#include "../second_gradients.cuh"
#include "steps.cuh"

// Q, tQ and dO of a tile of queries in shared memory, and the numbers of its rows.
struct QueryTile {
  real* Q;    // [BLOCK_Q][HEAD_DIM]
  real* tQ;   // [BLOCK_Q][HEAD_DIM]
  real* dO;   // [BLOCK_Q][HEAD_DIM_V]
  real* lse;  // [BLOCK_Q]; +inf for a row that sees no key, so that its P is 0
  real* mu;
  real* delta;
  real* eps;
  real* end;

  __device__ QueryTile(real* smem) : Q(smem) {
    tQ = Q + BLOCK_Q * row_stride(HEAD_DIM);
    dO = tQ + TQ * BLOCK_Q * row_stride(HEAD_DIM);
    lse = dO + BLOCK_Q * row_stride(HEAD_DIM_V);
    mu = lse + BLOCK_Q, delta = mu + BLOCK_Q, eps = delta + BLOCK_Q, end = eps + BLOCK_Q;
  }

  __device__ void load(const Params& p, const Sequence& sequence, int head, int q_start, Range queries) {
    load_tile<BLOCK_Q, HEAD_DIM>(Q, sequence.query_rows<element>(p.q, head).tile(q_start), queries);
    if constexpr (TQ) load_tile<BLOCK_Q, HEAD_DIM>(tQ, sequence.query_rows<element>(p.tq, head).tile(q_start), queries);
    load_dO(dO, p, sequence, head, q_start, queries);
    load_rows(lse, delta, p, sequence, head, q_start);
    for (int row = threadIdx.x; row < BLOCK_Q; row += THREADS) {
      int i = q_start + row;
      bool sees = i < sequence.q_len && sequence.queries<real>(p.lse, head)[i * p.lse.row] != -infinity();
      mu[row] = sees ? sequence.queries<real>(p.tlse, head)[i * p.tlse.row] : 0;
      eps[row] = sees ? sequence.queries<real>(p.eps, head)[i * p.eps.row] : 0;
    }
  }

  // Returns the gradients of score x and of its tangent, and the weight of dO in dV, from dO V^T and dO tV^T.
  __device__ PairGradients differentiate(const Score::Moved& x, real dP, real dtP, real factor, int query) const {
    // A hidden score has P = 0 also where lse is NaN; its tangent and slopes may be NaN.
    real probability = x.score == -infinity() ? 0 : exp(x.score - lse[query]);
    if (probability == 0) return {};
    return pair_gradients(probability, x.tangent, dP, dtP, factor, mu[query], delta[query], eps[query]);
  }
};

// K, V and their tangents of a tile of keys in shared memory.
struct KeyTile {
  real* K;   // [BLOCK_KV][HEAD_DIM]
  real* tK;  // [BLOCK_KV][HEAD_DIM]
  real* V;   // [BLOCK_KV][HEAD_DIM_V]
  real* tV;  // [BLOCK_KV][HEAD_DIM_V]
  real* end;

  __device__ KeyTile(real* smem) : K(smem) {
    tK = K + BLOCK_KV * row_stride(HEAD_DIM);
    V = tK + TK * BLOCK_KV * row_stride(HEAD_DIM);
    tV = V + BLOCK_KV * row_stride(HEAD_DIM_V);
    end = tV + TV * BLOCK_KV * row_stride(HEAD_DIM_V);
  }

  __device__ void load(const Params& p, const Sequence& sequence, int kv_head, int kv_start, Range keys) {
    auto rows = [&](const Operand& x) { return sequence.key_rows<element>(x, kv_head).tile(kv_start); };
    load_tile<BLOCK_KV, HEAD_DIM>(K, rows(p.k), keys);
    if constexpr (TK) load_tile<BLOCK_KV, HEAD_DIM>(tK, rows(p.tk), keys);
    load_tile<BLOCK_KV, HEAD_DIM_V>(V, rows(p.v), keys);
    if constexpr (TV) load_tile<BLOCK_KV, HEAD_DIM_V>(tV, rows(p.tv), keys);
  }
};

// The products of a tile and, after `differentiate`, its gradients. TRANSPOSED: rows are keys, columns are queries.
// QK_GRADIENT: gradients of scale * q.k, else of the bias or of the elements that score_mod reads.
template <int ROWS, int COLS, bool TRANSPOSED, bool QK_GRADIENT>
struct SecondGradients {
  real dS[ROWS][COLS] = {};   // Q K^T, then dS
  real dtS[ROWS][COLS] = {};  // the tangent of Q K^T, then dtS
  real W[ROWS][COLS] = {};    // dO V^T, then W
  real dtP[ROWS][COLS] = {};  // dO tV^T

  template <int DIM>
  __device__ static void product(real (&X)[ROWS][COLS], const real* by_query, const real* by_key) {
    scores<ROWS, COLS, DIM>(X, TRANSPOSED ? by_key : by_query, TRANSPOSED ? by_query : by_key);
  }

  __device__ SecondGradients(const QueryTile& queries, const KeyTile& keys) {
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
        PairGradients gradients = queries.differentiate(x, W[r][c], dtP[r][c], factor, query);
        if constexpr (QK_GRADIENT || SCORE_MOD) score.second_gradient(gradients.dS, gradients.dtS, x);
        dS[r][c] = gradients.dS, dtS[r][c] = gradients.dtS, W[r][c] = gradients.W;
      }
    }
  }

  __device__ void differentiate(bool masked, const Score& score, const Band& band, const Dropout& dropout,
                                const QueryTile& queries, int2 start) {
    if (masked)
      differentiate<true>(score, band, dropout, queries, start);
    else
      differentiate<false>(score, band, dropout, queries, start);
  }
};

// O += P X. P goes from the registers of all threads through P_smem.
template <int DIM, int ROWS, int COLS>
__device__ void add_product(real (&O)[ROWS][columns_of(DIM)], const real (&P)[ROWS][COLS], real* P_smem,
                            const real* X_smem) {
  __syncthreads();
  store_p(P_smem, P);
  __syncthreads();
  accumulate<ROWS, COLS * LANES, DIM>(O, P_smem, X_smem);
}
