// What a backward does with the fragments of matrix instructions, element by element, whichever instruction made them:
// from two products to the probabilities and the gradients of the scores.
#pragma once
#include "fragments.cuh"

// Transposed, a lane has the elements of two counters, one of each of two columns, and its neighbour the other halves
// of their words: each makes one, and they exchange.
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
    unsigned int mine = own.word[2 * (n % 2) + e / 2], theirs = other.word[2 * (n % 2) + e / 2];
    return (e % 2 == odd ? mine : theirs) >> 16 * odd & 0xFFFF;
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

// What the backward needs of a row that it walks over, by its place in the tile.
struct Rows {
  const float* lse2;
  const float* delta;
};

// Q K^T and dO V^T of a tile to P (after dropout) and dS, in place. TRANSPOSED: rows are keys and columns queries.
// OF_SCORE: dS is the gradient of the score that the softmax saw, else that of scale * q.k.
template <bool MASKED, bool TRANSPOSED, bool OF_SCORE, int M, int N>
__device__ void differentiate(float (&S)[M][N][4], float (&dP)[M][N][4], const Score& score, const Band& band,
                              const Dropout& dropout, float unit, Rows queries, int i0, int j0) {
  using TheirBits = typename Choice<TRANSPOSED, TransposedBits, Bits>::type;
  float keep_scale = dropout.keep_scale;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    Range seen_by[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = row_of(m, 2 * half);
      seen_by[half] = TRANSPOSED ? band.queries(j0 + row) : band.keys(i0 + row);
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      int row = row_of(m, 0), column = column_of(n, 0);
      TheirBits bits;
      if constexpr (DROPOUT) bits.draw(dropout, i0 + (TRANSPOSED ? column : row), j0 + (TRANSPOSED ? row : column));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        int row = row_of(m, e % 4), column = column_of(n + e / 4, e % 4);
        int query = TRANSPOSED ? column : row, i = i0 + query, j = j0 + (TRANSPOSED ? row : column);
        float &s = S[m][n + e / 4][e % 4], &dp = dP[m][n + e / 4][e % 4];
        bool seen = !MASKED || seen_by[e % 4 / 2](TRANSPOSED ? i : j);
        if constexpr (DENSE_MASK) seen = seen && DenseMask::sees(score.p, score.batch, score.head, i, j);
        float slope_of_cap = 0;
        if constexpr (MODIFIED)
          s = seen ? score.apply(s, i, j, slope_of_cap) : -infinity();
        else
          s = seen ? s : -infinity();
        float probability = exp2_fast(s * unit - queries.lse2[query]);
        float factor = 1;
        if constexpr (DROPOUT) factor = bits(e / 4, e % 4) < dropout.drop_below ? 0 : keep_scale;
        float ds = probability * (dp * factor - queries.delta[query]);
        s = probability * factor;
        dp = OF_SCORE ? ds : score.gradient(ds, slope_of_cap);
      }
    }
  }
}
