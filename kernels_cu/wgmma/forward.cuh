// Forward, for every dtype of Q, K and V:
//
//   BlockKvTiles       the tiles of keys that a block visits
//   PublishedKvTiles   these tiles, as the producer publishes them to the consumers under a mask_mod
//   store_O            epilogue: O -> the shared memory of Q -> global memory
#pragma once
#include "../walk.cuh"
#include "tile.cuh"

constexpr int N = BLOCK_KV / 8;                // score fragments, by columns
constexpr int N_V = fragments_of(HEAD_DIM_V);  // fragments of O, by columns
// Registers per thread: the producer warpgroup gives registers to two or three consumer warpgroups, but keeps more if
// its warp evaluates mods.
constexpr int TWO = THREADS == 384, CLASSIFYING = PRODUCER_WARP ? (TWO ? 32 : 24) : 0;
constexpr int PRODUCER_REGISTERS = (TWO ? 24 : 32) + CLASSIFYING,
              CONSUMER_REGISTERS = (TWO ? 240 : 160) - CLASSIFYING / (TWO ? 2 : 3);

// SCORE_MODIFIED: scores need a pass before the softmax in every tile. With mods this pass has a version with masks and
// one without, because a mod takes more instructions where positions may be past the end or hidden. ALWAYS_MASKED: the
// pass has only the version with masks.
constexpr bool SCORE_MODIFIED = MODIFIED || DENSE_MASK, ALWAYS_MASKED = SCORE_MODIFIED && !MODS;

using BlockKvTiles = KvTiles<Order::LAST_TO_FIRST>;

// Under a mask_mod each stage of K has a record of its tile: the start, plus CUT if the mask_mod cuts the tile.
constexpr int RECORDS_BYTES = MASK_MOD ? round_up(4 * STAGES, 16) : 0;

template <typename K_Ring>
__device__ unsigned int record_of(const K_Ring& K, unsigned int records) {
  return records + 4 * (K.index % STAGES);  // @record-of-stage
}
// Producer: writes the record of the tile to load next, which the full mbarrier of its K publishes.
template <typename K_Ring>
__device__ void write_record(const K_Ring& K, unsigned int records, const BlockKvTiles& kv_tiles) {
  if constexpr (MASK_MOD) {
    K.acquire();                                                                           // @acquire-record-of-keys
    st_shared(record_of(K, records), kv_tiles.start + (kv_tiles.may_hide & 1 ? CUT : 0));  // @record-of-keys
  }
}
template <typename K_Ring>
__device__ void publish_end(K_Ring& K, unsigned int records) {
  if constexpr (MASK_MOD) {
    K.acquire();
    st_shared(record_of(K, records), END);  // @write-end-of-keys
    mbarrier_arrive(K.full());              // @publish-end-of-keys
    ++K.index;
  }
}

// Values that mods compute from a key alone, for the keys of a tile. The producer warp writes them before it loads K,
// whose full mbarrier publishes them. Consumers read them until they release the K of the next tile, so this ring has
// one slot more than the ring of K.
constexpr int KEY_SLOTS = STAGES + 1, KEY_VALUES_BYTES = KEY_SLOTS * BLOCK_KV * KEY_BYTES;  // @KEY_SLOTS
static_assert(KEY_BYTES == 0 || KEY_BYTES == sizeof(Mod::KeyValues), "the plan's shared memory has another size");

// Producer, all lanes: writes the values of the tile to load next.
template <typename K_Ring>
__device__ void stage_keys(const K_Ring& K, Mod::KeyValues* staged, const Band& band, int kv_start) {
  if constexpr (KEY_BYTES > 0) {
    unsigned int index = __shfl_sync(0xFFFFFFFF, K.index, 0);
    if (issues_loads()) K.acquire();  // @acquire-key-values
    __syncwarp();
    for (int n = lane_id(); n < BLOCK_KV; n += WARP)
      staged[index % KEY_SLOTS * BLOCK_KV + n] = band.mod.key_values(band.key(kv_start + n));  // @stage-key-values
    __syncwarp();                                                                              // @written-key-values
  }
}
// Consumer: points the mods to the values of the current tile, the K of which has just been released.
template <typename K_Ring>
__device__ void read_staged_keys(const K_Ring& K, const Mod::KeyValues* staged, Band& band, Score& score) {
  if constexpr (KEY_BYTES > 0)
    band.mod.staged_keys = score.mod.staged_keys = staged + (K.index - 1) % KEY_SLOTS * BLOCK_KV;  // @read-staged-keys
}

