// Tiles of the wgmma engine: 16-bit numbers in shared memory, in 128-byte swizzled panels of 64 columns as TMA writes
// them.
//
//   TileRing       a SlotRing that TMA fills with tiles
//   scores         C = A B^T     64 rows of tile A by the rows of tile B
//   accumulate     C += P X      P in fragments, X the rows of a tile
//   pingpong_wait  order of the consumer warpgroups
//   clear_rows     zeroes rows that belong to another sequence
//   store_rows     fragments -> rows of a tensor
#pragma once
#include "../fragments.cuh"
#include "../slot_ring.cuh"

constexpr int PANEL = 64;             // columns
constexpr int PANEL_ROW = 2 * PANEL;  // bytes
constexpr int COMMON_BARRIER = 1;     // named barrier of all consumers
constexpr int PINGPONG_BARRIER = 2;   // + n: named barrier of consumer warpgroup n

// Under a mask_mod the producer alone classifies tiles, and passes each tile to the consumers in a record: the start of
// the tile, which is a multiple of 16, plus CUT if the mask_mod cuts the tile. END follows the last tile.
constexpr int END = -1, CUT = 1;
// True if all lanes of the producer warp work: they classify tiles, or stage the values that mods compute per key.
constexpr bool PRODUCER_WARP = MASK_MOD || KEY_BYTES > 0;
__device__ inline bool issues_loads() {
  return !PRODUCER_WARP || lane_id() == 0;
}

__device__ constexpr int panels_of(int dim) {
  return (dim + PANEL - 1) / PANEL;
}
// Bytes of a tile of `rows` rows of `dim` columns, in panels of `columns` with rows of `row` bytes.
__device__ constexpr int tile_bytes(int rows, int dim, int columns = PANEL, int row = PANEL_ROW) {
  return (dim + columns - 1) / columns * rows * row;
}
// Fragments of DIM columns: the smallest supported wgmma width that holds them. Columns past DIM are zeros.
__device__ constexpr int fragments_of(int dim) {
  return (dim <= 64 ? 64 : dim <= 96 ? 96 : dim <= 128 ? 128 : dim <= 192 ? 192 : 256) / 8;
}

// A SlotRing of ROWS x DIM tiles, in panels of COLUMNS with rows of ROW bytes. With CLUSTER_SIZE 2 each block loads
// half of the rows and multicasts them to both.
template <int SLOTS, int ROWS, int DIM, int CLUSTER_SIZE = 1, int COLUMNS = PANEL, int ROW = PANEL_ROW>
struct TileRing : SlotRing<SLOTS, tile_bytes(ROWS, DIM, COLUMNS, ROW), 1, CLUSTER_SIZE> {
  static constexpr int TILE_BYTES = tile_bytes(ROWS, DIM, COLUMNS, ROW);
  static constexpr int PANEL_BYTES = ROWS * ROW, PANELS = TILE_BYTES / PANEL_BYTES;
  using SlotRing<SLOTS, TILE_BYTES, 1, CLUSTER_SIZE>::SlotRing;

  __device__ unsigned int tile() const { return this->slot(); }

  // Waits for an empty slot and issues the TMA loads of a tile. Called by one thread.
  __device__ void load(const TensorMap& map, int row, int head, int batch, unsigned long long policy = EVICT_NORMAL,
                       int column = 0) {
    this->acquire();
    mbarrier_arrive_expect_tx(this->full(), TILE_BYTES);  // @expect-bytes
#pragma unroll
    for (int n = 0; n < PANELS; ++n) {
      unsigned int panel = tile() + n * PANEL_BYTES;
      int x = column + n * COLUMNS;
      if constexpr (CLUSTER_SIZE == 1) {
        tma_load(panel, map, this->full(), x, row, head, batch, policy);
      } else {
        int half = cluster_ctarank() * (ROWS / CLUSTER_SIZE);
        tma_load_multicast(panel + half * ROW, map, this->full(), x, row + half, head, batch, policy);  // @load-half
      }
    }
    ++this->index;
  }
};

// Issues C = A B^T for 64 rows of A and 8 N rows of B, which begin at descriptors a and b in tiles of A_ROWS and B_ROWS
// rows.
template <int A_ROWS, int B_ROWS, int DIM, int N>
__device__ void scores(float (&C)[1][N][4], unsigned long long a, unsigned long long b) {
  constexpr int NEXT_OF_A = A_ROWS * PANEL_ROW, NEXT_OF_B = B_ROWS * PANEL_ROW;
#pragma unroll
  for (int k = 0; k < round_up(DIM, 16) / 16; ++k)
    wgmma<element>(C, a + k / 4 * (NEXT_OF_A >> 4) + k % 4 * NEXT_16_COLUMNS,
                   b + k / 4 * (NEXT_OF_B >> 4) + k % 4 * NEXT_16_COLUMNS, k > 0);  // @S-panel
  wgmma_commit_group();
}

