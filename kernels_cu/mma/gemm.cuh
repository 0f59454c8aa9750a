// The two matrix products, in fragments, and the epilogue that stores an accumulator:
//
//   scores           C = A B^T     rows of two tiles with DIM columns each
//   accumulate       C += P X      P in fragments, X the rows of a tile; this warp's columns
//   store_fragments  accumulator -> a tile
//   store_tile       a tile -> rows of a tensor
#pragma once
#include "tile.cuh"

// C += A B^T for columns [16 k, 16 k + 16) of A and B; k = 0 starts the sum.
template <int M, int N, int DIM, typename Lane>
__device__ void add_product(float (&C)[M][N][4], const unsigned int (&A)[M][4], unsigned int B_smem, const Lane& b_lane,
                            int k) {
  unsigned int b[4];
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    ldmatrix_x4(b, B_smem + b_lane.at(8 * n, 2 * k));
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        // Constant zeros cost neither a register nor an instruction.
        const float zeros[4] = {};
        if (k == 0)
          mma_m16n8k16<element>(C[m][n + right], A[m], b[2 * right], b[2 * right + 1], zeros);
        else
          mma_m16n8k16<element>(C[m][n + right], A[m], b[2 * right], b[2 * right + 1], C[m][n + right]);
      }
  }
}

// C = A B^T for 16 M rows of tile A and 8 N rows of tile B, at this lane's addresses.
template <int M, int N, int DIM, typename Lane>
__device__ void scores(float (&C)[M][N][4], unsigned int A_smem, const typename Tile<DIM>::Lane& a_lane,
                       unsigned int B_smem, const Lane& b_lane) {
  unsigned int a[M][4];
#pragma unroll
  for (int k = 0; k < padded(DIM) / 16; ++k) {
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], A_smem + a_lane.at(16 * m, 2 * k));
    add_product<M, N, DIM>(C, a, B_smem, b_lane, k);
  }
}

// Loads A fragments for the whole mainloop: DIM columns of 16 M rows from `row` of a tile.
template <int M, int DIM>
__device__ void load_fragments(unsigned int (&A)[padded(DIM) / 16][M][4], unsigned int A_smem, int row) {
  auto a_lane = Tile<DIM>::lane_of_A(row);
#pragma unroll
  for (int k = 0; k < padded(DIM) / 16; ++k)
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(A[k][m], A_smem + a_lane.at(16 * m, 2 * k));
}
template <int M, int N, int DIM, typename Lane>
__device__ void scores(float (&C)[M][N][4], const unsigned int (&A)[padded(DIM) / 16][M][4], unsigned int B_smem,
                       const Lane& b_lane) {
#pragma unroll
  for (int k = 0; k < padded(DIM) / 16; ++k) add_product<M, N, DIM>(C, A[k], B_smem, b_lane, k);
}

// C += P X for P (16 M rows, 16 K columns) and the 16 K rows of tile X: this warp's columns.
template <int M, int K, int DIM, typename Lane>
__device__ void accumulate(float (&C)[M][fragments_of(DIM)][4], const unsigned int (&P)[M][K][4], unsigned int X_smem,
                           const Lane& x_lane) {
  unsigned int b[4];
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int n = 0; n < fragments_of(DIM); n += 2) {
      ldmatrix_x4_trans(b, X_smem + x_lane.at(16 * k, n * COLUMN_WARPS));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<element>(C[m][n], P[m][k], b[0], b[1], C[m][n]);
        mma_m16n8k16<element>(C[m][n + 1], P[m][k], b[2], b[3], C[m][n + 1]);
      }
    }
}

// Rounds C times `factor(m, half)` and stores it to rows of a tile that only this warp uses.
template <int M, int DIM, typename Factor>
__device__ void store_fragments(unsigned char* smem, const float (&C)[M][fragments_of(DIM)][4], int row,
                                Factor factor) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < fragments_of(DIM); ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float by = factor(m, half);
        unsigned int at = Tile<DIM>::at(row + row_of(m, 2 * half), first_column(n) / 8) + lane_id() % 4 * 4;
        *(unsigned int*)(smem + at) = cvt_rn_x2<element>(C[m][n][2 * half] * by, C[m][n][2 * half + 1] * by);
      }
}

// Copies a tile to rows [first, end) of a tensor, 16 bytes at a time if rows are aligned.
template <int ROWS, int DIM>
__device__ void store_tile(element* rows, const Operand& x, const unsigned char* smem, int first, int end) {
  using T = Tile<DIM>;
  constexpr int CHUNKS = round_up(DIM, 8) / 8;
  for (int n = threadIdx.x; n < ROWS * CHUNKS; n += THREADS) {
    int row = n / CHUNKS, chunk = n % CHUNKS;
    if (first + row >= end) continue;
    uint4 numbers = *(const uint4*)(smem + T::at(row, chunk));
    store_chunk<DIM>(rows + (long long)(first + row) * x.row, x, chunk, numbers);
  }
}
