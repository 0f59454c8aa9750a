// Double backward of attention to selected keys, dK and dV, with the loop of selected_backward_kv.cu. grid (tiles of
// all blocks of keys, key/value heads, sequences)
#include "selected_backward.cuh"

constexpr int ROWS = BLOCK_KV / ROW_THREADS;  // score tiles are transposed: rows are keys
constexpr int COLS = BLOCK_Q / LANES;
using SharedMemory = ByKey;

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_second_kv(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_listed_dK_dV<ROWS, COLS>(p, (real*)smem);
}
