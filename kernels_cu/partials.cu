// Merges (out, lse) over two disjoint sets of keys, one warp per row. Twin of partials.py. grid (row tiles, heads,
// batch entries)
#include "number.cuh"
#include "params.cuh"

constexpr int WARP = 32;

template <typename T>
__device__ T* row_of(const Operand& x, int row) {
  return (T*)x.data + blockIdx.z * x.batch + blockIdx.y * x.head + row * x.row;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) partials(const __grid_constant__ Partials p) {
  int lane = threadIdx.x % WARP;
  for (int row = (blockIdx.x * THREADS + threadIdx.x) / WARP; row < p.rows; row += gridDim.x * THREADS / WARP) {
    real a = *row_of<real>(p.lse_a, row), b = *row_of<real>(p.lse_b, row);
    real larger = max(a, b);
    // A row without keys on one side takes the other side's result; without keys on both sides it stays 0 and -inf.
    bool empty = larger == -infinity();
    real weight_a = empty ? 0 : exp(a - larger), weight_b = empty ? 0 : exp(b - larger);
    real sum = empty ? 1 : weight_a + weight_b;
    const element* out_a = row_of<element>(p.out_a, row);
    const other_element* out_b = row_of<other_element>(p.out_b, row);
    for (int d = lane; d < HEAD_DIM_V; d += WARP)
      store(row_of<element>(p.out, row) + d, (weight_a * to_real(out_a[d]) + weight_b * to_real(out_b[d])) / sum);
    if (lane == 0) *row_of<real>(p.lse, row) = larger + log(sum);
  }
}
