// Parts of forward.cu:
//
//   SharedMemory    the layout of shared memory; TensorMemory: that of tensor memory
//   Signal          an mbarrier between two roles; Ring: slots of tiles that TMA fills and tcgen05.mma read
//   Barriers        the mbarriers and rings of a block, as one role sees them
//   load_S, rescale_O     columns of tensor memory
//   store_O         epilogue: O -> global memory
#pragma once
#include "../rows.cuh"
#include "../walk.cuh"
#include "../wgmma/tile_scheduler.cuh"

constexpr int ROWS = TENSOR_MEMORY_ROWS;  // queries of a tile in tensor memory, one in each lane
constexpr int TILES = BLOCK_Q / ROWS;     // a block computes two of them in turn, or one
constexpr int DIM_V = round_up(HEAD_DIM_V, 16);

// Threads of the roles, in this order: softmax of each tile, correction, and the warps that issue and clear.
constexpr int SOFTMAX_WARPS = 4, CORRECTION_WARP = 8, MMA_WARP = 12, LOAD_WARP = 13, CLEAR_WARP = 14;
constexpr int SOFTMAX_REGISTERS = 184, CORRECTION_REGISTERS = 80, ISSUING_REGISTERS = 64;

// The softmax stores P in parts of PART keys. PV of the first EARLY_KEYS is issued before the last part is stored.
constexpr int EARLY_KEYS = BLOCK_KV - PART;

// SCORE_MODIFIED: scores need a pass before the softmax in every tile; ALWAYS_MASKED: this pass has only the version
// with masks (wgmma/forward.cuh). STORES_S: the pass stores them to tensor memory again, part by part, so that its code
// and its registers are those of one part.
constexpr bool SCORE_MODIFIED = MODIFIED || DENSE_MASK, ALWAYS_MASKED = SCORE_MODIFIED && !MODS;
constexpr bool STORES_S = SCORE_MODIFIED || MASK_MOD;
constexpr bool READS_DENSE = BIAS || DENSE_MASK;
// The rows of V past the end of a sequence may hold another sequence's data.
constexpr bool CLEARS_V = PACKED || KV_LENGTHS;

using BlockKvTiles = KvTiles<Order::LAST_TO_FIRST>;

// P, two numbers a column, has columns of its own where they fit: then S of the next keys is issued once the softmax
// has read S, so that the tensor cores compute it and PV under the softmax of the same tile. With STORES_S the softmax
// reads S until P is complete, which leaves nothing to gain.
//
// Else P lies over the first half of its S: the softmax has read S before it stores P, and S of the next keys is issued
// behind the PV that reads P. PTX promises the order of two mma only if they have the same accumulator; every published
// measurement has found those of a thread in order. STRICT does not rely on it.
constexpr int P_COLUMNS = BLOCK_KV / 2;
constexpr bool P_OVER_S = STORES_S || TILES * (BLOCK_KV + DIM_V + P_COLUMNS) > TENSOR_MEMORY_COLUMNS;
// PV of each tile of keys signals that it is complete, not only that of the last one.
constexpr bool SIGNALS_PV = STRICT || !P_OVER_S;

// First columns.
struct TensorMemory {
  __device__ static constexpr int S(int t) { return t * BLOCK_KV; }  // @columns-of-S
  __device__ static constexpr int O(int t) { return TILES * BLOCK_KV + t * DIM_V; }
  __device__ static constexpr int P(int t) { return P_OVER_S ? S(t) : O(TILES) + t * P_COLUMNS; }  // @columns-of-P
};
static_assert(TILES * (BLOCK_KV + DIM_V) <= TENSOR_MEMORY_COLUMNS, "S and O fit tensor memory");

// Slots of K and of V: STAGES counts both. With one slot of V the tensor cores would wait for V of the next keys. Then
// the tiles follow each other in a ring of panels instead, K and V by turns, in which two tiles of K and one of V fit:
// V takes the place of the first panels of K before, and K that of its last panels and of V before.
constexpr int K_PANELS = panels_of(HEAD_DIM), V_PANELS = panels_of(HEAD_DIM_V);
constexpr bool BY_TURNS = STAGES == 3 && V_PANELS <= K_PANELS;
constexpr int K_STAGES = (STAGES + 1) / 2, V_STAGES = BY_TURNS ? 2 : STAGES / 2;
constexpr int TURN_PANELS = K_PANELS + V_PANELS, MEMORY_PANELS = TURN_PANELS + K_PANELS;

