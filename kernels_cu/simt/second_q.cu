// Double backward, dQ, with the loop of backward_q.cu. grid (query tiles, heads, sequences)
#include "second.cuh"
#include "mainloop.cuh"

using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_q(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dQ<Gradients>(p, (real*)smem);
}
