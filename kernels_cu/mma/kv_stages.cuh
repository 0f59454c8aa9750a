// KvStages passes the K and V tiles of a part to the consumer warps through STAGES slots of shared memory.
//
//   TMA_KV 0   all threads copy tiles with cp.async, and look up page numbers one tile ahead
//   TMA_KV 1   a producer warp loads boxes of one page each, and runs ahead into the next part
//
// Both forms visit the tiles of PartTiles in the same order, so their results are bitwise equal.
#pragma once
#include "cache_gemm.cuh"
#include "load.cuh"
#if TMA_KV
#include "page_box.cuh"
#endif
#include "parts.cuh"

#if SCALED_KV
#include "scales.cuh"
#if CODES_OF_4_BITS
using Gemm = CacheGemm<nibbles>;
#else
using Gemm = CacheGemm<e4m3>;  // of codes of 8 bits, whatever they mean
#endif
#else
using Gemm = CacheGemm<kv_element>;
#endif
constexpr int WARPS = THREADS / WARP;
constexpr int O_ROW = columns_of_O(sizeof(kv_element));

#if LATENT
// A warp has the scores of eight keys of a tile, and SLICES warps share rows.
constexpr int SLICES = BLOCK_KV / 8;
static_assert(SLICES == 4, "a lane reads the numbers of all slices at once");

// Offsets in bytes. Q in registers has been read before the last slot is filled for the first time.
struct SharedMemory {
  static constexpr int Q_BYTES = BLOCK_Q * row_bytes(HEAD_DIM);
  static constexpr int SLOTS = Q_IN_REGISTERS ? 0 : Q_BYTES;                    // STAGES x KeySlot
  static constexpr int Q = Q_IN_REGISTERS ? (STAGES - 1) * KeySlot::BYTES : 0;  // [BLOCK_Q][HEAD_DIM]
  static constexpr int SUMS = SLOTS + STAGES * KeySlot::BYTES;                  // parts of S: a fragment of each warp
  static constexpr int P = SUMS + SLICES * BLOCK_Q * 32;                        // [BLOCK_Q][BLOCK_KV]
  static constexpr int ROWS = P + BLOCK_Q * row_bytes(BLOCK_KV);                // floats [BLOCK_Q][SLICES]
  static constexpr int BYTES = ROWS + 4 * SLICES * BLOCK_Q;
};
static_assert(!Q_IN_REGISTERS || SharedMemory::Q_BYTES <= KeySlot::BYTES, "Q fits a slot");
#else
// Offsets in bytes. O, and the row max and row sum of each warp, reuse the memory of Q and of the slots at the end of a
// part. With TMA_KV they have memory of their own, because the producer warp already fills the slots for the next part.
struct SharedMemory {
  static constexpr int Q_BYTES = BLOCK_Q * row_bytes(HEAD_DIM), SLOTS_BYTES = STAGES * KeySlot::BYTES;
  static constexpr int SLOTS = TMA_KV ? 0 : Q_BYTES;            // STAGES x KeySlot
  static constexpr int Q = TMA_KV ? SLOTS_BYTES : 0;            // [BLOCK_Q][HEAD_DIM]
  static constexpr int O = TMA_KV ? Q + Q_BYTES : 0;            // floats [WARPS][BLOCK_Q][O_ROW]
  static constexpr int ROWS = O + 4 * WARPS * BLOCK_Q * O_ROW;  // floats [WARPS][BLOCK_Q][2]: row max, row sum
#if STATISTICS
  static constexpr int STATISTICS_ROWS = ROWS + 4 * WARPS * BLOCK_Q * 2;  // RowStatistics [WARPS][BLOCK_Q]
  static constexpr int MBARRIERS = STATISTICS_ROWS + 12 * WARPS * BLOCK_Q;
#else
  static constexpr int MBARRIERS = ROWS + 4 * WARPS * BLOCK_Q * 2;  // TMA_KV: mbarriers of the slots
#endif
  static constexpr int BYTES = TMA_KV ? MBARRIERS + 16 * STAGES : maximum(Q_BYTES + SLOTS_BYTES, MBARRIERS);
};
#endif

#if TMA_KV
// Tensor maps; a box has the columns of one panel, and those keys of a tile that are on one page.
struct Maps {
  TensorMap k;
  TensorMap v;
};

using KvRing = SlotRing<STAGES, KeySlot::BYTES, 1>;

struct KvStages {
  using Shared = KvRing;
  static_assert(Gemm::K::PANELS * Gemm::K::ROW * BLOCK_KV == KeySlot::K_BYTES, "panels hold whole rows");
  static_assert(Gemm::V::PANELS * Gemm::V::ROW * BLOCK_KV == KeySlot::V_BYTES, "panels hold whole rows");
  static_assert(KvRing::MBARRIER_BYTES == SharedMemory::BYTES - SharedMemory::MBARRIERS, "of all slots");

  KvRing& ring;
  Range keys;

