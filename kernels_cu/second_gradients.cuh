// Computes the gradients of a double backward at one score. tS is the score's tangent in the direction (tQ, tK, tV,
// ...), m its dropout factor; row_numbers.cuh defines mu, delta and eps:
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

// Returns the gradients of a score from its probability and tangent, dP = dO V^T, dtP = dO tV^T and dropout factor.
__device__ inline PairGradients pair_gradients(real probability, real tangent, real dP, real dtP, real factor,
                                               real lse_tangent, real delta, real delta_tangent) {
  real moving = tangent - lse_tangent, excess = dP * factor - delta;  // @moving-tangent
  // @second-gradients
  return {probability * (moving * excess + (dtP * factor - delta_tangent)), probability * excess,
          probability * factor * moving};
}
