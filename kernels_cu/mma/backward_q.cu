// Backward, dQ: one block per tile of BLOCK_Q queries of one head, over all keys they see. The scores are recomputed a
// second time instead of adding to dQ atomically, so that every sum is deterministic. grid (query tiles, heads,
// sequences)
#include "steps.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and by columns
constexpr int Q_BYTES = BLOCK_Q * Tile<HEAD_DIM>::ROW;
constexpr int dO_BYTES = BLOCK_Q * Tile<HEAD_DIM_V>::ROW;
constexpr int K_BYTES = BLOCK_KV * Tile<HEAD_DIM>::ROW;
constexpr int STAGE_BYTES = K_BYTES + BLOCK_KV * Tile<HEAD_DIM_V>::ROW;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_q(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  unsigned char* smem = (unsigned char*)shared;
  // Shared memory: Q [BLOCK_Q][HEAD_DIM], dO [BLOCK_Q][HEAD_DIM_V], lse2 [BLOCK_Q], delta [BLOCK_Q], then STAGES x (K
  // [BLOCK_KV][HEAD_DIM], V [BLOCK_KV][HEAD_DIM_V]). The epilogue stages dQ in the space of Q.
  unsigned int Q_smem = smem_address(smem), dO_smem = Q_smem + Q_BYTES, lse2_smem = dO_smem + dO_BYTES;
  const float* lse2 = (const float*)(smem + Q_BYTES + dO_BYTES);
  Rows rows = {lse2 + row_warp() * M * 16, lse2 + BLOCK_Q + row_warp() * M * 16};
  unsigned int KV_smem = lse2_smem + 2 * 4 * BLOCK_Q;

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  auto K = sequence.key_rows<element>(p.k, kv_head), V = sequence.key_rows<element>(p.v, kv_head);
  auto K_loader = Loader<BLOCK_KV, HEAD_DIM>(K.stride).kept();
  auto V_loader = Loader<BLOCK_KV, HEAD_DIM_V>(V.stride).kept();
  float scale_log2 = log2_scale_of(p);
  int row = row_warp() * M * 16;
  Loader<BLOCK_Q, HEAD_DIM_V> dO_loader(p.dout.row);
  auto Q_lane = Tile<HEAD_DIM>::lane_of_A(row), K_lane = Tile<HEAD_DIM>::lane_of_B(),
       KT_lane = Tile<HEAD_DIM>::lane_of_X();
  auto dO_lane = Tile<HEAD_DIM_V>::lane_of_A(row), V_lane = Tile<HEAD_DIM_V>::lane_of_B();

  // Under a causal mask the last tiles see the most keys, so they start first.
  int tiles = (sequence.q_rows + BLOCK_Q - 1) / BLOCK_Q;
  for (int tile = tiles - 1 - blockIdx.x; tile >= 0; tile -= gridDim.x) {
    int q_start = tile * BLOCK_Q;
    Range queries = {band.q_begin(0), band.q_end(sequence.kv_len)};  // queries that see any key
    KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start);
    auto loaded = kv_tiles;  // the tile to load next
    Pipeline<STAGES, STAGE_BYTES> stages(KV_smem);

    auto load = [&] {
      if (loaded.valid()) {
        K_loader.load(stages.next(), K.tile(loaded.start), loaded.visible);
        V_loader.load(stages.next() + K_BYTES, V.tile(loaded.start), loaded.visible);
      }
      loaded.next();
      stages.commit();
    };

    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start), queries);
    load_dO(dO_smem, dO_loader, sequence.query_rows<element>(p.dout, head).tile(q_start), p, sequence, head, queries);
    load_numbers<BLOCK_Q>(lse2_smem, sequence.queries<float>(p.lse2, head) + q_start, q_start, queries);
    load_numbers<BLOCK_Q>(lse2_smem + 4 * BLOCK_Q, sequence.queries<float>(p.delta, head) + q_start, q_start, queries);
    for (int stage = 0; stage < STAGES - 1; ++stage) load();
    float dQ_rmem[M][fragments_of(HEAD_DIM)][4] = {};

    for (; kv_tiles.valid(); kv_tiles.next()) {
      if constexpr (STAGES == 1) {
        __syncthreads();  // @dQ.barrier-before-load
        load();
      }
      unsigned int K_smem = stages.wait(), V_smem = K_smem + K_BYTES;

      float S_rmem[M][N][4], dP_rmem[M][N][4];
      scores<M, N, HEAD_DIM>(S_rmem, Q_smem, Q_lane, K_smem, K_lane);
      if constexpr (STAGES > 1) load();  // its addresses are computed while the tensor cores run
      scores<M, N, HEAD_DIM_V>(dP_rmem, dO_smem, dO_lane, V_smem, V_lane);
      differentiate<false, false>(S_rmem, dP_rmem, kv_tiles.masked(), score, band, dropout, scale_log2, rows,
                                  q_start + row, kv_tiles.start);  // @dQ.mask
      unsigned int dS_rmem[M][N / 2][4];
      round_fragments(dS_rmem, dP_rmem);
      accumulate<M, N / 2, HEAD_DIM>(dQ_rmem, dS_rmem, K_smem, KT_lane);
    }

    cp_async_wait_group<0>();  // Q and dO may be in flight if no key was visited
    __syncthreads();
    store_fragments<M, HEAD_DIM>(smem, dQ_rmem, row, [&](int, int) { return (float)p.scale; });  // @scale-dQ
    __syncthreads();
    store_tile<BLOCK_Q, HEAD_DIM>(sequence.queries<element>(p.dq, head), p.dq, smem, q_start, sequence.q_rows);
  }
}
