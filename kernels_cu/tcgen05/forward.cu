// Forward: a block computes tiles of BLOCK_Q queries of one head, assigned by the tile scheduler. grid (number of SMs,
// or of tiles)
//
// Warp-specialised, after FlashAttention-4. Warps 0-3 and 4-7 compute the softmax of one tile of 128 queries each, with
// a row a thread; warps 8-11 rescale O, and store it at the end; a thread of warp 12 issues all mma, and one of warp 13
// the TMA loads; under a mask_mod each warp classifies the tiles for itself. Warp 14 zeroes the rows of V past the end
// of a sequence. While the softmax of one tile runs, the tensor cores work for the other.
#include "forward.cuh"

// Tensor maps; the box of each is one panel of a tile.
struct Maps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
#if TMA_STORE_O
  TensorMap out;
#endif
};

// The role of the loads. K of a tile is loaded before V of the one before, whose slot is free later, unless they take
// turns. L2 policy: Q is read once, K and V by every tile of queries.
__device__ void load_tiles(const Params& p, const Maps& maps, Barriers barriers) {
  Q_Ring Q[2] = {barriers.Q(0), barriers.Q(TILES - 1)};
  for (TileScheduler scheduler(p); scheduler.tile >= 0; scheduler.next(p)) {
    const Sequence sequence = scheduler.sequence;
    int q_start = scheduler.tile * BLOCK_Q, batch = PACKED ? 0 : sequence.batch, kv_head = scheduler.head / p.group;
    Band band(p, sequence);
    BlockKvTiles kv_tiles(band, scheduler.head, q_start);
    auto load_K = [&](int kv_start) {
      Box keys = sequence.key_box(kv_start);
      if (issues_loads()) barriers.K.load(maps.k, keys.row, kv_head, keys.batch, barriers.V);
    };
    auto load_V = [&](int kv_start) {
      Box keys = sequence.key_box(kv_start);
      if (issues_loads()) barriers.V.load(maps.v, keys.row, kv_head, keys.batch, barriers.K);
    };
    if (!kv_tiles.valid()) continue;
    load_K(kv_tiles.start);
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      if (issues_loads()) Q[t].load(maps.q, sequence.q_start + q_start + t * ROWS, scheduler.head, batch, EVICT_FIRST);
    while (kv_tiles.valid()) {
      int kv_start = kv_tiles.start;
      kv_tiles.next();
      if (BY_TURNS) load_V(kv_start);
      if (kv_tiles.valid()) load_K(kv_tiles.start);
      if (!BY_TURNS) load_V(kv_start);
    }
  }
  if (!issues_loads()) return;
  barriers.K.drain(), barriers.V.drain();  // @drain-slots
#pragma unroll
  for (int t = 0; t < TILES; ++t) Q[t].drain();  // @drain-Q
}

// True if rows of this tile of V are past the end of the sequence.
__device__ bool clears_V(const Sequence& sequence, int kv_start) {
  return CLEARS_V && kv_start + BLOCK_KV > sequence.kv_len;  // @V-past-keys
}

