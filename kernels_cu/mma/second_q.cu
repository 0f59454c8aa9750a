// Double backward, dQ, with the loop of backward_q.cu. grid (query tiles, heads, sequences)
#include "mainloop.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and by columns
using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_q(const __grid_constant__ Params p) {
  extern __shared__ uint4 smem[];
  sum_dQ<M, N>(p, (unsigned char*)smem);
}
