// Online softmax in base 2, for scores in mma fragments: a probability costs one FFMA and one ex2. scale_log2 turns a
// score into an exponent of two: log2(e), or scale * log2(e) if the scores are the bare q.k.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// State of one row, replicated in the four lanes that share it, except for l.
struct Softmax2 {
  float m;          // row max at the last update; -inf: no key seen yet
  float reference;  // scale_log2 * m - LARGEST_LOG2; 0 while m is -inf
  float l;          // this lane's partial sum of 2^(scale_log2 * s - reference)

  __device__ void init() {
    m = -infinity();
    reference = l = 0;
  }

  // Lazy rescaling: a probability may grow to 2^(LARGEST_LOG2 + RESCALE_ABOVE) before the reference is updated. This is
  // exact: any reference gives the same result, and O is rescaled once or twice per row, not per tile. P overflows
  // at 2^16 in fp16, at 448 in e4m3.
  __device__ bool exceeds_reference(float largest, float scale_log2) const {
    return largest > m + RESCALE_ABOVE / scale_log2;
  }

  // Updates m and the reference, rescales l, and returns the factor 2^(old - new) that rescales O.
  __device__ float update(float row_max, float scale_log2) {
    float previous = reference;
    bool first = m == -infinity();
    m = max(m, row_max);
    reference = m == -infinity() ? 0 : m * scale_log2 - LARGEST_LOG2;  // @softmax-reference
    float factor = first ? 0 : ex2_approx(previous - reference);
    l *= factor;  // @rescale-l
    return factor;
  }

  __device__ float probability(float s, float scale_log2) const { return ex2_approx(s * scale_log2 - reference); }

  // Result of a row; end() computes it once l is the sum over the row's four lanes. `scale` is scale_log2 / log2(e).
  struct Ending {
    float lse;     // natural log; corrected for the rounding of `reference`
    float factor;  // normalises O

    // A sink is one more key, with score `sink` and value 0.
    __device__ void add_sink(float sink) {
      float top = max(lse, sink);
      if (top == -infinity()) return;
      float share = expf(lse - top), sum = share + expf(sink - top);
      factor *= share / sum;
      lse = top + logf(sum);
    }

#if STATISTICS
    // The entropy of the keys and the sink from that of the keys, whose lse is without the sink: that of the choice
    // between keys and sink, and that among the keys. The shares are e^-of_keys and e^-of_sink.
    __device__ float entropy_with_sink(float entropy, float sink) const {
      if (lse == -infinity() || sink == -infinity()) return entropy;
      float distance = sink - lse, rest = log1pf(expf(-fabsf(distance)));
      float of_keys = max(distance, 0.0f) + rest, of_sink = max(-distance, 0.0f) + rest;
      return expf(-of_keys) * (entropy + of_keys) + expf(-of_sink) * of_sink;
    }
#endif
  };
#if STATISTICS
  // The entropy from the sum of 2^x x over the exponents x of the row.
  __device__ float entropy(float w) const { return l == 0 ? 0 : LN_2 * (log2f(l) - w / l); }
#endif
  __device__ Ending end(float scale_log2, float scale) const {
    if (l == 0) return {-infinity(), 0};
    float log2_sum = log2f(l / (1 << LARGEST_LOG2)) - fmaf(m, scale_log2, -LARGEST_LOG2 - reference);  // @log2-sum
    return {fmaf(m, scale, LN_2 * log2_sum), 1 / l};
  }
};

// Adds the sink to the lse of a row, if there is one. Returns the new lse and the factor of O.
__device__ inline Softmax2::Ending with_sink(const Params& p, int head, float lse) {
  Softmax2::Ending ending{lse, 1};
  if constexpr (SINK) ending.add_sink(to_real(((const sink_element*)p.sink)[head]));
  return ending;
}

#if STATISTICS
// Adds the sink to the entropy of a row, if there is one; `ending` is that of the keys.
__device__ inline float entropy_with_sink(const Params& p, int head, const Softmax2::Ending& ending, float entropy) {
  if constexpr (SINK) entropy = ending.entropy_with_sink(entropy, to_real(((const sink_element*)p.sink)[head]));
  return entropy;
}
#endif
