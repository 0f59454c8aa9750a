// Tiles of the simt engine: 8 lanes x THREADS / 8 row threads share a tile. It has three operations:
//
//   load_tile      rows of a tensor -> shared memory, in the accumulation dtype, zeros for rows outside the range
//   scores         S += A B^T     a thread has rows y + r * ROW_THREADS and columns x + c * LANES of S
//   accumulate     O += P X       the same rows, and columns (c * LANES + x) * VECTOR + e of O
//
// The row stride in shared memory is an odd number of 16-byte chunks. So 8 lanes that read the same chunk of 8
// consecutive rows touch each of the 32 banks once, and the 4 row threads of a warp, which read the same chunk of 4
// consecutive rows, touch no bank twice.
#pragma once
#include "../number.cuh"
#include "../sequence.cuh"

constexpr int LANES = 8;
constexpr int ROW_THREADS = THREADS / LANES;
constexpr int VECTOR = 16 / sizeof(real);  // numbers in 16 bytes

struct alignas(16) Chunk {
  real x[VECTOR];
};

__device__ constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
__device__ constexpr int row_stride(int dim) {
  return (round_up(dim, LANES * VECTOR) / VECTOR | 1) * VECTOR;  // @row-stride
}
// A warp writes P one number per lane, 8 lanes x 4 rows: the padding puts the rows 8 words apart modulo the 32 banks.
__device__ constexpr int p_stride(int columns) {
  return columns + 8;
}

__device__ inline int lane_x() {
  return threadIdx.x % LANES;
}
__device__ inline int row_y() {
  return threadIdx.x / LANES;
}

// Reductions over the lanes that share a row.
__device__ inline real row_max(real x) {
#pragma unroll
  for (int lane = 1; lane < LANES; lane *= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFF, x, lane));
  return x;
}
__device__ inline real row_sum(real x) {
#pragma unroll
  for (int lane = 1; lane < LANES; lane *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, lane);
  return x;
}

// Loads ROWS rows of a tensor. Rows for which read(position) is false become zeros, and their memory is not accessed.
template <int ROWS, int DIM, typename Rows, typename Read>
__device__ void load_tile(real* X_smem, const Rows& rows, Read read) {
  constexpr int CHUNKS = round_up(DIM, LANES * VECTOR) / VECTOR;
  struct alignas(VECTOR * sizeof(element)) Elements {
    element x[VECTOR];
  };
  for (int n = threadIdx.x; n < ROWS * CHUNKS; n += THREADS) {
    int row = n / CHUNKS, d = n % CHUNKS * VECTOR;
    const element* source = rows(row) + d;
    Chunk chunk = {};
    if (read(rows.first + row) && rows.has(rows.first + row)) {
      if (rows.aligned >= VECTOR && d + VECTOR <= DIM) {
        Elements elements = *(const Elements*)source;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) chunk.x[e] = to_real(elements.x[e]);
      } else {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
          if (d + e < DIM) chunk.x[e] = to_real(source[e]);
      }
    }
    *(Chunk*)&X_smem[row * row_stride(DIM) + d] = chunk;
  }
}

template <int ROWS, int COLS, int DIM>
__device__ void scores(real (&S)[ROWS][COLS], const real* A_smem, const real* B_smem) {
  constexpr int STRIDE = row_stride(DIM);
#pragma unroll 2
  for (int d = 0; d < DIM; d += VECTOR) {
    Chunk a[ROWS], b[COLS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) a[r] = *(const Chunk*)&A_smem[(row_y() + r * ROW_THREADS) * STRIDE + d];
#pragma unroll
    for (int c = 0; c < COLS; ++c) b[c] = *(const Chunk*)&B_smem[(lane_x() + c * LANES) * STRIDE + d];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; ++c) S[r][c] += a[r].x[e] * b[c].x[e];
  }
}

// Number of columns of a row of the output that one thread accumulates.
__device__ constexpr int columns_of(int dim) {
  return round_up(dim, LANES * VECTOR) / LANES;
}

// O += P X. The sum over one tile is computed first, because a single running sum over a long sequence has a larger
// rounding error.
template <int ROWS, int INNER, int DIM>
__device__ void accumulate(real (&O)[ROWS][columns_of(DIM)], const real* P_smem, const real* X_smem) {
#pragma unroll
  for (int g = 0; g < columns_of(DIM) / VECTOR; ++g) {
    Chunk sum[ROWS] = {};
#pragma unroll 1
    for (int j = 0; j < INNER; j += VECTOR) {
      Chunk p[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) p[r] = *(const Chunk*)&P_smem[(row_y() + r * ROW_THREADS) * p_stride(INNER) + j];
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        Chunk x = *(const Chunk*)&X_smem[(j + e) * row_stride(DIM) + (g * LANES + lane_x()) * VECTOR];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int k = 0; k < VECTOR; ++k) sum[r].x[k] += p[r].x[e] * x.x[k];
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) O[r][g * VECTOR + k] += sum[r].x[k];
  }
}

// The column of the tensor that this thread holds in O[.][n].
__device__ inline int column_of(int n) {
  return (n / VECTOR * LANES + lane_x()) * VECTOR + n % VECTOR;
}

template <int DIM, int N>
__device__ void store_row(element* row, const real (&O)[N], real factor) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (column_of(n) < DIM) store(row + column_of(n), O[n] * factor);
}
