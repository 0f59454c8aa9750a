// Where the blocks of a backward add up dQ, each its keys' part: fp32, by squares of 16 x 16 as a warp holds them in
// fragments, so that each addition is of four numbers in a row and a warp's of 512 bytes.
#pragma once
#include "ptx.cuh"
#include "sequence.cuh"

struct DqSums {
  static constexpr int COLUMNS = (HEAD_DIM + 15) / 16 * 16;
  float* data;

  // Those of one head. Packed sequences begin with a square of their own, whatever row they begin with.
  __device__ DqSums(const Params& p, const Sequence& sequence, int head) {
    long long first_row = PACKED ? (sequence.q_start / 16 + sequence.batch) * 16ll : 0;
    data = (float*)p.dq_sums.data + (PACKED ? 0 : sequence.batch * p.dq_sums.batch) + head * p.dq_sums.head +
           first_row * COLUMNS;
  }

  // Elements 0 to 3 of this lane in fragment `half` (0: the left 8 columns, 1: the right) of a square.
  __device__ float* of_lane(int row, int column, int half) const {
    return data + (long long)row * COLUMNS + column * 16 + half * 128 + threadIdx.x % 32 * 4;
  }
  __device__ void add(int row, int column, int half, const float (&x)[4]) const {
    add_vector(of_lane(row, column, half), x);
  }

  // Zeros for the numbers that stand where row i would, were the squares rows; a warp's work.
  __device__ void clear(int i) const {
    for (int column = threadIdx.x % 32; column < COLUMNS; column += 32) data[(long long)i * COLUMNS + column] = 0;
  }
};
