// Tiles of the mma engine: 16-bit numbers in shared memory, and the columns of a tile that each warp has.
//
// A tile is ROWS x DIM; a row is DIM / 8 chunks of 16 bytes. ldmatrix reads eight rows of one chunk at a time, which
// must lie in different banks: chunk c of row r is stored at c ^ swizzle(r).
#pragma once
#include "../fragments.cuh"

constexpr int ROW_WARPS = THREADS / WARP / COLUMN_WARPS;  // warps with different rows

// Columns of a tile: `dim` rounded up, so that every column warp has whole fragments.
__device__ constexpr int padded(int dim) {
  return round_up(dim, 16 * COLUMN_WARPS);
}
// Columns of a row of `dim` numbers of `size` bytes, counted in 16-bit numbers. A row of 1-byte numbers is rounded up
// to pairs of chunks.
__device__ constexpr int columns_of_16_bits(int dim, int size) {
  return size == 1 ? round_up(dim, 32) / 2 : dim;
}
// Bytes of a row of a tile.
__device__ constexpr int row_bytes(int dim, int size = 2) {
  return 2 * padded(columns_of_16_bits(dim, size));
}

// Index of this warp among those with different rows, and among those with different columns.
__device__ inline int row_warp() {
  return threadIdx.x / WARP / COLUMN_WARPS;
}
__device__ inline int column_warp() {
  return COLUMN_WARPS == 1 ? 0 : threadIdx.x / WARP % COLUMN_WARPS;
}

// Returns x through a shuffle, which the compiler cannot see through: it keeps the result in a register instead of
// recomputing x in every iteration. Must be executed by whole warps.
template <typename T>
__device__ T keep(T x) {
  return __shfl_sync(0xFFFFFFFF, x, threadIdx.x % WARP);
}

// Swizzled layout of a row of DIM numbers.
template <int DIM>
struct Tile {
  static constexpr int ROW = row_bytes(DIM), CHUNKS = ROW / 16;
  // Chunks are permuted within groups of 8, or of the largest power of two that divides their number. In the latter
  // case a row is no multiple of 128 bytes, so neighbouring rows start at different banks and need less swizzling.
  static constexpr int GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;

  __device__ static int swizzle(int row) { return row / (8 / GROUP) % GROUP; }  // @swizzle-of-row
  // @swizzled-address
  __device__ static unsigned int at(int row, int chunk) { return row * ROW + ((chunk ^ swizzle(row)) << 4); }

  // Address arithmetic of one lane: byte offsets into a tile for ldmatrix of 16 x 16 numbers.
  struct Lane {
    unsigned int offset[GROUP / 2];  // swizzled offsets of chunks 0, 2 .. of the first group

    // A row is a multiple of a group, so these offsets differ in the bits of the chunk alone.
    __device__ Lane(int row, int chunk) {
      begin_at(row * ROW + (((chunk % GROUP ^ swizzle(row)) + chunk / GROUP * GROUP) << 4));
    }
    __device__ void begin_at(unsigned int first) {
#pragma unroll
      for (int n = 0; n < GROUP / 2; ++n) offset[n] = first ^ 2 * n << 4;
    }
    __device__ Lane kept() const {
      Lane lane = *this;
#pragma unroll
      for (int n = 0; n < GROUP / 2; ++n) lane.offset[n] = keep(offset[n]);
      return lane;
    }
    // Keeps only the first offset in a register and computes each other offset from it with one instruction, for
    // kernels with few free registers.
    __device__ Lane first_kept() const {
      Lane lane = *this;
      lane.begin_at(keep(offset[0]));
      return lane;
    }
    // `row` is a multiple of 8, and `chunk` has no bit in common with the lane's chunk.
    __device__ unsigned int at(int row, int chunk) const {
      return offset[chunk % GROUP / 2] + row * ROW + (chunk / GROUP * GROUP << 4);
    }
  };

  // The part of this lane for ldmatrix: of 16 rows of A, of 16 rows of B, and of 16 rows of X in this warp's columns.
  __device__ static Lane lane_of_A(int row) { return Lane(row + lane_id() % 16, lane_id() / 16); }
  __device__ static Lane lane_of_B() { return Lane(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2); }
  __device__ static Lane lane_of_X() { return Lane(lane_id() % 16, 2 * column_warp() + lane_id() / 16); }
};

// Swizzled layout of a tile of ROWS rows of DIM numbers as TMA writes it: panels of 64 columns, each a Tile.
template <int ROWS, int DIM>
struct PanelTile {
  using Panel = Tile<(DIM < 64 ? DIM : 64)>;
  static constexpr int PANELS = DIM / (8 * Panel::CHUNKS), ROW = Panel::ROW;  // bytes of a row of a panel

  struct Lane {
    typename Panel::Lane lane;

    __device__ unsigned int at(int row, int chunk) const {
      return lane.at(row, chunk % Panel::CHUNKS) + chunk / Panel::CHUNKS * ROWS * ROW;  // @panel-address
    }
  };
  __device__ static Lane lane_of_B() { return {Panel::lane_of_B()}; }
  __device__ static Lane lane_of_X() { return {Panel::lane_of_X()}; }
};

// Type of a tile with rows of DIM elements.
template <int DIM, typename Number>
using TileOf = Tile<columns_of_16_bits(DIM, sizeof(Number))>;

// Fragments of DIM columns that one warp accumulates: 16-column blocks are dealt round-robin to the column warps.
__device__ constexpr int fragments_of(int dim) {
  return padded(dim) / 8 / COLUMN_WARPS;
}
// Column of the tensor where fragment n of this warp begins.
__device__ inline int first_column(int n) {
  return 16 * (n / 2 * COLUMN_WARPS + column_warp()) + n % 2 * 8;
}