// The role of the mma. S and PV of two tiles of queries alternate: behind PV of a tile follows its next S, or, where P
// has columns of its own, before it.
__device__ void issue_products(const Params& p, Barriers barriers, unsigned int tmem) {
  constexpr unsigned int QK = instruction_descriptor<element>(BLOCK_KV, K_MAJOR),
                         PV = instruction_descriptor<element>(DIM_V, MN_MAJOR);  // @major-of-V
  Q_Ring Q[2] = {barriers.Q(0), barriers.Q(TILES - 1)};
  Signal S_read[2] = {barriers.S_read(0), barriers.S_read(TILES - 1)};
  Signal P_ready[2] = {barriers.P_ready(0), barriers.P_ready(TILES - 1)};
  Signal P_complete[2] = {barriers.P_complete(0), barriers.P_complete(TILES - 1)};
  Signal PV_complete[2] = {barriers.PV_complete(0), barriers.PV_complete(TILES - 1)};

  auto issue_S = [&](int t) {
    if constexpr (!P_OVER_S) S_read[t].wait();  // @wait-S-read
    if (!issues_loads()) return;
    unsigned long long q = tcgen05_descriptor(k_major_descriptor(recomputed(Q[t].tile()))), k;
    constexpr int NEXT_OF_Q = ROWS * PANEL_ROW >> 4;
#pragma unroll
    for (int n = 0; n < round_up(HEAD_DIM, 16) / 16; ++n) {
      if (n % 4 == 0) k = tcgen05_descriptor(k_major_descriptor(recomputed(barriers.K.panel(n / 4))));
      tcgen05_mma(tmem + TensorMemory::S(t), q + n / 4 * NEXT_OF_Q + n % 4 * NEXT_16_COLUMNS,
                  k + n % 4 * NEXT_16_COLUMNS, QK, n > 0);  // @mma-S
    }
    tcgen05_commit(barriers.S_ready(t).mbarrier);  // @commit-S
  };
  // PV of the keys in [begin, end).
  auto issue_PV = [&](int t, int begin, int end, bool adds) {
    if (!issues_loads()) return;
    unsigned long long v =
        tcgen05_descriptor(mn_major_descriptor(recomputed(barriers.V.panel(0)), barriers.V.distance()));
#pragma unroll
    for (int n = begin / 16; n < end / 16; ++n)
      tcgen05_mma(tmem + TensorMemory::O(t), tmem + TensorMemory::P(t) + 8 * n, v + n * NEXT_16_ROWS, PV,
                  adds || n > 0);  // @mma-PV
  };

  for (TileScheduler scheduler(p); scheduler.tile >= 0; scheduler.next(p)) {
    const Sequence sequence = scheduler.sequence;
    Band band(p, sequence);
    BlockKvTiles kv_tiles(band, scheduler.head, scheduler.tile * BLOCK_Q);
    if (!kv_tiles.valid()) continue;
    auto is_last = [&] {
      BlockKvTiles ahead = kv_tiles;
      ahead.next();
      return !ahead.valid();
    };
    bool ends = is_last();
    auto issue_next_S = [&](int t) {
      if (t == 0) barriers.K.wait();  // @wait-K
      issue_S(t);
      if (ends) Q[t].release();  // @release-Q
    };
    barriers.K.wait();  // @wait-first-K
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      Q[t].wait();  // @wait-Q
      issue_S(t);
      if (ends) Q[t].release();  // @release-Q
    }
    barriers.K.release();
    for (bool adds = false; kv_tiles.valid(); adds = true) {
      bool is_end = ends;
      kv_tiles.next();
      if (!is_end) ends = is_last();
      barriers.V.wait();                                    // @wait-V
      if constexpr (CLEARS_V) barriers.V_cleared().wait();  // @wait-cleared-V
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        if (!P_OVER_S && !is_end) issue_next_S(t);
        P_ready[t].wait();  // @wait-P
        issue_PV(t, 0, EARLY_KEYS, adds);
        P_complete[t].wait();  // @wait-complete-P-stored
        issue_PV(t, EARLY_KEYS, BLOCK_KV, true);
        if (t == TILES - 1) barriers.V.release();
        if ((SIGNALS_PV || is_end) && issues_loads()) tcgen05_commit(PV_complete[t].mbarrier);  // @signal-PV
        // Also after the last keys: S of the next tile of queries takes the place of P.
        if constexpr (STRICT && P_OVER_S) PV_complete[t].wait();  // @wait-PV
        if (P_OVER_S && !is_end) issue_next_S(t);
      }
      if (!is_end) barriers.K.release();
    }
  }
}

