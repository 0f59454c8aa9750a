// Double backward, dK and dV, with the loop of backward_kv.cu. grid (key tiles, key/value heads, sequences)
#include "mainloop.cuh"

constexpr int ROWS = BLOCK_KV / ROW_THREADS;  // score tiles are transposed: rows are keys
constexpr int COLS = BLOCK_Q / LANES;
using SharedMemory = ByKey;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_kv(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dK_dV<ROWS, COLS>(p, (real*)smem);
}
