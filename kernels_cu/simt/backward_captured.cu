// Backward, the gradients of the arrays that a score_mod reads at computed indices, or at neither a query nor a key;
// backward_bias.cu computes those of other reads. One block per tile of BLOCK_Q queries of one head recomputes the
// scores of all keys they see. Any score may read any element, so gradients are added atomically, in any order; an
// element that all keys of a row read is added to once per row. A deterministic backward launches this twice: the Mod
// of the first launch finds the largest contribution of a row, that of the second adds in fixed point, scaled by it.
// grid (query tiles, heads, sequences)
#include "steps.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

// Adds the gradients of the elements that the scores of a tile read, from Q K^T and dO V^T.
__device__ void add_gradients(Mod::RowSums (&sums)[ROWS], const real (&S)[ROWS][COLS], const real (&dP)[ROWS][COLS],
                              bool masked, const Score& score, const Band& band, const Dropout& dropout,
                              const real* lse_smem, const real* delta_smem, int2 start) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    Kept kept;
    int row = row_y() + r * ROW_THREADS, i = start.x + row;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int j = start.y + lane_x() + c * LANES;
      real factor = DROPOUT ? kept.factor(dropout, c, i, j) : 1;
      if (masked ? !sees<true>(score, band, i, j) : !sees<false>(score, band, i, j)) continue;
      real derivative, by_score;
      bool hidden = false;
      real s = score.unmodified<true>(S[r][c], i, j, derivative, hidden);
      if (hidden) continue;
      Mod::Query q = band.mod.query(score.head, i);
      Mod::Key k = band.mod.key(j);
      real probability = exp(band.mod.score(s, q, k, by_score) - lse_smem[row]);
      real ds = probability * (dP[r][c] * factor - delta_smem[row]);
      if (ds != 0) band.mod.add_gradients(ds, s, q, k, sums[r]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_captured(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  real* Q_smem = (real*)smem;                                   // [BLOCK_Q][HEAD_DIM]
  real* dO_smem = Q_smem + BLOCK_Q * row_stride(HEAD_DIM);      // [BLOCK_Q][HEAD_DIM_V]
  real* K_smem = dO_smem + BLOCK_Q * row_stride(HEAD_DIM_V);    // [BLOCK_KV][HEAD_DIM]
  real* V_smem = K_smem + BLOCK_KV * row_stride(HEAD_DIM);      // [BLOCK_KV][HEAD_DIM_V]
  real* lse_smem = V_smem + BLOCK_KV * row_stride(HEAD_DIM_V);  // [BLOCK_Q]
  real* delta_smem = lse_smem + BLOCK_Q;                        // [BLOCK_Q]

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_len; q_start += gridDim.x * BLOCK_Q) {
    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start),
                                 Range{0, sequence.q_len});
    load_dO(dO_smem, p, sequence, head, q_start, Range{0, sequence.q_len});
    load_rows(lse_smem, delta_smem, p, sequence, head, q_start);
    Mod::RowSums sums[ROWS] = {};

    for (KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      int2 start = {q_start, kv_tiles.start};
      __syncthreads();
      load_tile<BLOCK_KV, HEAD_DIM>(K_smem, sequence.key_rows<element>(p.k, kv_head).tile(start.y), kv_tiles.visible);
      load_tile<BLOCK_KV, HEAD_DIM_V>(V_smem, sequence.key_rows<element>(p.v, kv_head).tile(start.y), kv_tiles.visible);
      __syncthreads();
      real S_rmem[ROWS][COLS] = {}, dP_rmem[ROWS][COLS] = {};
      scores<ROWS, COLS, HEAD_DIM>(S_rmem, Q_smem, K_smem);
      scores<ROWS, COLS, HEAD_DIM_V>(dP_rmem, dO_smem, V_smem);
      add_gradients(sums, S_rmem, dP_rmem, kv_tiles.masked(), score, band, dropout, lse_smem, delta_smem, start);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int i = q_start + row_y() + r * ROW_THREADS;
      auto total = [](real x) { return row_sum(x); };
      band.mod.add_row(sums[r], band.mod.query(head, band.query(i)), i < sequence.q_len && lane_x() == 0, total);
    }
  }
}
