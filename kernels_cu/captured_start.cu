// Before the kernels of tiles: fills the tables of extremes of captured arrays, which the classes of tiles depend on,
// and clears the sums of their gradients. grid (any number of blocks)
#include "mod.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) captured_start(const __grid_constant__ Params p) {
  int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
  Mod::fill_tables(p, thread / 32, threads / 32);
  Mod::clear_sums(p, thread, threads);
}
