// The step of the online softmax of a row with its statistics.
#pragma once
#include "../softmax.cuh"
#include "../statistics.cuh"
#include "tile.cuh"

// Turns this thread's scores of a row into probabilities, adds the terms of the entropy, and returns their sum. m has
// been updated from `previous_m`, and `rescale` = e^(previous m - m) not yet been applied to l.
template <int COLS>
__device__ real exponentiate(real (&S)[COLS], const Softmax& softmax, RowStatistics& statistics, real previous_m,
                             real rescale) {
  RowStatistics of_tile = {};
  real sum = 0;
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    real exponent = S[c] - softmax.m;  // @shift-of-term
    sum += S[c] = softmax.probability(S[c]);
    if constexpr (ENTROPY) of_tile.add_term(S[c], exponent);
  }
  if constexpr (ENTROPY) {
    statistics.rescale(previous_m, softmax.m, rescale, softmax.l);
    statistics.w += row_sum(of_tile.w);
  }
  return sum;
}
