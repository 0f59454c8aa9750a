// top_weights: its steps are in ../top_weights.cuh.
#include "weights.cuh"
// The steps are on tiles of scores of this engine, which are above.
#include "../top_weights.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) top_weights(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  find_top(p, (unsigned char*)smem);
}
