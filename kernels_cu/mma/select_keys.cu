// select_keys: its steps are in ../indexer/select_keys.cuh.
#include "weights.cuh"
// The steps are on tiles of scores of this engine, which are above.
#include "../indexer/select_keys.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_keys(const __grid_constant__ Params p) {
  extern __shared__ uint4 smem[];
  select(p, (unsigned char*)smem);
}