// The role of the softmax of tile t: each thread has the scores of one query.
__device__ void compute_softmax(const Params& p, Barriers barriers, float* factors, unsigned int tmem, int t) {
  float scale_log2 = log2_scale_of(p);
  int row = t * ROWS + threadIdx.x % ROWS;
  unsigned int S_tmem = lanes_of_warp(tmem + TensorMemory::S(t)), P_tmem = lanes_of_warp(tmem + TensorMemory::P(t));
  Signal S_ready = barriers.S_ready(t), S_read = barriers.S_read(t), P_read = barriers.P_read(t);
  Signal P_ready = barriers.P_ready(t), P_complete = barriers.P_complete(t);
  Signal factor_ready = barriers.factor_ready(t), factor_read = barriers.factor_read(t);

  auto send = [&](float factor) {
    factor_read.wait();     // @wait-factor-read
    factors[row] = factor;  // @send-factor
    factor_ready.arrive();
  };

  for (TileScheduler scheduler(p); scheduler.tile >= 0; scheduler.next(p)) {
    const Sequence sequence = scheduler.sequence;
    int head = scheduler.head, q_start = scheduler.tile * BLOCK_Q, i = q_start + row;
    Band band(p, sequence);
    Score score(p, sequence, head);
    Dropout dropout(p, sequence.batch, head);
    DenseParts dense(p, barriers.smem + SharedMemory::DENSE + threadIdx.x / WARP * DenseParts::BYTES, sequence, head,
                     q_start + row / WARP * WARP);
    DenseRow dense_row;
    Softmax2 softmax;
    softmax.init();
#if STATISTICS
    RowStatistics statistics;
    statistics.init();
#endif
    Range queries = {q_start + t * ROWS, q_start + (t + 1) * ROWS};
    for (BlockKvTiles kv_tiles(band, head, q_start, queries); kv_tiles.valid(); kv_tiles.next()) {
      float S[BLOCK_KV];
      bool masked = ALWAYS_MASKED || kv_tiles.masked();
      if constexpr (READS_DENSE) dense.start(kv_tiles.start);
      S_ready.wait();  // @wait-S-ready
      if constexpr (STORES_S) {
        float row_max = -infinity();
#pragma unroll 1
        for (int n = 0; n < BLOCK_KV; n += PART) {
          float part[PART];
          if constexpr (READS_DENSE) {
            dense.read(dense_row);
            if (n + PART < BLOCK_KV) dense.start(kv_tiles.start + n + PART);  // @next-part
          }
          load(part, S_tmem + n);
          if (masked)
            modify<true>(part, score, band, i, kv_tiles.start + n, dense_row);
          else if constexpr (SCORE_MODIFIED)
            modify<false>(part, score, band, i, kv_tiles.start + n, dense_row);
#if STATISTICS
          float largest = max_of(part);
          observe(statistics, part, largest, kv_tiles.start + n);
          row_max = max_nan(row_max, largest);
#else
          row_max = max(row_max, max_of(part));
#endif
          tmem_st(S_tmem + n, *(const unsigned int (*)[PART])part);
        }
        tmem_wait_st();  // @wait-stored-S
#if STATISTICS
        send(update_max(softmax, statistics, row_max, scale_log2));
#else
        send(update_max(softmax, row_max, scale_log2));
#endif
      } else {
        load_S(S, S_tmem);
        if (masked) modify<true>(S, score, band, i, kv_tiles.start, dense_row);  // @mask-row
#if STATISTICS
        float row_max = max_of(S);
        send(update_max(softmax, statistics, row_max, scale_log2));
        observe(statistics, S, row_max, kv_tiles.start);
#else
        send(update_max(softmax, max_of(S), scale_log2));
#endif
        if constexpr (!P_OVER_S) S_read.arrive();  // @arrive-S-read
      }
      RowSum sum(softmax.l);
#if STATISTICS
      RowSum w(statistics.w);
#endif
#pragma unroll(STORES_S ? 1 : BLOCK_KV / PART)
      for (int n = 0; n < BLOCK_KV; n += PART) {
        float (&part)[PART] = *(float (*)[PART])(S + (STORES_S ? 0 : n));
        unsigned int P[PART / 2];
        if constexpr (STORES_S) load(part, S_tmem + n);
#if STATISTICS
        if constexpr (!ENTROPY)
          exponentiate(part, sum, softmax, scale_log2);
        else if (masked || SCORE_MODIFIED)
          exponentiate<true>(part, sum, w, softmax, scale_log2);
        else
          exponentiate<false>(part, sum, w, softmax, scale_log2);
#else
        exponentiate(part, sum, softmax, scale_log2);
#endif
        if constexpr (DROPOUT) drop(part, dropout, i, kv_tiles.start + n);
        round_row(P, part);
        if (!P_OVER_S && n == 0) P_read.wait();  // @wait-P-read
        tmem_st(P_tmem + n / 2, P);
        if (n + PART == EARLY_KEYS) {
          tmem_wait_st();  // @wait-stored-P
          P_ready.arrive();
        }
      }
      softmax.l = sum.total();
#if STATISTICS
      if constexpr (ENTROPY) statistics.w = w.total();
#endif
      tmem_wait_st();  // @wait-complete-P
      P_complete.arrive();
    }
    send(finish(softmax, p, sequence, dropout, head, i));
#if STATISTICS
    store_statistics(statistics, softmax, p, sequence, head, i);
#endif
  }
}

