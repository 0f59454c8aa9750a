// Backward, dQ: one block per tile of BLOCK_Q queries of one head, over all keys they see. The scores are recomputed a
// second time instead of adding to dQ atomically, so that every sum is deterministic. grid (query tiles, heads,
// sequences)
#include "mainloop.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;
using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_q(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dQ<ROWS, COLS>(p, (real*)smem);
}
