// Double backward of attention to selected keys, dQ, with the loop of selected_backward_q.cu. grid (tiles of all lists,
// groups of heads that share a list, sequences)
#include "selected_backward.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;
using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_second_q(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_listed_dQ<ROWS, COLS>(p, (real*)smem);
}
