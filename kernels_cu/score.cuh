// Score modifications between q.k and the softmax, with their gradients, tangents and second gradients. score.py has
// the same math.
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
#if STAGED_BIAS
  real bias;  // of the next pair
#endif

  __device__ Score(const Params& params, const Sequence& sequence, int h)
      : Score(params, sequence, h, Mod(params, sequence)) {}
  // Takes the Mod from a kernel that computes several heads of a sequence with one Mod.
  __device__ Score(const Params& params, const Sequence& sequence, int h, const Mod& mod)
      : p(params),
        batch(sequence.batch),
        head(h),
        offset(sequence.offset),
        step(sequence.step),
        scale((real)params.scale),
        slope(0),
        mod(mod) {
    // The rows past a packed batch's last sequence have no slope.
    if (ALIBI && batch < p.batch) slope = (real)p.alibi_slopes[batch * p.alibi_batch + head];  // @alibi-slope
  }

  // Score of query i and key j from q.k, before the score_mod. Sets `derivative` to d score / d (scale * q.k), or with
  // BY_BIAS to d score / d bias; and `hidden` if the bias is -inf.
  template <bool BY_BIAS>
  __device__ real unmodified(real product, int i, int j, real& derivative, bool& hidden) const {
    real s = scale * product;
    derivative = 1;
    if constexpr (SOFTCAP) {
      real t = tanh(s / (real)p.softcap);
      s = (real)p.softcap * t;
      if constexpr (!BY_BIAS) derivative = 1 - t * t;
    }
    return shifted(s, i, j, derivative, hidden);
  }

  // Adds ALiBi and the bias to s. Where the bias is -inf, sets `derivative` to 0.
  __device__ real shifted(real s, int i, int j, real& derivative, bool& hidden) const {
    if constexpr (ALIBI) s -= slope * (real)abs((i - j) * step + offset);
    if constexpr (BIAS) {
      // A bias of -inf hides the key for every q.k: adding it would keep a NaN and turn +inf into NaN.
#if !STAGED_BIAS
      real bias = to_real(((const bias_element*)p.bias.data)[bias_index(p.bias, i, j)]);
#endif
      hidden = bias == -infinity();
      s = hidden ? bias : s + bias;
      if (hidden) derivative = 0;
    }
    return s;
  }

  // Score of query i and key j from q.k. Sets `derivative`, which gradient() needs.
  template <bool BY_BIAS = false>
  __device__ real apply(real product, Position i, Position j, real& derivative) const {
    bool hidden = false;
    real s = unmodified<BY_BIAS>(product, i, j, derivative, hidden);
#if MODS
    if constexpr (SCORE_MOD) {
      // At -inf a score_mod's derivative may be infinite, and 0 times infinity is a NaN: hidden scores pass 0.
      real by_score, modified = mod.score(hidden ? 0 : s, mod.query(head, i), mod.key(j), by_score);
      s = hidden ? s : modified;
      derivative = times(derivative, by_score);  // @mod-slope
    }
#endif
    return s;
  }

  // Gradient of scale * q.k, or of the bias: the gradient ds of the score times the derivative from apply().
  // @score-gradient
  __device__ real gradient(real ds, real derivative) const { return SOFTCAP || SCORE_MOD ? times(ds, derivative) : ds; }

#if DIRECTION
  // A score, its tangent, and the derivatives of both.
  struct Moved {
    real score;
    real tangent;
    real slope;  // d score / d (scale * q.k) = d tangent / d (tangent of scale * q.k); BY_BIAS: by the bias
    real curve;  // d tangent / d (scale * q.k), or by the bias
  };

  // Score of query i and key j before the score_mod, with its tangent, from q.k and its tangent.
  template <bool BY_BIAS>
  __device__ Moved unmodified_moved(real product, real tproduct, int i, int j, bool& hidden) const {
    Moved x = {scale * product, scale * tproduct, 1, 0};
    if constexpr (SOFTCAP) {
      real t = tanh(x.score / (real)p.softcap), slope = 1 - t * t;
      x.score = (real)p.softcap * t;
      // @softcap-curve
      if constexpr (!BY_BIAS) x.slope = slope, x.curve = -2 / (real)p.softcap * t * slope * x.tangent;
      x.tangent *= slope;  // @softcap-tangent
    }
    x.score = shifted(x.score, i, j, x.slope, hidden);
    // @add-tbias
    if constexpr (TBIAS) x.tangent += to_real(((const bias_element*)p.tbias.data)[bias_index(p.tbias, i, j)]);
    return x;
  }

  // Score of query i and key j with its tangent, from q.k and its tangent.
  template <bool BY_BIAS = false>
  __device__ Moved moved(real product, real tproduct, int i, int j) const {
    bool hidden = false;
    Moved x = unmodified_moved<BY_BIAS>(product, tproduct, i, j, hidden);
#if MODS
    if constexpr (SCORE_MOD) {
      real slope, curve, tangent = hidden ? 0 : x.tangent;
      real modified = mod.moved(hidden ? 0 : x.score, tangent, mod.query(head, i), mod.key(j), tangent, slope, curve);
      if (!hidden) x.score = modified, x.tangent = tangent;
      x.curve = times(x.slope, curve) + times(x.curve, slope);
      x.slope = times(x.slope, slope);
    }
#endif
    return x;
  }

  // Replaces ds and dts, the gradients of a score and of its tangent, by the gradients of scale * q.k and of its
  // tangent or, if x is by the bias, of the bias and its tangent. For a hidden score ds and dts are 0, and x.slope may
  // be NaN.
  __device__ static void second_gradient(real& ds, real& dts, const Moved& x) {
    if (ds == 0 && dts == 0) return;
    if constexpr (SOFTCAP || SCORE_MOD) {
      ds = times(ds, x.slope) + times(dts, x.curve);
      dts = times(dts, x.slope);
    }
  }
#endif

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
