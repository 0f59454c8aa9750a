// What the wgmma engine does with tiles of e4m3, in the place of what tile.cuh does with 16-bit numbers:
//
//   Descales          what the numbers of Q, K and V stand for a multiple of
//   scores_fp8        C = A B^T     64 rows of tile A by the rows of tile B
//   round_to_fp8      fragments of probabilities, as the left factor of the next product
//   accumulate_fp8      C += P X      fragments of P in registers, tile X of V^T
#pragma once
#include "tile.cuh"
#include "vt.cuh"

constexpr int QK_PANEL = 128;  // columns of a panel of Q or K
constexpr int VT_PANEL = 64;   // and of V^T, in rows of as many bytes

struct Descales {
  float qk;
  float v;

  __device__ Descales(const Params& p, int b, int kv_head)
      : qk(of(p, p.q_descale, b, kv_head) * of(p, p.k_descale, b, kv_head)), v(of(p, p.v_descale, b, kv_head)) {}

  // The rows past a packed batch's last sequence have none.
  __device__ static float of(const Params& p, const Operand& x, int b, int kv_head) {
    return x.data && b < p.batch ? ((const float*)x.data)[b * x.batch + kv_head * x.head] : 1.0f;
  }

  // The scale of the bare q.k. The softmax divides by it: in place of 0 stands what leaves all scores alike.
  __device__ float scale(const Params& p) const {
    float x = (float)p.scale * qk;
    if (!SCALE_IN_EXPONENT) return x;
    return x < 0x1p-100f ? 0x1p-100f : x > 0x1p100f ? 0x1p100f : x;
  }
};

// Begins C = A B^T, for the 64 rows from address A of a tile of A_ROWS rows and the 8 N rows of tile B.
template <int A_ROWS, int DIM, int N>
__device__ void scores_fp8(float (&C)[1][N][4], unsigned int A_smem, unsigned int B_smem) {
  constexpr int NEXT_OF_A = A_ROWS * PANEL_ROW, NEXT_OF_B = 8 * N * PANEL_ROW;
  unsigned long long a = smem_descriptor(A_smem, NEXT_OF_A), b = smem_descriptor(B_smem, NEXT_OF_B);
#pragma unroll
  for (int k = 0; k < round_up(DIM, 32) / 32; ++k)
    wgmma_e4m3(C, a + k / 4 * (NEXT_OF_A >> 4) + k % 4 * NEXT_16_COLUMNS,
               b + k / 4 * (NEXT_OF_B >> 4) + k % 4 * NEXT_16_COLUMNS, k > 0);
  wgmma_commit_group();
}

// C, rounded. A lane has two columns of a fragment, and the left factor wants four in a row of it: it gets those of two
// fragments, which makes an order of keys that V^T has, too.
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

// C += P X^T, for fragments of P in 32 K columns and tile X of V^T, which has as many rows as C columns.
//
// A product keeps 14 bits of what it sums, so a sum over many tiles would lose those of each: the products of this tile
// are summed apart, some columns after the other as registers allow, and added to C in fp32.
template <int N, int K>
__device__ void accumulate_fp8(float (&C)[1][N][4], unsigned int (&P)[1][K][4], unsigned int X_smem) {
  constexpr int PART = SUM_COLUMNS / 8, ROW = VT_PANEL >> 4;
#pragma unroll
  for (int n = 0; n < N; n += PART) {
    float sums[1][PART][4];
    unsigned long long x = smem_descriptor_64b(X_smem) + 8 * n * ROW;
    fence_operand(sums), fence_operand(P);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; ++k) wgmma_e4m3(sums, P[0][k], x + k / 2 * 8 * N * ROW + k % 2 * NEXT_16_COLUMNS, k > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    fence_operand(sums), fence_operand(P);
#pragma unroll
    for (int e = 0; e < 4 * PART; ++e) C[0][n + e / 4][e % 4] += sums[0][e / 4][e % 4];
  }
}
