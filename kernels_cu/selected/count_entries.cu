// Counts the entries of each chunk of lists by the block of keys that they name. grid (chunks, heads of lists,
// sequences)
#include "../inverse_lists.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) count_entries(const __grid_constant__ Params p) {
  Sequence sequence(p, blockIdx.z);
  InverseLists inverse(p, sequence, Lists(p, sequence, blockIdx.y * HEADS_OF_LIST), blockIdx.y);
  for (int block = threadIdx.x; block < inverse.blocks; block += THREADS)
    inverse.ends[(long long)block * InverseLists::CHUNKS + blockIdx.x] = 0;
  __syncthreads();
  for_each_entry(p, sequence, blockIdx.y, blockIdx.x,
                 [](const InverseLists& inverse, long long place, int list) { atomicAdd(&inverse.ends[place], 1); });
}
