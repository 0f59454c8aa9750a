// Averages the partial results of one row, weighted by exp(lse). One warp adds them in the order of its calls of add(),
// so that results are reproducible.
#pragma once
#include "ptx.cuh"

struct PartialSums {
  static constexpr int COLUMNS = (HEAD_DIM_V + WARP - 1) / WARP;  // columns of one lane, WARP apart

  real largest;  // largest lse of the parts
  real O[COLUMNS];
  real sum = 0;

  __device__ PartialSums(real largest) : largest(largest) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) O[n] = -0.0f;  // x + -0.0f is x for every x, also for -0.0f
  }
  // True if no part of the row has a key: then the result is 0, with lse -inf.
  __device__ bool empty() const { return largest == -infinity(); }

  // out[d] is column d of the part's result.
  template <typename Row>
  __device__ void add(real lse, Row out) {
    real weight = empty() ? 0 : exp(lse - largest);  // @weight-of-part
    sum += weight;
#pragma unroll
    for (int n = 0, d = lane_id(); n < COLUMNS; ++n, d += WARP)
      if (d < HEAD_DIM_V) O[n] += weight * to_real(out[d]);
  }
#if STATISTICS
  // The logarithm of a part's share of the sum, after all parts are added.
  __device__ real log_share(real lse) const { return empty() ? -infinity() : lse - largest - log(sum); }
#endif
  __device__ real lse() const { return largest + (empty() ? 0 : log(sum)); }

  // Calls write(column, number) for this lane's columns of the average.
  template <typename Write>
  __device__ void finish(Write write) const {
#pragma unroll
    for (int n = 0, d = lane_id(); n < COLUMNS; ++n, d += WARP)
      if (d < HEAD_DIM_V) write(d, O[n] / (empty() ? 1 : sum));
  }
};
