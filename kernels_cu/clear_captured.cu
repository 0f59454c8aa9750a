// Clears the sums of the gradients of captured arrays, before the kernels that add to them. grid (any number of blocks)
#include "mod.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) clear_captured(const __grid_constant__ Params p) {
  Mod::clear_sums(p, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
}