// Issues C += P X for columns [16 BEGIN, 16 END) of P, in fragments, and the same rows of tile X, which has 16 K rows.
template <int BEGIN, int END, int N, int K>
__device__ void accumulate(float (&C)[1][N][4], const unsigned int (&P)[1][K][4], unsigned int X_smem) {
  unsigned long long x = mn_major_descriptor(X_smem, 16 * K * PANEL_ROW);
#pragma unroll
  for (int k = BEGIN; k < END; ++k) wgmma<element>(C, P[0][k], x + k * NEXT_16_ROWS);
  wgmma_commit_group();  // @commit-PV
}

// Ping-pong scheduling: consumer warpgroups issue their wgmmas in turn, so that one computes the softmax while another
// keeps the tensor cores busy. The last warpgroup signals the first before the loop.
__device__ inline void pingpong_wait(int warpgroup) {
  if constexpr (PINGPONG) named_barrier_sync(PINGPONG_BARRIER + warpgroup, 2 * WARPGROUP);
}
__device__ inline void pingpong_signal(int warpgroup) {
  if constexpr (PINGPONG)
    named_barrier_arrive(PINGPONG_BARRIER + (warpgroup + 1) % (CONSUMERS / WARPGROUP), 2 * WARPGROUP);  // @signal-turn
}

// Zeroes the rows of a tile for which wanted(row) is false: they may hold another sequence's data. All consumers must
// take part.
template <int ROWS, int DIM, typename Wanted>
__device__ void clear_rows(unsigned int tile, Wanted wanted) {
  constexpr int CHUNKS = PANEL_ROW / 16;
  const unsigned int zeros[4] = {};
  for (int n = threadIdx.x - WARPGROUP; n < ROWS * CHUNKS; n += CONSUMERS)
    if (!wanted(n / CHUNKS))
      for (int panel = 0; panel < panels_of(DIM); ++panel)
        st_shared_v4(tile + panel * ROWS * PANEL_ROW + 16 * n, zeros);
}
// Makes the zeros visible to all consumers and to their wgmmas.
__device__ inline void sync_cleared_rows() {
  fence_proxy_async();                            // @fence-cleared-rows
  named_barrier_sync(COMMON_BARRIER, CONSUMERS);  // @barrier-after-cleared-rows
}

// Byte offset of chunk `chunk` of a row in a tile of ROWS rows.
template <int ROWS>
__device__ unsigned int swizzled_offset(int row, int chunk) {
  return chunk / 8 * ROWS * PANEL_ROW + row * PANEL_ROW + ((chunk % 8 ^ row % 8) << 4);
}

// Stores this warp's rounded fragments to 16 rows of a tile, from row `row` and chunk `chunk`.
template <int ROWS, int K>
__device__ void store_fragments(unsigned int tile, const unsigned int (&A)[1][K][4], int row, int chunk) {
  // @lane-of-16-bytes
#pragma unroll
  for (int k = 0; k < K; ++k)
    stmatrix_x4(tile + swizzled_offset<ROWS>(row + lane_id() % 16, chunk + 2 * k + lane_id() / 16), A[0][k]);
}

// Stores this warp's rounded fragments, through the tile, from row `first` of a tensor with DIM columns and `end` rows
// on; 16 bytes at a time if rows are aligned.
template <int ROWS, int DIM, int K>
__device__ void store_rows(element* rows, const Operand& x, unsigned char* tile, const unsigned int (&A)[1][K][4],
                           int row, int chunk, int first, int end) {
  // Eight lanes read the eight chunks of one row, without bank conflicts.
  constexpr int CHUNKS = round_up(2 * K, 8);
  store_fragments<ROWS>(smem_address(tile), A, row, chunk);
  __syncwarp();
#pragma unroll 4
  for (int n = lane_id(); n < 16 * CHUNKS; n += WARP) {
    int r = n / CHUNKS, column = chunk + n % CHUNKS;
    if (first + r >= end || n % CHUNKS >= 2 * K || 8 * column >= DIM) continue;  // @rows-of-sequence
    uint4 numbers = *(const uint4*)(tile + swizzled_offset<ROWS>(row + r, column));
    store_chunk<DIM>(rows + (long long)(first + r) * x.row, x, column, numbers);
  }
}
