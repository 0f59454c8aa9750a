// Backward, dQ: one block per tile of BLOCK_Q queries of one head, over all keys they see. The scores are recomputed a
// second time instead of adding to dQ atomically, so that every sum is deterministic. grid (query tiles, heads,
// sequences)
#include "steps.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_q(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  real* Q_smem = (real*)smem;                                  // [BLOCK_Q][HEAD_DIM]
  real* dO_smem = Q_smem + BLOCK_Q * row_stride(HEAD_DIM);     // [BLOCK_Q][HEAD_DIM_V]
  real* K_smem = dO_smem + BLOCK_Q * row_stride(HEAD_DIM_V);   // [BLOCK_KV][HEAD_DIM]
  real* V_smem = K_smem + BLOCK_KV * row_stride(HEAD_DIM);     // [BLOCK_KV][HEAD_DIM_V]
  real* dS_smem = V_smem + BLOCK_KV * row_stride(HEAD_DIM_V);  // [BLOCK_Q][BLOCK_KV]
  real* lse_smem = dS_smem + BLOCK_Q * p_stride(BLOCK_KV);     // [BLOCK_Q]
  real* delta_smem = lse_smem + BLOCK_Q;                       // [BLOCK_Q]

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start),
                                 Range{0, sequence.q_len});
    load_dO(dO_smem, p, sequence, head, q_start, Range{0, sequence.q_len});
    load_rows(lse_smem, delta_smem, p, sequence, head, q_start);
    real dQ_rmem[ROWS][columns_of(HEAD_DIM)] = {};

    for (KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      int2 start = {q_start, kv_tiles.start};
      __syncthreads();
      load_tile<BLOCK_KV, HEAD_DIM>(K_smem, sequence.key_rows<element>(p.k, kv_head).tile(start.y), kv_tiles.visible);
      load_tile<BLOCK_KV, HEAD_DIM_V>(V_smem, sequence.key_rows<element>(p.v, kv_head).tile(start.y), kv_tiles.visible);
      __syncthreads();
      real S_rmem[ROWS][COLS] = {}, dP_rmem[ROWS][COLS] = {};
      scores<ROWS, COLS, HEAD_DIM>(S_rmem, Q_smem, K_smem);
      scores<ROWS, COLS, HEAD_DIM_V>(dP_rmem, dO_smem, V_smem);
      if (kv_tiles.masked())
        differentiate<true, false, true>(S_rmem, dP_rmem, score, band, dropout, lse_smem, delta_smem, start);
      else
        differentiate<false, false, true>(S_rmem, dP_rmem, score, band, dropout, lse_smem, delta_smem, start);
      store_p(dS_smem, dP_rmem);
      __syncthreads();
      accumulate<ROWS, BLOCK_KV, HEAD_DIM>(dQ_rmem, dS_smem, K_smem);
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int i = q_start + row_y() + r * ROW_THREADS;
      // @simt.scale-dQ
      if (i < sequence.q_rows)
        store_row<HEAD_DIM>(sequence.queries<element>(p.dq, head) + i * p.dq.row, dQ_rmem[r], (real)p.scale);
    }
  }
}
