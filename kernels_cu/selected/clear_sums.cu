// Zeroes the sums of dK and dV. grid (tiles of keys, key/value heads, sequences)
#include "../selection.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) clear_sums(const __grid_constant__ Params p) {
  Sequence sequence(p, blockIdx.z);
  KeySums sums(p, sequence, blockIdx.y);
  for (int j = blockIdx.x; j < sequence.kv_rows; j += gridDim.x) {
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) sums.of_K(j)[d] = 0;
    for (int d = threadIdx.x; d < HEAD_DIM_V; d += THREADS) sums.of_V(j)[d] = 0;
  }
}
