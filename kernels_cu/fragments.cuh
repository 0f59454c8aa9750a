// Steps of the forward on mma fragments, shared by the mma and the wgmma engine:
//
//   modify          q.k -> scores, -inf where a query does not see a key
//   moved           q.k and its tangent -> one score and its tangent
//   update_max      row max and, lazily, the reference of the exponents
//   exponentiate    scores -> probabilities, and their partial row sums
//   drop            dropout of probabilities
//   finish          row sums -> normalisation of O, and lse
//   observe, store_statistics     statistics of the rows, beside update_max and finish
//   store_chunk     eight rounded numbers -> a row of a tensor
//
// A warp has 16 M rows: fragment (m, n) of C is 16 x 8, and a lane has four elements of each, laid out as those of
// mma_m16n8k16 in ptx.cuh. The accumulators of wgmma have the same layout.
#pragma once
#include "dropout.cuh"
#include "mask.cuh"
#include "score.cuh"
#include "softmax2.cuh"
#if STATISTICS
#include "statistics.cuh"
#endif

__device__ constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
__device__ constexpr int maximum(int a, int b) {
  return a > b ? a : b;
}

// Reductions over the four lanes that share a row.
__device__ inline float row_max(float x) {
  x = max(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return max(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// True if the softmax takes the bare q.k, with the scale folded into scale_log2; false if scores are computed first.
constexpr bool SCALE_IN_EXPONENT = !MODIFIED;

__device__ inline float log2_scale_of(float scale) {
  return SCALE_IN_EXPONENT ? scale * LOG2_E : LOG2_E;
}
__device__ inline float log2_scale_of(const Params& p) {
  return log2_scale_of((float)p.scale);
}

// Masks keys that a query does not see with -inf; MODIFIED: also turns q.k into scores.
template <bool MASKED, int M, int N>
__device__ void modify(float (&S)[M][N][4], const Score& score, const Band& band, int q_start, int kv_start) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int i = q_start + row_of(m, 2 * half);
      Range keys = band.keys(i);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          int j = kv_start + column_of(n, e);
          bool seen = !MASKED || keys(j);
          Position key_in_bounds(band.key(j), 0, column_of(n, e));  // @key-in-bounds
          if constexpr (DENSE_MASK) seen = seen && DenseMask::sees(score.p, band, score.batch, score.head, i, j);
          if constexpr (MASKED && MASK_MOD) seen &= band.mod_sees(score.head, band.query(i), key_in_bounds);
          float derivative;
          if constexpr (SCORE_MOD) {
            Position query(q_start + row_of(0, 0), row_offset(m, e));
            Position key(kv_start + column_of(0, 0), column_offset(n, e), column_of(n, e));
            if constexpr (MASKED) query = band.query(i), key = key_in_bounds;
            float s = score.apply(S[m][n][e], query, key, derivative);
            S[m][n][e] = seen ? s : -infinity();
          } else if constexpr (MODIFIED)
            S[m][n][e] = seen ? score.apply(S[m][n][e], i, j, derivative) : -infinity();
          else
            S[m][n][e] = seen ? S[m][n][e] : -infinity();
        }
    }
}

#if DIRECTION
// The score of query i and key j with its tangent, from q.k and its tangent; -inf if the query does not see the key.
template <bool MASKED, bool BY_BIAS>
__device__ Score::Moved moved(const Score& score, const Band& band, float product, float tproduct, int i, int j) {
  bool seen = !MASKED || band.sees(i, j);
  if constexpr (MASKED && MASK_MOD) seen = seen && band.mod_sees(score.head, i, j);
  if constexpr (DENSE_MASK) seen = seen && DenseMask::sees(score.p, band, score.batch, score.head, i, j);
  Score::Moved hidden = {-infinity()};
  if (!seen) return hidden;
  Score::Moved x = score.moved<BY_BIAS>(product, tproduct, i, j);
  // The tangent of a score of -inf may be NaN, and so would be its product with P = 0.
  return (BIAS || SCORE_MOD) && x.score == -infinity() ? hidden : x;
}
#endif

