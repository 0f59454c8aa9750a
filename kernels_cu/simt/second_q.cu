// Double backward, dQ, with the loop of backward_q.cu. grid (query tiles, heads, sequences)
#include "mainloop.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;
using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_q(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dQ<ROWS, COLS>(p, (real*)smem);
}
