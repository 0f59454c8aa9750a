// Double backward, dK and dV, with the loop of backward_kv.cu, without dQ. grid (key tiles, key/value heads,
// sequences)
#include "mainloop.cuh"

constexpr int M = BLOCK_KV / ROW_WARPS / 16;  // fragments of a warp, by rows; score tiles are transposed: rows are keys
constexpr int N = BLOCK_Q / 8;                // and by columns
using SharedMemory = ByKey;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_kv(const __grid_constant__ Params p) {
  extern __shared__ uint4 smem[];
  sum_dK_dV<M, N>(p, (unsigned char*)smem);
}
