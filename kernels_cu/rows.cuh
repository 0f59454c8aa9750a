// Steps of the forward in which a thread has a row of scores; fragments.cuh has them for mma fragments:
//
//   modify          q.k -> scores, -inf where a query does not see a key
//   max_of          row max
//   update_max      lazily, the reference of the exponents
//   exponentiate    scores -> probabilities, and their sum
//   drop            dropout of probabilities
//   round_row       probabilities -> pairs of 16 bits
//   finish          row sum -> normalisation of O, and lse
//   observe, store_statistics     statistics of the rows
//
// The 32 rows of a warp begin at a multiple of 16.
#pragma once
#include "blackwell.cuh"
#include "dense_rows.cuh"
#include "fragments.cuh"

// Hides with -inf the columns of a row from `limit` on, or those before it. A byte of a word of bits stands for 7
// columns: one instruction moves so many bits to predicates.
template <bool FROM_LIMIT, int N>
__device__ void hide(float (&S)[N], int limit) {
  limit = max(limit, 0);
  int bit = limit + __umulhi(limit, 0x24924925);  // limit / 7
#pragma unroll
  for (int n = 0; n < N; ++n) {
    unsigned int from_limit = __funnelshift_lc(0, 0xFFFFFFFF, max(bit - n / 28 * 32, 0));
    bool is_from_limit = from_limit >> (n % 28 + n % 28 / 7) & 1;
    S[n] = is_from_limit == FROM_LIMIT ? -infinity() : S[n];
  }
}

// Masks keys that query i does not see with -inf; MODIFIED: also turns q.k into scores. `dense` has the row's bias and
// dense mask.
template <bool MASKED, int N>
__device__ void modify(float (&S)[N], Score& score, const Band& band, int i, int kv_start, const DenseRow& dense) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    bool seen = true;
    Position key_in_bounds(band.key(kv_start + n), 0, n);
    if constexpr (DENSE_MASK) seen = dense.sees(n);
#if STAGED_BIAS
    score.bias = dense.bias_of(n);
#endif
    if constexpr (MASKED && MASK_MOD) seen &= band.mod_sees(score.head, band.query(i), key_in_bounds);
    float derivative;
    if constexpr (SCORE_MOD) {
      Position query(i), key(kv_start, n, n);
      if constexpr (MASKED) query = band.query(i), key = key_in_bounds;
      S[n] = score.apply(S[n], query, key, derivative);
    } else if constexpr (MODIFIED)
      S[n] = score.apply(S[n], i, kv_start + n, derivative);
    S[n] = seen ? S[n] : -infinity();
  }
  if constexpr (MASKED) {
    Range keys = band.keys(i);
    if (keys.end < kv_start + N) hide<true>(S, keys.end - kv_start);   // @visible-end
    if (keys.begin > kv_start) hide<false>(S, keys.begin - kv_start);  // @visible-begin
  }
}

#if STATISTICS
// Where the largest score of a row grows, its key is sought among so many columns.
constexpr int SOUGHT = 16;

// The largest number of a row, found part by part; NaN if one is NaN.
template <int N>
__device__ float max_of(const float (&S)[N]) {
  if constexpr (N > SOUGHT) {
    float rest = max_of(*(const float (*)[N - SOUGHT])(S + SOUGHT));
    return max_nan(max_of(*(const float (*)[SOUGHT])S), rest);
  } else {
    float even = S[0], odd = S[1];
#pragma unroll
    for (int n = 2; n < N; n += 2) even = max_nan(even, S[n]), odd = max_nan(odd, S[n + 1]);
    return max_nan(even, odd);
  }
}
#else
template <int N>
__device__ float max_of(const float (&S)[N]) {
  float largest[4] = {-infinity(), -infinity(), -infinity(), -infinity()};
#pragma unroll
  for (int n = 0; n < N; n += 2) largest[n / 2 % 4] = max(largest[n / 2 % 4], max(S[n], S[n + 1]));
  return max(max(largest[0], largest[1]), max(largest[2], largest[3]));
}
#endif

