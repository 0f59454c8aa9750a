// The loops of a backward and of a double backward. The products of a tile of queries and a tile of keys are
// `Gradients` of backward.cuh or, if DIRECTION, of second.cuh. A separate kernel computes each sum, and recomputes the
// scores, so that every sum is deterministic.
//
//   visit_keys   the mainloop of a tile of queries, over all keys that they see
//   sum_dQ       dQ, by blocks that own queries
//   sum_dK_dV    dK and dV, by blocks that own keys
//   sum_dbias    dbias, by blocks that own a part of the bias
// A thread has ROWS x COLS elements of a tile of scores.
#pragma once
#include "../dbias.cuh"
#if DIRECTION
#include "second.cuh"
#else
#include "backward.cuh"
#endif

// Offsets in shared memory, in elements of type real: for blocks that own queries, and for those that own keys.
struct ByQuery {
  static constexpr int QUERIES = 0;
  static constexpr int KEYS = QUERIES + QuerySlot::END;
  static constexpr int P = KEYS + KeySlot::END;  // [BLOCK_Q][BLOCK_KV]: dS or another left operand of dQ; dS of dbias
  static constexpr int BYTES = sizeof(real) * (P + BLOCK_Q * p_stride(BLOCK_KV));
};
struct ByKey {
  static constexpr int KEYS = 0;
  static constexpr int QUERIES = KEYS + KeySlot::END;
  static constexpr int P = QUERIES + QuerySlot::END;  // [BLOCK_KV][BLOCK_Q]: P and dS, or other left operands, in turn
  static constexpr int BYTES = sizeof(real) * (P + BLOCK_KV * p_stride(BLOCK_Q));
};

// Mainloop of a tile of queries: calls add(tile, start, masked) for each tile of keys; `tile` has the products.
template <typename Products, typename Add>
__device__ void visit_keys(const Params& p, const Sequence& sequence, int kv_head, int q_start,
                           KvTiles<Order::FIRST_TO_LAST> kv_tiles, const QueryTile& queries, KeyTile& keys, Add add) {
  for (; kv_tiles.valid(); kv_tiles.next()) {
    __syncthreads();
    keys.load(p, sequence, kv_head, kv_tiles.start, kv_tiles.visible);
    __syncthreads();
    Products tile(queries, keys);
    add(tile, int2{q_start, kv_tiles.start}, kv_tiles.masked());
  }
}

template <typename Gradients>
__device__ void differentiate(Gradients& tile, bool masked, const Score& score, const Band& band,
                              const Dropout& dropout, const QueryTile& queries, int2 start) {
  if (masked)
    tile.template differentiate<true>(score, band, dropout, queries, start);
  else
    tile.template differentiate<false>(score, band, dropout, queries, start);
}

// A block owns tiles of BLOCK_Q queries of one head, and visits all keys that they see.
template <int ROWS, int COLS>
__device__ void sum_dQ(const Params& p, real* smem) {
  QueryTile queries(smem + ByQuery::QUERIES);
  KeyTile keys(smem + ByQuery::KEYS);
  real* P_smem = smem + ByQuery::P;

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    // Prologue.
    __syncthreads();
    queries.load(p, sequence, head, q_start, Range{0, sequence.q_len});
    real dQ_rmem[ROWS][columns_of(HEAD_DIM)] = {};

    using Tile = Gradients<ROWS, COLS, false, true>;
    KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start);
    visit_keys<Tile>(p, sequence, kv_head, q_start, kv_tiles, queries, keys, [&](Tile& tile, int2 start, bool masked) {
      differentiate(tile, masked, score, band, dropout, queries, start);
      tile.add_to(dQ_rmem, keys, P_smem);
    });

    // Epilogue.
    for_each_row<ROWS>(q_start, sequence.q_rows, [&](int r, int i) {
      // @simt.scale-dQ
      store_row<HEAD_DIM>(sequence.queries<element>(p.dq, head) + i * p.dq.row, dQ_rmem[r], (real)p.scale);
    });
  }
}

#if SHARED_KV
// Multiplies dK by the scale and adds dV: values are inside the keys, and their sum is rounded once.
template <int ROWS>
__device__ void add_dV(real (&dK)[ROWS][columns_of(HEAD_DIM)], const real (&dV)[ROWS][columns_of(HEAD_DIM_V)],
                       real scale) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < columns_of(HEAD_DIM); ++n) dK[r][n] *= scale;
