// Split-KV attention to values that are the first columns of the keys (multi-head latent attention) on a KV cache, in
// the form of wgmma. Rows are (query, head of the GQA group) pairs; mma/parts.cuh divides the work. grid (blocks)
#include "latent.cuh"

extern "C" __global__ void __launch_bounds__(THREADS + WARPGROUP, 1)
    latent_decode(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  KeyRing ring(smem_address(smem));
  if (threadIdx.x == 0) {
    ring.init();
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < CONSUMERS) {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    for_each_part(p, [&](const Part& part) { attend(p, part, smem, ring); });
  } else {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < CONSUMERS + WARP) for_each_part(p, [&](const Part& part) { load_tiles(p, part, maps, ring); });
  }
}
