// Tiles of scores of the kernels of attention weights, as ../weights.cuh needs them.
#pragma once
#include "steps.cuh"

using OperandAddress = real*;  // of a tile of Q or K in shared memory

// Bytes of a tile of Q or K.
__device__ constexpr int operand_bytes(int rows) {
  return sizeof(real) * rows * row_stride(HEAD_DIM);
}
__device__ inline OperandAddress operand_at(unsigned char* smem, int offset) {
  return (real*)(smem + offset);
}

// Loads a tile with zeros for the rows of which read(position) is false. `stride` is that of rows in a line.
template <int ROWS, typename Rows, typename Read>
__device__ void load_operand(OperandAddress to, const Rows& rows, long long stride, Read read) {
  load_tile<ROWS, HEAD_DIM>(to, rows, read);
}
__device__ inline void wait_for_operands() {
  __syncthreads();
}

// The products of the rows of two tiles, of which a thread has ROWS x COLS; row(r) and column(c) are their places.
template <int A_ROWS, int B_ROWS>
struct ScoreTile {
  static constexpr int ROWS = A_ROWS / ROW_THREADS, COLS = B_ROWS / LANES;

  real s[ROWS][COLS] = {};

  __device__ ScoreTile(OperandAddress A, OperandAddress B) { scores<ROWS, COLS, HEAD_DIM>(s, A, B); }
  __device__ static int row(int r) { return row_y() + r * ROW_THREADS; }
  __device__ static int column(int c) { return lane_x() + c * LANES; }
  __device__ static bool is_first_of_row() { return lane_x() == 0; }
};