#pragma unroll
    for (int n = 0; n < columns_of(HEAD_DIM_V); ++n)
      if (column_of(n) < HEAD_DIM_V) dK[r][n] += dV[r][n];
  }
}
#endif

// A block owns tiles of BLOCK_KV keys of one key/value head, and visits all queries that see them, head after head of
// the GQA group.
template <int ROWS, int COLS>
__device__ void sum_dK_dV(const Params& p, real* smem) {
  KeyTile keys(smem + ByKey::KEYS);
  QueryTile queries(smem + ByKey::QUERIES);
  real* P_smem = smem + ByKey::P;

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    // Prologue.
    __syncthreads();
    keys.load(p, sequence, kv_head, kv_start, Range{0, sequence.kv_len});
    real dK_rmem[ROWS][columns_of(HEAD_DIM)] = {}, dV_rmem[ROWS][columns_of(HEAD_DIM_V)] = {};

    // Mainloop.
    for (QTiles q_tiles(p, band, kv_head, kv_start); q_tiles.valid(); q_tiles.next()) {
      int head = q_tiles.head;
      Score score(p, sequence, head);
      Dropout dropout(p, sequence.batch, head);
      __syncthreads();
      queries.load(p, sequence, head, q_tiles.start, q_tiles.visible);
      __syncthreads();
      Gradients<ROWS, COLS, true, true> tile(queries, keys);
      differentiate(tile, q_tiles.masked(), score, band, dropout, queries, int2{q_tiles.start, kv_start});
      tile.add_to(dK_rmem, dV_rmem, queries, P_smem);
    }

    // Epilogue.
#if SHARED_KV
    add_dV<ROWS>(dK_rmem, dV_rmem, (real)p.scale);
    for_each_row<ROWS>(kv_start, sequence.kv_rows, [&](int r, int j) {
      store_row<HEAD_DIM>(sequence.keys<element>(p.dk, kv_head) + j * p.dk.row, dK_rmem[r], (real)1);
    });
#else
    for_each_row<ROWS>(kv_start, sequence.kv_rows, [&](int r, int j) {
      store_row<HEAD_DIM>(sequence.keys<element>(p.dk, kv_head) + j * p.dk.row, dK_rmem[r], (real)p.scale);
      store_row<HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head) + j * p.dv.row, dV_rmem[r], (real)1);
    });
#endif
  }
}

// A block owns a tile of the bias, or of an array that score_mod reads, and visits all (query, key) pairs that use an
// element of the tile, over all dimensions along which the array broadcasts.
template <int ROWS, int COLS>
__device__ void sum_dbias(const Params& p, real* smem) {
  QueryTile queries(smem + ByQuery::QUERIES);
  KeyTile keys(smem + ByQuery::KEYS);
  real* dS_smem = smem + ByQuery::P;

  for (int tile = blockIdx.x; tile < BiasTile::tiles(p); tile += gridDim.x) {
    using Tile = Gradients<ROWS, COLS, false, false>;
    BiasTile bias(p, tile);
    real dS_rmem[ROWS][COLS] = {};
    for (int b = bias.batches.begin; b < bias.batches.end; ++b) {
      Sequence sequence(p, b);
      Band band(p, sequence);
      for (int head = bias.heads.begin; head < bias.heads.end; ++head) {
        int kv_head = head / p.group;
        Score score(p, sequence, head);
        Dropout dropout(p, b, head);
        auto add = [&](Tile& tile, int2 start, bool) {
          tile.template differentiate<true>(score, band, dropout, queries, start);
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLS; ++c) dS_rmem[r][c] += tile.dS[r][c];
        };
        for (int q_start = bias.queries.begin; q_start < min(bias.queries.end, sequence.q_len); q_start += BLOCK_Q) {
          __syncthreads();
          queries.load(p, sequence, head, q_start, Range{0, sequence.q_len});
          visit_keys<Tile>(p, sequence, kv_head, q_start, bias.kv_tiles(band, head, q_start), queries, keys, add);
        }
      }
    }

    // Epilogue.
    __syncthreads();
    store_p(dS_smem, dS_rmem);
    __syncthreads();
    bias.store(dS_smem, p_stride(BLOCK_KV));
  }
}
