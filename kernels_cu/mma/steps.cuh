// The load of dO, which the backward kernels of the mma engine share.
#pragma once
#include "../gradients.cuh"
#include "gemm.cuh"
#include "load.cuh"

// Loads the rows of dO whose queries are in `queries`, and zeros for others. A row that sees no key must not
// contribute, whatever its dO is. `queries` excludes rows that see no key by position; rows whose keys are all hidden
// by a dense mask or a bias have an lse of -inf.
template <typename Rows>
__device__ void load_dO(unsigned int dO_smem, const Loader<BLOCK_Q, HEAD_DIM_V>& loader, const Rows& dO,
                        const Params& p, const Sequence& sequence, int head, Range queries) {
  if constexpr (DENSE_MASK || BIAS) {
    const float* lse = sequence.queries<float>(p.lse, head);
    loader.load(dO_smem, dO, false, [&](int i) { return queries(i) && lse[i * p.lse.row] != -infinity(); });
  } else {
    loader.load(dO_smem, dO, queries);
  }
}
