// Steps that the kernels of a backward and of a double backward share: loading Q and dO, the addresses of products, and
// storing the dS of a bias.
#pragma once
#include "../gradients.cuh"
#include "gemm.cuh"
#include "load.cuh"

// Byte offsets, for a tile of queries, of Q, its tangent (TQ) and dO, and of lse2 and delta of the rows (DIRECTION:
// RowNumbers), which dentropy, dmax and argmax follow (DSTATISTICS).
struct QuerySlot {
  static constexpr int Q = 0;                                           // [BLOCK_Q][HEAD_DIM]
  static constexpr int tQ = Q + BLOCK_Q * row_bytes(HEAD_DIM);          // TQ: [BLOCK_Q][HEAD_DIM]
  static constexpr int dO = tQ + TQ * BLOCK_Q * row_bytes(HEAD_DIM);    // [BLOCK_Q][HEAD_DIM_V]
  static constexpr int NUMBERS = dO + BLOCK_Q * row_bytes(HEAD_DIM_V);  // lse2 [BLOCK_Q], delta [BLOCK_Q]
#if DSTATISTICS
  static constexpr int BYTES = NUMBERS + 20 * BLOCK_Q;
#else
  static constexpr int BYTES = NUMBERS + (DIRECTION ? 16 : 8) * BLOCK_Q;  // DIRECTION: RowNumbers [BLOCK_Q]
#endif
};

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

// Loads tiles of Q and dO in the order of QTiles. Addresses are computed anew where the head changes. Otherwise they
// advance by one tile or, under a mask_mod, past the tiles that it hides.
struct QdOLoads {
  const Params& p;
  const Sequence& sequence;
  Loader<BLOCK_Q, HEAD_DIM> Q_loader;
  Loader<BLOCK_Q, HEAD_DIM_V> dO_loader;
  int head;  // the head to which the addresses belong
  AdvancingRows Q;
  AdvancingRows dO;

  __device__ QdOLoads(const Params& p, const Sequence& sequence)
      : p(p), sequence(sequence), Q_loader(p.q.row), dO_loader(p.dout.row), head(-1) {}

  // Moves Q and dO to a tile. `seek()` and `advance(rows)` must do the same for the addresses of the caller's other
  // operands.
  template <typename Seek, typename Advance>
  __device__ void move_to(int new_head, int q_start, Seek seek, Advance advance) {
    if (new_head != head) {  // @head-changes
      head = new_head;
      Q.seek(sequence.query_rows<element>(p.q, head), q_start);
      dO.seek(sequence.query_rows<element>(p.dout, head), q_start);
      seek();
    } else {
      int rows = MASK_MOD ? q_start - Q.first : BLOCK_Q;  // @advance-Q
      Q.advance(rows), dO.advance(rows);
      advance(rows);
    }
  }
  // Loads the current tile, with zeros for queries that are not in `queries`.
  __device__ void load(unsigned int Q_smem, unsigned int dO_smem, Range queries) const {
    Q_loader.load(Q_smem, Q, queries);
    load_dO(dO_smem, dO_loader, dO, p, sequence, head, queries);
  }
};

// DIRECTION: keeps addresses in registers, because the compiler would compute them anew for every tile.
template <typename Lane>
__device__ Lane held(const Lane& lane) {
  if constexpr (DIRECTION)
    return lane.kept();
  else
    return lane;
}

// This lane's addresses for the products of a tile, of which this warp has the rows from `row`.
struct ProductLanes {
  typename Tile<HEAD_DIM>::Lane A;
  typename Tile<HEAD_DIM>::Lane B;
  typename Tile<HEAD_DIM_V>::Lane A_v;
  typename Tile<HEAD_DIM_V>::Lane B_v;

  __device__ ProductLanes(int row)
      : A(held(Tile<HEAD_DIM>::lane_of_A(row))),
        B(held(Tile<HEAD_DIM>::lane_of_B())),
        A_v(held(Tile<HEAD_DIM_V>::lane_of_A(row))),
        B_v(held(Tile<HEAD_DIM_V>::lane_of_B())) {}
};

constexpr int dS_ROW = BLOCK_KV + 8;  // numbers, padded: a half-warp writes its pairs to different banks

// Stores the dS of the rows from `row` to shared memory [BLOCK_Q][BLOCK_KV]; of the warps that share rows, and so have
// the same dS, only one stores it.
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
