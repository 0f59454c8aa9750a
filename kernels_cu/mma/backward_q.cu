// Backward, dQ: one block per tile of BLOCK_Q queries of one head, over all keys they see. The scores are recomputed a
// second time instead of adding to dQ atomically, so that every sum is deterministic. grid (query tiles, heads,
// sequences)
#include "mainloop.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and by columns
using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_q(const __grid_constant__ Params p) {
  extern __shared__ uint4 smem[];
  sum_dQ<M, N>(p, (unsigned char*)smem);
}
