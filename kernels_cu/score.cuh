// Score modifications between q.k and the softmax, with their gradients. Twin of score.py.
//
//     s = scale * q.k ;  c * tanh(s / c) ;  - slope * |i + o - j| ;  + bias
#pragma once
#include "mask.cuh"
#include "number.cuh"

struct Score {
  const Params& p;
  int batch;
  int head;
  int offset;
  int step;
  real scale;
  real slope;

  __device__ Score(const Params& params, const Sequence& sequence, int h)
      : p(params),
        batch(sequence.batch),
        head(h),
        offset(sequence.offset),
        step(sequence.step),
        scale((real)params.scale),
        slope(0) {
    // The rows past a packed batch's last sequence have no slope.
    if (ALIBI && batch < p.batch) slope = (real)p.alibi_slopes[batch * p.alibi_batch + head];
  }

  // Score of query i and key j from q.k. Sets softcap_slope, the derivative of the soft cap, for gradient().
  __device__ real apply(real product, int i, int j, real& softcap_slope) const {
    real s = scale * product;
    softcap_slope = 1;
    if constexpr (SOFTCAP) {
      real t = tanh(s / (real)p.softcap);
      s = (real)p.softcap * t;
      softcap_slope = 1 - t * t;
    }
    if constexpr (ALIBI) s -= slope * (real)abs((i - j) * step + offset);
    if constexpr (BIAS) {
      // A bias of -inf hides the key for every q.k: adding it would keep a NaN and turn +inf into NaN.
      real bias = to_real(((const bias_element*)p.bias.data)[bias_index(p.bias, i, j)]);
      bool hidden = bias == -infinity();
      s = hidden ? bias : s + bias;
      if (hidden) softcap_slope = 0;
    }
    return s;
  }

  // Gradient of scale * q.k from that of the score. The gradient of the bias is that of the score itself.
  __device__ real gradient(real ds, real softcap_slope) const { return SOFTCAP ? ds * softcap_slope : ds; }

  __device__ long long bias_index(const Dense& x, int i, int j) const {
    return batch * x.batch + head * x.head + i * x.row + j * x.column;
  }
};