  __device__ KvStages(const Params&, const Part& part, const PartTiles&, unsigned int, KvRing& ring)
      : ring(ring), keys(part.keys) {}
  // Nothing to wait for: Q, O and the slots do not share memory, and the previous part ended with a barrier after its
  // last use of Q.
  __device__ void reuse_memory() {}
  __device__ void begin() {}
  __device__ void wait_for_Q() { cp_async_wait_group<0>(); }
  // Waits for the tile at `start`. This warp zeroes those of its 16 rows of V whose keys are outside the part: a
  // probability of 0 does not cancel a NaN.
  __device__ unsigned int next(int start) {
    ring.wait();                                              // @wait-KV-slot
    if (start < keys.begin || start + BLOCK_KV > keys.end) {  // @clear-hidden-keys
      constexpr int CHUNKS = Gemm::V::ROW / 16;
      int first = threadIdx.x / WARP * 16;
      const unsigned int zeros[4] = {};
      for (int n = lane_id(); n < 16 * CHUNKS; n += WARP) {
        int row = first + n / CHUNKS;
        for (int panel = 0; panel < Gemm::V::PANELS && !keys(start + row); ++panel)
          st_shared_v4(ring.slot() + KeySlot::V + (panel * BLOCK_KV + row) * Gemm::V::ROW + 16 * (n % CHUNKS), zeros);
      }
      fence_proxy_async();  // @fence-zeros: TMA writes to the slot next
      __syncwarp();
    }
    return ring.slot();
  }
  __device__ void release() {
    __syncwarp();
    ring.release();
  }
  __device__ void end() {}
};

// Issues the loads of this lane's box of K or V: the rows of `tile` from `row` on, which begin at `row_in_block` of
// page (or contiguous sequence) `block`.
template <typename Layout>
__device__ void load_boxes(unsigned int tile, const TensorMap& map, unsigned int mbarrier, int row, int row_in_block,
                           int kv_head, int block) {
  constexpr int COLUMNS = Layout::ROW / sizeof(kv_element);
#pragma unroll
  for (int panel = 0; panel < Layout::PANELS; ++panel)
    tma_load(tile + (panel * BLOCK_KV + row) * Layout::ROW, map, mbarrier, panel * COLUMNS, row_in_block, kv_head,
             block);
}

// Producer warp: loads the tiles of a part.
__device__ inline void load_tiles(const Params& p, const Part& part, const Maps& maps, KvRing& ring) {
  PageBox box(part);
  PartTiles tiles(p, part);
  int block = box.look_up(tiles.start);
  while (tiles.valid()) {
    int start = tiles.start, current = block;
    tiles.next();
    block = box.look_up(tiles.start);
    ring.acquire();  // @acquire-KV-slot
    if (lane_id() == 0) mbarrier_arrive_expect_tx(ring.full(), KeySlot::BYTES);
    __syncwarp();
    if (box.exists()) {
      int row_in_block = box.row_in_block(start);
      load_boxes<Gemm::K>(ring.slot() + KeySlot::K, maps.k, ring.full(), box.row, row_in_block, part.kv_head, current);
      // @load-V-page
      load_boxes<Gemm::V>(ring.slot() + KeySlot::V, maps.v, ring.full(), box.row, row_in_block, part.kv_head, current);
    }
    ++ring.index;
  }
}
#else
struct KvStages {
  using Shared = int[2][BLOCK_KV];  // page numbers

  const Part& part;
  KvLoads loads;
  Pipeline<STAGES, KeySlot::BYTES> slots;
  PartTiles loaded;  // the tile to load next
#if SCALED_KV
  ScaleLoads scales;
#endif

  __device__ KvStages(const Params& p, const Part& part, const PartTiles& tiles, unsigned int smem, Shared& pages_smem)
      : part(part),
        loads(p, part.sequence, part.kv_head, pages_smem),
        slots(smem + SharedMemory::SLOTS),
        loaded(tiles)
#if SCALED_KV
        ,
        scales(p, part.sequence, part.kv_head)
#endif
  {
  }
  __device__ void load() {
#if SCALED_KV
    if (loaded.valid()) scales.load(slots.next(), loaded.start, part.keys, loads.pages.stored());
#endif
    if (loaded.valid()) loads.load(slots.next(), loaded.start, part.keys);
    loaded.next();  // @next-load-of-part
    slots.commit();
  }
  __device__ void reuse_memory() {
    __syncthreads();  // @barrier-before-part: all warps have finished with the shared memory of the previous part
  }
  // Fills all slots but one.
  __device__ void begin() {
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      loads.pages.look_up(loaded.start, part.keys);
      loads.pages.store();
      if constexpr (PAGED) __syncthreads();
      load();
#if SCALED_KV
      scales.store();
#endif
    }
    loads.pages.look_up(loaded.start, part.keys);
    loads.pages.store();
  }
  __device__ void wait_for_Q() { cp_async_wait_group<STAGES - 1>(); }  // @wait-for-Q
  // Waits for the next tile, and loads the one that is STAGES - 1 ahead.
  __device__ unsigned int next(int) {
    if constexpr (STAGES == 1) {
      __syncthreads();
      load();
#if SCALED_KV
      scales.store();
#endif
    }
    unsigned int tile = slots.wait();
    if constexpr (STAGES > 1) load();
    loads.pages.look_up(loaded.start, part.keys);
    return tile;
  }
#if LATENT
  __device__ void load_ahead() {
    load();
    loads.pages.look_up(loaded.start, part.keys);
  }
#endif
  __device__ void release() {
    loads.pages.store();
#if SCALED_KV
    scales.store();
#endif
  }
  __device__ void end() {
    cp_async_wait_group<0>();  // @wait-part-loads
    __syncthreads();           // @barrier-after-part
  }
};
#endif

// Score fragments of a warp, by rows and by columns.
#if LATENT
constexpr int M = BLOCK_Q / 16 * SLICES / WARPS;
constexpr int N = 1;
#else
constexpr int M = BLOCK_Q / 16;
constexpr int N = BLOCK_KV / WARPS / 8;
static_assert(N == 2, "16 keys of a warp are one fragment of P");
#endif
