// The numbers of a row that a double backward reads with every score, in one record that a thread loads at once.
#pragma once
#include "number.cuh"

struct alignas(16) RowNumbers {
  real lse2;  // lse * log2(e); +inf for a row that sees no key, whose other numbers are 0
  real mu;
  real delta;
  real eps;
};
