// The loops of a backward and, if DIRECTION, of a double backward. backward.cuh or second.cuh defines their loads and
// products.
//
//   sum_dQ       dQ, by blocks that own queries
//   sum_dK_dV    dK and dV, by blocks that own keys
//   sum_dbias    dbias, by blocks that own a part of the bias
// A warp has M x N fragments of a tile of scores.
#pragma once
#include "../dbias.cuh"
#if DIRECTION
#include "second.cuh"
#else
#include "backward.cuh"
#endif
#include "shared_dq.cuh"
#include "tile_stream.cuh"

// Offsets in shared memory, in bytes: for blocks that own queries, for those that own keys, and for those that own a
// part of the bias.
struct ByQuery {
  static constexpr int QUERIES = 0;                        // QuerySlot
  static constexpr int KEYS = QUERIES + QuerySlot::BYTES;  // STAGES x KeySlot
  static constexpr int dQ = QUERIES + QuerySlot::Q;        // staging memory of the epilogue
  static constexpr int BYTES = KEYS + STAGES * KeySlot::BYTES;
};
struct ByKey {
  static constexpr int KEYS = 0;                                        // KeySlot
  static constexpr int QUERIES = KEYS + KeySlot::BYTES;                 // STAGES x QuerySlot
  static constexpr int dS = QUERIES + STAGES * QuerySlot::BYTES;        // ADD_DQ: dS^T [BLOCK_KV][BLOCK_Q]
  static constexpr int dK = KEYS + KeySlot::K, dV = KEYS + KeySlot::V;  // staging memory of the epilogue
  static constexpr int BYTES = dS + ADD_DQ * BLOCK_KV * row_bytes(BLOCK_Q);
};
struct ByBias {
  static constexpr int QUERIES = 0;                            // QuerySlot
  static constexpr int KEYS = QUERIES + QuerySlot::BYTES;      // KeySlot
  static constexpr int dS = 0, dS_END = 4 * BLOCK_Q * dS_ROW;  // floats [BLOCK_Q][dS_ROW]
  static constexpr int BYTES = maximum(KEYS + KeySlot::BYTES, dS_END);
};

// A block owns tiles of BLOCK_Q queries of one head, and visits all keys that they see.
template <int M, int N>
__device__ void sum_dQ(const Params& p, unsigned char* smem) {
  QueryTile queries(smem_address(smem) + ByQuery::QUERIES);
  int row = row_warp() * M * 16;
  ProductLanes lanes(row);
  auto KT_lane = held(Tile<HEAD_DIM>::lane_of_X());
  auto numbers = queries.numbers_of(smem, row);

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);

  // Under a causal mask the last tiles see the most keys, so they start first.
  int tiles = (sequence.q_rows + BLOCK_Q - 1) / BLOCK_Q;
  for (int tile = tiles - 1 - blockIdx.x; tile >= 0; tile -= gridDim.x) {
    // Prologue.
    int q_start = tile * BLOCK_Q;
    KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start);
    auto key_loads = KeyLoads(p, sequence, kv_head, kv_tiles.start).kept();
    TileStream<KeyTile, KvTiles<Order::FIRST_TO_LAST>, KeyLoads> stream(kv_tiles, key_loads,
                                                                        smem_address(smem) + ByQuery::KEYS);
    __syncthreads();
    Range seeing = {band.q_begin(0), band.q_end(sequence.kv_len)};  // queries that see any key
    QueryLoads(p, sequence).load(queries, head, q_start, seeing);
    stream.fill();
    float dQ_rmem[M][fragments_of(HEAD_DIM)][4] = {};
    Scale scale(p);

    // Mainloop.
    for (; kv_tiles.valid(); kv_tiles.next()) {
      KeyTile keys(stream.wait());
      Gradients<M, N, false, true> gradients(queries, keys, lanes, [&] { stream.load_ahead(); });
      gradients.differentiate(kv_tiles.masked(), scale, score, band, dropout, numbers, q_start + row,
                              kv_tiles.start);  // @dQ.mask
      gradients.add_to(dQ_rmem, scale, keys, KT_lane);
    }

    // Epilogue.
    cp_async_wait_group<0>();  // the queries may be in flight if no key was visited
    __syncthreads();
    // @scale-dQ
    store_fragments<M, HEAD_DIM>(smem + ByQuery::dQ, dQ_rmem, row,
                                 [&](int, int) { return (float)p.scale * scale.inverse(); });
    __syncthreads();
    store_tile<BLOCK_Q, HEAD_DIM>(sequence.queries<element>(p.dq, head), p.dq, smem + ByQuery::dQ, q_start,
                                  sequence.q_rows);
  }
}

#if SHARED_KV
// Multiplies dK by the scale and adds dV: values are inside the keys, and their sum is rounded once. Fragments of both
// have the same columns.
template <int M>
__device__ void add_dV(float (&dK)[M][fragments_of(HEAD_DIM)][4], const float (&dV)[M][fragments_of(HEAD_DIM_V)][4],
                       float scale) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int n = 0; n < fragments_of(HEAD_DIM); ++n) dK[m][n][e] *= scale;
#pragma unroll
      for (int n = 0; n < fragments_of(HEAD_DIM_V); ++n) dK[m][n][e] += dV[m][n][e];
    }
}
#endif

