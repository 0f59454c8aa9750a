// The gradients that a double backward has at one score. In a direction (tQ, tK, tV, ...) with score tangents tS, m the
// factors of dropout and mu the tangent of lse:
//
//     g = m (dO V^T) ;  h = m (dO tV^T) ;  c = tS - mu
//     dS = P (c (g - delta) + h - eps) ;  dtS = P (g - delta) ;  W = m P c, of which dV = W^T dO
#pragma once
#include "mean.cuh"
#include "row_numbers.cuh"

struct PairGradients {
  real dS;
  real dtS;
  real W;
};

// The gradients of a score with this probability and tangent, from its dO V^T and dO tV^T.
__device__ inline PairGradients pair_gradients(real probability, real tangent, real dP, real dtP, real factor, real mu,
                                               real delta, real eps) {
  real moving = tangent - mu, excess = dP * factor - delta;
  return {probability * (moving * excess + (dtP * factor - eps)), probability * excess, probability * factor * moving};
}
