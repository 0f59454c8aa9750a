// Statistics of a row of scores beside its online softmax: the largest score, its key, and the entropy.
//
// The entropy is log l - w / l with w = sum of e^(s - m) (s - m), whose terms have one sign: it is no difference of
// large numbers, as lse - sum of P s is for scores far from 0.
//
// In a backward (DSTATISTICS) max has a gradient at its key, and the entropy the gradient -dH P (s - mu), where mu is
// the mean of the scores: s - mu = log P + H. delta.cu adds dH H to delta.
#pragma once
#include "number.cuh"
#include "params.cuh"
#include "sequence.cuh"

// The largest score of some keys.
struct LargestScore {
  real top;  // NaN if one is NaN
  int key;   // the lowest key that has it; NO_KEY: none seen yet

  static constexpr int NO_KEY = 0x7FFFFFFF;

  // Takes a score that is not above all keys taken before; a hidden one is -inf.
  __device__ void take_descending(real s, int j) {
    bool replaces = s >= top || s != s;  // @ties-descending
    top = replaces ? s : top;
    key = replaces ? j : key;
  }

  // Takes the largest score of other keys, in any order.
  __device__ void take(real s, int j) {
    bool lower = j < key;
    bool replaces = s > top || (s == top && lower) || (s != s && (top == top || lower));  // @ties
    top = replaces ? s : top;
    key = replaces ? j : key;
  }

  // Takes the largest score of `lanes` lanes side by side, into all of them.
  __device__ void reduce(int lanes) {
    for (int lane = 1; lane < lanes; lane *= 2) {
      real other = __shfl_xor_sync(0xFFFFFFFF, top, lane);
      take(other, __shfl_xor_sync(0xFFFFFFFF, key, lane));
    }
  }

  // Stores what the call asks for of query i; a query past the length of its sequence sees no key. `entropy` may be
  // negative by its rounding.
  __device__ void store(const Params& p, const Sequence& sequence, int head, int i, real entropy) const {
    bool dead = i >= sequence.q_len || top == -infinity();
    if (p.max.data) sequence.queries<real>(p.max, head)[i * p.max.row] = dead ? -infinity() : top;
    if (p.argmax.data) sequence.queries<int>(p.argmax, head)[i * p.argmax.row] = dead ? -1 : key;
    if (p.entropy.data)
      sequence.queries<real>(p.entropy, head)[i * p.entropy.row] = i >= sequence.q_len || entropy < 0 ? 0 : entropy;
  }
};

// The statistics of a row: partial ones, over the scores of one thread, and after `reduce` those of the whole row.
struct RowStatistics : LargestScore {
  real w;  // the sum of e^(s - m) (s - m); 0 for hidden scores

  __device__ void init() {
    top = -infinity();
    key = NO_KEY;
    w = 0;
  }

  // Refers w to an m that has grown, before l is multiplied by `factor` = e^(old m - new m).
  __device__ void rescale(real previous_m, real m, real factor, real l) {
    if (l != 0) w = factor * (w - (m - previous_m) * l);  // @rescale-w
  }

  // Adds the term of a score; `exponent` is s - m, -inf for a hidden score, whose probability is 0.
  __device__ void add_term(real probability, real exponent) {
    w = fma(probability, max(exponent, (real)-1e30f), w);  // @hidden-term
  }

  // 0 for a row that has seen no key, NaN if l is.
  __device__ real entropy(real l) const { return l == 0 ? 0 : log(l) - w / l; }
};

// The statistics of a part of the keys of a row, and of several parts together.
struct PartStatistics : LargestScore {
  real entropy;

  __device__ void init() {
    top = -infinity();
    key = NO_KEY;
    entropy = 0;
  }

  // Adds a part with this logarithm of its share of the sum of e^s: the entropy is that of the choice of a part, and
  // that within the part.
  __device__ void add(const PartStatistics& part, real log_share) {
    take(part.top, part.key);
    if (log_share != -infinity()) entropy += exp(log_share) * (part.entropy - log_share);  // @merge-entropy
  }
};

#if DSTATISTICS
// The gradients of the statistics of the rows of a tile of queries, and the keys of their largest scores.
struct StatisticsGradients {
  const real* dentropy;
  const real* dmax;
  const int* argmax;  // -1 for a row that sees no key

  // Returns the terms of dS of a row and key j, whose probability is P, that delta does not contain.
  __device__ real of_score(int row, int j, real P, real log_P) const {
    real ds = 0;
    if (DENTROPY && P > 0) ds -= dentropy[row] * P * log_P;  // @gradient-of-entropy
    if (DMAX && argmax[row] == j) ds += dmax[row];           // @gradient-of-max
    return ds;
  }
};
#endif
