// Backward: one block per tile of BLOCK_KV keys of one key/value head, over all queries that see them, head after head
// of the GQA group. dK and dV accumulate in tensor memory; the block's part of dQ is added to the workspace. grid (key
// tiles, key/value heads, sequences)
//
// Warp-specialised, after FlashAttention-4. Score tiles are transposed: a lane of tensor memory has a key, and columns
// are queries. Warps 0-3 add dQ to the workspace; warps 4-7 and 8-11 compute P^T and dS^T of half of the queries each,
// with a key a thread; a thread of warp 12 issues all mma, and one of warp 13 the TMA loads; warp 14 loads lse2 and
// delta; warp 15 waits for the turns of a deterministic dQ. Under a mask_mod each warp classifies the tiles for itself.
#include "backward.cuh"

// The role of the mma. S of the next tile of queries is computed under dS of this one, and dP of the next under P.
__device__ void issue_products(const Params& p, Rings rings, unsigned int tmem, const Sequence& sequence,
                               const Band& band, const BlockIndex& block) {
  constexpr unsigned int A_MN_MAJOR = 1u << 15, SCORES = instruction_descriptor<element>(BLOCK_Q, K_MAJOR),
                         OF_V = instruction_descriptor<element>(DIM_V, MN_MAJOR),
                         OF_K = instruction_descriptor<element>(DIM, MN_MAJOR), OF_Q = OF_K | A_MN_MAJOR;
  constexpr int PANEL_BYTES = ROWS * PANEL_ROW;
  Q_Ring next_Q = rings.Q;  // of S; rings.Q is that of dK
  Signal P_ready = rings.P_ready(), dS_ready = rings.dS_ready(), products_complete = rings.products_complete();

  // Products of the rows of a tile of keys and of one of queries, over `columns` columns.
  auto issue_scores = [&](int columns_of_tmem, unsigned int keys, unsigned int queries, int columns) {
    unsigned long long a = tcgen05_descriptor(k_major_descriptor(recomputed(keys))),
                       b = tcgen05_descriptor(k_major_descriptor(recomputed(queries)));
#pragma unroll
    for (int n = 0; n < columns / 16; ++n) {
      int next = n / 4 * (PANEL_BYTES >> 4) + n % 4 * NEXT_16_COLUMNS;
      tcgen05_mma(tmem + columns_of_tmem, a + next, b + next, SCORES, n > 0);  // @mma-scores
    }
  };
  // Adds P^T dO, or dS^T Q; P^T and dS^T are two halves in tensor memory.
  auto issue_sum = [&](int sum, int left, unsigned int queries, unsigned int shape, bool adds) {
    unsigned long long b = tcgen05_descriptor(mn_major_descriptor(recomputed(queries), PANEL_BYTES));
#pragma unroll
    for (int n = 0; n < BLOCK_Q / 16; ++n)
      tcgen05_mma(tmem + sum, tmem + left + n / 4 * QUERIES + n % 4 * 8, b + n * NEXT_16_ROWS, shape,
                  adds || n > 0);  // @mma-sum
  };
  auto issue_S = [&] {
    rings.rows.wait();  // @wait-cleared-rows
    ++rings.rows.index;
    next_Q.wait();  // @wait-next-Q
    if (issues_loads()) {
      issue_scores(TensorMemory::S, rings.K.tile(), next_Q.tile(), round_up(HEAD_DIM, 16));
      tcgen05_commit(rings.S_ready().mbarrier);  // @commit-S-of-queries
    }
    ++next_Q.index;
  };
  auto issue_dP = [&] {
    rings.dO.wait();                                             // @wait-dO-tile
    if constexpr (TensorMemory::dQ_OVER_dP) rings.acquire_dQ();  // @wait-dQ-over-dP
    if (issues_loads()) {
      issue_scores(TensorMemory::dP, rings.V.tile(), rings.dO.tile(), round_up(HEAD_DIM_V, 16));
      tcgen05_commit(rings.dP_ready().mbarrier);  // @commit-dP
    }
  };
  auto issue_dQ = [&] {
    if constexpr (!TensorMemory::dQ_OVER_dP) rings.acquire_dQ();  // @wait-dQ-buffer-read
    if (issues_loads()) {
      unsigned long long dS = tcgen05_descriptor(
                             mn_major_descriptor(recomputed(rings.smem + SharedMemory::dS), PANEL_BYTES)),
                         K = tcgen05_descriptor(mn_major_descriptor(recomputed(rings.K.tile()), PANEL_BYTES));
      unsigned int dQ = tmem + TensorMemory::dQ(rings.dQ.index % TensorMemory::dQ_BUFFERS);
#pragma unroll
      for (int n = 0; n < BLOCK_KV / 16; ++n)
        tcgen05_mma(dQ, dS + n * NEXT_16_ROWS, K + n * NEXT_16_ROWS, OF_Q, n > 0);  // @mma-dQ
      tcgen05_commit(rings.dQ.full());                                              // @commit-dQ
    }
    ++rings.dQ.index;
  };
  // STRICT: S and dQ, or dP, are written over operands of the product before.
  auto wait_for_products = [&] {
    if constexpr (STRICT) {
      if (issues_loads()) tcgen05_commit(products_complete.mbarrier);
      products_complete.wait();  // @wait-products
    }
  };

  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next()) {
    QTiles q_tiles(p, band, block.kv_head, kv_tiles.kv_start);
    rings.K.wait(), rings.V.wait();  // @wait-K-V-tiles
    if (q_tiles.valid()) issue_S(), issue_dP();
    for (bool adds = false; q_tiles.valid(); adds = true) {
      P_ready.wait();  // @wait-P-stored
      if (issues_loads()) issue_sum(TensorMemory::dV, TensorMemory::S, rings.dO.tile(), OF_V, adds);
      rings.dO.release();
      q_tiles.next();
      if (q_tiles.valid()) {
        wait_for_products();  // @wait-dV
        issue_S();
      }
      dS_ready.wait();  // @wait-dS-stored
      if (issues_loads()) issue_sum(TensorMemory::dK, TensorMemory::dP, rings.Q.tile(), OF_K, adds);
      rings.Q.release();
      wait_for_products();  // @wait-dK
      issue_dQ();
      if (q_tiles.valid()) issue_dP();
    }
    if (issues_loads()) tcgen05_commit(rings.gradients_ready().mbarrier);  // @commit-gradients
    ++rings.K.index, ++rings.V.index;
  }
}