// Consumer: iterator over the published tiles. `unmasked` are the keys that only the mask_mod may mask.
template <typename K_Ring>
struct PublishedKvTiles {
  K_Ring& ring;
  unsigned int records;
  Range unmasked;
  int start;
  bool cut;

  __device__ PublishedKvTiles(K_Ring& ring, unsigned int records, Range unmasked)
      : ring(ring), records(records), unmasked(unmasked) {
    next();
  }
  __device__ bool valid() const { return start >= 0; }
  __device__ void next() {
    ring.wait();  // @wait-record-of-keys
    int record = ld_shared(record_of(ring, records));
    start = record & ~CUT, cut = record & CUT;
    if (record == END) {
      __syncwarp();    // all lanes have read the record, not only the lane that arrives
      ring.release();  // @release-end-of-keys
    }
  }
  __device__ bool masked() const { return cut || start < unmasked.begin || start + BLOCK_KV > unmasked.end; }
};

// The tiles of keys that a consumer visits, with masked() for its own `queries`.
template <typename K_Ring>
__device__ auto consumer_tiles(K_Ring& K, unsigned int records, const Band& band, int head, int q_start,
                               Range queries) {
  if constexpr (MASK_MOD)
    return PublishedKvTiles<K_Ring>(K, records, band.sees_all(queries.begin, queries.end));
  else
    return BlockKvTiles(band, head, q_start, queries);
}

// Waits until the stores of this warp have read shared memory.
__device__ inline void wait_for_stored_O() {
  if (lane_id() == 0) bulk_wait_group_read<0>();
  __syncwarp();  // @waited-O-buffer
}

// Stores 16 rows x DIM columns by TMA, one box per panel; TMA clips rows past the end of the tensor. One lane issues
// the stores and waits until they have read shared memory. With O_BUFFER it waits for the stores of the previous tile
// instead, before this tile is written.
template <int ROWS, int DIM, int K>
__device__ void tma_store_rows(const TensorMap& map, unsigned int tile, const unsigned int (&A)[1][K][4], int row,
                               int first, int head, int batch) {
  if constexpr (O_BUFFER) wait_for_stored_O();  // @wait-O-buffer
  store_fragments<ROWS>(tile, A, row, 0);
  fence_proxy_async();  // @fence-O
  __syncwarp();         // @written-O
  if (lane_id() == 0) {
#pragma unroll
    for (int n = 0; n < panels_of(DIM); ++n)
      tma_store(map, tile + (n * ROWS + row) * PANEL_ROW, n * PANEL, first, head, batch);
    bulk_commit_group();                                 // @commit-O
    if constexpr (!O_BUFFER) bulk_wait_group_read<0>();  // @wait-stored-O
  }
}

// Normalises and rounds this warp's 16 rows, from row `row` of the tile and row `first` of the sequence, and stores
// them. When it returns, the warp's shared memory may be reused, unless O_BUFFER.
template <typename Maps>
__device__ void store_O(float (&O)[1][N_V][4], const float (&factors)[1][2], const Params& p, const Maps& maps,
                        unsigned char* tile, const Sequence& sequence, int head, int row, int first) {
  unsigned int rounded[1][N_V / 2][4];
  rescale(O, factors);
  round_fragments(rounded, O);
  if constexpr (TMA_STORE_O) {
    tma_store_rows<BLOCK_Q, HEAD_DIM_V>(maps.out, smem_address(tile), rounded, row, first, head, sequence.batch);
  } else {
    element* rows = sequence.queries<element>(p.out, head);
    store_rows<BLOCK_Q, HEAD_DIM_V>(rows, p.out, tile, rounded, row, 0, first, sequence.q_rows);
    fence_proxy_async();  // @fence-rows-of-O
    __syncwarp();
  }
}
