// Forward: one block per tile of BLOCK_Q queries of one head. grid (query tiles, heads, sequences)
#include "gemm.cuh"
#include "load.cuh"
#if SCALED_KV
#include "cvt_tiles.cuh"
#include "scales.cuh"
#endif

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // score fragments of a warp, by columns

// Offsets in bytes. Q_IN_REGISTERS: Q passes through the memory of the first slots on its way to registers. The
// epilogue stages O in the same memory.
struct SharedMemory {
  static constexpr int Q = 0, Q_END = BLOCK_Q * row_bytes(HEAD_DIM);    // [BLOCK_Q][HEAD_DIM]
  static constexpr int KV = Q_IN_REGISTERS ? 0 : Q_END;                 // STAGES x KeySlot
  static constexpr int O = 0, O_END = BLOCK_Q * row_bytes(HEAD_DIM_V);  // [BLOCK_Q][HEAD_DIM_V]
#if SCALED_KV
  static constexpr int NUMBERS = KV + STAGES * KeySlot::BYTES;  // NumberTiles
  static constexpr int BYTES = maximum(NUMBERS + NumberTiles::BYTES, maximum(Q_END, O_END));
#else
  static constexpr int BYTES = maximum(KV + STAGES * KeySlot::BYTES, maximum(Q_END, O_END));
#endif
};

// Turns S into the probabilities of a tile, and rescales O if the reference of the exponents changes.
__device__ void attend(float (&S)[M][N][4], float (&O)[M][fragments_of(HEAD_DIM_V)][4], Softmax2 (&softmax)[M][2],
#if STATISTICS
                       RowStatistics (&statistics)[M][2],
#endif
#if SCALED_KV
                       float (&zeros)[M][1][4],
#endif
                       bool masked, const Score& score, const Band& band, const Dropout& dropout, float scale_log2,
                       int q_start, int kv_start) {
  if (masked)
    modify<true>(S, score, band, q_start, kv_start);
  else if constexpr (MODIFIED || DENSE_MASK)
    modify<false>(S, score, band, q_start, kv_start);
  float O_scale[M][2];
#if STATISTICS
#if SCALED_KV
  bool grows = observe(O_scale, softmax, statistics, S, scale_log2, kv_start);
  if (grows) rescale(O, O_scale);
  if (CODES_OF_4_BITS && grows) rescale(zeros, O_scale);
#else
  if (observe(O_scale, softmax, statistics, S, scale_log2, kv_start)) rescale(O, O_scale);
#endif
  if constexpr (!ENTROPY)
    exponentiate(S, softmax, scale_log2);
  else if (masked || MODIFIED || DENSE_MASK)
    exponentiate<true>(S, softmax, statistics, scale_log2);
  else
    exponentiate<false>(S, softmax, statistics, scale_log2);
#else
#if SCALED_KV
  bool grows = update_max(O_scale, softmax, S, scale_log2);
  if (grows) rescale(O, O_scale);
  if (CODES_OF_4_BITS && grows) rescale(zeros, O_scale);  // @rescale-zeros
#else
  if (update_max(O_scale, softmax, S, scale_log2)) rescale(O, O_scale);
#endif
  exponentiate(S, softmax, scale_log2);
#endif
  if constexpr (DROPOUT) drop(S, dropout, q_start, kv_start);
}

// Loads Q to shared memory; Q_IN_REGISTERS: and its fragments to registers.
__device__ void load_Q(unsigned int (&Q)[padded(HEAD_DIM) / 16][M][4], unsigned int Q_smem, const Params& p,
                       const Sequence& sequence, int head, int q_start, int row) {
  __syncthreads();
  load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start), Range{0, sequence.q_len});
  if constexpr (Q_IN_REGISTERS) {
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    load_fragments<M, HEAD_DIM>(Q, Q_smem, row);
    __syncthreads();  // @barrier-after-Q-fragments
  }
}