#if !STATISTICS
// Lazy rescaling (FlashAttention-4): true if any row max in the warp grew by more than RESCALE_ABOVE. Then every row
// updates its reference, and factors = 2^(old - new) rescale O.
template <int M, int N>
__device__ bool update_max(float (&factors)[M][2], Softmax2 (&softmax)[M][2], const float (&S)[M][N][4],
                           float scale_log2) {
  float largest[M][2];
  bool exceeds = false;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[m][half] = -infinity();
#pragma unroll
      for (int n = 0; n < N; ++n)
        largest[m][half] = max(largest[m][half], max(S[m][n][2 * half], S[m][n][2 * half + 1]));
      exceeds |= softmax[m][half].exceeds_reference(largest[m][half], scale_log2);
    }
  if (!__any_sync(0xFFFFFFFF, exceeds)) return false;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      factors[m][half] = softmax[m][half].update(row_max(largest[m][half]), scale_log2);  // @update-softmax
  return true;
}

#endif
#if STATISTICS
template <int M>
__device__ void init(RowStatistics (&statistics)[M][2]) {
#pragma unroll
  for (int n = 0; n < 2 * M; ++n) statistics[n / 2][n % 2].init();
}

// The largest scores of a lane in a tile, by parts of the columns: where a row max grows, its key is sought in one
// part.
template <int M, int N>
struct LargestOfTile {
  static constexpr int PART = 4, PARTS = (N + PART - 1) / PART;  // fragments of a part

  float parts[M][2][PARTS];
  float all[M][2];

  __device__ LargestOfTile(const float (&S)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < N; ++n) {
          float& part = parts[m][half][n / PART];
          float of_fragment = max_nan(S[m][n][2 * half], S[m][n][2 * half + 1]);
          part = n % PART ? max_nan(part, of_fragment) : of_fragment;
          if (n % PART == PART - 1 || n == N - 1) all[m][half] = n < PART ? part : max_nan(all[m][half], part);
        }
  }
};

// The lowest column of a lane with the number x in a row of a tile.
template <int M, int N>
__device__ int column_with(const LargestOfTile<M, N>& largest, const float (&S)[M][N][4], int m, int half, float x) {
  constexpr int PART = LargestOfTile<M, N>::PART;
  int column = 0;
#pragma unroll
  for (int c = LargestOfTile<M, N>::PARTS - 1; c >= 0; --c)
    if (largest.parts[m][half][c] == x) {  // @lowest-part
#pragma unroll
      for (int n = min(c * PART + PART, N) - 1; n >= c * PART; --n)
#pragma unroll
        for (int e = 2 * half + 1; e >= 2 * half; --e)
          column = S[m][n][e] == x ? column_offset(n, e) : column;  // @lowest-column
    }
  return column;
}

// The lowest column of a lane with NaN in a row of a tile.
template <int M, int N>
__device__ int column_with_nan(const float (&S)[M][N][4], int m, int half) {
  int column = 0;
#pragma unroll
  for (int n = N - 1; n >= 0; --n)
#pragma unroll
    for (int e = 2 * half + 1; e >= 2 * half; --e) column = S[m][n][e] != S[m][n][e] ? column_offset(n, e) : column;
  return column;
}

// Finds the lowest key of a tile that has the row's largest score so far. In the four lanes of a row `top` is the same,
// and `key` that of the lane's own scores, or NO_KEY if they are lower.
template <int M, int N>
__device__ void find_keys(RowStatistics (&statistics)[M][2], const float (&S)[M][N][4],
                          const LargestOfTile<M, N>& largest, int kv_start) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowStatistics& row = statistics[m][half];
      float of_lane = largest.all[m][half], found = max_nan(of_lane, __shfl_xor_sync(0xFFFFFFFF, of_lane, 1));
      found = max_nan(found, __shfl_xor_sync(0xFFFFFFFF, found, 2));
      int first = kv_start + column_of(0, 0);
      if (found != found) {
        if (row.top == row.top) row.top = found, row.key = RowStatistics::NO_KEY;
        if (of_lane != of_lane) row.key = first + column_with_nan(S, m, half);
      } else {
        if (found > row.top) row.top = found, row.key = RowStatistics::NO_KEY;
        if (of_lane == row.top) row.key = first + column_with(largest, S, m, half, of_lane);
      }
    }
}