// A block owns tiles of BLOCK_KV keys of one key/value head, and visits all queries that see them, head after head of
// the GQA group. ADD_DQ: it also adds its part of dQ to the workspace.
template <int M, int N>
__device__ void sum_dK_dV(const Params& p, unsigned char* smem) {
  KeyTile keys(smem_address(smem) + ByKey::KEYS);
  unsigned char* dS_smem = smem + ByKey::dS;

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  int row = row_warp() * M * 16;
  ProductLanes lanes(row);
  auto QT_lane = held(Tile<HEAD_DIM>::lane_of_X());
  auto dOT_lane = held(Tile<HEAD_DIM_V>::lane_of_X());

  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    // Prologue.
    QTiles q_tiles(p, band, kv_head, kv_start);
    TileStream<QueryTile, QTiles, QueryLoads> stream(q_tiles, QueryLoads(p, sequence).kept(),
                                                     smem_address(smem) + ByKey::QUERIES);
    __syncthreads();
    KeyLoads(p, sequence, kv_head, kv_start).load(keys, Range{0, sequence.kv_len});
    stream.fill();
    float dK_rmem[M][fragments_of(HEAD_DIM)][4] = {}, dV_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};
    Scale scale(p);

    // Mainloop.
    for (; q_tiles.valid(); q_tiles.next()) {
      QueryTile queries(stream.wait());
      Score score(p, sequence, q_tiles.head);
      Dropout dropout(p, sequence.batch, q_tiles.head);
      Gradients<M, N, true, true> gradients(queries, keys, lanes, [&] { stream.load_ahead(); });
      gradients.differentiate(q_tiles.masked(), scale, score, band, dropout, queries.numbers_of(smem, 0), q_tiles.start,
                              kv_start + row);  // @dKV.mask
      // Captures by value, because with captures by reference the compiler computes the addresses anew for every tile.
      auto share_dS = [dS_smem, row](const unsigned int (&dS)[M][N / 2][4]) {
        if constexpr (ADD_DQ) share(dS_smem, dS, row);
      };
      gradients.add_to(dK_rmem, dV_rmem, scale, queries, QT_lane, dOT_lane, share_dS);
      if constexpr (ADD_DQ) {
        __syncthreads();  // @barrier-before-added-dQ
        add_dQ(DqSums(p, sequence, q_tiles.head), smem_address(dS_smem), keys.K, q_tiles.start, sequence.q_len);
      }
    }

    // Epilogue.
    cp_async_wait_group<0>();  // the keys may be in flight if no query was visited
    __syncthreads();
#if SHARED_KV
    add_dV<M>(dK_rmem, dV_rmem, (float)p.scale);
    store_fragments<M, HEAD_DIM>(smem + ByKey::dK, dK_rmem, row, [&](int, int) { return scale.inverse(); });
    __syncthreads();
    store_tile<BLOCK_KV, HEAD_DIM>(sequence.keys<element>(p.dk, kv_head), p.dk, smem + ByKey::dK, kv_start,
                                   sequence.kv_rows);
#else
    // @scale-dK
    store_fragments<M, HEAD_DIM>(smem + ByKey::dK, dK_rmem, row,
                                 [&](int, int) { return (float)p.scale * scale.inverse(); });
    // @scale-dV-back
    store_fragments<M, HEAD_DIM_V>(smem + ByKey::dV, dV_rmem, row, [&](int, int) { return scale.inverse(); });
    __syncthreads();
    store_tile<BLOCK_KV, HEAD_DIM>(sequence.keys<element>(p.dk, kv_head), p.dk, smem + ByKey::dK, kv_start,
                                   sequence.kv_rows);
    store_tile<BLOCK_KV, HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head), p.dv, smem + ByKey::dV, kv_start,
                                     sequence.kv_rows);
#endif
  }
}

// A block owns a tile of the bias, or of an array that score_mod reads, and visits all (query, key) pairs that use an
// element of the tile, over all dimensions along which the array broadcasts.
template <int M, int N>
__device__ void sum_dbias(const Params& p, unsigned char* smem) {
  QueryTile queries(smem_address(smem) + ByBias::QUERIES);
  KeyTile keys(smem_address(smem) + ByBias::KEYS);
  float* dS_smem = (float*)(smem + ByBias::dS);
  int row = row_warp() * M * 16;
  ProductLanes lanes(row);
  auto numbers = queries.numbers_of(smem, row);
  Scale scale = Scale::of_exact(p);

  for (int tile = blockIdx.x; tile < BiasTile::tiles(p); tile += gridDim.x) {
    BiasTile bias(p, tile);
    float dS_rmem[M][N][4] = {};
    for (int b = bias.batches.begin; b < bias.batches.end; ++b) {
      Sequence sequence(p, b);
      Band band(p, sequence);
      for (int head = bias.heads.begin; head < bias.heads.end; ++head) {
        Score score(p, sequence, head);
        Dropout dropout(p, b, head);
        for (int q_start = bias.queries.begin; q_start < min(bias.queries.end, sequence.q_len); q_start += BLOCK_Q) {
          for (auto kv_tiles = bias.kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
            __syncthreads();
            QueryLoads(p, sequence).load(queries, head, q_start, Range{0, sequence.q_len});
            KeyLoads(p, sequence, head / p.group, kv_tiles.start).load(keys, kv_tiles.visible);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncthreads();
            Gradients<M, N, false, false> gradients(queries, keys, lanes, [] {});  // @differentiate-by-bias
            gradients.differentiate(true, scale, score, band, dropout, numbers, q_start + row, kv_tiles.start);
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
              for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dS_rmem[m][n][e] += gradients.dS[m][n][e];
          }
        }
      }
    }

    // Epilogue.
    __syncthreads();
    store_dS(dS_smem, dS_rmem, row);
    __syncthreads();  // @barrier-before-dbias
    bias.store(dS_smem, dS_ROW);
  }
}
