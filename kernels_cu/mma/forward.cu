// Forward: one block per tile of BLOCK_Q queries of one head. grid (query tiles, heads, sequences)
#include "gemm.cuh"
#include "load.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and score fragments by columns
constexpr int K_BYTES = BLOCK_KV * Tile<HEAD_DIM>::ROW;
constexpr int V_BYTES = BLOCK_KV * Tile<HEAD_DIM_V>::ROW;
constexpr int Q_BYTES = BLOCK_Q * Tile<HEAD_DIM>::ROW;

// Turns S into the probabilities of a tile, and rescales O if the reference of the exponents changes.
__device__ void attend(float (&S)[M][N][4], float (&O)[M][fragments_of(HEAD_DIM_V)][4], Softmax2 (&softmax)[M][2],
                       bool masked, const Score& score, const Band& band, const Dropout& dropout, float scale_log2,
                       int q_start, int kv_start) {
  if (masked)
    modify<true>(S, score, band, q_start, kv_start);
  else if constexpr (MODIFIED || DENSE_MASK)
    modify<false>(S, score, band, q_start, kv_start);
  float O_scale[M][2];
  if (update_max(O_scale, softmax, S, scale_log2)) rescale(O, O_scale);
  exponentiate(S, softmax, scale_log2);
  if constexpr (DROPOUT) drop(S, dropout, q_start, kv_start);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  __shared__ int pages_smem[2][BLOCK_KV];
  unsigned char* smem = (unsigned char*)shared;
  // Shared memory: Q [BLOCK_Q][HEAD_DIM], then STAGES x (K [BLOCK_KV][HEAD_DIM], V [BLOCK_KV][HEAD_DIM_V]).
  // Q_IN_REGISTERS: Q is loaded through the space of the first stages. The epilogue stages O in the same memory.
  unsigned int Q_smem = smem_address(smem), KV_smem = Q_smem + (Q_IN_REGISTERS ? 0 : Q_BYTES);

  int head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  KvLoads loads = KvLoads(p, sequence, head / p.group, pages_smem).kept();
  float scale_log2 = log2_scale_of(p);
  int row = row_warp() * M * 16;
  auto Q_lane = Tile<HEAD_DIM>::lane_of_A(row).kept(), K_lane = Tile<HEAD_DIM>::lane_of_B().kept();
  auto V_lane = Tile<HEAD_DIM_V>::lane_of_X().kept();

  // Under a causal mask the last tiles see the most keys, so they start first.
  int tiles = (sequence.q_rows + BLOCK_Q - 1) / BLOCK_Q;
  for (int tile = tiles - 1 - blockIdx.x; tile >= 0; tile -= gridDim.x) {
    int q_start = tile * BLOCK_Q;
    KvTiles<Order::LAST_TO_FIRST> kv_tiles(band, head, q_start);
    kv_tiles.first = keep(kv_tiles.first);
    kv_tiles.unmasked = {keep(kv_tiles.unmasked.begin), keep(kv_tiles.unmasked.end)};
    auto loaded = kv_tiles;  // the tile to load next
    Pipeline<STAGES, K_BYTES + V_BYTES> stages(KV_smem);

    auto load = [&] {
      if (loaded.valid()) loads.load(stages.next(), loaded.start, loaded.visible);
      loaded.next();  // @forward.next-load
      stages.commit();
      loads.pages.look_up(loaded.start, loaded.visible);
    };

    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start),
                                 Range{0, sequence.q_len});
    unsigned int Q_rmem[padded(HEAD_DIM) / 16][M][4];
    if constexpr (Q_IN_REGISTERS) {
      cp_async_commit_group();
      cp_async_wait_group<0>();
      __syncthreads();
      load_fragments<M, HEAD_DIM>(Q_rmem, Q_smem, row);
      __syncthreads();  // @barrier-after-Q-fragments
    }
    loads.pages.look_up(loaded.start, loaded.visible);
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      loads.pages.store();
      if constexpr (PAGED) __syncthreads();  // @barrier-after-pages
      load();
    }
    loads.pages.store();

    Softmax2 softmax[M][2];
#pragma unroll
    for (int n = 0; n < 2 * M; ++n) softmax[n / 2][n % 2].init();
    float O_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};

    for (; kv_tiles.valid(); kv_tiles.next()) {
      if constexpr (STAGES == 1) {
        __syncthreads();  // @forward.barrier-before-load
        load();
      }
      unsigned int K_smem = stages.wait(), V_smem = K_smem + K_BYTES;

      float S_rmem[M][N][4];
      if constexpr (Q_IN_REGISTERS)
        scores<M, N, HEAD_DIM>(S_rmem, Q_rmem, K_smem, K_lane);
      else
        scores<M, N, HEAD_DIM>(S_rmem, Q_smem, Q_lane, K_smem, K_lane);
      if constexpr (STAGES > 1) load();  // its addresses are computed while the tensor cores run
      attend(S_rmem, O_rmem, softmax, kv_tiles.masked(), score, band, dropout, scale_log2, q_start + row,
             kv_tiles.start);  // @forward.mask
      unsigned int P_rmem[M][N / 2][4];
      round_fragments(P_rmem, S_rmem);
      accumulate<M, N / 2, HEAD_DIM_V>(O_rmem, P_rmem, V_smem, V_lane);
      loads.pages.store();
    }

    float factors[M][2];
    finish(factors, softmax, p, sequence, dropout, head, q_start + row, column_warp() == 0);
    cp_async_wait_group<0>();  // @wait-Q-loaded: Q may be in flight if no key was visited
    __syncthreads();           // @barrier-before-O
    store_fragments<M, HEAD_DIM_V>(smem, O_rmem, row, [&](int m, int half) { return factors[m][half]; });
    __syncthreads();
    store_tile<BLOCK_Q, HEAD_DIM_V>(sequence.queries<element>(p.out, head), p.out, smem, q_start, sequence.q_rows);
  }
}
