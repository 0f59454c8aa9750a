// Where the blocks of a backward add up dQ, each its keys' part: fp32, by squares of 16 x 16 as a warp holds them in
// fragments, so that each addition is of four numbers in a row and a warp's of 512 bytes.
#pragma once
#include "ptx.cuh"
#include "sequence.cuh"

// Squares of 16 queries before a sequence: packed ones begin with one of their own, whatever row they begin with.
__device__ inline long long first_block(const Sequence& sequence) {
  return PACKED ? sequence.q_start / 16 + sequence.batch : 0;
}

struct DqSums {
  static constexpr int COLUMNS = (HEAD_DIM + 15) / 16 * 16;
  float* data;

  // Those of one head.
  __device__ DqSums(const Params& p, const Sequence& sequence, int head) {
    data = (float*)p.dq_sums.data + (PACKED ? 0 : sequence.batch * p.dq_sums.batch) + head * p.dq_sums.head +
           first_block(sequence) * 16 * COLUMNS;
  }

  // 16 rows, their squares side by side one after the other.
  __device__ float* block_row(int row) const { return data + (long long)row * COLUMNS; }
  // Elements 0 to 3 of this lane in fragment `half` (0: the left 8 columns, 1: the right) of a square.
  __device__ float* fragment(int row, int column, int half) const {
    return block_row(row) + column * 16 + half * 128 + threadIdx.x % 32 * 4;
  }
  __device__ void add(int row, int column, int half, const float (&x)[4]) const {
    red_add_v4(fragment(row, column, half), x);
  }

  // Zeros for the numbers that stand where row i would, were the squares rows; a warp's work.
  __device__ void clear(int i) const {
    for (int column = threadIdx.x % 32; column < COLUMNS; column += 32) data[(long long)i * COLUMNS + column] = 0;
  }
};

// Where blocks that add in one order tell how many have: for 16 rows and each half of their columns a number.
//
// A block waits for blocks of lower blockIdx.x, and keeps its multiprocessor meanwhile. That ends because GPUs start
// blocks in the order of their numbers, which CUDA does not promise: a block that all others of its head wait for would
// else find no room.
struct DqTurns {
  unsigned int* data;

  __device__ DqTurns(const Params& p, const Sequence& sequence, int head) {
    data = (unsigned int*)p.dq_turns.data + (PACKED ? 0 : sequence.batch * p.dq_turns.batch) + head * p.dq_turns.head +
           first_block(sequence) * 2;
  }
  __device__ unsigned int* of(int row, int half) const { return data + row / 16 * 2 + half; }

  // Until so many blocks have added; a warp's work.
  __device__ void wait(int row, int half, unsigned int before) const {
    if (threadIdx.x % 32 == 0)
      while (ld_acquire(of(row, half)) != before) {}
    __syncwarp();
  }
  // This warp has added too: what all its lanes did before the __syncwarp is released with the number.
  __device__ void pass(int row, int half, unsigned int before) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) st_release(of(row, half), before + 1);
  }
};
