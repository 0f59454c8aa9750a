// Merges (out, lse) over disjoint sets of keys: result a, and a stack b of equally distant results. Sums run over the
// stack in its order; a is added last, as in partials.py. One warp per row. grid (row tiles, heads, sequences), where a
// block computes several tiles, heads or sequences if this exceeds the limits of a grid
#include "params.cuh"
#include "partials.cuh"
#if STATISTICS
#include "statistics.cuh"
#endif

struct Row {
  int batch;
  int head;
  long long row;

  template <typename T>
  __device__ T* of(const Operand& x) const {
    return (T*)x.data + batch * x.batch + head * x.head + row * x.row;
  }
};

#if STATISTICS
__device__ PartStatistics statistics_of(const Row& row, const Operand& max, const Operand& argmax,
                                        const Operand& entropy, int key_offset) {
  PartStatistics part;
  part.init();
  if (max.data) part.top = *row.of<real>(max);
  if (argmax.data) part.key = *row.of<int>(argmax) + key_offset;  // @key-offset
  if (entropy.data) part.entropy = *row.of<real>(entropy);
  return part;
}

__device__ void merge_statistics(const Partials& p, const Row& row, const PartialSums& sums) {
  PartStatistics total;
  total.init();
  total.add(statistics_of(row, p.max_a, p.argmax_a, p.entropy_a, 0), sums.log_share(*row.of<real>(p.lse_a)));
  total.add(statistics_of(row, p.max_b, p.argmax_b, p.entropy_b, p.key_offset_b),
            sums.log_share(*row.of<real>(p.lse_b)));
  if (p.max.data) *row.of<real>(p.max) = total.top;
  if (p.argmax.data) *row.of<int>(p.argmax) = total.top == -infinity() ? -1 : total.key;
  if (p.entropy.data) *row.of<real>(p.entropy) = total.entropy < 0 ? 0 : total.entropy;
}
#endif

__device__ void merge_row(const Partials& p, const Row& row) {
  real lse_a = *row.of<real>(p.lse_a), largest = lse_a;
  const real* lse_b = row.of<real>(p.lse_b);
  for (int part = 0; part < p.stacked; ++part) largest = max(largest, lse_b[part * p.lse_b_next]);

  PartialSums sums(largest);
  const other_element* out_b = row.of<other_element>(p.out_b);
  for (int part = 0; part < p.stacked; ++part) sums.add(lse_b[part * p.lse_b_next], out_b + part * p.out_b_next);
  sums.add(lse_a, row.of<element>(p.out_a));
  sums.finish([&](int d, real x) { store(row.of<element>(p.out) + d, x); });
  if (lane_id() == 0) *row.of<real>(p.lse) = sums.lse();
#if STATISTICS
  if (lane_id() == 0) merge_statistics(p, row, sums);
#endif
}

// Without a bound the loops would use so many registers that fewer than 7 blocks fit an SM, too few to hide the latency
// of the loads; a stricter bound spills in fp64 with D 512.
extern "C" __global__ void __launch_bounds__(THREADS, 7) partials(const __grid_constant__ Partials p) {
  constexpr int WARPS = THREADS / WARP;
  for (int batch = blockIdx.z; batch < p.batch; batch += gridDim.z)
    for (int head = blockIdx.y; head < p.heads; head += gridDim.y)
      for (long long row = (long long)blockIdx.x * WARPS + threadIdx.x / WARP; row < p.rows; row += gridDim.x * WARPS)
        merge_row(p, {batch, head, row});
}
