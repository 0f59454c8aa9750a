// The online softmax in powers of two, for scores in the fragments of matrix instructions: one FFMA and one ex2 make a
// probability. `unit` is what turns a score into an exponent of two: log2(e), or scale * log2(e) for the bare q.k.
#pragma once
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// One row, as the lanes that share it keep it.
struct Softmax2 {
  float m;          // the largest score when the reference last moved; -inf: none was seen
  float reference;  // unit * m - LARGEST_LOG2, or 0
  float l;          // this lane's part of the sum of 2^(unit * s - reference)

  __device__ void init() {
    m = -infinity();
    reference = l = 0;
  }

  // A probability may grow to 2^(LARGEST_LOG2 + RESCALE_ABOVE) before the reference moves: the result is the same
  // number, and O is multiplied once or twice in a row, not at every tile. P in fp16 ends at 2^16, in e4m3 at 448.
  __device__ bool exceeds_reference(float largest, float scale_log2) const {
    return largest > m + RESCALE_ABOVE / scale_log2;
  }

  // The reference moves to the largest score of the row; the factor that brings along what was summed so far.
  __device__ float update(float row_max, float scale_log2) {
    float previous = reference;
    bool first = m == -infinity();
    m = max(m, row_max);
    reference = m == -infinity() ? 0 : m * scale_log2 - LARGEST_LOG2;
    float factor = first ? 0 : ex2_approx(previous - reference);
    l *= factor;
    return factor;
  }

  __device__ float probability(float s, float scale_log2) const { return ex2_approx(s * scale_log2 - reference); }

  // What the row ends with, once `l` is the sum over all its lanes. `scale` is unit / log2(e).
  struct Ending {
    float lse;     // natural; what `reference` was rounded by is taken back
    float factor;  // of what was summed

    // A sink is one more key, of score `sink` and value 0.
    __device__ void add_sink(float sink) {
      float top = max(lse, sink);
      if (top == -infinity()) return;
      float share = expf(lse - top), sum = share + expf(sink - top);
      factor *= share / sum;
      lse = top + logf(sum);
    }
  };
  __device__ Ending end(float scale_log2, float scale) const {
    if (l == 0) return {-infinity(), 0};
    float log2_sum = log2f(l / (1 << LARGEST_LOG2)) - fmaf(m, scale_log2, -LARGEST_LOG2 - reference);
    return {fmaf(m, scale, LN_2 * log2_sum), 1 / l};
  }
};
