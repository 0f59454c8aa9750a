// Merges (out, lse) over disjoint sets of keys: result a, and a stack b of equally distant results. Sums run over the
// stack in its order; a is added last. One warp per row. Twin of partials.py. grid (row tiles, heads, batch entries)
#include "number.cuh"
#include "params.cuh"

constexpr int WARP = 32;
constexpr int COLUMNS = (HEAD_DIM_V + WARP - 1) / WARP;  // of one lane, WARP apart

template <typename T>
__device__ T* row_of(const Operand& x, int row) {
  return (T*)x.data + blockIdx.z * x.batch + blockIdx.y * x.head + row * x.row;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) partials(const __grid_constant__ Partials p) {
  int lane = threadIdx.x % WARP;
  for (int row = (blockIdx.x * THREADS + threadIdx.x) / WARP; row < p.rows; row += gridDim.x * THREADS / WARP) {
    real lse_a = *row_of<real>(p.lse_a, row), largest = lse_a;
    const real* lse_b = row_of<real>(p.lse_b, row);
    for (int part = 0; part < p.stacked; ++part) largest = max(largest, lse_b[part * p.lse_b_next]);
    // A row without keys in one part takes the results of the others; without keys in all parts it stays 0 and -inf.
    bool empty = largest == -infinity();
    auto weight_of = [&](real lse) { return empty ? 0 : exp(lse - largest); };

    real O[COLUMNS], sum = 0;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) O[n] = -0.0f;  // the number that changes no other when added to it
    auto add = [&](real weight, const auto* out) {
      sum += weight;
#pragma unroll
      for (int n = 0, d = lane; n < COLUMNS; ++n, d += WARP)
        if (d < HEAD_DIM_V) O[n] += weight * to_real(out[d]);
    };
    const other_element* out_b = row_of<other_element>(p.out_b, row);
    for (int part = 0; part < p.stacked; ++part)
      add(weight_of(lse_b[part * p.lse_b_next]), out_b + part * p.out_b_next);
    add(weight_of(lse_a), row_of<element>(p.out_a, row));
    if (empty) sum = 1;
#pragma unroll
    for (int n = 0, d = lane; n < COLUMNS; ++n, d += WARP)
      if (d < HEAD_DIM_V) store(row_of<element>(p.out, row) + d, O[n] / sum);
    if (lane == 0) *row_of<real>(p.lse, row) = largest + log(sum);
  }
}
