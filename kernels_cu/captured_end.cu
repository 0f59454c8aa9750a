// Runs after backward_captured: rounds the sums of the gradients of captured arrays to the arrays' dtypes. grid (any
// number of blocks)
#include "mod.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) captured_end(const __grid_constant__ Params p) {
  Mod::round_sums(p, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
}
