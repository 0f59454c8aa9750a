// The tangent mu of lse over the keys so far, which a JVP updates after each tile of keys.
#pragma once
#include "number.cuh"

constexpr bool SCORES_MOVE = TQ || TK || TBIAS || TSINK || TCAPTURED;  // probabilities have a tangent

// The mean of tS over the keys so far; a sink counts as the first key. The double backward subtracts the mean from each
// tS, which magnifies the rounding error of the mean where one key dominates. The sum is therefore kept in twice the
// precision of real, and only mu is rounded.
struct Mean {
  real sum;          // sum of P tS, with P relative to the current row max
  real rest;         // rounding errors of `sum`
  real lse_tangent;  // mu

  // Adds the sum of a tile, and returns the change of mu.
  __device__ real update(real rescale, real tile_sum, real l) {
    real before = lse_tangent, scaled = sum * rescale, total = scaled + tile_sum, added = total - scaled;
    rest = rest * rescale + fma(sum, rescale, -scaled) + (scaled - (total - added)) + (tile_sum - added);
    sum = total;
    real quotient = sum / l;
    lse_tangent = l == 0 ? 0 : quotient + (fma(-quotient, l, sum) + rest) / l;
    return lse_tangent - before;
  }
};
