// Tiles of scores of the kernels of attention weights, as ../weights.cuh needs them.
#pragma once
#include "gemm.cuh"
#include "load.cuh"

static_assert(COLUMN_WARPS == 1, "a score belongs to one warp");

using OperandAddress = unsigned int;  // of a tile of Q or K in shared memory

// Bytes of a tile of Q or K.
__device__ constexpr int operand_bytes(int rows) {
  return rows * row_bytes(HEAD_DIM);
}
__device__ inline OperandAddress operand_at(unsigned char* smem, int offset) {
  return smem_address(smem) + offset;
}

// Loads a tile with zeros for the rows of which read(position) is false. `stride` is that of rows in a line.
template <int ROWS, typename Rows, typename Read>
__device__ void load_operand(OperandAddress to, const Rows& rows, long long stride, Read read) {
  Loader<ROWS, HEAD_DIM>(stride).load(to, rows, false, [&](int i) { return read(i) && rows.has(i); });
}
__device__ inline void wait_for_operands() {
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
}

// The products of the rows of two tiles, of which a thread has ROWS x COLS; row(r) and column(c) are their places.
template <int A_ROWS, int B_ROWS>
struct ScoreTile {
  static constexpr int M = A_ROWS / ROW_WARPS / 16, N = B_ROWS / 8, ROWS = 2 * M, COLS = 2 * N;

  real s[ROWS][COLS];

  __device__ ScoreTile(OperandAddress A, OperandAddress B) {
    float S[M][N][4];
    scores<M, N, HEAD_DIM>(S, A, Tile<HEAD_DIM>::lane_of_A(row_warp() * M * 16), B, Tile<HEAD_DIM>::lane_of_B());
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < COLS; ++c) s[r][c] = S[r / 2][c / 2][r % 2 * 2 + c % 2];
  }
  __device__ static int row(int r) { return row_warp() * M * 16 + row_of(r / 2, r % 2 * 2); }
  __device__ static int column(int c) { return column_of(c / 2, c % 2); }
  __device__ static bool is_first_of_row() { return lane_id() % 4 == 0; }
};
