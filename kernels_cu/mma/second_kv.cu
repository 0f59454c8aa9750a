// Double backward, dK and dV: blocks and loops of backward_kv.cu, without dQ. grid (key tiles, key/value heads,
// sequences)
#include "second.cuh"

constexpr int M = BLOCK_KV / ROW_WARPS / 16;  // fragments of a warp, by rows; score tiles are transposed: rows are keys
constexpr int N = BLOCK_Q / 8;                // and by columns

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_kv(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  unsigned char* smem = (unsigned char*)shared;
  // Shared memory: the tile of keys, then STAGES x one of queries. The epilogue stages dK and dV in that of keys.
  KeyTile keys(smem_address(smem));

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  int row = row_warp() * M * 16;
  ProductLanes lanes(row);
  auto QT_lane = Tile<HEAD_DIM>::lane_of_X().kept();
  auto dOT_lane = Tile<HEAD_DIM_V>::lane_of_X().kept();

  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    QTiles q_tiles(p, band, kv_head, kv_start), loaded = q_tiles;  // `loaded`: the tile to load next
    auto query_loads = QueryLoads(p, sequence).kept();
    Pipeline<STAGES, QueryTile::BYTES> stages(keys.K + KeyTile::BYTES);
    auto load = [&] {
      if (loaded.valid()) {
        query_loads.load(QueryTile(stages.next()), loaded.head, loaded.start, loaded.visible);
        loaded.next();
      }
      stages.commit();
    };

    __syncthreads();
    KeyLoads(p, sequence, kv_head, kv_start).load(keys, Range{0, sequence.kv_len});
    for (int stage = 0; stage < STAGES - 1; ++stage) load();
    float dK_rmem[M][fragments_of(HEAD_DIM)][4] = {}, dV_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};
    FactorScale scale;

    for (; q_tiles.valid(); q_tiles.next()) {
      if constexpr (STAGES == 1) {
        __syncthreads();
        load();
      }
      QueryTile queries(stages.wait());

      Score score(p, sequence, q_tiles.head);
      Dropout dropout(p, sequence.batch, q_tiles.head);
      auto numbers = (const RowNumbers*)(smem + (queries.numbers - keys.K));
      SecondGradients<M, N, true, true> tile(queries, keys, lanes, [&] {
        if constexpr (STAGES > 1) load();
      });
      tile.differentiate(q_tiles.masked(), scale.log2, score, band, dropout, numbers, q_tiles.start, kv_start + row);
      auto W = factor<SCORES_MOVE>(tile.W);
      auto dS = factor(tile.dS);
      auto dtS = factor<TQ>(tile.dtS);
      scale.round([&](float by) { multiply(dK_rmem, by), multiply(dV_rmem, by); }, W, dS, dtS);  // @lower-dK-dV
      if constexpr (SCORES_MOVE) accumulate<M, N / 2, HEAD_DIM_V>(dV_rmem, W.rounded, queries.dO, dOT_lane);
      accumulate<M, N / 2, HEAD_DIM>(dK_rmem, dS.rounded, queries.Q, QT_lane);
      if constexpr (TQ) accumulate<M, N / 2, HEAD_DIM>(dK_rmem, dtS.rounded, queries.tQ, QT_lane);  // @dtP-of-tQ
    }

    cp_async_wait_group<0>();  // the keys may be in flight if no query was visited
    __syncthreads();
    store_fragments<M, HEAD_DIM>(smem, dK_rmem, row, [&](int, int) { return (float)p.scale * scale.inverse(); });
    // @scale-dV-back
    store_fragments<M, HEAD_DIM_V>(smem + K_BYTES, dV_rmem, row, [&](int, int) { return scale.inverse(); });
    __syncthreads();
    store_tile<BLOCK_KV, HEAD_DIM>(sequence.keys<element>(p.dk, kv_head), p.dk, smem, kv_start, sequence.kv_rows);
    store_tile<BLOCK_KV, HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head), p.dv, smem + K_BYTES, kv_start,
                                     sequence.kv_rows);
  }
}
