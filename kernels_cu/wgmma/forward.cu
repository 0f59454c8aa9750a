// Forward: a block computes tiles of BLOCK_Q queries of one head, assigned by the tile scheduler. grid (query tiles,
// heads, sequences), or (number of SMs) if PERSISTENT
//
// Warp-specialised: one thread of warpgroup 0, the producer, issues the TMA loads of Q, K and V; its warp classifies
// the tiles by a mask_mod, and stages the values that mods compute per key. Each consumer warpgroup computes 64 queries
// and overlaps the PV wgmma of one tile with the softmax of the next.
#include "forward.cuh"
#include "tile_scheduler.cuh"

// Tensor maps; the box of each is one panel of a tile.
struct Maps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
#if TMA_STORE_O
  TensorMap out;
#endif
};

// Number of the N / 2 wgmmas of PV that are issued right behind QK of the next tile. The queue of the tensor cores
// holds few wgmmas, and a warpgroup stalls while the queue is full. The other wgmmas of PV are issued after the row
// max, when the first have run, so that the softmax starts as soon as S is ready. Kernels that wait for PV before the
// softmax issue all at once.
constexpr int EARLY_PV = EXPONENTIALS_FIRST && !SCORE_MODIFIED && !PINGPONG && N / 2 > 5 ? 4 : N / 2;

using Q_Ring = TileRing<1, BLOCK_Q, HEAD_DIM>;
using K_Ring = TileRing<STAGES, BLOCK_KV, HEAD_DIM, 1 + KV_MULTICAST>;
using V_Ring = TileRing<STAGES, BLOCK_KV, HEAD_DIM_V, 1 + KV_MULTICAST>;

// Offsets in bytes. O is staged in the memory of Q, unless O_BUFFER.
struct SharedMemory {
  static constexpr int Q_BYTES = tile_bytes(BLOCK_Q, HEAD_DIM), O_BYTES = tile_bytes(BLOCK_Q, HEAD_DIM_V);
  static constexpr int Q = 0;                                               // [BLOCK_Q][HEAD_DIM]
  static constexpr int K = O_BUFFER ? Q_BYTES : maximum(Q_BYTES, O_BYTES);  // STAGES x [BLOCK_KV][HEAD_DIM]
  static constexpr int V = K + STAGES * tile_bytes(BLOCK_KV, HEAD_DIM);     // STAGES x [BLOCK_KV][HEAD_DIM_V]
  static constexpr int V_END = V + STAGES * tile_bytes(BLOCK_KV, HEAD_DIM_V);
  static constexpr int O = O_BUFFER ? V_END : Q;  // [BLOCK_Q][HEAD_DIM_V]
  static constexpr int Q_MBARRIERS = O_BUFFER ? O + O_BYTES : V_END;
  static constexpr int K_MBARRIERS = Q_MBARRIERS + mbarrier_bytes(1);
  static constexpr int V_MBARRIERS = K_MBARRIERS + mbarrier_bytes(STAGES);
  static constexpr int KV_RECORDS = V_MBARRIERS + mbarrier_bytes(STAGES);
  static constexpr int KEY_VALUES = KV_RECORDS + RECORDS_BYTES;      // KeyValues [KEY_SLOTS][BLOCK_KV]
  static constexpr int TILE_RECORD = KEY_VALUES + KEY_VALUES_BYTES;  // TileScheduler
  static constexpr int BYTES = TILE_RECORD + 48;
};
static_assert(sizeof(TileScheduler) <= SharedMemory::BYTES - SharedMemory::TILE_RECORD, "the tile record fits");

struct Rings {
  Q_Ring Q;
  K_Ring K;
  V_Ring V;
  unsigned int kv_records;
  Mod::KeyValues* staged_keys;

  __device__ Rings(unsigned char* generic, unsigned int smem)
      : Q(smem + SharedMemory::Q, smem + SharedMemory::Q_MBARRIERS),
        K(smem + SharedMemory::K, smem + SharedMemory::K_MBARRIERS),
        V(smem + SharedMemory::V, smem + SharedMemory::V_MBARRIERS),
        kv_records(smem + SharedMemory::KV_RECORDS),
        staged_keys((Mod::KeyValues*)(generic + SharedMemory::KEY_VALUES)) {}
};

