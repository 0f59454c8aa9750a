// dsink = -sum exp(sink - lse) * (delta - dlse) over all queries of a head, deterministic: one block per head.
// DSTATISTICS: minus the gradient of the entropy by the sink, which is one more key of its row.
// DIRECTION (double backward): eps + delta * (tsink - mu) instead of delta. grid (heads)
#include "number.cuh"
#include "sequence.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) dsink(const __grid_constant__ Params p) {
  __shared__ real sums[THREADS];
  int head = blockIdx.x;
  real sink = to_real(((const sink_element*)p.sink)[head]), sum = 0;
#if DIRECTION
  real tsink = TSINK ? to_real(((const sink_element*)p.tsink)[head]) : 0;
#endif
  for (int b = 0; b < p.batch; ++b) {
    Sequence sequence(p, b);
    const real* lse = sequence.queries<real>(p.lse, head);
    const real* delta = sequence.queries<real>(p.delta, head);
    for (int i = threadIdx.x; i < sequence.q_len; i += THREADS) {
      real x = lse[i * p.lse.row];
      if (x == -infinity()) continue;
      real change = delta[i * p.delta.row];
#if DIRECTION
      real c = tsink - sequence.queries<real>(p.tlse, head)[i * p.tlse.row];  // @lse-tangent-of-dsink
      change = sequence.queries<real>(p.delta_tangent, head)[i * p.delta_tangent.row] + change * c;
#endif
#if DSTATISTICS
      // @entropy-of-sink
      if (DENTROPY && sink != -infinity())
        change += sequence.queries<real>(p.dentropy, head)[i * p.dentropy.row] * (sink - x);
#endif
      sum += exp(sink - x) * change;
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) store((sink_element*)p.dsink + head, -sums[0]);
}
