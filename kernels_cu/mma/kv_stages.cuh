// KvStages passes the K and V tiles of a part to the consumer warps through STAGES slots of shared memory.
//
//   TMA_KV 0   all threads copy tiles with cp.async, and look up page numbers one tile ahead
//   TMA_KV 1   a producer warp loads boxes of one page each, and runs ahead into the next part
//
// Both forms visit the tiles of PartTiles in the same order, so their results are bitwise equal.
#pragma once
#include "cache_gemm.cuh"
#include "load.cuh"
#include "parts.cuh"

using Gemm = CacheGemm<kv_element>;
constexpr int Q_BYTES = BLOCK_Q * Tile<HEAD_DIM>::ROW;
constexpr int K_BYTES = BLOCK_KV * TileOf<HEAD_DIM, kv_element>::ROW;
constexpr int V_BYTES = BLOCK_KV * TileOf<HEAD_DIM_V, kv_element>::ROW;
constexpr int SLOT_BYTES = K_BYTES + V_BYTES;

#if TMA_KV
// Tensor maps; a box has the columns of one panel, and those keys of a tile that are on one page.
struct Maps {
  TensorMap k;
  TensorMap v;
};

using KvRing = SlotRing<STAGES, SLOT_BYTES, 1>;

// Shared memory: STAGES x (K, V); Q [BLOCK_Q][HEAD_DIM]; O [WARPS][BLOCK_Q][O_ROW], row max and row sum
// [WARPS][BLOCK_Q]; mbarriers. O does not reuse the slots, because the producer fills them during the epilogue.
struct KvStages {
  using Shared = KvRing;
  static_assert(Gemm::K::PANELS * Gemm::K::ROW == K_BYTES / BLOCK_KV, "panels hold whole rows");
  static_assert(Gemm::V::PANELS * Gemm::V::ROW == V_BYTES / BLOCK_KV, "panels hold whole rows");
  static constexpr int Q_START = KvRing::BYTES, O_START = Q_START + Q_BYTES;

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
          st_shared_v4(ring.slot() + K_BYTES + (panel * BLOCK_KV + row) * Gemm::V::ROW + 16 * (n % CHUNKS), zeros);
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

// Producer warp: loads the tiles of a part. Each lane loads the keys of one page, and looks up its number one tile
// ahead. A page that does not exist, or holds no key of the part, gets a number out of bounds, for which TMA writes
// zeros.
__device__ inline void load_tiles(const Params& p, const Part& part, const Maps& maps, KvRing& ring) {
  const Blocks& blocks = part.sequence.blocks;
  int keys_of_box = PAGED ? min(1 << blocks.page_log2, BLOCK_KV) : BLOCK_KV, row = lane_id() * keys_of_box;
  auto look_up = [&](int start) {
    int key = start + row;
    bool needed = row < BLOCK_KV && key < part.keys.end && key + keys_of_box > part.keys.begin;  // @look-up-page
    return needed ? blocks.block_of(key) : -1;
  };
  PartTiles tiles(p, part);
  int block = look_up(tiles.start);
  while (tiles.valid()) {
    int start = tiles.start, current = block;
    tiles.next();
    block = look_up(tiles.start);
    ring.acquire();  // @acquire-KV-slot
    if (lane_id() == 0) mbarrier_arrive_expect_tx(ring.full(), SLOT_BYTES);
    __syncwarp();
    if (row < BLOCK_KV) {
      int row_in_block = blocks.row_in_block(start + row);  // @row-in-page-of-box
      load_boxes<Gemm::K>(ring.slot(), maps.k, ring.full(), row, row_in_block, part.kv_head, current);
      // @load-V-page
      load_boxes<Gemm::V>(ring.slot() + K_BYTES, maps.v, ring.full(), row, row_in_block, part.kv_head, current);
    }
    ++ring.index;
  }
}
#else
// Shared memory: Q [BLOCK_Q][HEAD_DIM], then STAGES x (K [BLOCK_KV][HEAD_DIM], V [BLOCK_KV][HEAD_DIM_V]); at the end O
// [WARPS][BLOCK_Q][O_ROW] in their place, then row max and row sum [WARPS][BLOCK_Q].
struct KvStages {
  using Shared = int[2][BLOCK_KV];  // page numbers
  static constexpr int Q_START = 0, O_START = 0;

  const Part& part;
  KvLoads loads;
  Pipeline<STAGES, SLOT_BYTES> slots;
  PartTiles loaded;  // the tile to load next

  __device__ KvStages(const Params& p, const Part& part, const PartTiles& tiles, unsigned int smem, Shared& pages_smem)
      : part(part), loads(p, part.sequence, part.kv_head, pages_smem), slots(smem + Q_BYTES), loaded(tiles) {}
  __device__ void load() {
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
    }
    unsigned int tile = slots.wait();
    if constexpr (STAGES > 1) load();
    loads.pages.look_up(loaded.start, part.keys);
    return tile;
  }
  __device__ void release() { loads.pages.store(); }
  __device__ void end() {
    cp_async_wait_group<0>();  // @wait-part-loads
    __syncthreads();           // @barrier-after-part
  }
};
#endif
