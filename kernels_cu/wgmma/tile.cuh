// Tiles of the wgmma engine: 16-bit numbers in shared memory, in panels of 64 columns as copies of boxes bring them;
// who waits for whom; and what is done with a tile.
//
//   Ring           places for tiles, filled by one thread and emptied by the warps that compute
//   scores         C = A B^T     64 rows of tile A by the rows of tile B
//   accumulate     C += P X      fragments of P in registers, the rows of tile X
//   pingpong_wait  warpgroups begin products one after the other
//   clear_rows     zeros in place of what another sequence has there
//   store_rows     fragments -> rows of a tensor
#pragma once
#include "../fragments.cuh"
#include "../hopper.cuh"

constexpr int WARPGROUP = 128;                  // threads
constexpr int CONSUMERS = THREADS - WARPGROUP;  // threads that compute, a warpgroup for 64 queries
constexpr int PANEL = 64;                       // columns
constexpr int PANEL_ROW = 2 * PANEL;            // bytes
constexpr int COMMON_BARRIER = 1;               // of all threads that compute
constexpr int PINGPONG_BARRIER = 2;             // of the first warpgroup that computes; the next number of the next

__device__ constexpr int panels_of(int dim) {
  return (dim + PANEL - 1) / PANEL;
}
// Fragments of O in a row: as many columns as there is a product for. Those past the last are of zeros.
__device__ constexpr int fragments_of(int dim) {
  return (dim <= 64 ? 64 : dim <= 96 ? 96 : dim <= 128 ? 128 : dim <= 192 ? 192 : 256) / 8;
}

// SLOTS of shared memory, as who fills them sees them, or who empties them: each counts its own turns. A place has an
// mbarrier that completes when its PRODUCERS have filled it, and one when every warp that computes has emptied it; all
// begin empty. Of CLUSTER_SIZE blocks that fill each other's, the warps of all.
template <int SLOTS, int SLOT_BYTES, int PRODUCERS, int CLUSTER_SIZE = 1>
struct SlotRing {
  static constexpr int BYTES = SLOTS * SLOT_BYTES, MBARRIER_BYTES = 2 * 8 * SLOTS;

  unsigned int start;
  unsigned int mbarriers;
  unsigned int index = 0;

  __device__ SlotRing(unsigned int start, unsigned int mbarriers) : start(start), mbarriers(mbarriers) {}
  __device__ void init() const {
#pragma unroll
    for (int n = 0; n < SLOTS; ++n) {
      mbarrier_init(mbarriers + 8 * n, PRODUCERS);
      mbarrier_init(mbarriers + 8 * (SLOTS + n), CLUSTER_SIZE * CONSUMERS / WARP);
    }
  }
  __device__ unsigned int parity() const { return index / SLOTS % 2; }
  __device__ unsigned int slot() const { return start + index % SLOTS * SLOT_BYTES; }
  __device__ unsigned int full() const { return mbarriers + 8 * (index % SLOTS); }
  __device__ unsigned int empty() const { return mbarriers + 8 * (SLOTS + index % SLOTS); }

  // Until the place is empty.
  __device__ void acquire() const { mbarrier_wait(empty(), parity() ^ 1); }
  // Until it is full.
  __device__ void wait() const { mbarrier_wait(full(), parity()); }
  // This warp has read all of it.
  __device__ void release() {
    if (CLUSTER_SIZE > 1 && lane_id() < CLUSTER_SIZE)
      mbarrier_arrive_cluster(empty(), lane_id());
    else if (lane_id() == 0)
      mbarrier_arrive(empty());
    ++index;
  }
};

// Places for tiles of ROWS x DIM, in panels of COLUMNS in rows of ROW bytes. Of two blocks that share them each brings
// half of the rows to both.
template <int SLOTS, int ROWS, int DIM, int CLUSTER_SIZE = 1, int COLUMNS = PANEL, int ROW = PANEL_ROW>
struct TileRing : SlotRing<SLOTS, (DIM + COLUMNS - 1) / COLUMNS * ROWS * ROW, 1, CLUSTER_SIZE> {
  static constexpr int PANELS = (DIM + COLUMNS - 1) / COLUMNS, PANEL_BYTES = ROWS * ROW;
  static constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
  using SlotRing<SLOTS, TILE_BYTES, 1, CLUSTER_SIZE>::SlotRing;

  __device__ unsigned int tile() const { return this->slot(); }

  // One thread asks for a tile, once its place is empty.
  __device__ void load(const TensorMap& map, int row, int head, int batch, unsigned long long policy = EVICT_NORMAL,
                       int column = 0) {
    this->acquire();
    mbarrier_arrive_expect_tx(this->full(), TILE_BYTES);
#pragma unroll
    for (int n = 0; n < PANELS; ++n) {
      unsigned int panel = tile() + n * PANEL_BYTES;
      int x = column + n * COLUMNS;
      if constexpr (CLUSTER_SIZE == 1) {
        tma_load(panel, map, this->full(), x, row, head, batch, policy);
      } else {
        int half = cluster_ctarank() * (ROWS / CLUSTER_SIZE);
        tma_load_multicast(panel + half * ROW, map, this->full(), x, row + half, head, batch, policy);
      }
    }
    ++this->index;
  }
};