// PART_BY_PART: P^T and dS^T of a key and half of the queries, `first` and after.
__device__ inline void compute_by_parts(unsigned int S_tmem, unsigned int dP_tmem, unsigned int dS_smem,
                                        const unsigned int (&kept)[QUERIES / PART], bool masked, const Score& score,
                                        const Band& band, const Dropout& dropout, int i, int j, float scale_log2,
                                        const float* minus_lse2, int row, int first) {
#pragma unroll 1
  for (int n = 0; n < QUERIES; n += PART) {
    unsigned int P_rounded[PART / 2], dS_rounded[PART / 2];
#pragma unroll
    for (int m = 0; m < PART; m += HALF_PART) {
      float P[HALF_PART], dP[HALF_PART], derivatives[HALF_PART];
      unsigned int kept_of_part = (n > 0 ? kept[1] : kept[0]) >> m;
      load(P, S_tmem + n + m);
      exponentiate(P, derivatives, masked, score, band, i + n + m, j, scale_log2, minus_lse2 + n + m);
      load(dP, dP_tmem + n + m);
      if constexpr (DROPOUT) drop(dP, dropout, kept_of_part);
      differentiate(dP, P, derivatives, score, minus_lse2 + BLOCK_Q + n + m);
      if constexpr (DROPOUT) drop(P, dropout, kept_of_part);
      round_row(*(unsigned int (*)[HALF_PART / 2])(P_rounded + m / 2), P);
      round_row(*(unsigned int (*)[HALF_PART / 2])(dS_rounded + m / 2), dP);
    }
    tmem_st(S_tmem + n / 2, P_rounded);
    store_dS(dP_tmem + n / 2, dS_smem, dS_rounded, row, first + n);
  }
}

