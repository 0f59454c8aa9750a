// Steps that the backward kernels of the mma engine share: loading dO, and storing the dS of a bias.
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

constexpr int dS_ROW = BLOCK_KV + 8;  // numbers, padded: a half-warp writes its pairs to different banks

// Stores the dS of the rows from `row` to shared memory [BLOCK_Q][BLOCK_KV]; warps that share rows have the same.
template <int M, int N>
__device__ void store_dS(float* dS_smem, const float (&dS)[M][N][4], int row) {
  if (column_warp() > 0) return;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; e += 2)
        *(float2*)&dS_smem[(row + row_of(m, e)) * dS_ROW + column_of(n, e)] = make_float2(dS[m][n][e], dS[m][n][e + 1]);
}