// Begins C = A B^T, for the 64 rows from address A of a tile of A_ROWS rows and the 8 N rows from address B of one of
// B_ROWS.
template <int A_ROWS, int B_ROWS, int DIM, int N>
__device__ void scores(float (&C)[1][N][4], unsigned int A_smem, unsigned int B_smem) {
  constexpr int NEXT_OF_A = A_ROWS * PANEL_ROW, NEXT_OF_B = B_ROWS * PANEL_ROW;
  unsigned long long a = smem_descriptor(A_smem, NEXT_OF_A), b = smem_descriptor(B_smem, NEXT_OF_B);
#pragma unroll
  for (int k = 0; k < round_up(DIM, 16) / 16; ++k)
    wgmma<element>(C, a + k / 4 * (NEXT_OF_A >> 4) + k % 4 * NEXT_16_COLUMNS,
                   b + k / 4 * (NEXT_OF_B >> 4) + k % 4 * NEXT_16_COLUMNS, k > 0);
  wgmma_commit_group();
}

// Begins C += P X, for fragments of P in 16 K columns and the 16 K rows of tile X.
template <int N, int K>
__device__ void accumulate(float (&C)[1][N][4], const unsigned int (&P)[1][K][4], unsigned int X_smem) {
  unsigned long long x = smem_descriptor(X_smem, 16 * K * PANEL_ROW);
#pragma unroll
  for (int k = 0; k < K; ++k) wgmma<element>(C, P[0][k], x + k * NEXT_16_ROWS);
  wgmma_commit_group();
}

// Around what a warpgroup begins, if they take turns, from the first to the last and again; before all, the last passes
// the turn to the first.
__device__ inline void pingpong_wait(int warpgroup) {
  if constexpr (PINGPONG) named_barrier_sync(PINGPONG_BARRIER + warpgroup, 2 * WARPGROUP);
}
__device__ inline void pingpong_signal(int warpgroup) {
  if constexpr (PINGPONG)
    named_barrier_arrive(PINGPONG_BARRIER + (warpgroup + 1) % (CONSUMERS / WARPGROUP), 2 * WARPGROUP);
}

// Rows of a tile that are not `wanted(row)` become 0, whatever another sequence has there; by all threads that compute.
template <int ROWS, int DIM, typename Wanted>
__device__ void clear_rows(unsigned int tile, Wanted wanted) {
  constexpr int CHUNKS = PANEL_ROW / 16;
  const unsigned int zeros[4] = {};
  for (int n = threadIdx.x - WARPGROUP; n < ROWS * CHUNKS; n += CONSUMERS)
    if (!wanted(n / CHUNKS))
      for (int panel = 0; panel < panels_of(DIM); ++panel)
        st_shared_v4(tile + panel * ROWS * PANEL_ROW + 16 * n, zeros);
}
// And all of them see it, their products too.
__device__ inline void sync_cleared_rows() {
  fence_proxy_async();
  named_barrier_sync(COMMON_BARRIER, CONSUMERS);
}

// Where chunk `chunk` of a row of a tile of ROWS rows lies in it.
template <int ROWS>
__device__ unsigned int swizzled_offset(int row, int chunk) {
  return chunk / 8 * ROWS * PANEL_ROW + row * PANEL_ROW + ((chunk % 8 ^ row % 8) << 4);
}

// Rounded fragments of this warp into 16 rows of a tile of ROWS rows, from row `row` and chunk `chunk`.
template <int ROWS, int K>
__device__ void store_fragments(unsigned int tile, const unsigned int (&A)[1][K][4], int row, int chunk) {
#pragma unroll
  for (int k = 0; k < K; ++k)
    stmatrix_x4(tile + swizzled_offset<ROWS>(row + lane_id() % 16, chunk + 2 * k + lane_id() / 16), A[0][k]);
}

// The same through the tile to row `first` of a tensor of DIM columns that ends at `end`, 16 bytes at once where they
// may.
template <int ROWS, int DIM, int K>
__device__ void store_rows(element* rows, const Operand& x, unsigned char* tile, const unsigned int (&A)[1][K][4],
                           int row, int chunk, int first, int end) {
  // Eight lanes read eight chunks of one row: no two want one bank.
  constexpr int CHUNKS = round_up(2 * K, 8);
  store_fragments<ROWS>(smem_address(tile), A, row, chunk);
  __syncwarp();
#pragma unroll 4
  for (int n = lane_id(); n < 16 * CHUNKS; n += WARP) {
    int r = n / CHUNKS, column = chunk + n % CHUNKS;
    if (first + r >= end || n % CHUNKS >= 2 * K || 8 * column >= DIM) continue;
    uint4 numbers = *(const uint4*)(tile + swizzled_offset<ROWS>(row + r, column));
    store_chunk<DIM>(rows + (long long)(first + r) * x.row, x, column, numbers);
  }
}
