// The loads of a backward, and its products of a tile of queries and a tile of keys, for the loops of mainloop.cuh.
// second.cuh has those of a double backward.
#pragma once
#include "steps.cuh"

// Addresses in shared memory of the operands of a tile of queries.
struct QueryTile {
  static constexpr int BYTES = QuerySlot::BYTES;
  unsigned int Q;
  unsigned int dO;
  unsigned int numbers;

  __device__ QueryTile(unsigned int slot)
      : Q(slot + QuerySlot::Q), dO(slot + QuerySlot::dO), numbers(slot + QuerySlot::NUMBERS) {}
  // lse2 and delta of the rows from `row` on; `smem` is the start of shared memory.
  __device__ Rows numbers_of(const unsigned char* smem, int row) const {
    const float* lse2 = (const float*)(smem + (numbers - smem_address(smem)));
    return {lse2 + row, lse2 + BLOCK_Q + row};
  }
};

// Loads a single tile of queries, or the tiles of a walk, for which it advances addresses.
struct QueryLoads : QdOLoads {
  const float* lse2;
  const float* delta;

  __device__ QueryLoads(const Params& p, const Sequence& sequence) : QdOLoads(p, sequence) {}
  __device__ QueryLoads kept() const {
    QueryLoads loads = *this;
    loads.Q_loader = Q_loader.kept(), loads.dO_loader = dO_loader.kept();
    return loads;
  }

  // Loads one tile, with zeros for queries that are not in `queries`.
  __device__ void load(const QueryTile& to, int head, int q_start, Range queries) const {
    load_tile<BLOCK_Q, HEAD_DIM>(to.Q, sequence.query_rows<element>(p.q, head).tile(q_start), queries);
    load_dO(to.dO, dO_loader, sequence.query_rows<element>(p.dout, head).tile(q_start), p, sequence, head, queries);
    load_numbers<BLOCK_Q>(to.numbers, sequence.queries<float>(p.lse2, head) + q_start, q_start, queries);
    load_numbers<BLOCK_Q>(to.numbers + 4 * BLOCK_Q, sequence.queries<float>(p.delta, head) + q_start, q_start, queries);
#if DSTATISTICS
    load_statistics(to, head, q_start, queries);
#endif
  }
  // Loads the current tile of a walk, and moves the walk to the next.
  __device__ void load_next(const QueryTile& to, QTiles& tiles) {
    auto seek = [&] {
      lse2 = sequence.queries<float>(p.lse2, head) + tiles.start;
      delta = sequence.queries<float>(p.delta, head) + tiles.start;
    };
    move_to(tiles.head, tiles.start, seek, [&](int rows) { lse2 += rows, delta += rows; });
    QdOLoads::load(to.Q, to.dO, tiles.visible);
    load_numbers<BLOCK_Q>(to.numbers, lse2, tiles.start, tiles.visible);
    load_numbers<BLOCK_Q>(to.numbers + 4 * BLOCK_Q, delta, tiles.start, tiles.visible);
#if DSTATISTICS
    load_statistics(to, tiles.head, tiles.start, tiles.visible);
#endif
    tiles.next();  // @dKV.next-load
  }

#if DSTATISTICS
  // Loads what StatisticsGradients has. Rows that are not in `queries` get a dmax of 0.
  __device__ void load_statistics(const QueryTile& to, int head, int q_start, Range queries) const {
    unsigned int dentropy = to.numbers + 8 * BLOCK_Q, dmax = dentropy + 4 * BLOCK_Q, argmax = dmax + 4 * BLOCK_Q;
    if constexpr (DENTROPY)
      load_numbers<BLOCK_Q>(dentropy, sequence.queries<float>(p.dentropy, head) + q_start, q_start, queries);
    if constexpr (DMAX) {
      load_numbers<BLOCK_Q>(dmax, sequence.queries<float>(p.dmax, head) + q_start, q_start, queries);
      load_numbers<BLOCK_Q>(argmax, sequence.queries<int>(p.argmax, head) + q_start, q_start, queries);
    }
  }
#endif
};

// Addresses in shared memory of the operands of a tile of keys.
struct KeyTile {
  static constexpr int BYTES = KeySlot::BYTES;
  unsigned int K;
  unsigned int V;

  __device__ KeyTile(unsigned int slot) : K(slot + KeySlot::K), V(slot + KeySlot::V) {}
};