// Offsets in bytes.
struct SharedMemory {
  static constexpr int K_BYTES = tile_bytes(BLOCK_KV, HEAD_DIM), V_BYTES = tile_bytes(BLOCK_KV, HEAD_DIM_V);
  static constexpr int Q = 0;                                  // TILES x [ROWS][HEAD_DIM]
  static constexpr int K = Q + tile_bytes(BLOCK_Q, HEAD_DIM);  // K_STAGES x [BLOCK_KV][HEAD_DIM]
  static constexpr int V = K + K_STAGES * K_BYTES;             // V_STAGES x [BLOCK_KV][HEAD_DIM_V]
  static constexpr int O = V + STAGES / 2 * V_BYTES;           // TMA_STORE_O: [ROWS][HEAD_DIM_V]
  static constexpr int DENSE = O + (TMA_STORE_O ? tile_bytes(ROWS, HEAD_DIM_V) : 0);  // DenseParts of each warp
  static constexpr int FACTORS = DENSE + TILES * SOFTMAX_WARPS * DenseParts::BYTES;   // [BLOCK_Q]
  static constexpr int Q_MBARRIERS = FACTORS + 4 * BLOCK_Q;
  static constexpr int K_MBARRIERS = Q_MBARRIERS + TILES * mbarrier_bytes(1);
  static constexpr int V_MBARRIERS = K_MBARRIERS + mbarrier_bytes(K_STAGES);
  static constexpr int SIGNALS = V_MBARRIERS + mbarrier_bytes(V_STAGES);
  static constexpr int V_CLEARED = SIGNALS + 8 * 7 * TILES;
  static constexpr int TENSOR_MEMORY_ADDRESS = V_CLEARED + (CLEARS_V ? 8 * V_STAGES : 0);
  static constexpr int BYTES = TENSOR_MEMORY_ADDRESS + 8;
};

#include "ring.cuh"

using Q_Ring = Ring<1, ROWS, HEAD_DIM>;

// The ring of K or of V. If the two take turns, its tiles begin FIRST panels after K of their turn, and their panels
// from number AFTER_OTHER on take the place of a tile of the other.
template <int SLOTS, int DIM, int FIRST, int AFTER_OTHER>
struct KvRing : Ring<SLOTS, BLOCK_KV, DIM> {
  using Base = Ring<SLOTS, BLOCK_KV, DIM>;
  using Base::Base;

  __device__ unsigned int panel(int n) const {
    if constexpr (!BY_TURNS) return this->tile() + n * Base::PANEL_BYTES;
    return this->start + (first_panel() + (wraps() ? n ^ 1 : n)) % MEMORY_PANELS * Base::PANEL_BYTES;  // @panel-of-turn
  }
  // Bytes from the first panel of V to the second. One that is the last of the memory is followed by the first of it:
  // then the panels change places, as a descriptor has no negative distance.
  __device__ int distance() const { return (wraps() ? MEMORY_PANELS - 1 : 1) * Base::PANEL_BYTES; }
  template <typename Other>
  __device__ void load(const TensorMap& map, int row, int head, int batch, const Other& other) {
    this->acquire();
    mbarrier_arrive_expect_tx(this->full(), Base::TILE_BYTES);
#pragma unroll
    for (int n = 0; n < Base::PANELS; ++n) {
      if (BY_TURNS && n == AFTER_OTHER) other.acquire();  // @wait-tile-before
      tma_load(panel(n), map, this->full(), n * PANEL, row, head, batch, EVICT_LAST);
    }
    ++this->index;
  }

 private:
  __device__ int first_panel() const { return (this->index * TURN_PANELS + FIRST) % MEMORY_PANELS; }
  // Only panels of V change places: those of K have a descriptor each, and the second may have to wait for V.
  __device__ bool wraps() const {
    return BY_TURNS && FIRST > 0 && Base::PANELS == 2 && first_panel() == MEMORY_PANELS - 1;
  }
};
using K_Ring = KvRing<K_STAGES, HEAD_DIM, 0, K_PANELS - V_PANELS>;
using V_Ring = KvRing<V_STAGES, HEAD_DIM_V, K_PANELS, 0>;

struct Barriers {
  unsigned int smem;
  K_Ring K;
  V_Ring V;

  __device__ Barriers(unsigned int smem)
      : smem(smem),
        K(smem + SharedMemory::K, smem + SharedMemory::K_MBARRIERS),
        V(smem + (BY_TURNS ? SharedMemory::K : SharedMemory::V), smem + SharedMemory::V_MBARRIERS) {}
  __device__ Q_Ring Q(int t) const {
    return {smem + SharedMemory::Q + t * Q_Ring::TILE_BYTES, smem + SharedMemory::Q_MBARRIERS + t * mbarrier_bytes(1)};
  }
  // The rows of this tile of V that are past the end of its sequence are zeros.
  __device__ Signal V_cleared() const {
    return {smem + SharedMemory::V_CLEARED + 8 * (V.index % V_STAGES), V.parity() == 1};
  }
  __device__ unsigned int signal(int n, int t) const { return smem + SharedMemory::SIGNALS + 8 * (n * TILES + t); }
  __device__ Signal S_ready(int t) const { return signal(0, t); }  // q.k are in S; P_OVER_S: and PV before is complete
  __device__ Signal P_ready(int t) const { return signal(1, t); }  // P of the early keys is stored, O is rescaled
  __device__ Signal P_complete(int t) const { return signal(2, t); }    // all of P is stored
  __device__ Signal PV_complete(int t) const { return signal(3, t); }   // O has been added to, and P read
  __device__ Signal factor_ready(int t) const { return signal(4, t); }  // the factors of O are in shared memory
  // The first wait for one of these passes, as nothing has been written yet.
  __device__ Signal S_read(int t) const { return {signal(5, t), true}; }  // the softmax has loaded S
  __device__ Signal P_read(int t) const { return {signal(3, t), true}; }  // PV_complete
  __device__ Signal factor_read(int t) const { return {signal(6, t), true}; }

