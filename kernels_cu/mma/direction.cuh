// Tiles, loads and products of inputs that move: those of a JVP and of a double backward. A product with its tangent
// loads every fragment once.
#pragma once
#include "factor_scale.cuh"
#include "load.cuh"

constexpr int Q_BYTES = BLOCK_Q * Tile<HEAD_DIM>::ROW;
constexpr int K_BYTES = BLOCK_KV * Tile<HEAD_DIM>::ROW;
constexpr int V_BYTES = BLOCK_KV * Tile<HEAD_DIM_V>::ROW;

// Addresses in shared memory of the operands of a tile of keys: K, tK [BLOCK_KV][HEAD_DIM], V, tV
// [BLOCK_KV][HEAD_DIM_V].
struct KeyTile {
  static constexpr int BYTES = (1 + TK) * K_BYTES + (1 + TV) * V_BYTES;
  unsigned int K;
  unsigned int tK;
  unsigned int V;
  unsigned int tV;

  __device__ KeyTile(unsigned int smem) : K(smem), tK(K + K_BYTES), V(tK + TK * K_BYTES), tV(V + V_BYTES) {}
};

// Loads the operands of tiles of keys, one after the other.
struct KeyLoads {
  Loader<BLOCK_KV, HEAD_DIM> K_loader;
  Loader<BLOCK_KV, HEAD_DIM> tK_loader;
  Loader<BLOCK_KV, HEAD_DIM_V> V_loader;
  Loader<BLOCK_KV, HEAD_DIM_V> tV_loader;
  AdvancingRows K;
  AdvancingRows tK;
  AdvancingRows V;
  AdvancingRows tV;

  // The first tile is that at kv_start.
  __device__ KeyLoads(const Params& p, const Sequence& sequence, int kv_head, int kv_start)
      : K_loader(p.k.row), tK_loader(p.tk.row), V_loader(p.v.row), tV_loader(p.tv.row) {
    auto rows = [&](const Operand& x) { return sequence.key_rows<element>(x, kv_head); };
    K.seek(rows(p.k), kv_start), V.seek(rows(p.v), kv_start);
    if constexpr (TK) tK.seek(rows(p.tk), kv_start);
    if constexpr (TV) tV.seek(rows(p.tv), kv_start);
  }
  __device__ KeyLoads kept() const {
    KeyLoads loads = *this;
    loads.K_loader = K_loader.kept(), loads.tK_loader = tK_loader.kept();
    loads.V_loader = V_loader.kept(), loads.tV_loader = tV_loader.kept();
    return loads;
  }

  // Loads the current tile, with zeros for keys that are not in `keys`.
  __device__ void load(const KeyTile& to, Range keys) const {
    K_loader.load(to.K, K, keys);
    if constexpr (TK) tK_loader.load(to.tK, tK, keys);
    V_loader.load(to.V, V, keys);
    if constexpr (TV) tV_loader.load(to.tV, tV, keys);
  }
  // Loads the current tile of a walk, and moves both to the next.
  template <typename Tiles>
  __device__ void load_next(const KeyTile& to, Tiles& tiles) {
    load(to, tiles.visible);
    tiles.next();
    int rows = MASK_MOD ? tiles.start - K.first : Tiles::STEP;
    K.advance(rows), V.advance(rows);
    if constexpr (TK) tK.advance(rows);
    if constexpr (TV) tV.advance(rows);
  }
};

// C += A B^T and tC += tA B^T + A tB^T, as `scores`; MOVES_A, MOVES_B: A, B has a tangent. B_FIRST: A tB^T is added
// first. A transposed tile of tS needs it to have the bits from which the JVP computed mu: tS - mu is 0 where P is 1.
template <int M, int N, int DIM, bool MOVES_A, bool MOVES_B, bool B_FIRST = false>
__device__ void scores_moved(float (&C)[M][N][4], float (&tC)[M][N][4], unsigned int A_smem, unsigned int tA_smem,
                             const typename Tile<DIM>::Lane& a_lane, unsigned int B_smem, unsigned int tB_smem,
                             const typename Tile<DIM>::Lane& b_lane) {
  unsigned int a[M][4], ta[M][4], b[4], tb[4];
#pragma unroll
  for (int k = 0; k < padded(DIM) / 16; ++k) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      ldmatrix_x4(a[m], A_smem + a_lane.at(16 * m, 2 * k));
      if constexpr (MOVES_A) ldmatrix_x4(ta[m], tA_smem + a_lane.at(16 * m, 2 * k));
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4(b, B_smem + b_lane.at(8 * n, 2 * k));
      if constexpr (MOVES_B) ldmatrix_x4(tb, tB_smem + b_lane.at(8 * n, 2 * k));
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          float (&c)[4] = C[m][n + right], (&tc)[4] = tC[m][n + right];
          mma_m16n8k16<element>(c, a[m], b[2 * right], b[2 * right + 1], c);
          if constexpr (MOVES_A && !B_FIRST) mma_m16n8k16<element>(tc, ta[m], b[2 * right], b[2 * right + 1], tc);
          if constexpr (MOVES_B) mma_m16n8k16<element>(tc, a[m], tb[2 * right], tb[2 * right + 1], tc);
          if constexpr (MOVES_A && B_FIRST) mma_m16n8k16<element>(tc, ta[m], b[2 * right], b[2 * right + 1], tc);
        }
    }
  }
}

// C += P X and tC += tP X + P tX, as `accumulate`; MOVES_P, MOVES_X: P, X has a tangent. `scale` is that of tP and tC.
template <int M, int K, int DIM, bool MOVES_P, bool MOVES_X>
__device__ void accumulate_moved(float (&C)[M][fragments_of(DIM)][4], float (&tC)[M][fragments_of(DIM)][4],
                                 const unsigned int (&P)[M][K][4], const unsigned int (&tP)[M][K][4],
                                 const FactorScale& scale, unsigned int X_smem, unsigned int tX_smem,
                                 const typename Tile<DIM>::Lane& x_lane) {
  unsigned int b[4], tb[4];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    unsigned int scaled[M][4];
#pragma unroll
    for (int e = 0; e < 4 * M; ++e) scaled[e / 4][e % 4] = scale.times(P[e / 4][k][e % 4]);
#pragma unroll
    for (int n = 0; n < fragments_of(DIM); n += 2) {
      ldmatrix_x4_trans(b, X_smem + x_lane.at(16 * k, n * COLUMN_WARPS));
      if constexpr (MOVES_X) ldmatrix_x4_trans(tb, tX_smem + x_lane.at(16 * k, n * COLUMN_WARPS));
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          float (&c)[4] = C[m][n + right], (&tc)[4] = tC[m][n + right];
          mma_m16n8k16<element>(c, P[m][k], b[2 * right], b[2 * right + 1], c);
          if constexpr (MOVES_P) mma_m16n8k16<element>(tc, tP[m][k], b[2 * right], b[2 * right + 1], tc);
          if constexpr (MOVES_X) mma_m16n8k16<element>(tc, scaled[m], tb[2 * right], tb[2 * right + 1], tc);
        }
    }
  }
}
