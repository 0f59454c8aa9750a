// Writes the numbers of the lists of each chunk to the places of the blocks that they name. grid (chunks, heads of
// lists, sequences)
#include "../inverse_lists.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) fill_lists(const __grid_constant__ Params p) {
  Sequence sequence(p, blockIdx.z);
  for_each_entry(p, sequence, blockIdx.y, blockIdx.x, [](const InverseLists& inverse, long long place, int list) {
    inverse.lists[atomicAdd(&inverse.ends[place], 1)] = list;  // an entry twice in a list takes two places
  });
}
