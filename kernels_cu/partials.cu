// Merges (out, lse) over disjoint sets of keys: result a, and a stack b of equally distant results. Sums run over the
// stack in its order; a is added last, as in partials.py. One warp per row. grid (row tiles, heads, batch entries)
#include "params.cuh"
#include "partials.cuh"

template <typename T>
__device__ T* row_of(const Operand& x, int row) {
  return (T*)x.data + blockIdx.z * x.batch + blockIdx.y * x.head + row * x.row;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) partials(const __grid_constant__ Partials p) {
  for (int row = (blockIdx.x * THREADS + threadIdx.x) / WARP; row < p.rows; row += gridDim.x * THREADS / WARP) {
    real lse_a = *row_of<real>(p.lse_a, row), largest = lse_a;
    const real* lse_b = row_of<real>(p.lse_b, row);
    for (int part = 0; part < p.stacked; ++part) largest = max(largest, lse_b[part * p.lse_b_next]);

    PartialSums sums(largest);
    const other_element* out_b = row_of<other_element>(p.out_b, row);
    for (int part = 0; part < p.stacked; ++part) sums.add(lse_b[part * p.lse_b_next], out_b + part * p.out_b_next);
    sums.add(lse_a, row_of<element>(p.out_a, row));
    sums.finish([&](int d, real x) { store(row_of<element>(p.out, row) + d, x); });
    if (lane_id() == 0) *row_of<real>(p.lse, row) = sums.lse();
  }
}
