// ADD_DQ: blocks that own keys also compute dQ. The warps share dS^T in shared memory, and each adds 16 x 16 blocks of
// dS K to the workspace.
#pragma once
#include "../dq_sums.cuh"
#include "gemm.cuh"

// Writes this warp's dS^T to shared memory [BLOCK_KV][BLOCK_Q], for the other warps.
template <int M, int PAIRS>
__device__ void share(unsigned char* dS_smem, const unsigned int (&dS)[M][PAIRS][4], int row) {
  if (column_warp() > 0) return;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < 2 * PAIRS; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *(unsigned int*)(dS_smem + Tile<BLOCK_Q>::at(row + row_of(m, 2 * half), n) + lane_id() % 4 * 4) =
            dS[m][n / 2][n % 2 * 2 + half];
}

// dQ += dS K over all keys of the block, in blocks of 16 queries x 16 columns distributed over the warps. All counts
// are powers of two, except for COLUMNS.
__device__ inline void add_dQ(const DqSums& sums, unsigned int dS_smem, unsigned int K_smem, int q_start, int q_len) {
  constexpr int ROWS = BLOCK_Q / 16, COLUMNS = DqSums::COLUMNS / 16, WARPS = THREADS / WARP;
  constexpr int SIDE_BY_SIDE = WARPS > ROWS ? WARPS / ROWS : 1, EACH = (COLUMNS + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
  int warp = threadIdx.x / WARP, row = warp / SIDE_BY_SIDE, column = warp % SIDE_BY_SIDE;
  // ldmatrix transposes dS^T. The addresses of a lane include its warp's row and column.
  typename Tile<BLOCK_Q>::Lane dS_lane(lane_id() % 8 + lane_id() / 16 * 8, 2 * row + lane_id() / 8 % 2);
  typename Tile<HEAD_DIM>::Lane K_lane(lane_id() % 16, 2 * column + lane_id() / 16);
  auto exists = [&](int n) { return COLUMNS % SIDE_BY_SIDE == 0 || column + n * SIDE_BY_SIDE < COLUMNS; };
#pragma unroll
  for (int next = 0; next < ROWS; next += WARPS / SIDE_BY_SIDE) {
    int q = q_start + 16 * (row + next);
    if (q >= q_len) break;
    float dQ[EACH][2][4] = {};
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; ++k) {
      unsigned int a[4], b[4];
      ldmatrix_x4_trans(a, dS_smem + dS_lane.at(16 * k, 2 * next));
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        if (!exists(n)) continue;
        ldmatrix_x4_trans(b, K_smem + K_lane.at(16 * k, 2 * n * SIDE_BY_SIDE));
        mma_m16n8k16<element>(dQ[n][0], a, b[0], b[1], dQ[n][0]);
        mma_m16n8k16<element>(dQ[n][1], a, b[2], b[3], dQ[n][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < EACH; ++n)
      if (exists(n))
#pragma unroll
        for (int half = 0; half < 2; ++half) sums.add(q, 16 * (column + n * SIDE_BY_SIDE), half, dQ[n][half]);
  }
}
