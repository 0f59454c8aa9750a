// Runs before the attention kernels: fills the tables of least and greatest elements of captured arrays, from which
// those kernels bound the mask_mod over a tile, and zeroes the sums of the arrays' gradients. grid (any number of
// blocks)
#include "mod.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) captured_start(const __grid_constant__ Params p) {
  int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
  Mod::fill_tables(p, thread / 32, threads / 32);
  Mod::clear_sums(p, thread, threads);
}
