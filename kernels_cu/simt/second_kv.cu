// Double backward, dK and dV, with the loop of backward_kv.cu. grid (key tiles, key/value heads, sequences)
#include "second.cuh"
#include "mainloop.cuh"

using SharedMemory = ByKey;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_kv(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dK_dV<Gradients>(p, (real*)smem);
}
