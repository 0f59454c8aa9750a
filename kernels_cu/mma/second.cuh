// The loads of a double backward, and its products of a tile of queries and a tile of keys, for the loops of
// mainloop.cuh.
#pragma once
#include "../second_gradients.cuh"
#include "direction.cuh"
#include "steps.cuh"

// Addresses in shared memory of the operands of a tile of queries.
struct QueryTile {
  static constexpr int BYTES = QuerySlot::BYTES;
  static_assert(BYTES == QuerySlot::NUMBERS + BLOCK_Q * sizeof(RowNumbers), "the numbers of its rows are the last");
  unsigned int Q;
  unsigned int tQ;
  unsigned int dO;
  unsigned int numbers;

  __device__ QueryTile(unsigned int slot)
      : Q(slot + QuerySlot::Q),
        tQ(slot + QuerySlot::tQ),
        dO(slot + QuerySlot::dO),
        numbers(slot + QuerySlot::NUMBERS) {}
  // The RowNumbers of the rows from `row` on; `smem` is the start of shared memory.
  __device__ const RowNumbers* numbers_of(const unsigned char* smem, int row) const {
    return (const RowNumbers*)(smem + (numbers - smem_address(smem))) + row;
  }
};

// Loads the operands of a tile of queries.
struct QueryLoads : QdOLoads {
  Loader<BLOCK_Q, HEAD_DIM> tQ_loader;
  AdvancingRows tQ;
  const RowNumbers* numbers;

  __device__ QueryLoads(const Params& p, const Sequence& sequence) : QdOLoads(p, sequence), tQ_loader(p.tq.row) {}
  __device__ QueryLoads kept() const {
    QueryLoads loads = *this;
    loads.Q_loader = Q_loader.kept(), loads.tQ_loader = tQ_loader.kept(), loads.dO_loader = dO_loader.kept();
    return loads;
  }

  // Loads the tile at q_start, with zeros for queries that are not in `queries`.
  __device__ void load(const QueryTile& to, int new_head, int q_start, Range queries) {
    auto seek = [&] {
      if constexpr (TQ) tQ.seek(sequence.query_rows<element>(p.tq, head), q_start);
      numbers = sequence.queries<RowNumbers>(p.row_numbers, head) + q_start;
    };
    auto advance = [&](int rows) {
      if constexpr (TQ) tQ.advance(rows);  // @advance-tQ
      numbers += rows;
    };
    move_to(new_head, q_start, seek, advance);
    QdOLoads::load(to.Q, to.dO, queries);
    if constexpr (TQ) tQ_loader.load(to.tQ, tQ, queries);
    load_numbers<BLOCK_Q>(to.numbers, numbers, q_start, queries);
  }
  __device__ void load_next(const QueryTile& to, QTiles& tiles) {
    load(to, tiles.head, tiles.start, tiles.visible);
    tiles.next();
  }
};

// The power of two by which factors and sums are multiplied. Gradients that are stored unrounded (of_exact) are not
// scaled.
struct Scale : FactorScale {
  __device__ Scale(const Params&) {}
  __device__ static Scale of_exact(const Params& p) {
    Scale scale(p);
    scale.log2 = 0;
    return scale;
  }
};

// The matrix products of a tile, which `differentiate` replaces by its gradients. TRANSPOSED: rows are keys, columns
// are queries. QK_GRADIENT: gradients are those of scale * q.k, else those of the bias or of the elements that
// score_mod reads.
template <int M, int N, bool TRANSPOSED, bool QK_GRADIENT>
struct Gradients {
  float dS[M][N][4] = {};   // Q K^T, then dS
  float dtS[M][N][4] = {};  // the tangent of Q K^T, then dtS
  float W[M][N][4] = {};    // dO V^T, then W
  float dtP[M][N][4] = {};  // dO tV^T

