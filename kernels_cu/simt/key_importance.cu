// key_importance: its steps are in ../key_importance.cuh.
#include "weights.cuh"
// The steps are on tiles of scores of this engine, which are above.
#include "../key_importance.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) key_importance(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_importance(p, (unsigned char*)smem);
}
