// Merges the partial results of one row of a decode, adds the sink, and stores the row.
#pragma once
#include "partials.cuh"
#include "sequence.cuh"
#include "softmax2.cuh"
#if STATISTICS
#include "statistics.cuh"
#endif

// One warp merges the parts 0 to count - 1, in this order: lse_of(c) is the lse of part c, and row_of(c)[d] column
// d of its result. `row` counts the rows of the sequence for this kv_head (split_kv.cuh). STATISTICS: statistics_of(c)
// are its PartStatistics.
#if STATISTICS
template <typename Lse, typename Row, typename Of>
#else
template <typename Lse, typename Row>
#endif
__device__ void merge_row(const Params& p, const Sequence& sequence, int kv_head, int row, int count, Lse lse_of,
                          Row row_of
#if STATISTICS
                          ,
                          Of statistics_of
#endif
) {
  int i = row / p.group, head = kv_head * p.group + row % p.group;
  float largest = -infinity();
  for (int c = 0; c < count; ++c) largest = max(largest, lse_of(c));
  PartialSums sums(largest);
  for (int c = 0; c < count; ++c) sums.add(lse_of(c), row_of(c));  // @sum-parts
  Softmax2::Ending ending = with_sink(p, head, sums.lse());
  element* out = sequence.queries<element>(p.out, head) + i * p.out.row;
  sums.finish([&](int d, float x) { store(out + d, x * ending.factor); });  // @normalise-O
  if (lane_id() == 0) sequence.queries<float>(p.lse, head)[i * p.lse.row] = ending.lse;
#if STATISTICS
  PartStatistics total;
  total.init();
  for (int c = 0; c < count; ++c) total.add(statistics_of(c), sums.log_share(lse_of(c)));  // @merge-statistics
  float entropy = entropy_with_sink(p, head, {sums.lse(), 1}, total.entropy);
  if (lane_id() == 0) total.store(p, sequence, head, i, entropy);
#endif
}
