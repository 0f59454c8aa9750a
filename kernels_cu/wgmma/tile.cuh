// Tiles of the wgmma engine: 16-bit numbers in shared memory, in panels of 64 columns as copies of boxes bring them;
// who waits for whom; and what is done with a tile.
//
//   Ring           places for tiles, filled by one thread and emptied by the warps that compute
//   scores         C = A B^T     64 rows of tile A by the rows of tile B
//   accumulate     C += P X      fragments of P in registers, the rows of tile X
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

__device__ constexpr int panels_of(int dim) {
  return (dim + PANEL - 1) / PANEL;
}
// Fragments of O in a row: as many columns as there is a product for. Those past the last are of zeros.
__device__ constexpr int fragments_of(int dim) {
  return (dim <= 64 ? 64 : dim <= 96 ? 96 : dim <= 128 ? 128 : dim <= 192 ? 192 : 256) / 8;
}

// PLACES for tiles of ROWS x DIM, as who fills them sees them, or who empties them: each counts its own turns. A place
// has an mbarrier that completes when it is full, and one when it is empty; the ring begins empty.
// Its panels have COLUMNS of a tensor each, in rows of ROW bytes.
template <int PLACES, int ROWS, int DIM, int COLUMNS = PANEL, int ROW = PANEL_ROW>
struct Ring {
  static constexpr int PANELS = (DIM + COLUMNS - 1) / COLUMNS, PANEL_BYTES = ROWS * ROW;
  static constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
  static constexpr int BYTES = PLACES * TILE_BYTES, MBARRIER_BYTES = 2 * 8 * PLACES;

  unsigned int tiles;
  unsigned int mbarriers;
  unsigned int turn = 0;

  __device__ Ring(unsigned int tiles, unsigned int mbarriers) : tiles(tiles), mbarriers(mbarriers) {}
  __device__ void init() const {
#pragma unroll
    for (int n = 0; n < PLACES; ++n) {
      init_mbarrier(mbarriers + 8 * n, 1);
      init_mbarrier(mbarriers + 8 * (PLACES + n), CONSUMERS / WARP);
    }
  }
  __device__ unsigned int parity() const { return turn / PLACES % 2; }
  __device__ unsigned int tile() const { return tiles + turn % PLACES * TILE_BYTES; }
  __device__ unsigned int full() const { return mbarriers + 8 * (turn % PLACES); }
  __device__ unsigned int empty() const { return mbarriers + 8 * (PLACES + turn % PLACES); }

  // One thread asks for a tile, once its place is empty.
  __device__ void fill(const TensorMap& map, int row, int head, int batch, int column = 0) {
    wait_for_phase(empty(), parity() ^ 1);
    arrive_expecting(full(), TILE_BYTES);
#pragma unroll
    for (int n = 0; n < PANELS; ++n)
      copy_box(tile() + n * PANEL_BYTES, map, full(), column + n * COLUMNS, row, head, batch);
    ++turn;
  }

  // Until the tile is there.
  __device__ void wait() const { wait_for_phase(full(), parity()); }
  // This warp has read all of it.
  __device__ void release() {
    if (lane_of() == 0) arrive(empty());
    ++turn;
  }
};

// Begins C = A B^T, for the 64 rows from address A of a tile of A_ROWS rows and the 8 N rows of tile B.
template <int A_ROWS, int DIM, int N>
__device__ void scores(float (&C)[1][N][4], unsigned int A_smem, unsigned int B_smem) {
  constexpr int NEXT_OF_A = A_ROWS * PANEL_ROW, NEXT_OF_B = 8 * N * PANEL_ROW;
  unsigned long long a = matrix(A_smem, NEXT_OF_A), b = matrix(B_smem, NEXT_OF_B);
#pragma unroll
  for (int k = 0; k < round_up(DIM, 16) / 16; ++k)
    multiply<element, N>(C, a + k / 4 * (NEXT_OF_A >> 4) + k % 4 * NEXT_16_COLUMNS,
                         b + k / 4 * (NEXT_OF_B >> 4) + k % 4 * NEXT_16_COLUMNS, k > 0);
  end_products();
}

// Begins C += P X, for fragments of P in 16 K columns and the 16 K rows of tile X.
template <int N, int K>
__device__ void accumulate(float (&C)[1][N][4], const unsigned int (&P)[1][K][4], unsigned int X_smem) {
  unsigned long long x = matrix(X_smem, 16 * K * PANEL_ROW);
#pragma unroll
  for (int k = 0; k < K; ++k) multiply<element, N>(C, P[0][k], x + k * NEXT_16_ROWS);
  end_products();
}

// Rows [first, ROWS) of a tile become 0, whatever another sequence has there; by all threads that compute.
template <int ROWS, int DIM>
__device__ void clear_rows(unsigned int tile, int first) {
  constexpr int CHUNKS = PANEL_ROW / 16;
  const unsigned int zeros[4] = {};
  for (int panel = 0; panel < panels_of(DIM); ++panel)
    for (int n = first * CHUNKS + threadIdx.x - WARPGROUP; n < ROWS * CHUNKS; n += CONSUMERS)
      store_shared(tile + panel * ROWS * PANEL_ROW + 16 * n, zeros);
  fence_async();
  wait_for_threads(COMMON_BARRIER, CONSUMERS);
}

// The 16 rows of this warp, from row `row` of a tile of ROWS rows and row `first` of a tensor that ends at `end`: C
// times `factors` of each row, rounded, through shared memory, 16 bytes at once where they may be.
template <int ROWS, int DIM, int N>
__device__ void store_rows(element* rows, const Operand& x, unsigned char* tile, const float (&C)[1][N][4],
                           const float (&factors)[1][2], int row, int first, int end) {
  constexpr int CHUNKS = (DIM + 7) / 8;
  auto at = [&](int r, int chunk) {
    return chunk / 8 * ROWS * PANEL_ROW + (row + r) * PANEL_ROW + ((chunk % 8 ^ r % 8) << 4);
  };
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float by = factors[0][half];
      *(unsigned int*)(tile + at(row_of(0, 2 * half), n) + lane_of() % 4 * 4) =
          pack<element>(C[0][n][2 * half] * by, C[0][n][2 * half + 1] * by);
    }
  __syncwarp();
#pragma unroll 4
  for (int n = lane_of(); n < 16 * CHUNKS; n += WARP) {
    int r = n / CHUNKS, chunk = n % CHUNKS;
    if (first + r >= end) continue;
    uint4 numbers = *(const uint4*)(tile + at(r, chunk));
    element* to = rows + (long long)(first + r) * x.row + 8 * chunk;
    if (x.aligned == 8) {
      *(uint4*)to = numbers;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (8 * chunk + e < DIM) to[e].bits = ((unsigned int*)&numbers)[e / 2] >> 16 * (e % 2);
    }
  }
}