// Stores O times `factors` through shared memory.
__device__ void store_O(const float (&O)[M][fragments_of(HEAD_DIM_V)][4], const float (&factors)[M][2],
                        unsigned char* O_smem, const Params& p, const Sequence& sequence, int head, int q_start,
                        int row) {
  cp_async_wait_group<0>();  // @wait-Q-loaded: Q may be in flight if no key was visited
  __syncthreads();           // @barrier-before-O
  store_fragments<M, HEAD_DIM_V>(O_smem, O, row, [&](int m, int half) { return factors[m][half]; });
  __syncthreads();
  store_tile<BLOCK_Q, HEAD_DIM_V>(sequence.queries<element>(p.out, head), p.out, O_smem, q_start, sequence.q_rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  __shared__ int pages_smem[2][BLOCK_KV];
  unsigned char* O_smem = (unsigned char*)shared + SharedMemory::O;
  unsigned int smem = smem_address(shared), Q_smem = smem + SharedMemory::Q;

  int head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
#if SCALED_KV
  ScaleLoads scales(p, sequence, head / p.group);
  unsigned int numbers = smem + SharedMemory::NUMBERS;
#endif
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
    Pipeline<STAGES, KeySlot::BYTES> stages(smem + SharedMemory::KV);

    auto load = [&] {
#if SCALED_KV
      if (loaded.valid()) scales.load(stages.next(), loaded.start, loaded.visible, loads.pages.stored());
#endif
      if (loaded.valid()) loads.load(stages.next(), loaded.start, loaded.visible);
      loaded.next();  // @forward.next-load
      stages.commit();
      loads.pages.look_up(loaded.start, loaded.visible);
    };

    // Prologue.
    unsigned int Q_rmem[padded(HEAD_DIM) / 16][M][4];
    load_Q(Q_rmem, Q_smem, p, sequence, head, q_start, row);
#if SCALED_KV
    float Q_sums[M][2], zeros_rmem[M][1][4] = {};
    ScaledP scaled_P;
    if constexpr (CODES_OF_4_BITS) {
      cp_async_commit_group();
      cp_async_wait_group<0>();
      __syncthreads();
      sum_Q(Q_sums, Q_smem, row);
      if constexpr (Q_IN_REGISTERS) __syncthreads();
    }
#endif
    loads.pages.look_up(loaded.start, loaded.visible);
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      loads.pages.store();
      if constexpr (PAGED) __syncthreads();  // @barrier-after-pages
      load();
#if SCALED_KV
      scales.store();
#endif
    }
    loads.pages.store();

    Softmax2 softmax[M][2];
#pragma unroll
    for (int n = 0; n < 2 * M; ++n) softmax[n / 2][n % 2].init();
    float O_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};
#if STATISTICS
    RowStatistics statistics[M][2];
    init(statistics);
#endif

    // Mainloop.
    for (; kv_tiles.valid(); kv_tiles.next()) {
      if constexpr (STAGES == 1) {
        __syncthreads();  // @forward.barrier-before-load
        load();
#if SCALED_KV
        scales.store();
#endif
      }
#if SCALED_KV
      unsigned int slot = stages.wait(), K_smem = numbers + NumberTiles::K, V_smem = numbers + NumberTiles::V;
      convert_tile<HEAD_DIM>(K_smem, slot + KeySlot::K);
      convert_tile<HEAD_DIM_V>(V_smem, slot + KeySlot::V);
      __syncthreads();  // @barrier-after-conversion
#else
      unsigned int slot = stages.wait(), K_smem = slot + KeySlot::K, V_smem = slot + KeySlot::V;
#endif

      float S_rmem[M][N][4];
      if constexpr (Q_IN_REGISTERS)
        scores<M, N, HEAD_DIM>(S_rmem, Q_rmem, K_smem, K_lane);
      else
        scores<M, N, HEAD_DIM>(S_rmem, Q_smem, Q_lane, K_smem, K_lane);
      if constexpr (STAGES > 1) load();  // here, so that addresses are computed while the tensor cores run
#if SCALED_KV
      scale_products(S_rmem, slot, 0, Q_sums);
#endif
#if STATISTICS
      attend(S_rmem, O_rmem, softmax, statistics,
#if SCALED_KV
             zeros_rmem,
#endif
             kv_tiles.masked(), score, band, dropout, scale_log2, q_start + row, kv_tiles.start);
#else
      attend(S_rmem, O_rmem, softmax,
#if SCALED_KV
             zeros_rmem,
#endif
             kv_tiles.masked(), score, band, dropout, scale_log2, q_start + row,
             kv_tiles.start);  // @forward.mask
#endif
      unsigned int P_rmem[M][N / 2][4];
#if SCALED_KV
      scaled_P.round(P_rmem, S_rmem, O_rmem, zeros_rmem, slot, 0);
#else
      round_fragments(P_rmem, S_rmem);
#endif
      accumulate<M, N / 2, HEAD_DIM_V>(O_rmem, P_rmem, V_smem, V_lane);
      loads.pages.store();
#if SCALED_KV
      scales.store();
#endif
    }

    // Epilogue.
#if SCALED_KV
    scaled_P.end(O_rmem, zeros_rmem);
#endif
    float factors[M][2];
    finish(factors, softmax, p, sequence, dropout, head, q_start + row, column_warp() == 0);
#if STATISTICS
    store_statistics(statistics, softmax, p, sequence, head, q_start + row, column_warp() == 0);
#endif
    store_O(O_rmem, factors, O_smem, p, sequence, head, q_start, row);
  }
}
