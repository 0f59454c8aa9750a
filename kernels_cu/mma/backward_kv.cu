// Backward, dK and dV: one block per tile of BLOCK_KV keys of one key/value head, over all queries that see them, head
// after head of the GQA group, so that every sum is deterministic. ADD_DQ: the block also adds its part of dQ to the
// workspace; otherwise backward_q.cu computes dQ. grid (key tiles, key/value heads, sequences)
#include "mainloop.cuh"

constexpr int M = BLOCK_KV / ROW_WARPS / 16;  // fragments of a warp, by rows; score tiles are transposed: rows are keys
constexpr int N = BLOCK_Q / 8;                // and by columns
using SharedMemory = ByKey;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kv(const __grid_constant__ Params p) {
  extern __shared__ uint4 smem[];
  sum_dK_dV<M, N>(p, (unsigned char*)smem);
}
