// The online-softmax state of one row: reference m and sum l, the sink among them. Twin of partials.py.
#pragma once
#include "number.cuh"

struct Softmax {
  real m;
  real l;

  // A sink is a key of score `sink` and value 0, seen before all others.
  __device__ void init(real sink) {
    m = sink;
    l = sink > -infinity() ? 1 : 0;
  }

  // The factor that brings what was summed to the new reference; a row that has seen nothing has none to bring.
  __device__ real rescale(real row_max) {
    real previous = m;
    m = max(m, row_max);
    return m == -infinity() ? 1 : exp(previous - m);
  }

  __device__ real probability(real s) const { return s == -infinity() ? 0 : exp(s - m); }

  __device__ real inverse_sum() const { return l == 0 ? 0 : 1 / l; }
  __device__ real lse() const { return m + log(l); }
};
