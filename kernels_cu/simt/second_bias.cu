// Double backward, dbias, with the loop of backward_bias.cu. CAPTURED_GRADIENT: the gradient of an array that score_mod
// reads instead of the bias. grid (tiles of the bias, its heads, its batch entries)
#include "second.cuh"
#include "mainloop.cuh"

using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_bias(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dbias<Gradients>(p, (real*)smem);
}