// Lazy rescaling (FlashAttention-4): returns the factor by which O must be rescaled, 1 unless the row max grew by more
// than RESCALE_ABOVE.
__device__ inline float update_max(Softmax2& softmax, float row_max, float scale_log2) {
  return softmax.exceeds_reference(row_max, scale_log2) ? softmax.update(row_max, scale_log2) : 1;  // @update-row-max
}

#if STATISTICS
// update_max, beside the terms of the entropy, whose exponents have base 2.
__device__ inline float update_max(Softmax2& softmax, RowStatistics& statistics, float row_max, float scale_log2) {
  float reference = softmax.reference, l = softmax.l, factor = update_max(softmax, row_max, scale_log2);
  if constexpr (ENTROPY) statistics.rescale(reference, softmax.reference, factor, l);
  return factor;
}

// Takes the scores of the keys from kv_start into the largest score of their row; `largest` is the largest of them.
template <int N>
__device__ void observe(RowStatistics& statistics, const float (&S)[N], float largest, int kv_start) {
  if constexpr (FIND_ARGMAX) {
    if (largest < statistics.top) return;
    int column = 0;
#pragma unroll
    for (int part = N - SOUGHT; part >= 0; part -= SOUGHT)
      if (max_of(*(const float (*)[SOUGHT])(S + part)) == largest) {  // @lowest-part-of-row
#pragma unroll
        for (int n = part + SOUGHT - 1; n >= part; --n) column = S[n] == largest ? n : column;  // @lowest-column-of-row
      }
    if (largest != largest) {
#pragma unroll
      for (int n = N - 1; n >= 0; --n) column = S[n] != S[n] ? n : column;
    }
    statistics.take(largest, kv_start + column);
  } else if constexpr (FIND_MAX) {
    statistics.top = max_nan(statistics.top, largest);
  }
}
#endif

// Sum of a row, in four parts.
struct RowSum {
  Pair even;
  Pair odd;

  __device__ RowSum(float first) : even(first, 0), odd(0, 0) {}
  __device__ float total() {
    float low, high;
    even += odd;
    even.get(low, high);
    return low + high;
  }
};

// 2^x and 2^y on the FMA pipe: a polynomial of degree 5 errs by 2.1e-7 at most, as ex2.approx does. What is below
// 2^-126 becomes 0, and NaN stays NaN.
__device__ inline void exp2_by_polynomial(float& x, float& y) {
  constexpr float COEFFICIENTS[] = {1.0000001f, 0.69314694f, 0.2402212f, 0.05550713f, 0.009675542f, 0.0013276472f};
  constexpr float TO_INTEGER = 12582912;  // 1.5 * 2^23: a sum with it is rounded to an integer, which its low bits have
  Pair exponent = {max_nan(x, -127), max_nan(y, -127)}, shifted = exponent;
  shifted += {TO_INTEGER, TO_INTEGER};
  Pair integer = shifted;
  integer += {-TO_INTEGER, -TO_INTEGER};
  Pair rest = fma_rn(integer, {-1, -1}, exponent);  // in [-1/2, 1/2]
  Pair power = {COEFFICIENTS[5], COEFFICIENTS[5]};
#pragma unroll
  for (int n = 4; n >= 0; --n) power = fma_rn(power, rest, {COEFFICIENTS[n], COEFFICIENTS[n]});  // @polynomial
  shifted.get(x, y);
  Pair scale = {__uint_as_float((__float_as_uint(x) << 23) + 0x3F800000),
                __uint_as_float((__float_as_uint(y) << 23) + 0x3F800000)};
  fma_rn(power, scale, {0, 0}).get(x, y);
}

template <int N>
__device__ void exponentiate(float (&S)[N], RowSum& sum, const Softmax2& softmax, float scale_log2) {
  Pair scale = {scale_log2, scale_log2}, reference = {-softmax.reference, -softmax.reference};
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    fma_rn({S[n], S[n + 1]}, scale, reference).get(S[n], S[n + 1]);
    if (n / 2 * POLYNOMIALS % 16 < POLYNOMIALS)
      exp2_by_polynomial(S[n], S[n + 1]);
    else
      S[n] = ex2_approx(S[n]), S[n + 1] = ex2_approx(S[n + 1]);
    (n % 4 ? sum.odd : sum.even) += {S[n], S[n + 1]};
  }
}

