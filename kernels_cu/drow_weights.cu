// Backward of key_importance: the gradient of the row weights, sums over the axes along which they broadcast of the
// gradients of all rows, deterministic: one block per element. grid (elements)
#include "row_weights.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) drow_weights(const __grid_constant__ Params p) {
  __shared__ real sums[THREADS];
  const Dense &to = p.drow_weights, &from = p.drow_sums;
  int sizes[3] = {PACKED ? 1 : p.batch, p.heads, p.q_len};
  int count[3] = {to.batch ? 1 : sizes[0], to.head ? 1 : sizes[1], to.row ? 1 : sizes[2]};  // of the axes of a sum
  int h_size = to.head ? sizes[1] : 1, i_size = to.row ? sizes[2] : 1;
  int b = blockIdx.x / i_size / h_size, h = blockIdx.x / i_size % h_size, i = blockIdx.x % i_size;
  real sum = 0;
  long long terms = (long long)count[0] * count[1] * count[2];
  for (long long n = threadIdx.x; n < terms; n += THREADS) {
    long long other_i = i + n % count[2], other_h = h + n / count[2] % count[1], other_b = b + n / count[2] / count[1];
    sum += ((const real*)from.data)[other_b * from.batch + other_h * from.head + other_i * from.row];  // @weights.sum
  }
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) store((weight_element*)to.data + b * to.batch + h * to.head + i * to.row, sums[0]);
}
