// Numbers the queries of the groups that share a prefix, and the iterations of their decode (prefixes.cuh): one warp
// per group. grid (1)
#include "prefixes.cuh"

constexpr int WARPS = THREADS / WARP;

// Calls visit(b, place, rows) in all lanes for each sequence of a group, with the place of its first row from `place`
// on; returns the place after the last.
template <typename Visit>
__device__ int for_each_sequence(const Params& p, int group, int place, Visit visit) {
  for (int first = 0; first < p.batch; first += WARP) {
    int b = first + lane_id(), rows = 0;
    bool of_group = false;
    if (b < p.batch) {
      Sequence sequence(p, b);
      of_group = sequence.group == group, rows = sequence.q_len;
    }
    unsigned int members = __ballot_sync(0xFFFFFFFF, of_group);
    while (members) {
      int lane = __ffs(members) - 1;
      // Boundaries of packed sequences that decrease must not number more queries than there are.
      int count = min(__shfl_sync(0xFFFFFFFF, rows, lane), all_queries(p) - place);
      visit(first + lane, place, count);
      place += count;  // @place-of-next-sequence
      members &= members - 1;
    }
  }
  return place;
}

extern "C" __global__ void __launch_bounds__(THREADS) prefix_rows(const __grid_constant__ Params p) {
  int warp = threadIdx.x / WARP;
  int2* starts = (int2*)p.prefix_starts;
  for (int g = warp; g < p.prefix_groups; g += WARPS) {
    int queries = for_each_sequence(p, g, 0, [](int, int, int) {});
    if (lane_id() == 0) starts[g].x = queries;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int2 sum = {};
    for (int g = 0; g < p.prefix_groups; ++g) {
      int queries = min(starts[g].x, all_queries(p) - sum.x);
      starts[g] = sum;
      int tiles = (queries * p.group + PREFIX_BLOCK_Q - 1) / PREFIX_BLOCK_Q * (p.heads / p.group);
      sum.x += queries, sum.y += tiles * PrefixGroup::iterations_of_prefix(p, g);
    }
    starts[p.prefix_groups] = sum;
  }
  __syncthreads();
  for (int g = warp; g < p.prefix_groups; g += WARPS)
    for_each_sequence(p, g, starts[g].x, [&](int b, int place, int rows) {
      if (lane_id() == 0) p.prefix_places[b] = place;
      for (int i = lane_id(); i < rows; i += WARP) p.prefix_rows[place + i] = b;
    });
}