// update_max beside the terms of the entropy, whose exponents have base 2; `largest` is that of this lane's scores.
template <int M>
__device__ bool update_max(float (&factors)[M][2], Softmax2 (&softmax)[M][2], RowStatistics (&statistics)[M][2],
                           const float (&largest)[M][2], float scale_log2) {
  bool exceeds = false;
#pragma unroll
  for (int n = 0; n < 2 * M; ++n) exceeds |= softmax[n / 2][n % 2].exceeds_reference(largest[n / 2][n % 2], scale_log2);
  if (!__any_sync(0xFFFFFFFF, exceeds)) return false;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Softmax2& row = softmax[m][half];
      float reference = row.reference, l = row.l;
      factors[m][half] = row.update(row_max(largest[m][half]), scale_log2);  // @update-softmax
      if constexpr (ENTROPY) statistics[m][half].rescale(reference, row.reference, factors[m][half], l);
    }
  return true;
}

// update_max, with statistics of the scores.
template <int M, int N>
__device__ bool observe(float (&factors)[M][2], Softmax2 (&softmax)[M][2], RowStatistics (&statistics)[M][2],
                        const float (&S)[M][N][4], float scale_log2, int kv_start) {
  LargestOfTile<M, N> of_tile(S);
  const float (&largest)[M][2] = of_tile.all;
  if constexpr (FIND_ARGMAX) {
    // A reference is exceeded only by a score that is larger than all before.
    bool grows = false;
#pragma unroll
    for (int n = 0; n < 2 * M; ++n) grows |= !(largest[n / 2][n % 2] < statistics[n / 2][n % 2].top);  // @grows
    if (!__any_sync(0xFFFFFFFF, grows)) return false;
    find_keys(statistics, S, of_tile, kv_start);
  } else if constexpr (FIND_MAX) {
#pragma unroll
    for (int n = 0; n < 2 * M; ++n)
      statistics[n / 2][n % 2].top = max_nan(statistics[n / 2][n % 2].top, largest[n / 2][n % 2]);
  }
  return update_max(factors, softmax, statistics, largest, scale_log2);
}
#endif

template <int M, int N>
__device__ void rescale(float (&O)[M][N][4], const float (&factors)[M][2]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) O[m][n][e] *= factors[m][e / 2];  // @rescale-O
}

template <int M, int N>
__device__ void exponentiate(float (&S)[M][N][4], Softmax2 (&softmax)[M][2], float scale_log2) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S[m][n][e] = softmax[m][e / 2].probability(S[m][n][e], scale_log2);
        softmax[m][e / 2].l += S[m][n][e];
      }
}

#if STATISTICS
// exponentiate, with the terms of the entropy. HIDES: some scores may be -inf.
template <bool HIDES, int M, int N>
__device__ void exponentiate(float (&S)[M][N][4], Softmax2 (&softmax)[M][2], RowStatistics (&statistics)[M][2],
                             float scale_log2) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float exponent = S[m][n][e] * scale_log2 - softmax[m][e / 2].reference;
        S[m][n][e] = ex2_approx(exponent);
        softmax[m][e / 2].l += S[m][n][e];
        if constexpr (HIDES)
          statistics[m][e / 2].add_term(S[m][n][e], exponent);
        else
          statistics[m][e / 2].w = fmaf(S[m][n][e], exponent, statistics[m][e / 2].w);
      }
}
#endif

// The random bits of two fragments side by side, from one Philox call per lane: the eight elements of a lane in a 16 x
// 16 block share one counter.
struct Bits {
  Philox bits;

  __device__ void draw(const Dropout& dropout, int i, int j) { bits = dropout.bits(i, j); }
  // @dropout-column
  __device__ unsigned int operator()(int n, int e) const { return bits.half(8 * (e / 2), 8 * (n % 2) + e % 2); }
};