// Producer. The first K and V of a tile are loaded before its Q, whose slot is occupied until the previous O has been
// stored or, with O_BUFFER, until the previous tile's last S is ready. Q's full mbarrier publishes the tile record.
// L2 policy: Q is read once, K and V by every tile of queries.
__device__ void load_tiles(const Params& p, const Maps& maps, Rings& rings, TileScheduler& tile_smem) {
  TileScheduler scheduler(p);
  for (; scheduler.tile >= 0; scheduler.next(p)) {
    const Sequence sequence = scheduler.sequence;
    int q_start = scheduler.tile * BLOCK_Q, batch = PACKED ? 0 : sequence.batch, kv_head = scheduler.head / p.group;
    Band band(p, sequence);
    BlockKvTiles kv_tiles(band, scheduler.head, q_start);
    auto load_next = [&] {
      stage_keys(rings.K, rings.staged_keys, band, kv_tiles.start);
      if (issues_loads()) {
        Box keys = sequence.key_box(kv_tiles.start);
        write_record(rings.K, rings.kv_records, kv_tiles);
        rings.K.load(maps.k, keys.row, kv_head, keys.batch, EVICT_LAST);
        rings.V.load(maps.v, keys.row, kv_head, keys.batch, EVICT_LAST);
      }
      kv_tiles.next();
    };
    if (kv_tiles.valid()) load_next();
    if (issues_loads()) {
      rings.Q.acquire();  // @wait-tile-read
      tile_smem = scheduler;
      rings.Q.load(maps.q, sequence.q_start + q_start, scheduler.head, batch, EVICT_FIRST);
    }
    while (kv_tiles.valid()) load_next();
    if (issues_loads()) publish_end(rings.K, rings.kv_records);
  }
  if (!issues_loads()) return;
  rings.Q.acquire();
  tile_smem.tile = -1;  // @tell-end
  mbarrier_arrive(rings.Q.full());
}

// The asynchronous steps of the mainloop: each issues one wgmma group, or waits until at most PENDING groups are in
// flight and releases the slot that the oldest one has read. Q's descriptor is the same in every step, so the compiler
// adds the offsets before the loop.
__device__ void issue_QK(float (&S)[1][N][4], unsigned int Q_smem, const K_Ring& K) {
  K.wait();  // @wait-K
  fence_operand(S);
  wgmma_fence();  // @fence-S
  scores<BLOCK_Q, BLOCK_KV, HEAD_DIM>(S, k_major_descriptor(Q_smem), opaque(k_major_descriptor(K.tile())));
}
template <int PENDING>
__device__ void wait_QK(float (&S)[1][N][4], K_Ring& K) {
  wgmma_wait_group<PENDING>();  // @wait-S-group
  fence_operand(S);
  K.release();
}
// Issues steps [BEGIN, END) of PV, 16 keys each.
template <int BEGIN, int END>
__device__ void issue_PV(float (&O)[1][N_V][4], unsigned int (&P)[1][N / 2][4], const V_Ring& V) {
  if constexpr (BEGIN == 0) V.wait();  // @wait-V
  fence_operand(O), fence_operand(P);
  wgmma_fence();
  accumulate<BEGIN, END>(O, P, V.tile());
}
__device__ void wait_PV(float (&O)[1][N_V][4], unsigned int (&P)[1][N / 2][4], V_Ring& V) {
  wgmma_wait_group<0>();  // @wait-O
  fence_operand(O), fence_operand(P);
  V.release();
}

// Zeroes rows of V past the end of the sequence, which may hold another sequence's data.
__device__ void clear_V(const V_Ring& V, const Sequence& sequence, int kv_start) {
  if constexpr (PACKED || KV_LENGTHS)
    if (kv_start + BLOCK_KV > sequence.kv_len) {  // @clear-rows-past-keys
      V.wait();
      clear_rows<BLOCK_KV, HEAD_DIM_V>(V.tile(), [&](int row) { return kv_start + row < sequence.kv_len; });
      sync_cleared_rows();
    }
}

