// Tiles, loads and products of inputs with tangents, for a JVP and a double backward. A product and its tangent are
// computed together, so that every fragment is loaded once.
#pragma once
#include "factor_scale.cuh"
#include "load.cuh"

// Addresses in shared memory of the operands of a tile of keys.
struct KeyTile {
  static constexpr int BYTES = KeySlot::BYTES;
  unsigned int K;
  unsigned int tK;
  unsigned int V;
  unsigned int tV;

  __device__ KeyTile(unsigned int slot)
      : K(slot + KeySlot::K), tK(slot + KeySlot::tK), V(slot + KeySlot::V), tV(slot + KeySlot::tV) {}
};

// Loads the operands of tiles of keys, one after the other. For aligned rows and whole tiles, each thread keeps an
// address per operand and advances it. All other tiles share code that computes the addresses anew for each tile, so
// that they take no registers in between.
struct KeyLoads {
  using KLoader = Loader<BLOCK_KV, HEAD_DIM>;
  using VLoader = Loader<BLOCK_KV, HEAD_DIM_V>;
  const Params& p;
  const Sequence& sequence;
  int kv_head;
  int first;      // position of the current tile
  bool advances;  // the kept addresses can be used: rows are aligned, and threads load equal parts of a tile
  KLoader K_loader;
  VLoader V_loader;
  const element* K;
  const element* tK;
  const element* V;
  const element* tV;

  // The first tile is the one at kv_start.
  __device__ KeyLoads(const Params& p, const Sequence& sequence, int kv_head, int kv_start)
      : p(p), sequence(sequence), kv_head(kv_head), first(kv_start), K_loader(p.k.row), V_loader(p.v.row) {
    int aligned = min(min(p.k.aligned, p.v.aligned), min(TK ? p.tk.aligned : 8, TV ? p.tv.aligned : 8));
    advances = KLoader::REGULAR && VLoader::REGULAR && aligned == 8;
    auto chunk = [&](const Operand& x, long long from) {
      auto rows = sequence.key_rows<element>(x, kv_head);
      return rows.data + kv_start * rows.stride + from;
    };
    K = chunk(p.k, K_loader.from), V = chunk(p.v, V_loader.from);
    if constexpr (TK) tK = chunk(p.tk, KLoader(p.tk.row).from);
    if constexpr (TV) tV = chunk(p.tv, VLoader(p.tv.row).from);
  }
  __device__ KeyLoads kept() const {
    KeyLoads loads = *this;
    loads.K_loader.to = keep(K_loader.to), loads.V_loader.to = keep(V_loader.to);
    loads.advances = keep((int)advances);
    return loads;
  }

  // Loads the current tile, with zeros for keys that are not in `keys`.
  __device__ void load(const KeyTile& to, Range keys) const {
    if (advances && first >= keys.begin && first + BLOCK_KV <= keys.end) {
      K_loader.load_whole(to.K, K, p.k.row);
      if constexpr (TK) K_loader.load_whole(to.tK, tK, p.tk.row);
      V_loader.load_whole(to.V, V, p.v.row);
      if constexpr (TV) V_loader.load_whole(to.tV, tV, p.tv.row);
    } else {
      auto rows = [&](const Operand& x) { return sequence.key_rows<element>(x, kv_head).tile(first); };
#pragma unroll 1
      for (int tangent = 0; tangent < 2; ++tangent) {
        if (TK || !tangent) load_tile<BLOCK_KV, HEAD_DIM>(tangent ? to.tK : to.K, rows(tangent ? p.tk : p.k), keys);
        if (TV || !tangent) load_tile<BLOCK_KV, HEAD_DIM_V>(tangent ? to.tV : to.V, rows(tangent ? p.tv : p.v), keys);
      }
    }
  }
  // Loads the current tile of a walk, and moves the walk and the addresses to the next tile.
  template <typename Tiles>
  __device__ void load_next(const KeyTile& to, Tiles& tiles) {
    load(to, tiles.visible);
    tiles.next();
    int rows = MASK_MOD ? tiles.start - first : Tiles::STEP;  // @advance-keys
    first += rows, K += rows * p.k.row, V += rows * p.v.row;  // @advance-K-V
    if constexpr (TK) tK += rows * p.tk.row;                  // @advance-tK
    if constexpr (TV) tV += rows * p.tv.row;                  // @advance-tV
  }
};

// C += A B^T and tC += tA B^T + A tB^T, as `scores`; MOVES_A, MOVES_B: A, B has a tangent. B_FIRST adds A tB^T before
// tA B^T. A transposed tile needs this order to get the bits of tS from which the JVP computed mu, so that tS - mu is
// exactly 0 where P is 1.
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
          // @tS-of-tA
          if constexpr (MOVES_A && !B_FIRST) mma_m16n8k16<element>(tc, ta[m], b[2 * right], b[2 * right + 1], tc);
          if constexpr (MOVES_B) mma_m16n8k16<element>(tc, a[m], tb[2 * right], tb[2 * right + 1], tc);  // @tS-of-tB
          if constexpr (MOVES_A && B_FIRST) mma_m16n8k16<element>(tc, ta[m], b[2 * right], b[2 * right + 1], tc);
        }
    }
  }
}

// C += P X and tC += tP X + P tX, as `accumulate`; MOVES_P, MOVES_X: P, X has a tangent. tP and tC are
// scaled by `scale`, so this scales P tX.
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
    for (int e = 0; e < 4 * M; ++e) scaled[e / 4][e % 4] = scale.times(P[e / 4][k][e % 4]);  // @scale-P-of-tV
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