// The role of the correction: rescales O of both tiles before PV is added, and stores it after the last.
__device__ void correct(const Params& p, const Maps& maps, Barriers barriers, const float* factors, unsigned int tmem) {
  int row = threadIdx.x % ROWS;
  Signal P_ready[2] = {barriers.P_ready(0), barriers.P_ready(TILES - 1)};
  Signal PV_complete[2] = {barriers.PV_complete(0), barriers.PV_complete(TILES - 1)};
  Signal factor_ready[2] = {barriers.factor_ready(0), barriers.factor_ready(TILES - 1)};
  Signal factor_read[2] = {barriers.factor_read(0), barriers.factor_read(TILES - 1)};

  auto receive = [&](int t) {
    factor_ready[t].wait();  // @wait-factor
    float factor = factors[t * ROWS + row];
    factor_read[t].arrive();
    return factor;
  };

  for (TileScheduler scheduler(p); scheduler.tile >= 0; scheduler.next(p)) {
    const Sequence sequence = scheduler.sequence;
    int q_start = scheduler.tile * BLOCK_Q;
    Band band(p, sequence);
    bool visited = false;
    for (BlockKvTiles kv_tiles(band, scheduler.head, q_start); kv_tiles.valid(); kv_tiles.next(), visited = true)
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        float factor = receive(t);
        // Where this role need not wait, O is at rest: S, for which the softmax has waited, ran behind PV before.
        if (SIGNALS_PV && visited) PV_complete[t].wait();  // @wait-O-at-rest
        // @rescales-O
        if (visited && __any_sync(0xFFFFFFFF, factor != 1)) rescale_O(lanes_of_warp(tmem + TensorMemory::O(t)), factor);
        P_ready[t].arrive();
      }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float factor = receive(t);
      if (visited) PV_complete[t].wait();  // @wait-O-ready
      store_O(p, maps, barriers.smem + SharedMemory::O, sequence, scheduler.head, q_start + t * ROWS,
              lanes_of_warp(tmem + TensorMemory::O(t)), factor, visited);
    }
  }
  if constexpr (TMA_STORE_O) wait_for_stored_O();  // @wait-last-O
}

// The role of warp 14: zeroes rows of V that may hold another sequence's data. It waits for every tile, and the mma for
// this role, because a role that skips tiles takes a phase of an mbarrier for a later one.
__device__ void clear_V(const Params& p, Barriers barriers) {
  constexpr int CHUNKS = PANEL_ROW / 16;
  const unsigned int zeros[4] = {};
  for (TileScheduler scheduler(p); scheduler.tile >= 0; scheduler.next(p)) {
    const Sequence sequence = scheduler.sequence;
    Band band(p, sequence);
    BlockKvTiles kv_tiles(band, scheduler.head, scheduler.tile * BLOCK_Q);
    for (; kv_tiles.valid(); kv_tiles.next(), ++barriers.V.index) {
      barriers.V.wait();  // @wait-V-to-clear
      if (clears_V(sequence, kv_tiles.start)) {
        for (int n = (sequence.kv_len - kv_tiles.start) * CHUNKS + lane_id(); n < BLOCK_KV * CHUNKS; n += WARP)
#pragma unroll
          for (int panel = 0; panel < V_Ring::PANELS; ++panel)
            st_shared_v4(barriers.V.panel(panel) + 16 * n, zeros);  // @clear-V
        fence_proxy_async();                                        // @fence-cleared-V
      }
      barriers.V_cleared().arrive();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Barriers barriers(smem_address(smem));
  int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP, 0);
  if (threadIdx.x == 0) {
    barriers.init();
    fence_mbarrier_init();  // @fence-mbarriers
  }
  if (warp == MMA_WARP) tmem_alloc(smem_address(smem) + SharedMemory::TENSOR_MEMORY_ADDRESS);
  tcgen05_fence_before();
  __syncthreads();  // @barrier-after-mbarriers
  tcgen05_fence_after();
  unsigned int tmem = *(volatile unsigned int*)(smem + SharedMemory::TENSOR_MEMORY_ADDRESS);
  float* factors = (float*)(smem + SharedMemory::FACTORS);

  if (warp < CORRECTION_WARP) {
    setmaxnreg_inc<SOFTMAX_REGISTERS>();
    int t = warp / SOFTMAX_WARPS;
    if (t < TILES) compute_softmax(p, barriers, factors, tmem, t);
  } else if (warp < MMA_WARP) {
    setmaxnreg_dec<CORRECTION_REGISTERS>();
    correct(p, maps, barriers, factors, tmem);
  } else {
    setmaxnreg_dec<ISSUING_REGISTERS>();
    if (warp == MMA_WARP) {
      if (MASK_MOD || elect_one()) issue_products(p, barriers, tmem);
    } else if (warp == LOAD_WARP) {
      if (MASK_MOD || elect_one()) load_tiles(p, maps, barriers);
    } else if (CLEARS_V && warp == CLEAR_WARP) {
      clear_V(p, barriers);
    }
    __syncwarp();
  }
  tcgen05_fence_before();
  __syncthreads();                           // @end-of-roles
  if (warp == MMA_WARP) tmem_dealloc(tmem);  // @free-tensor-memory
}
