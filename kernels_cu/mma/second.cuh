// Operands and steps that the double backward kernels of the mma engine share.
#pragma once
#include "../second_gradients.cuh"
#include "direction.cuh"
#include "steps.cuh"

constexpr int dO_BYTES = BLOCK_Q * Tile<HEAD_DIM_V>::ROW;

// Addresses in shared memory of the operands of a tile of queries: Q, tQ [BLOCK_Q][HEAD_DIM], dO [BLOCK_Q][HEAD_DIM_V],
// RowNumbers [BLOCK_Q].
struct QueryTile {
  static constexpr int BYTES = (1 + TQ) * Q_BYTES + dO_BYTES + BLOCK_Q * sizeof(RowNumbers);
  unsigned int Q;
  unsigned int tQ;
  unsigned int dO;
  unsigned int numbers;

  __device__ QueryTile(unsigned int smem) : Q(smem), tQ(Q + Q_BYTES), dO(tQ + TQ * Q_BYTES), numbers(dO + dO_BYTES) {}
};

struct QueryLoads {
  const Params& p;
  const Sequence& sequence;
  Loader<BLOCK_Q, HEAD_DIM> Q;
  Loader<BLOCK_Q, HEAD_DIM> tQ;
  Loader<BLOCK_Q, HEAD_DIM_V> dO;

  __device__ QueryLoads(const Params& p, const Sequence& sequence)
      : p(p), sequence(sequence), Q(p.q.row), tQ(p.tq.row), dO(p.dout.row) {}
  __device__ QueryLoads kept() const {
    QueryLoads loads = *this;
    loads.Q = Q.kept(), loads.tQ = tQ.kept(), loads.dO = dO.kept();
    return loads;
  }

  // Loads the tile at q_start, with zeros for queries that are not in `queries`.
  __device__ void load(const QueryTile& to, int head, int q_start, Range queries) const {
    Q.load(to.Q, sequence.query_rows<element>(p.q, head).tile(q_start), queries);
    if constexpr (TQ) tQ.load(to.tQ, sequence.query_rows<element>(p.tq, head).tile(q_start), queries);
    load_dO(to.dO, dO, sequence.query_rows<element>(p.dout, head).tile(q_start), p, sequence, head, queries);
    load_numbers<BLOCK_Q>(to.numbers, sequence.queries<RowNumbers>(p.row_numbers, head) + q_start, q_start, queries);
  }
};

// The products of a tile and, after `differentiate`, its gradients. TRANSPOSED: rows are keys, columns are queries.
// QK_GRADIENT: gradients are those of scale * q.k, else those of the bias or of what score_mod reads.
template <int M, int N, bool TRANSPOSED, bool QK_GRADIENT>
struct SecondGradients {
  float dS[M][N][4] = {};   // Q K^T before
  float dtS[M][N][4] = {};  // its tangent before
  float W[M][N][4] = {};    // dO V^T before
  float dtP[M][N][4] = {};  // dO tV^T

  // `row`: the first of this warp's rows.
  __device__ SecondGradients(const QueryTile& queries, const KeyTile& keys, int row) {
    auto A_lane = Tile<HEAD_DIM>::lane_of_A(row), B_lane = Tile<HEAD_DIM>::lane_of_B();
    auto A_lane_v = Tile<HEAD_DIM_V>::lane_of_A(row), B_lane_v = Tile<HEAD_DIM_V>::lane_of_B();
    if constexpr (TRANSPOSED) {
      scores_moved<M, N, HEAD_DIM, TK, TQ>(dS, dtS, keys.K, keys.tK, A_lane, queries.Q, queries.tQ, B_lane);
      scores_moved<M, N, HEAD_DIM_V, TV, false>(W, dtP, keys.V, keys.tV, A_lane_v, queries.dO, 0, B_lane_v);
    } else {
      scores_moved<M, N, HEAD_DIM, TQ, TK>(dS, dtS, queries.Q, queries.tQ, A_lane, keys.K, keys.tK, B_lane);
      scores_moved<M, N, HEAD_DIM_V, false, TV>(W, dtP, queries.dO, 0, A_lane_v, keys.V, keys.tV, B_lane_v);
    }
  }

  template <bool MASKED>
  __device__ void differentiate(const Score& score, const Band& band, const Dropout& dropout, const RowNumbers* queries,
                                int i0, int j0) {
    using RandomBits = typename Choice<TRANSPOSED, TransposedBits, Bits>::type;
    // Query and key of element e of fragments (m, n) and (m, n + 1).
    auto query_of = [](int m, int n, int e) { return TRANSPOSED ? column_of(n + e / 4, e % 4) : row_of(m, e % 4); };
    auto key_of = [](int m, int n, int e) { return TRANSPOSED ? row_of(m, e % 4) : column_of(n + e / 4, e % 4); };
#pragma unroll
    for (int t = 0; t < M * N / 2; ++t) {
      int m = t / (N / 2), n = t % (N / 2) * 2;
      RandomBits bits;
      if constexpr (DROPOUT) bits.draw(dropout, i0 + query_of(m, n, 0), j0 + key_of(m, n, 0));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        int query = query_of(m, n, e);
        RowNumbers row = queries[query];
        float &ds = dS[m][n + e / 4][e % 4], &dts = dtS[m][n + e / 4][e % 4], &w = W[m][n + e / 4][e % 4];
        Score::Moved x = moved<MASKED, !QK_GRADIENT>(score, band, ds, dts, i0 + query, j0 + key_of(m, n, e));
        float factor = 1;
        if constexpr (DROPOUT) factor = bits(e / 4, e % 4) < dropout.drop_below ? 0 : (float)dropout.keep_scale;
        float probability = ex2_approx(x.score * LOG2_E - row.lse2);
        PairGradients gradients =
            pair_gradients(probability, x.tangent, w, dtP[m][n + e / 4][e % 4], factor, row.mu, row.delta, row.eps);
        if constexpr (QK_GRADIENT || SCORE_MOD) score.second_gradient(gradients.dS, gradients.dtS, x);
        ds = gradients.dS, dts = gradients.dtS, w = gradients.W;
      }
    }
  }

  __device__ void differentiate(bool masked, const Score& score, const Band& band, const Dropout& dropout,
                                const RowNumbers* queries, int i0, int j0) {
    if (masked)
      differentiate<true>(score, band, dropout, queries, i0, j0);
    else
      differentiate<false>(score, band, dropout, queries, i0, j0);
  }
};

// C += P X for P (16 M rows, 8 N columns), rounded, and the rows of tile X: this warp's columns.
template <int DIM, int M, int N>
__device__ void add_rounded(float (&C)[M][fragments_of(DIM)][4], const float (&P)[M][N][4], unsigned int X_smem) {
  unsigned int P_rmem[M][N / 2][4];
  round_fragments(P_rmem, P);
  accumulate<M, N / 2, DIM>(C, P_rmem, X_smem, Tile<DIM>::lane_of_X());
}