// The role of the computation: P^T and dS^T of one key and half of the queries in each thread. At the end one half of
// the warps stores dV, the other dK.
__device__ void compute(const Params& p, Rings rings, unsigned char* smem, unsigned int tmem, const Sequence& sequence,
                        const Band& band, const BlockIndex& block) {
  int row = threadIdx.x % ROWS, half = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP / HALF_WARPS, 0) - 1;
  int first = half * QUERIES, warp_row = row - lane_id();
  float scale_log2 = log2_scale_of(p);
  unsigned int S_tmem = lanes_of_warp(tmem + TensorMemory::S + first);
  unsigned int dP_tmem = lanes_of_warp(tmem + TensorMemory::dP + first);
  unsigned int dS_smem = rings.smem + SharedMemory::dS;
  Signal S_ready = rings.S_ready(), P_ready = rings.P_ready(), dP_ready = rings.dP_ready(), dS_ready = rings.dS_ready();
  Signal gradients_ready = rings.gradients_ready();

  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next()) {
    int kv_start = kv_tiles.kv_start, j = kv_start + row;
    bool visited = false;
    Range keys = {kv_start + warp_row, kv_start + warp_row + WARP};
    for (QTiles q_tiles(p, band, block.kv_head, kv_start, keys); q_tiles.valid(); q_tiles.next(), visited = true) {
      Score score(p, sequence, q_tiles.head);
      Dropout dropout(p, sequence.batch, q_tiles.head);
      int i = q_tiles.start + first;
      bool masked = q_tiles.masked(first, QUERIES);  // @mask-of-key
      unsigned int kept[QUERIES / PART] = {};
      if constexpr (DROPOUT) {
#pragma unroll
        for (int n = 0; n < QUERIES; n += PART) kept[n / PART] = kept_queries(dropout, i + n, j);
      }
      // S is issued after the mma has waited for the rows, but its commit is a signal of the mma alone.
      rings.rows.wait();  // @wait-rows-of-queries
      const float *minus_lse2 = rings.row_numbers(smem) + first, *minus_delta = minus_lse2 + BLOCK_Q;
      S_ready.wait();  // @wait-S-of-queries
      if constexpr (PART_BY_PART) {
        dP_ready.wait();  // @wait-dP-of-parts
        compute_by_parts(S_tmem, dP_tmem, dS_smem, kept, masked, score, band, dropout, i, j, scale_log2, minus_lse2,
                         row, first);
        tmem_wait_st();  // @wait-stored-parts
        P_ready.arrive();
      } else {
        float P[QUERIES], derivatives[PART];
#pragma unroll
        for (int n = 0; n < QUERIES; n += PART) tmem_ld(*(float (*)[PART])(P + n), S_tmem + n);
        tmem_wait_ld();  // @wait-loaded-scores
        fence_loaded(P);
#pragma unroll
        for (int n = 0; n < QUERIES; n += PART) {
          float (&part)[PART] = *(float (*)[PART])(P + n);
          unsigned int rounded[PART / 2];
          exponentiate(part, derivatives, masked, score, band, i + n, j, scale_log2, minus_lse2 + n);
          round_row(rounded, part);
          tmem_st(S_tmem + n / 2, rounded);
        }
        tmem_wait_st();  // @wait-stored-P-halves
        P_ready.arrive();
        dP_ready.wait();  // @wait-dP-ready
#pragma unroll
        for (int n = 0; n < QUERIES; n += PART) {
          float dP[PART];
          unsigned int rounded[PART / 2];
          load(dP, dP_tmem + n);
          differentiate(dP, *(float (*)[PART])(P + n), derivatives, score, minus_delta + n);
          round_row(rounded, dP);
          store_dS(dP_tmem + n / 2, dS_smem, rounded, row, first + n);
        }
        tmem_wait_st();  // @wait-stored-dS
      }
      fence_proxy_async();  // @fence-dS-of-key
      dS_ready.arrive();    // all lanes have read the rows as well
      rings.rows.release();
    }
    gradients_ready.wait();  // @wait-gradients
    if (half == 0) {
      store_gradient<HEAD_DIM_V>(sequence.keys<element>(p.dv, block.kv_head), p.dv, smem + SharedMemory::V,
                                 tmem + TensorMemory::dV, 1, visited, kv_start, sequence.kv_rows);
      rings.V.release();
    } else {
      store_gradient<HEAD_DIM>(sequence.keys<element>(p.dk, block.kv_head), p.dk, smem + SharedMemory::K,
                               tmem + TensorMemory::dK, (float)p.scale, visited, kv_start, sequence.kv_rows);
      rings.K.release();
    }
  }
}