// Loads a single tile of keys of one head, or the tiles of a walk.
struct KeyLoads {
  KeyRows<element> K;
  KeyRows<element> V;
  Loader<BLOCK_KV, HEAD_DIM> K_loader;
  Loader<BLOCK_KV, HEAD_DIM_V> V_loader;
  int first;  // position of the first tile

  __device__ KeyLoads(const Params& p, const Sequence& sequence, int kv_head, int kv_start)
      : K(sequence.key_rows<element>(p.k, kv_head)),
        V(sequence.key_rows<element>(p.v, kv_head)),
        K_loader(K.stride),
        V_loader(V.stride),
        first(kv_start) {}
  __device__ KeyLoads kept() const {
    KeyLoads loads = *this;
    loads.K_loader = K_loader.kept(), loads.V_loader = V_loader.kept();
    return loads;
  }

  // Loads the first tile, with zeros for keys that are not in `keys`.
  __device__ void load(const KeyTile& to, Range keys) const {
    K_loader.load(to.K, K.tile(first), keys);
    V_loader.load(to.V, V.tile(first), keys);
  }
  // Loads the current tile of a walk, and moves the walk to the next.
  template <typename Tiles>
  __device__ void load_next(const KeyTile& to, Tiles& tiles) const {
    K_loader.load(to.K, K.tile(tiles.start), tiles.visible);
    V_loader.load(to.V, V.tile(tiles.start), tiles.visible);
    tiles.next();
  }
};

// The scale of scores in base 2. P and dS are rounded as they are; a double backward multiplies its factors by a power
// of two first (FactorScale).
struct Scale {
  float of_scores;

  __device__ Scale(const Params& p) : of_scores(log2_scale_of(p)) {}
  __device__ static Scale of_exact(const Params& p) { return p; }
  __device__ static float inverse() { return 1; }
};

// The matrix products of a tile, which `differentiate` replaces by its probabilities and gradients. TRANSPOSED: rows
// are keys, columns are queries. QK_GRADIENT: the gradients are those of scale * q.k, else those of the bias or of the
// elements that score_mod reads.
template <int M, int N, bool TRANSPOSED, bool QK_GRADIENT>
struct Gradients {
  float P[M][N][4];   // Q K^T, then P after dropout
  float dS[M][N][4];  // dO V^T, then dS

  // `load()` is called after the first product is issued.
  template <typename Load>
  __device__ Gradients(const QueryTile& queries, const KeyTile& keys, const ProductLanes& lanes, Load load) {
    scores<M, N, HEAD_DIM>(P, TRANSPOSED ? keys.K : queries.Q, lanes.A, TRANSPOSED ? queries.Q : keys.K, lanes.B);
    load();
    scores<M, N, HEAD_DIM_V>(dS, TRANSPOSED ? keys.V : queries.dO, lanes.A_v, TRANSPOSED ? queries.dO : keys.V,
                             lanes.B_v);
  }

  __device__ void differentiate(bool masked, const Scale& scale, const Score& score, const Band& band,
                                const Dropout& dropout, const Rows& numbers, int i0, int j0) {
    ::differentiate<TRANSPOSED, !QK_GRADIENT>(P, dS, masked, score, band, dropout, scale.of_scores, numbers, i0, j0);
  }

  // Adds the tile's part of dQ, or of dK and dV; `.._lane` are this lane's addresses of the right operands. share(dS)
  // is called with the rounded dS before dK is computed.
  template <typename Lane>
  __device__ void add_to(float (&dQ)[M][fragments_of(HEAD_DIM)][4], Scale&, const KeyTile& keys, const Lane& KT_lane) {
    unsigned int dS_rounded[M][N / 2][4];
    round_fragments(dS_rounded, dS);
    accumulate<M, N / 2, HEAD_DIM>(dQ, dS_rounded, keys.K, KT_lane);
  }
  template <typename Lane, typename LaneV, typename Share>
  __device__ void add_to(float (&dK)[M][fragments_of(HEAD_DIM)][4], float (&dV)[M][fragments_of(HEAD_DIM_V)][4], Scale&,
                         const QueryTile& queries, const Lane& QT_lane, const LaneV& dOT_lane, Share share) {
    unsigned int P_rounded[M][N / 2][4], dS_rounded[M][N / 2][4];
    round_fragments(P_rounded, P);
    accumulate<M, N / 2, HEAD_DIM_V>(dV, P_rounded, queries.dO, dOT_lane);
    round_fragments(dS_rounded, dS);
    share(dS_rounded);
    accumulate<M, N / 2, HEAD_DIM>(dK, dS_rounded, queries.Q, QT_lane);
  }
};
