// delta = rowsum(dO * O) - dlse of every query, one warp per row. DENTROPY: plus dentropy * entropy. LSE2: also writes
// lse * log2(e), for engines without a branch for empty rows: a row that sees no key gets delta 0 and lse2 +inf, so
// that its probabilities are 0. ADD_DQ: also zeroes the dQ workspace; DQ_IN_ORDER: also its semaphores. DIRECTION: also
// writes eps = rowsum(dO * tO); with LSE2 beside the other numbers of the row, in one record that a thread loads at
// once. grid (row tiles, heads, sequences)
#include "dq_sums.cuh"
#include "row_numbers.cuh"
#include "sequence.cuh"

// The sum of dO * O of a row, in all lanes of its warp.
__device__ inline real row_product(const element* dO, const element* O, int lane) {
  real sum = 0;
  for (int d = lane; d < HEAD_DIM_V; d += WARP) sum += to_real(dO[d]) * to_real(O[d]);
#pragma unroll
  for (int other = WARP / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, other);
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta(const __grid_constant__ Params p) {
  Sequence sequence(p, blockIdx.z);
  int head = blockIdx.y, lane = threadIdx.x % WARP;
  const element* dO = sequence.queries<element>(p.dout, head);
  const element* O = sequence.queries<element>(p.out, head);
  int first = (blockIdx.x * THREADS + threadIdx.x) / WARP, step = gridDim.x * THREADS / WARP;
  if constexpr (ADD_DQ) {
    DqSums sums(p, sequence, head);
    for (int i = first; i < (sequence.q_len + 15) / 16 * 16; i += step) sums.clear(i);  // @clear-sums
    if constexpr (DQ_IN_ORDER) {
      DqSemaphore semaphore(p, sequence, head);
      for (int i = first; i < sequence.q_len; i += step)
        if (i % 16 == 0 && lane == 0) *semaphore.counter_of(i) = 0;
      if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) *p.tile_counter = 0;
    }
  }
  for (int i = first; i < sequence.q_len; i += step) {
    real sum = row_product(dO + i * p.dout.row, O + i * p.out.row, lane);
#if DIRECTION
    // @delta-tangent-of-row
    real delta_tangent =
        row_product(dO + i * p.dout.row, sequence.queries<element>(p.tout, head) + i * p.tout.row, lane);
    if (lane == 0) sequence.queries<real>(p.delta_tangent, head)[i * p.delta_tangent.row] = delta_tangent;
#endif
    if constexpr (DLSE) sum -= sequence.queries<real>(p.dlse, head)[i * p.dlse.row];
#if DSTATISTICS
    // @entropy-in-delta
    if constexpr (DENTROPY)
      sum += sequence.queries<real>(p.dentropy, head)[i * p.dentropy.row] *
             sequence.queries<real>(p.entropy, head)[i * p.entropy.row];
#endif
    if constexpr (LSE2) {
      real lse = sequence.queries<real>(p.lse, head)[i * p.lse.row];
      if (lse == -infinity()) sum = 0;
      real lse2 = lse == -infinity() ? infinity() : lse * (real)1.4426950408889634;  // @delta-of-no-key
#if DIRECTION
      RowNumbers numbers = {lse2, 0, 0, 0};
      // @numbers-of-row
      if (lse != -infinity())
        numbers = {lse2, sequence.queries<real>(p.tlse, head)[i * p.tlse.row], sum, delta_tangent};
      if (lane == 0) sequence.queries<RowNumbers>(p.row_numbers, head)[i * p.row_numbers.row] = numbers;
#else
      if (lane == 0) sequence.queries<real>(p.lse2, head)[i * p.lse2.row] = lse2;
#endif
    }
    if (lane == 0) sequence.queries<real>(p.delta, head)[i * p.delta.row] = sum;
  }
}
