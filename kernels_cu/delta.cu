// delta = rowsum(dO * O) - dlse of every query, a warp per row. grid (tiles of rows, heads, sequences)
#include "number.cuh"
#include "sequence.cuh"

constexpr int WARP = 32;

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta(const __grid_constant__ Params p) {
  Sequence sequence(p, blockIdx.z);
  int head = blockIdx.y, lane = threadIdx.x % WARP;
  const element* dO = sequence.queries<element>(p.dout, head);
  const element* O = sequence.queries<element>(p.out, head);
  for (int i = (blockIdx.x * THREADS + threadIdx.x) / WARP; i < sequence.q_len; i += gridDim.x * THREADS / WARP) {
    real sum = 0;
    for (int d = lane; d < HEAD_DIM_V; d += WARP)
      sum += to_real(dO[i * p.dout.row + d]) * to_real(O[i * p.out.row + d]);
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, other);
    if constexpr (DLSE) sum -= sequence.queries<real>(p.dlse, head)[i * p.dlse.row];
    if (lane == 0) sequence.queries<real>(p.delta, head)[i * p.delta.row] = sum;
  }
}