  __device__ void init() const {
    K.init(), V.init();
#pragma unroll
    for (int n = 0; CLEARS_V && n < V_STAGES; ++n) mbarrier_init(smem + SharedMemory::V_CLEARED + 8 * n, 1);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      Q(t).init();
      mbarrier_init(S_ready(t).mbarrier, 1);
      if constexpr (!P_OVER_S) mbarrier_init(S_read(t).mbarrier, SOFTMAX_WARPS);  // @arrivals-of-S-read
      mbarrier_init(P_ready(t).mbarrier, 2 * SOFTMAX_WARPS);                      // @arrivals-of-P
      mbarrier_init(P_complete(t).mbarrier, SOFTMAX_WARPS);
      mbarrier_init(PV_complete(t).mbarrier, 1);
      mbarrier_init(factor_ready(t).mbarrier, SOFTMAX_WARPS);
      mbarrier_init(factor_read(t).mbarrier, SOFTMAX_WARPS);
    }
  }
};

// Loads a row of scores.
__device__ inline void load_S(float (&S)[BLOCK_KV], unsigned int tmem) {
#pragma unroll
  for (int n = 0; n < BLOCK_KV; n += PART) tmem_ld(*(float (*)[PART])(S + n), tmem + n);
  tmem_wait_ld();  // @wait-loaded-S
  fence_loaded(S);
}

// O is loaded in parts of so many columns.
constexpr int O_PART = DIM_V % 32 ? 16 : 32;

__device__ inline void rescale_O(unsigned int tmem, float factor) {
#pragma unroll 1
  for (int n = 0; n < DIM_V; n += O_PART) {
    float O[O_PART];
    unsigned int rescaled[O_PART];
    load(O, tmem + n);
#pragma unroll
    for (int e = 0; e < O_PART; ++e) rescaled[e] = __float_as_uint(O[e] * factor);
    tmem_st(tmem + n, rescaled);
  }
  tmem_wait_st();  // @wait-rescaled-O
}

// Waits until the TMA store of this warp has read shared memory.
__device__ inline void wait_for_stored_O() {
  if (lane_id() == 0) bulk_wait_group_read<0>();
  __syncwarp();  // @waited-O-buffer
}

// Epilogue of a tile: this warp's 32 rows of O, normalised by each thread's `factor` and rounded; zeros if the block
// has visited no keys. They go through shared memory, which all tiles use in turn; or, without TMA_STORE_O, each thread
// stores its row.
template <typename Maps>
__device__ void store_O(const Params& p, const Maps& maps, unsigned int O_smem, const Sequence& sequence, int head,
                        int q_start, unsigned int tmem, float factor, bool visited) {
  int row = threadIdx.x % ROWS, i = q_start + row;
  element* to = sequence.queries<element>(p.out, head) + (long long)i * p.out.row;
  if constexpr (TMA_STORE_O) wait_for_stored_O();  // @wait-O-buffer
#pragma unroll 1
  for (int n = 0; n < DIM_V; n += O_PART) {
    float O[O_PART] = {};
    unsigned int rounded[O_PART / 2];
    if (visited) load(O, tmem + n);
#pragma unroll
    for (int e = 0; e < O_PART; ++e) O[e] *= factor;
    round_row(rounded, O);
#pragma unroll
    for (int e = 0; e < O_PART; e += 8) {
      int chunk = (n + e) / 8;
      if constexpr (TMA_STORE_O)
        st_shared_v4(O_smem + swizzled_offset<ROWS>(row, chunk), *(unsigned int (*)[4])(rounded + e / 2));
      else if (i < sequence.q_rows && n + e < HEAD_DIM_V)  // @rows-of-O
        store_chunk<HEAD_DIM_V>(to, p.out, chunk, *(uint4*)(rounded + e / 2));
    }
  }
#if TMA_STORE_O
  fence_proxy_async();  // @fence-O
  __syncwarp();         // @written-O
  if (lane_id() == 0) {
#pragma unroll
    for (int n = 0; n < panels_of(HEAD_DIM_V); ++n)
      tma_store(maps.out, O_smem + (n * ROWS + row) * PANEL_ROW, n * PANEL, i, head, sequence.batch);
    bulk_commit_group();  // @commit-O-store
  }
#endif
}
