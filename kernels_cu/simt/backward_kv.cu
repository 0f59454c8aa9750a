// Backward, dK and dV: one block per tile of BLOCK_KV keys of one key/value head, over all queries that see them, head
// after head of the GQA group, so that every sum is deterministic. grid (key tiles, key/value heads, sequences)
#include "mainloop.cuh"

constexpr int ROWS = BLOCK_KV / ROW_THREADS;  // score tiles are transposed: rows are keys
constexpr int COLS = BLOCK_Q / LANES;
using SharedMemory = ByKey;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kv(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dK_dV<ROWS, COLS>(p, (real*)smem);
}
