// Score modifications between q.k and the softmax, with their gradients. Twin of score.py.
//
//     s = scale * q.k ;  c * tanh(s / c) ;  - slope * |i + o - j| ;  + bias ;  score_mod(s, b, h, i, j)
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
  Mod mod;

  __device__ Score(const Params& params, const Sequence& sequence, int h)
      : p(params),
        batch(sequence.batch),
        head(h),
        offset(sequence.offset),
        step(sequence.step),
        scale((real)params.scale),
        slope(0),
        mod(params, sequence.batch) {
    // The rows past a packed batch's last sequence have no slope.
    if (ALIBI && batch < p.batch) slope = (real)p.alibi_slopes[batch * p.alibi_batch + head];
  }

  // Score of query i and key j from q.k, before the score_mod. Sets `derivative` to its derivative by scale * q.k or,
  // BY_BIAS, by the bias; and `hidden` if the bias is -inf.
  template <bool BY_BIAS>
  __device__ real unmodified(real product, int i, int j, real& derivative, bool& hidden) const {
    real s = scale * product;
    derivative = 1;
    if constexpr (SOFTCAP) {
      real t = tanh(s / (real)p.softcap);
      s = (real)p.softcap * t;
      if constexpr (!BY_BIAS) derivative = 1 - t * t;
    }
    if constexpr (ALIBI) s -= slope * (real)abs((i - j) * step + offset);
    if constexpr (BIAS) {
      // A bias of -inf hides the key for every q.k: adding it would keep a NaN and turn +inf into NaN.
      real bias = to_real(((const bias_element*)p.bias.data)[bias_index(p.bias, i, j)]);
      hidden = bias == -infinity();
      s = hidden ? bias : s + bias;
      if (hidden) derivative = 0;
    }
    return s;
  }

  // Score of query i and key j from q.k. Sets `derivative`, which gradient() needs.
  template <bool BY_BIAS = false>
  __device__ real apply(real product, int i, int j, real& derivative) const {
    bool hidden = false;
    real s = unmodified<BY_BIAS>(product, i, j, derivative, hidden);
#if MODS
    if constexpr (SCORE_MOD) {
      // At -inf a score_mod's derivative may be infinite, and 0 times infinity is a NaN: hidden scores pass 0.
      real by_score, modified = mod.score(hidden ? 0 : s, mod.query(head, i), mod.key(j), by_score);
      s = hidden ? s : modified;
      derivative = times(derivative, by_score);
    }
#endif
    return s;
  }

  // Gradient of scale * q.k, or of the bias: the gradient ds of the score times the derivative from apply().
  __device__ real gradient(real ds, real derivative) const { return SOFTCAP || SCORE_MOD ? times(ds, derivative) : ds; }

  // x * derivative; 0 for x = 0, where a score_mod's derivative may be infinite.
  __device__ static real times(real x, real derivative) {
#if MODS
    if (SCORE_MOD && Mod::SLOPE_MAY_BE_INFINITE && x == 0) return 0;
#endif
    return x * derivative;
  }

  __device__ long long bias_index(const Dense& x, int i, int j) const {
    return batch * x.batch + head * x.head + i * x.row + j * x.column;
  }
};
