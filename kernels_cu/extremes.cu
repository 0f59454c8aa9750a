// Least and greatest elements, by chunks, of the captured arrays that a mask_mod reads at positions: the classes of
// tiles depend on them. grid (any number of blocks)
#include "mod.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) extremes(const __grid_constant__ Params p) {
  Mod::fill_tables(p, (blockIdx.x * THREADS + threadIdx.x) / 32, gridDim.x * THREADS / 32);
}
