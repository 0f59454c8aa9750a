// Writes the entries of the lists of each chunk, counted over the lists of a sequence, to the places of the keys that
// they name, after count_entries.cu and scan_counts.cu. grid (chunks, 1, sequences)
#include "../inverse_lists.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) loss_fill(const __grid_constant__ Params p) {
  Sequence sequence(p, blockIdx.z);
  Lists lists(p, sequence, 0);
  InverseLists inverse(p, sequence, lists, 0);
  Range range = inverse.chunk(blockIdx.x);
  for (int i = range.begin; i < range.end; ++i) {
    for (int n = threadIdx.x; n < lists.length; n += THREADS) {
      int key = lists.entry(i, n);
      if (!inverse.names(key)) continue;
      int place = atomicAdd(&inverse.ends[(long long)key * InverseLists::CHUNKS + blockIdx.x], 1);
      inverse.lists[place] = i * lists.length + n;  // @loss.entry-of-place
    }
    __syncthreads();  // those of a key are in ascending order
  }
}
