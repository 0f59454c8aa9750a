// Accumulation of dQ over the blocks of a backward, each of which adds the part of its keys. The workspace is fp32, in
// 16 x 16 blocks stored as mma fragments, so that a warp adds 512 consecutive bytes: each lane adds four consecutive
// numbers with one instruction or, if the GPU adds single numbers only, each instruction of a warp adds 128 consecutive
// bytes.
#pragma once
#include "ptx.cuh"
#include "sequence.cuh"

// The number of 16-row blocks before a sequence. A packed sequence starts at a new block, so that no block holds rows
// of two sequences.
__device__ inline long long first_block(const Sequence& sequence) {
  return PACKED ? sequence.q_start / 16 + sequence.batch : 0;  // @square-of-sequence
}

struct DqSums {
  static constexpr int COLUMNS = (HEAD_DIM + 15) / 16 * 16;
#if __CUDA_ARCH__ >= 900
  static constexpr bool VECTORS = true;  // one instruction adds four numbers
#else
  static constexpr bool VECTORS = false;
#endif
  float* data;

  // The sums of one head of a sequence.
  __device__ DqSums(const Params& p, const Sequence& sequence, int head) {
    data = (float*)p.dq_sums.data + (PACKED ? 0 : sequence.batch * p.dq_sums.batch) + head * p.dq_sums.head +
           first_block(sequence) * 16 * COLUMNS;
  }

  // Address of 16 rows from `row`, whose 16 x 16 blocks are contiguous.
  __device__ float* block_row(int row) const { return data + (long long)row * COLUMNS; }
  // This lane's elements of fragment `half` (0: left 8 columns, 1: right 8) of a 16 x 16 block.
  __device__ float* fragment(int row, int column, int half) const {
    return block_row(row) + column * 16 + half * 128 + threadIdx.x % 32 * (VECTORS ? 4 : 1);
  }
  __device__ void add(int row, int column, int half, const float (&x)[4]) const {
    float* to = fragment(row, column, half);
#if __CUDA_ARCH__ >= 900
    red_add_v4(to, x);
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) atomicAdd(to + 32 * e, x[e]);
#endif
  }
  __device__ float4 load(int row, int column, int half) const {
    const float* from = fragment(row, column, half);
    if constexpr (VECTORS) return *(const float4*)from;
    return {from[0], from[32], from[64], from[96]};  // @fragment-of-sums
  }

  // Zeroes the i-th COLUMNS numbers of the workspace. A row has COLUMNS numbers, so one call per row zeroes all of it.
  // All lanes of a warp must take part.
  __device__ void clear(int i) const {
    for (int column = threadIdx.x % 32; column < COLUMNS; column += 32) data[(long long)i * COLUMNS + column] = 0;
  }
};

// Semaphores for deterministic dQ: the counter of a tile of queries is the number of blocks that have added to it. One
// thread of a block calls both functions.
struct DqSemaphore {
  unsigned int* data;

  __device__ DqSemaphore(const Params& p, const Sequence& sequence, int head) {
    data = (unsigned int*)p.dq_semaphore.data + (PACKED ? 0 : sequence.batch * p.dq_semaphore.batch) +
           head * p.dq_semaphore.head + first_block(sequence);
  }
  // The counter of the tile that starts at query `row`, a multiple of 16.
  __device__ unsigned int* counter_of(int row) const { return data + row / 16; }

  // Waits until `before` blocks have added.
  __device__ void wait(int row, unsigned int before) const {
    while (ld_acquire(counter_of(row)) != before) {}
  }
  // Signals that this block has added. The release covers the additions that this thread has observed.
  __device__ void signal(int row, unsigned int before) const { st_release(counter_of(row), before + 1); }
};
