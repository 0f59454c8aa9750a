// Replaces the counts of blocks and chunks by the sums of those before them. A thread sums neighbouring counts. grid
// (1, heads of lists, sequences)
#include "../inverse_lists.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) scan_counts(const __grid_constant__ Params p) {
  __shared__ int sums[THREADS];
  Sequence sequence(p, blockIdx.z);
  InverseLists inverse(p, sequence, Lists(p, sequence, blockIdx.y * HEADS_OF_LIST), blockIdx.y);
  long long counts = (long long)inverse.blocks * InverseLists::CHUNKS, each = (counts + THREADS - 1) / THREADS;
  long long begin = min(threadIdx.x * each, counts), end = min(begin + each, counts);
  int sum = 0;
  for (long long n = begin; n < end; ++n) sum += inverse.ends[n];
  sums[threadIdx.x] = sum;
  __syncthreads();
  int before = 0;
  for (int thread = 0; thread < threadIdx.x; ++thread) before += sums[thread];
  for (long long n = begin; n < end; ++n) {
    int count = inverse.ends[n];
    inverse.ends[n] = before;
    before += count;
  }
}
