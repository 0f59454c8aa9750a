// Backward, dbias: one block per tile of the bias, over all dimensions that it broadcasts over, deterministic. The
// scores are recomputed a third time, and only if the bias has a gradient: the alternatives are atomic additions, or a
// gradient of the broadcast shape. CAPTURED_GRADIENT: the same for an array that score_mod reads, whose gradient is a
// sum of dS times a derivative. grid (tiles of the bias, its heads, its batch entries); a broadcast dimension counts as
// one tile, head or entry.
#include "mainloop.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;
using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_bias(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_dbias<ROWS, COLS>(p, (real*)smem);
}
