// Double backward, dQ: blocks and loops of backward_q.cu. grid (query tiles, heads, sequences)
#include "second.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and by columns

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_q(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  unsigned char* smem = (unsigned char*)shared;
  // Shared memory: the tile of queries, then STAGES x one of keys. The epilogue stages dQ in the space of Q.
  QueryTile queries(smem_address(smem));
  int row = row_warp() * M * 16;
  ProductLanes lanes(row);
  auto KT_lane = Tile<HEAD_DIM>::lane_of_X().kept();
  auto numbers = (const RowNumbers*)(smem + (queries.numbers - queries.Q)) + row;

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);

  // Under a causal mask the last tiles see the most keys, so they start first.
  int tiles = (sequence.q_rows + BLOCK_Q - 1) / BLOCK_Q;
  for (int tile = tiles - 1 - blockIdx.x; tile >= 0; tile -= gridDim.x) {
    int q_start = tile * BLOCK_Q;
    KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start);
    auto loaded = kv_tiles;  // the tile to load next
    auto key_loads = KeyLoads(p, sequence, kv_head, loaded.start).kept();
    Pipeline<STAGES, KeyTile::BYTES> stages(queries.Q + QueryTile::BYTES);
    auto load = [&] {
      if (loaded.valid()) key_loads.load_next(KeyTile(stages.next()), loaded);
      stages.commit();
    };

    __syncthreads();
    Range seeing = {band.q_begin(0), band.q_end(sequence.kv_len)};  // queries that see any key
    QueryLoads(p, sequence).load(queries, head, q_start, seeing);
    for (int stage = 0; stage < STAGES - 1; ++stage) load();
    float dQ_rmem[M][fragments_of(HEAD_DIM)][4] = {};
    FactorScale scale;

    for (; kv_tiles.valid(); kv_tiles.next()) {
      if constexpr (STAGES == 1) {
        __syncthreads();
        load();
      }
      KeyTile keys(stages.wait());
      SecondGradients<M, N, false, true> gradients(queries, keys, lanes, [&] {
        if constexpr (STAGES > 1) load();
      });
      gradients.differentiate(kv_tiles.masked(), scale.log2, score, band, dropout, numbers, q_start + row,
                              kv_tiles.start);
      auto dS = factor(gradients.dS);
      auto dtS = factor<TK>(gradients.dtS);
      scale.round([&](float by) { multiply(dQ_rmem, by); }, dS, dtS);
      accumulate<M, N / 2, HEAD_DIM>(dQ_rmem, dS.rounded, keys.K, KT_lane);
      if constexpr (TK) accumulate<M, N / 2, HEAD_DIM>(dQ_rmem, dtS.rounded, keys.tK, KT_lane);  // @dtP-of-tK
    }

    cp_async_wait_group<0>();  // the queries may be in flight if no key was visited
    __syncthreads();
    store_fragments<M, HEAD_DIM>(smem, dQ_rmem, row, [&](int, int) { return (float)p.scale * scale.inverse(); });
    __syncthreads();
    store_tile<BLOCK_Q, HEAD_DIM>(sequence.queries<element>(p.dq, head), p.dq, smem, q_start, sequence.q_rows);
  }
}
