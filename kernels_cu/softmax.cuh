// Online-softmax state of one row: row max m and row sum l, including the sink.
#pragma once
#include "number.cuh"

struct Softmax {
  real m;
  real l;

  // A sink is a key with score `sink` and value 0 that precedes all others.
  __device__ void init(real sink) {
    m = sink;
    l = sink > -infinity() ? 1 : 0;
  }

  // Updates m and returns exp(m_old - m_new), which rescales O and l; 1 while the row has seen no key.
  __device__ real rescale(real row_max) {
    real previous = m;
    m = max(m, row_max);
    return m == -infinity() ? 1 : exp(previous - m);
  }

  __device__ real probability(real s) const { return s == -infinity() ? 0 : exp(s - m); }

  __device__ real inverse_sum() const { return l == 0 ? 0 : 1 / l; }
  __device__ real lse() const { return m + log(l); }
};