// The role that adds dQ: 32 queries in each warp.
__device__ void add_dQ_of_tiles(const Params& p, Rings rings, unsigned char* smem, unsigned int tmem,
                                const Sequence& sequence, const Band& band, const BlockIndex& block) {
  constexpr int N = dQ_COLUMNS / 2, PARTS = DqSums::COLUMNS / dQ_COLUMNS;
  int warp = threadIdx.x / WARP;
  unsigned char* buffers = smem + SharedMemory::dQ + warp * dQ_PARTS * dQ_PART_BYTES;
  int number = 0;  // of a part

  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next())
    for (QTiles q_tiles(p, band, block.kv_head, kv_tiles.kv_start); q_tiles.valid(); q_tiles.next()) {
      rings.dQ.wait();  // @wait-dQ-ready
      tcgen05_fence_after();
      float dQ[2][PARTS][N];
      unsigned int from = lanes_of_warp(tmem + TensorMemory::dQ(rings.dQ.index % TensorMemory::dQ_BUFFERS));
#pragma unroll
      for (int n = 0; n < 2 * PARTS; ++n)
        tmem_ld_fragments(dQ[n / PARTS][n % PARTS], from + (n / PARTS * 16 << 16) + n % PARTS * dQ_COLUMNS);
      tmem_wait_ld();  // @wait-loaded-dQ
#pragma unroll
      for (int n = 0; n < 2 * PARTS; ++n) fence_loaded(dQ[n / PARTS][n % PARTS]);
      tcgen05_fence_before();
      __syncwarp();
      rings.dQ.release();
      DqSums sums(p, sequence, q_tiles.head);
      if constexpr (DQ_IN_ORDER) rings.turn.wait();  // @wait-turn-of-dQ
#pragma unroll
      for (int n = 0; n < 2 * PARTS; ++n) {
        int i = q_tiles.start + WARP * warp + n / PARTS * 16;
        if (i >= sequence.q_len) break;  // @rows-of-dQ
        add_dQ(sums, dQ[n / PARTS][n % PARTS], i, n % PARTS * dQ_COLUMNS, buffers + number % dQ_PARTS * dQ_PART_BYTES);
        ++number;
      }
      if constexpr (DQ_IN_ORDER) {
        __syncwarp();  // @added-dQ-of-warp
        rings.turn.release();
      }
    }
  if constexpr (DQ_IN_BULK)
    if (lane_id() == 0) bulk_wait_group_read<0>();  // @wait-last-dQ-part
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Rings rings(smem_address(smem));
  auto warp_number = [] { return __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP, 0); };
  int warp = warp_number();
  if (threadIdx.x == 0) {
    rings.init();
    fence_mbarrier_init();  // @fence-mbarriers
    if constexpr (DQ_IN_ORDER) *(int*)(smem + SharedMemory::TILE_NUMBER) = atomicAdd(p.tile_counter, 1);
  }
  if (warp == MMA_WARP) tmem_alloc(rings.smem + SharedMemory::TENSOR_MEMORY_ADDRESS);
  tcgen05_fence_before();
  __syncthreads();  // @barrier-after-mbarriers
  tcgen05_fence_after();
  unsigned int tmem = *(volatile unsigned int*)(smem + SharedMemory::TENSOR_MEMORY_ADDRESS);

  BlockIndex block(DQ_IN_ORDER ? *(int*)(smem + SharedMemory::TILE_NUMBER) : 0);
  Sequence sequence(p, block.batch);
  Band band(p, sequence);
  if (warp < COMPUTE_WARP) {
    setmaxnreg_inc<DQ_REGISTERS>();
    add_dQ_of_tiles(p, rings, smem, tmem, sequence, band, block);
  } else if (warp < MMA_WARP) {
    setmaxnreg_inc<COMPUTE_REGISTERS>();
    compute(p, rings, smem, tmem, sequence, band, block);
  } else {
    setmaxnreg_dec<ISSUING_REGISTERS>();
    if (warp == MMA_WARP) {
      if (MASK_MOD || elect_one()) issue_products(p, rings, tmem, sequence, band, block);
    } else if (warp == LOAD_WARP) {
      if (MASK_MOD || elect_one()) {
        load_tiles(p, maps, rings, sequence, band, block);
        if (issues_loads()) rings.Q.drain(), rings.dO.drain();
      }
    } else if (warp == ROWS_WARP) {
      load_rows(p, smem, rings, sequence, band, block);
    } else if (DQ_IN_ORDER && warp == TURN_WARP) {
      take_turns(p, rings, sequence, band, block);
    }
    __syncwarp();
  }
  tcgen05_fence_before();
  __syncthreads();                                    // @end-of-roles
  if (warp_number() == MMA_WARP) tmem_dealloc(tmem);  // @free-tensor-memory
}
