// Record of the numbers of a query row that a double backward reads with every score. delta.cu writes it, and a thread
// loads it at once.
#pragma once
#include "number.cuh"

struct alignas(16) RowNumbers {
  real lse2;           // lse * log2(e); +inf for a row that sees no key, whose other numbers are 0
  real lse_tangent;    // mu, the tangent of lse
  real delta;          // rowsum(dO * O) - dlse
  real delta_tangent;  // eps = rowsum(dO * tO)
};
