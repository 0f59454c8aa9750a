// Rounds the sums of the gradients of captured arrays to the arrays' dtypes, after all sums. grid (any number of
// blocks)
#include "mod.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) round_captured(const __grid_constant__ Params p) {
  Mod::round_sums(p, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
}
