// dQ = scale * the accumulated sums, rounded: one warp per 16 x 8 fragment. grid (tiles of 64 queries, heads,
// sequences)
#include "dq_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq(const __grid_constant__ Params p) {
  constexpr int ROWS = 64, COLUMNS = DqSums::COLUMNS / 16, BLOCKS = ROWS / 16 * COLUMNS;
  int head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  DqSums sums(p, sequence, head);
  element* dQ = sequence.queries<element>(p.dq, head);
  for (int q_start = blockIdx.x * ROWS; q_start < sequence.q_rows; q_start += gridDim.x * ROWS)
    for (int n = threadIdx.x / WARP; n < BLOCKS * 2; n += THREADS / WARP) {
      int row = q_start + n / 2 / COLUMNS * 16, column = n / 2 % COLUMNS * 16, half = n % 2;
      // Rows past q_len were neither zeroed nor added to.
      float4 x = row < sequence.q_len ? sums.load(row, column, half) : make_float4(0, 0, 0, 0);
      float numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int i = row + row_of(0, e), d = column + column_of(half, e);
        if (i < sequence.q_rows && d < HEAD_DIM)
          store(dQ + i * p.dq.row + d, i < sequence.q_len ? numbers[e] * (float)p.scale : 0);  // @scale-added-dQ
      }
    }
}