  // `load()` is called after the first products are issued, so that addresses are computed while the tensor cores run.
  template <typename Load>
  __device__ Gradients(const QueryTile& queries, const KeyTile& keys, const ProductLanes& lanes, Load load) {
    if constexpr (TRANSPOSED) {
      scores_moved<M, N, HEAD_DIM, TK, TQ, true>(dS, dtS, keys.K, keys.tK, lanes.A, queries.Q, queries.tQ, lanes.B);
      load();
      scores_moved<M, N, HEAD_DIM_V, TV, false>(W, dtP, keys.V, keys.tV, lanes.A_v, queries.dO, 0, lanes.B_v);
    } else {
      scores_moved<M, N, HEAD_DIM, TQ, TK>(dS, dtS, queries.Q, queries.tQ, lanes.A, keys.K, keys.tK, lanes.B);
      load();
      scores_moved<M, N, HEAD_DIM_V, false, TV>(W, dtP, queries.dO, 0, lanes.A_v, keys.V, keys.tV, lanes.B_v);
    }
  }

  // Computes the gradients, multiplied by 2^log2_scale.
  template <bool MASKED>
  __device__ void differentiate(float log2_scale, const Score& score, const Band& band, const Dropout& dropout,
                                const RowNumbers* queries, int i0, int j0) {
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
        // @drop-dP
        if constexpr (DROPOUT) factor = bits(e / 4, e % 4) < dropout.drop_below ? 0 : (float)dropout.keep_scale;
        float probability = ex2_approx(x.score * LOG2_E - (row.lse2 - log2_scale));
        PairGradients gradients = pair_gradients(probability, x.tangent, w, dtP[m][n + e / 4][e % 4], factor,
                                                 row.lse_tangent, row.delta, row.delta_tangent);
        if constexpr (QK_GRADIENT || SCORE_MOD) score.second_gradient(gradients.dS, gradients.dtS, x);
        ds = gradients.dS, dts = gradients.dtS, w = gradients.W;
      }
    }
  }

  __device__ void differentiate(bool masked, const Scale& scale, const Score& score, const Band& band,
                                const Dropout& dropout, const RowNumbers* numbers, int i0, int j0) {
    if (masked)
      differentiate<true>(scale.log2, score, band, dropout, numbers, i0, j0);
    else
      differentiate<false>(scale.log2, score, band, dropout, numbers, i0, j0);
  }

  // Adds the tile's part of dQ, or of dK and dV; `.._lane` are this lane's addresses of the right operands.
  template <typename Lane>
  __device__ void add_to(float (&dQ)[M][fragments_of(HEAD_DIM)][4], Scale& scale, const KeyTile& keys,
                         const Lane& KT_lane) {
    auto dS_factor = factor(dS);
    auto dtS_factor = factor<TK>(dtS);
    scale.round([&](float by) { multiply(dQ, by); }, dS_factor, dtS_factor);
    accumulate<M, N / 2, HEAD_DIM>(dQ, dS_factor.rounded, keys.K, KT_lane);
    if constexpr (TK) accumulate<M, N / 2, HEAD_DIM>(dQ, dtS_factor.rounded, keys.tK, KT_lane);  // @dtP-of-tK
  }
  template <typename Lane, typename LaneV, typename Share>
  __device__ void add_to(float (&dK)[M][fragments_of(HEAD_DIM)][4], float (&dV)[M][fragments_of(HEAD_DIM_V)][4],
                         Scale& scale, const QueryTile& queries, const Lane& QT_lane, const LaneV& dOT_lane, Share) {
    auto W_factor = factor<SCORES_MOVE>(W);
    auto dS_factor = factor(dS);
    auto dtS_factor = factor<TQ>(dtS);
    scale.round([&](float by) { multiply(dK, by), multiply(dV, by); }, W_factor, dS_factor,
                dtS_factor);  // @lower-dK-dV
    if constexpr (SCORES_MOVE) accumulate<M, N / 2, HEAD_DIM_V>(dV, W_factor.rounded, queries.dO, dOT_lane);
    accumulate<M, N / 2, HEAD_DIM>(dK, dS_factor.rounded, queries.Q, QT_lane);
    if constexpr (TQ) accumulate<M, N / 2, HEAD_DIM>(dK, dtS_factor.rounded, queries.tQ, QT_lane);  // @dtP-of-tQ
  }
};
