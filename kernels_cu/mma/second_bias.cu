// Double backward, dbias, with the loop of backward_bias.cu. CAPTURED_GRADIENT: the gradient of an array that score_mod
// reads instead of the bias. grid (tiles of the bias, its heads, its batch entries)
#include "mainloop.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and by columns
using SharedMemory = ByBias;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_bias(const __grid_constant__ Params p) {
  extern __shared__ uint4 smem[];
  sum_dbias<M, N>(p, (unsigned char*)smem);
}
