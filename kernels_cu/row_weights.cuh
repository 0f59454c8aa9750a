// The weights of rows of key_importance.
#pragma once
#include "number.cuh"
#include "params.cuh"

// The weight of a row of q, which is counted over all sequences of a packed batch; 1 without weights.
__device__ inline real row_weight(const Params& p, int batch, int head, int row) {
  const Dense& x = p.row_weights;
  if (!x.data) return 1;
  return to_real(((const weight_element*)x.data)[(PACKED ? 0 : batch * x.batch) + head * x.head + row * x.row]);
}