template <int M, int N>
__device__ void drop(float (&P)[M][N][4], const Dropout& dropout, int q_start, int kv_start) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      Bits bits;
      bits.draw(dropout, q_start + row_of(m, 0), kv_start + column_of(n, 0));
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (bits(e / 4, e % 4) < dropout.drop_below) P[m][n + e / 4][e % 4] = 0;
    }
}

// C, rounded, as A fragments of the next mma.
template <int M, int N>
__device__ void round_fragments(unsigned int (&A)[M][N / 2][4], const float (&C)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      A[m][n / 2][n % 2 * 2] = cvt_rn_x2<element>(C[m][n][0], C[m][n][1]);
      A[m][n / 2][n % 2 * 2 + 1] = cvt_rn_x2<element>(C[m][n][2], C[m][n][3]);
    }
}

// Computes the factors that normalise O in the rows from q_start, and stores lse; `writes_lse` is true in one of the
// warps that share rows. `scale` multiplies the bare q.k.
template <int M>
__device__ void finish(float (&factors)[M][2], Softmax2 (&softmax)[M][2], const Params& p, const Sequence& sequence,
                       const Dropout& dropout, int head, int q_start, bool writes_lse, float scale) {
  float* lse = sequence.queries<float>(p.lse, head);
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int i = q_start + row_of(m, 2 * half);
      softmax[m][half].l = row_sum(softmax[m][half].l);  // @sum-l
      Softmax2::Ending ending = softmax[m][half].end(log2_scale_of(scale), SCALE_IN_EXPONENT ? scale : 1.0f);
      if constexpr (SINK) ending.add_sink(to_real(((const sink_element*)p.sink)[head]));  // @add-sink
      // @keep-scale
      factors[m][half] = i < sequence.q_len ? ending.factor * (DROPOUT ? (float)dropout.keep_scale : 1.0f) : 0;
      if (writes_lse && lane_id() % 4 == 0 && i < sequence.q_rows)
        lse[i * p.lse.row] = i < sequence.q_len ? ending.lse : -infinity();
    }
}
template <int M>
__device__ void finish(float (&factors)[M][2], Softmax2 (&softmax)[M][2], const Params& p, const Sequence& sequence,
                       const Dropout& dropout, int head, int q_start, bool writes_lse) {
  finish(factors, softmax, p, sequence, dropout, head, q_start, writes_lse, (float)p.scale);
}

#if STATISTICS
// Stores the statistics of rows, after `finish`; place(m, half, head, i) sets the head and the query of a row.
template <int M, typename Place>
__device__ void store_statistics(RowStatistics (&statistics)[M][2], const Softmax2 (&softmax)[M][2], const Params& p,
                                 const Sequence& sequence, bool writes, Place place) {
  float scale = SCALE_IN_EXPONENT ? (float)p.scale : 1.0f;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowStatistics& row = statistics[m][half];
      row.reduce(4);
      row.top *= scale;
      float entropy = softmax[m][half].entropy(row_sum(row.w));
      int head, i;
      place(m, half, head, i);
      entropy = entropy_with_sink(p, head, softmax[m][half].end(log2_scale_of(p), scale), entropy);  // @join-sink
      if (writes && lane_id() % 4 == 0 && i < sequence.q_rows) row.store(p, sequence, head, i, entropy);
    }
}
template <int M>
__device__ void store_statistics(RowStatistics (&statistics)[M][2], const Softmax2 (&softmax)[M][2], const Params& p,
                                 const Sequence& sequence, int head, int q_start, bool writes) {
  store_statistics(statistics, softmax, p, sequence, writes, [&](int m, int half, int& of, int& i) {
    of = head;
    i = q_start + row_of(m, 2 * half);
  });
}
#endif

// Stores eight numbers to columns [8 * chunk, 8 * chunk + 8) of a row of DIM columns: as one vector if rows are
// aligned.
template <int DIM>
__device__ void store_chunk(element* row, const Operand& x, int chunk, uint4 numbers) {
  element* to = row + 8 * chunk;
  if (x.aligned == 8) {  // @aligned-store
    *(uint4*)to = numbers;
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (8 * chunk + e < DIM) to[e].bits = ((unsigned int*)&numbers)[e / 2] >> 16 * (e % 2);
  }
}
