// Operations of the wgmma engine on e4m3, in place of those of tile.cuh on 16-bit numbers:
//
//   scores_fp8        C = A B^T     64 rows of tile A by the rows of tile B
//   round_to_fp8      P, rounded, as A fragments of the next wgmma
//   PartialSums       C += P X      P in fragments, tile X of V^T
#pragma once
#include "../descales.cuh"
#include "tile.cuh"
#include "vt.cuh"

constexpr int QK_PANEL = 128;  // columns of a panel of Q or K
constexpr int VT_PANEL = 64;   // columns, and bytes of a row, of a panel of V^T

// Issues C = A B^T for 64 rows of a tile of A_ROWS rows, from descriptor a on, and the 8 N rows of the tile at b.
template <int A_ROWS, int DIM, int N>
__device__ void scores_fp8(float (&C)[1][N][4], unsigned long long a, unsigned long long b) {
  constexpr int NEXT_OF_A = A_ROWS * PANEL_ROW, NEXT_OF_B = 8 * N * PANEL_ROW;
#pragma unroll
  for (int k = 0; k < round_up(DIM, 32) / 32; ++k)
    wgmma_e4m3(C, a + k / 4 * (NEXT_OF_A >> 4) + k % 4 * NEXT_16_COLUMNS,
               b + k / 4 * (NEXT_OF_B >> 4) + k % 4 * NEXT_16_COLUMNS, k > 0);  // @S-panel
  wgmma_commit_group();
}

// Rounds C to A fragments. A lane has two adjacent columns of a C fragment but needs four of an A fragment, so it
// combines two C fragments, which permutes the keys. vt.cu permutes V^T in the same way.
template <int N>
__device__ void round_to_fp8(unsigned int (&A)[1][N / 4][4], const float (&C)[1][N][4]) {
#pragma unroll
  for (int k = 0; k < N / 4; ++k)
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float (&left)[4] = C[0][4 * k + x / 2 * 2], (&right)[4] = C[0][4 * k + x / 2 * 2 + 1];
      int e = x % 2 * 2;
      A[0][k][x] = cvt_rn_satfinite_e4m3x4(left[e], left[e + 1], right[e], right[e + 1]);
    }
}

// C += P X^T for P in fragments of 32 K columns and tile X of V^T, with as many rows as C has columns.
//
// wgmma accumulates e4m3 products with 14 bits of precision, which a sum over many tiles would lose: the sum over one
// tile is computed separately, for PART fragments of columns at a time, and added to C in fp32. A part is in flight
// between issue() and add().
template <int N>
struct PartialSums {
  static constexpr int PART = SUM_COLUMNS / 8;
  float sums[1][PART][4];  // @O-of-tile

  template <int K>
  __device__ void issue(unsigned int (&P)[1][K][4], unsigned int X_smem, int n = 0) {
    constexpr int ROW = VT_PANEL >> 4;
    unsigned long long x = k_major_descriptor<VT_PANEL>(X_smem) + 8 * n * ROW;  // @PV-part
    fence_operand(sums), fence_operand(P);
    wgmma_fence();  // @fence-O-registers
                    // @PV-of-tile
#pragma unroll
    for (int k = 0; k < K; ++k) wgmma_e4m3(sums, P[0][k], x + k / 2 * 8 * N * ROW + k % 2 * NEXT_16_COLUMNS, k > 0);
    wgmma_commit_group();
  }
  template <int K>
  __device__ void add(float (&C)[1][N][4], unsigned int (&P)[1][K][4], int n = N - PART) {
    wgmma_wait_group<0>();  // @wait-O
    fence_operand(sums), fence_operand(P);
#pragma unroll
    for (int e = 0; e < 4 * PART; ++e) C[0][n + e / 4][e % 4] += sums[0][e / 4][e % 4];  // @add-O-of-tile
  }
  // For every part but the last: adds it, and issues the next part.
  template <int K>
  __device__ void issue_others(float (&C)[1][N][4], unsigned int (&P)[1][K][4], unsigned int X_smem) {
#pragma unroll
    for (int n = PART; n < N; n += PART) add(C, P, n - PART), issue(P, X_smem, n);
  }
};
