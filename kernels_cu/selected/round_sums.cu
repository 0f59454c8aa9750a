// dK = scale * its sums, and dV, rounded; SHARED_KV: the gradient of the keys is the sum of both. grid (tiles of keys,
// key/value heads, sequences)
#include "../selection.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) round_sums(const __grid_constant__ Params p) {
  Sequence sequence(p, blockIdx.z);
  KeySums sums(p, sequence, blockIdx.y);
  element* dK = sequence.keys<element>(p.dk, blockIdx.y);
  for (int j = blockIdx.x; j < sequence.kv_rows; j += gridDim.x) {
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
      real sum = sums.of_K(j)[d] * (real)p.scale;  // @scale-added-dK
#if SHARED_KV
      if (d < HEAD_DIM_V) sum += sums.of_V(j)[d];
#endif
      store(dK + j * p.dk.row + d, sum);
    }
#if !SHARED_KV
    element* dV = sequence.keys<element>(p.dv, blockIdx.y) + j * p.dv.row;
    for (int d = threadIdx.x; d < HEAD_DIM_V; d += THREADS) store(dV + d, sums.of_V(j)[d]);
#endif
  }
}