// Consumer: one warpgroup, 64 queries of each tile.
__device__ void compute(const Params& p, const Maps& maps, Rings& rings, unsigned char* smem,
                        const TileScheduler& tile_smem) {
  float scale_log2 = log2_scale_of(p);
  int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP - 1, 0);
  int row = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP - WARPGROUP / WARP, 0) * 16;  // first row of this warp
  if (warpgroup == CONSUMERS / WARPGROUP - 1) pingpong_signal(warpgroup);            // @first-turn

  do {
    rings.Q.wait();  // @wait-Q
    if (tile_smem.tile < 0) break;
    const Sequence sequence = RELOAD_SEQUENCE ? Sequence(p, tile_smem.sequence.batch) : tile_smem.sequence;
    int head = tile_smem.head, q_start = tile_smem.tile * BLOCK_Q, q_group = q_start + 64 * warpgroup;
    if constexpr (O_BUFFER) __syncwarp();  // @read-tile: all lanes have read it, not only the lane that releases Q
    Band band(p, sequence);
    Score score(p, sequence, head);
    Dropout dropout(p, sequence.batch, head);
    auto kv_tiles = consumer_tiles(rings.K, rings.kv_records, band, head, q_start, {q_group, q_group + 64});
    unsigned int Q_smem = rings.Q.tile() + 64 * warpgroup * PANEL_ROW;
    Softmax2 softmax[1][2];
    softmax[0][0].init(), softmax[0][1].init();
    float O_rmem[1][N_V][4] = {}, S_rmem[1][N][4], O_scale[1][2];
    unsigned int P_rmem[1][N / 2][4];
#if STATISTICS
    RowStatistics statistics[1][2];
    init(statistics);
#endif

    // Modifies S and updates the row maxima; returns whether O must be rescaled by O_scale.
    auto update = [&] {
      read_staged_keys(rings.K, rings.staged_keys, band, score);
      if (ALWAYS_MASKED || kv_tiles.masked())
        modify<true>(S_rmem, score, band, q_start + row, kv_tiles.start);  // @mask-S
      else if constexpr (SCORE_MODIFIED)
        modify<false>(S_rmem, score, band, q_start + row, kv_tiles.start);
#if STATISTICS
      return observe(O_scale, softmax, statistics, S_rmem, scale_log2, kv_tiles.start);
#else
      return update_max(O_scale, softmax, S_rmem, scale_log2);
#endif
    };
    // Turns S into P.
    auto attend = [&] {
#if STATISTICS
      if constexpr (!ENTROPY)
        exponentiate(S_rmem, softmax, scale_log2);
      else if (ALWAYS_MASKED || SCORE_MODIFIED || kv_tiles.masked())
        exponentiate<true>(S_rmem, softmax, statistics, scale_log2);
      else
        exponentiate<false>(S_rmem, softmax, statistics, scale_log2);
#else
      exponentiate(S_rmem, softmax, scale_log2);
#endif
      if constexpr (DROPOUT) drop(S_rmem, dropout, q_start + row, kv_tiles.start);
    };

    if (kv_tiles.valid()) {
      // Prologue: P of the last tile of keys, the only one that can reach past the sequence.
      issue_QK(S_rmem, Q_smem, rings.K);
      wait_QK<0>(S_rmem, rings.K);
      update();
      attend();
      round_fragments(P_rmem, S_rmem);
      clear_V(rings.V, sequence, kv_tiles.start);

      // Mainloop: S of this tile and PV of the previous one are in flight together.
      for (kv_tiles.next(); kv_tiles.valid(); kv_tiles.next()) {
        pingpong_wait(warpgroup);
        issue_QK(S_rmem, Q_smem, rings.K);
        issue_PV<0, EARLY_PV>(O_rmem, P_rmem, rings.V);
        pingpong_signal(warpgroup);  // @pass-turn
        // The pass that modifies the scores needs the registers of P, so it waits for PV.
        if constexpr (SCORE_MODIFIED) wait_PV(O_rmem, P_rmem, rings.V);
        wait_QK<1>(S_rmem, rings.K);  // @wait-S
        bool rescales = update();
        if constexpr (EARLY_PV < N / 2) issue_PV<EARLY_PV, N / 2>(O_rmem, P_rmem, rings.V);  // @issue-late-PV
        attend();
        // A barrier for ptxas, which then moves no wait above the exponentials: they overlap with PV.
        if constexpr (EXPONENTIALS_FIRST) pmevent_if_negative(softmax[0][0].l + softmax[0][1].l);
        if constexpr (!SCORE_MODIFIED) wait_PV(O_rmem, P_rmem, rings.V);
        if (rescales) rescale(O_rmem, O_scale);
        round_fragments(P_rmem, S_rmem);
      }
      issue_PV<0, N / 2>(O_rmem, P_rmem, rings.V);
      if constexpr (O_BUFFER) rings.Q.release();  // @release-Q
      wait_PV(O_rmem, P_rmem, rings.V);
    } else if constexpr (O_BUFFER) {
      rings.Q.release();
    }

    // Epilogue.
    float factors[1][2];
    finish(factors, softmax, p, sequence, dropout, head, q_start + row, true);
#if STATISTICS
    store_statistics(statistics, softmax, p, sequence, head, q_start + row, true);
#endif
    store_O(O_rmem, factors, p, maps, smem + SharedMemory::O, sequence, head, row, q_start + row);  // @store-O
    if constexpr (!O_BUFFER) rings.Q.release();
  } while (PERSISTENT);
  if constexpr (O_BUFFER) wait_for_stored_O();  // @wait-last-O
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if KV_MULTICAST
    __cluster_dims__(2, 1, 1)
#endif
        forward(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Rings rings(smem, smem_address(smem));
  if (threadIdx.x == 0) {
    rings.Q.init(), rings.K.init(), rings.V.init();
    fence_mbarrier_init();  // @fence-mbarriers
  }
#if KV_MULTICAST
  cluster_sync();
#else
  __syncthreads();  // @barrier-after-mbarriers
#endif

  TileScheduler& tile_smem = *(TileScheduler*)(smem + SharedMemory::TILE_RECORD);
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && (PRODUCER_WARP || elect_one())) load_tiles(p, maps, rings, tile_smem);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    compute(p, maps, rings, smem, tile_smem);
  }
#if KV_MULTICAST
  // The other block may still multicast into the slots of this block and arrive at its mbarriers.
  cluster_sync();  // @wait-cluster-exit
#endif
}
