// Double backward, dbias, with the loop of backward_bias.cu. CAPTURED_GRADIENT: the gradient of an array that score_mod
// reads instead of the bias. grid (tiles of the bias, its heads, its batch entries)
#include "mainloop.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;
using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_bias(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dbias<ROWS, COLS>(p, (real*)smem);
}
