// attention_weights: its steps are in ../attention_weights.cuh.
#include "weights.cuh"
// The steps are on tiles of scores of this engine, which are above.
#include "../attention_weights.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_weights(const __grid_constant__ Params p) {
  extern __shared__ uint4 smem[];
  sum_weights(p, (unsigned char*)smem);
}
