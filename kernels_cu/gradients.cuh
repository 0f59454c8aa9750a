// Steps of the backward on mma fragments, shared by the mma and the wgmma engine: from q.k and dO V^T to the
// probabilities and the gradients of the scores.
#pragma once
#include "fragments.cuh"

// Random bits of a transposed tile. A lane's elements belong to two Philox counters, one per column, and a neighbouring
// lane needs the other halves of the same words. Each of the two lanes therefore computes one counter and sends its
// words to the other.
struct TransposedBits {
  Philox own;
  Philox other;
  unsigned int odd;

  __device__ void draw(const Dropout& dropout, int i, int j) {
    odd = j & 1;
    own = dropout.bits(i + odd, j);
#pragma unroll
    for (int n = 0; n < 4; ++n) other.word[n] = __shfl_xor_sync(0xFFFFFFFF, own.word[n], 4);
  }
  __device__ unsigned int operator()(int n, int e) const {
    unsigned int own_word = own.word[2 * (n % 2) + e / 2], other_word = other.word[2 * (n % 2) + e / 2];
    return (e % 2 == odd ? own_word : other_word) >> 16 * odd & 0xFFFF;  // @dropout-word
  }
};

template <bool FIRST, typename A, typename B>
struct Choice {
  using type = A;
};
template <typename A, typename B>
struct Choice<false, A, B> {
  using type = B;
};

// lse2 and delta of the rows of a tile.
struct Rows {
  const float* lse2;
  const float* delta;

#if DSTATISTICS
  // They follow delta, BLOCK_Q numbers each.
  __device__ StatisticsGradients statistics() const {
    return {delta + BLOCK_Q, delta + 2 * BLOCK_Q, (const int*)(delta + 3 * BLOCK_Q)};
  }
#endif
};

struct NoWait {
  __device__ void operator()() const {}
};
template <typename Wait>
constexpr bool WAITS = true;
template <>
constexpr bool WAITS<NoWait> = false;

// Turns Q K^T and dO V^T of a tile into P (after dropout) and dS, in place. TRANSPOSED: rows are keys, columns are
// queries. SCORE_GRADIENT: dS is the gradient of the bias, or of the elements that score_mod reads; otherwise of scale
// * q.k. `masked` is false if every query of the tile sees every key. `wait` runs between the exponentials and the dS
// pass, so that the caller can overlap dO V^T with them.
template <bool TRANSPOSED, bool SCORE_GRADIENT, int M, int N, typename Wait = NoWait>
__device__ void differentiate(float (&S)[M][N][4], float (&dP)[M][N][4], bool masked, const Score& score,
                              const Band& band, const Dropout& dropout, float scale_log2, Rows queries, int i0, int j0,
                              Wait wait = {}) {
  using RandomBits = typename Choice<TRANSPOSED, TransposedBits, Bits>::type;
  [[maybe_unused]] float keep_scale = dropout.keep_scale;
  // Query and key of element e of fragments (m, n) and (m, n + 1).
  auto query_of = [](int m, int n, int e) { return TRANSPOSED ? column_of(n + e / 4, e % 4) : row_of(m, e % 4); };
  auto key_of = [](int m, int n, int e) { return TRANSPOSED ? row_of(m, e % 4) : column_of(n + e / 4, e % 4); };
  auto probabilities = [&](bool masked, int m, int n, float (&derivatives)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      int query = query_of(m, n, e), i = i0 + query, j = j0 + key_of(m, n, e);
      float& s = S[m][n + e / 4][e % 4];
      bool seen = !masked || (TRANSPOSED ? band.queries(j)(i) : band.keys(i)(j));
      if constexpr (DENSE_MASK) seen = seen && DenseMask::sees(score.p, band, score.batch, score.head, i, j);
      if (MASK_MOD && masked) seen &= band.mod_sees(score.head, band.query(i), band.key(j));
      if constexpr (SCORE_MOD) {
        // Offsets are constants, so that the compiler evaluates a score_mod once for scores at the same distance.
        int row = row_offset(m, e % 4), column = column_offset(n + e / 4, e % 4);
        Position at_query(i0 + query_of(0, 0, 0), TRANSPOSED ? column : row);
        Position at_key(j0 + key_of(0, 0, 0), TRANSPOSED ? row : column);
        if (masked) at_query = band.query(i), at_key = band.key(j);
        float x = score.apply<SCORE_GRADIENT>(s, at_query, at_key, derivatives[e]);
        s = seen ? x : -infinity();
      } else if constexpr (MODIFIED)
        s = seen ? score.apply(s, i, j, derivatives[e]) : -infinity();
      else
        s = seen ? s : -infinity();
      // Otherwise a hidden score would keep the derivative of an earlier score, which may be NaN, and 0 times NaN is
      // NaN.
      if ((SOFTCAP || SCORE_MOD) && !seen) derivatives[e] = 0;
      s = ex2_approx(s * scale_log2 - queries.lse2[query]);
    }
  };
  auto gradients = [&](int m, int n, const float (&derivatives)[8]) {
    RandomBits bits;
    if constexpr (DROPOUT) bits.draw(dropout, i0 + query_of(m, n, 0), j0 + key_of(m, n, 0));
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float &s = S[m][n + e / 4][e % 4], &dp = dP[m][n + e / 4][e % 4];
      float factor = 1;
      if constexpr (DROPOUT) factor = bits(e / 4, e % 4) < dropout.drop_below ? 0 : keep_scale;
      float ds = s * (dp * factor - queries.delta[query_of(m, n, e)]);
#if DSTATISTICS
      ds += queries.statistics().of_score(query_of(m, n, e), j0 + key_of(m, n, e), s, LN_2 * lg2_approx(s));
#endif
      s *= factor;
      dp = SCORE_GRADIENT && !SCORE_MOD ? ds : score.gradient(ds, derivatives[e]);
    }
  };

  // Each call passes `masked` as a constant, so that the inlined code has one branch only.
  constexpr int PAIRS = M * N / 2;
  float derivatives[8] = {};
  // Probabilities and gradients of two fragments at a time. If all exponentials came first, as in exponentiate_all, the
  // derivatives of all scores would be live at once; with dropout or many scores the compiler would spill, too.
  auto attend_pairs = [&](bool masked) {
#pragma unroll
    for (int t = 0; t < PAIRS; ++t) {
      int m = t / (N / 2), n = t % (N / 2) * 2;
      probabilities(masked, m, n, derivatives);
      gradients(m, n, derivatives);
    }
  };
  auto exponentiate_all = [&](bool masked) {
#pragma unroll
    for (int t = 0; t < PAIRS; ++t) probabilities(masked, t / (N / 2), t % (N / 2) * 2, derivatives);
  };
  constexpr bool MANY = M * N > 8;
  if constexpr (SOFTCAP || SCORE_MOD || DROPOUT || (MANY && !WAITS<Wait>)) {
    wait();
    if (masked)
      attend_pairs(true);
    else
      attend_pairs(false);
  } else if (MANY && masked) {
    wait();  // @wait-dP-of-masked-tile
    attend_pairs(true);
  } else {
    if (masked)
      exponentiate_all(true);
    else
      exponentiate_all(false);
    wait();  // @wait-dP-of-full-tile
#pragma unroll
    for (int t = 0; t < PAIRS; ++t) gradients(t / (N / 2), t % (N / 2) * 2, derivatives);
  }
}