#if STATISTICS
// exponentiate, with the terms of the entropy in `w`. HIDES: some scores may be -inf.
template <bool HIDES, int N>
__device__ void exponentiate(float (&S)[N], RowSum& sum, RowSum& w, const Softmax2& softmax, float scale_log2) {
  Pair scale = {scale_log2, scale_log2}, reference = {-softmax.reference, -softmax.reference};
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    Pair exponents = fma_rn({S[n], S[n + 1]}, scale, reference);
    exponents.get(S[n], S[n + 1]);
    if (HIDES) exponents = {max_nan(S[n], -1e30f), max_nan(S[n + 1], -1e30f)};  // @hidden-term-of-row
    if (n / 2 * POLYNOMIALS % 16 < POLYNOMIALS)
      exp2_by_polynomial(S[n], S[n + 1]);
    else
      S[n] = ex2_approx(S[n]), S[n + 1] = ex2_approx(S[n + 1]);
    Pair probabilities = {S[n], S[n + 1]};
    (n % 4 ? sum.odd : sum.even) += probabilities;
    (n % 4 ? w.odd : w.even) = fma_rn(probabilities, exponents, n % 4 ? w.odd : w.even);
  }
}
#endif

// A Philox call serves the rows i and i + 8, which are those of lanes l and l ^ 8: each lane makes every other call,
// and gives the other lane two of its four words.
template <int N>
__device__ void drop(float (&P)[N], const Dropout& dropout, int i, int kv_start) {
  bool is_upper = i & 8;
#pragma unroll
  for (int n = 0; n < N; n += 16)
#pragma unroll
    for (int pair = 0; pair < 8; pair += 4) {  // columns pair, pair + 1 and pair + 2, pair + 3, and 8 further right
      Philox mine = dropout.bits(i, kv_start + n + pair + (is_upper ? 2 : 0));  // @call-of-lane
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned int kept = is_upper ? mine.word[2 + half] : mine.word[half];
        unsigned int given = is_upper ? mine.word[half] : mine.word[2 + half];
        unsigned int received = __shfl_xor_sync(0xFFFFFFFF, given, 8);  // @words-of-other-lane
        unsigned int bits[2] = {is_upper ? received : kept, is_upper ? kept : received};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if ((bits[e / 2] >> 16 * (e % 2) & 0xFFFF) < dropout.drop_below) P[n + 8 * half + pair + e] = 0;
      }
    }
}

template <int N>
__device__ void round_row(unsigned int (&rounded)[N / 2], const float (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N; n += 2) rounded[n / 2] = cvt_rn_x2<element>(x[n], x[n + 1]);
}

// Returns the factor that normalises O in row i, and stores the row's lse.
__device__ inline float finish(const Softmax2& softmax, const Params& p, const Sequence& sequence,
                               const Dropout& dropout, int head, int i) {
  Softmax2::Ending ending = softmax.end(log2_scale_of(p), SCALE_IN_EXPONENT ? (float)p.scale : 1.0f);
  if constexpr (SINK) ending.add_sink(to_real(((const sink_element*)p.sink)[head]));
  float* lse = sequence.queries<float>(p.lse, head);
  if (i < sequence.q_rows) lse[i * p.lse.row] = i < sequence.q_len ? ending.lse : -infinity();
  return i < sequence.q_len ? ending.factor * (DROPOUT ? (float)dropout.keep_scale : 1.0f) : 0;
}

#if STATISTICS
// Stores the statistics of row i.
__device__ inline void store_statistics(RowStatistics& statistics, const Softmax2& softmax, const Params& p,
                                        const Sequence& sequence, int head, int i) {
  float scale = SCALE_IN_EXPONENT ? (float)p.scale : 1.0f, entropy = softmax.entropy(statistics.w);
  entropy = entropy_with_sink(p, head, softmax.end(log2_scale_of(p), scale), entropy);
  statistics.top *= scale;
  if (i < sequence.q_rows) statistics.store(p, sequence, head, i, entropy);
}
#endif
