// Backward, dK and dV: one block per tile of BLOCK_KV keys of one key/value head, over all queries that see them, head
// after head of the GQA group, so that every sum is deterministic. grid (key tiles, key/value heads, sequences)
#include "steps.cuh"

constexpr int ROWS = BLOCK_KV / ROW_THREADS;  // score tiles are transposed: rows are keys
constexpr int COLS = BLOCK_Q / LANES;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kv(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  real* K_smem = (real*)smem;                                 // [BLOCK_KV][HEAD_DIM]
  real* V_smem = K_smem + BLOCK_KV * row_stride(HEAD_DIM);    // [BLOCK_KV][HEAD_DIM_V]
  real* Q_smem = V_smem + BLOCK_KV * row_stride(HEAD_DIM_V);  // [BLOCK_Q][HEAD_DIM]
  real* dO_smem = Q_smem + BLOCK_Q * row_stride(HEAD_DIM);    // [BLOCK_Q][HEAD_DIM_V]
  real* P_smem = dO_smem + BLOCK_Q * row_stride(HEAD_DIM_V);  // [BLOCK_KV][BLOCK_Q]: P^T, then dS^T
  real* lse_smem = P_smem + BLOCK_KV * p_stride(BLOCK_Q);     // [BLOCK_Q]
  real* delta_smem = lse_smem + BLOCK_Q;                      // [BLOCK_Q]

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    Range existing = {0, sequence.kv_len};
    __syncthreads();
    load_tile<BLOCK_KV, HEAD_DIM>(K_smem, sequence.key_rows<element>(p.k, kv_head).tile(kv_start), existing);
    load_tile<BLOCK_KV, HEAD_DIM_V>(V_smem, sequence.key_rows<element>(p.v, kv_head).tile(kv_start), existing);
    real dK_rmem[ROWS][columns_of(HEAD_DIM)] = {}, dV_rmem[ROWS][columns_of(HEAD_DIM_V)] = {};

    for (QTiles q_tiles(p, band, kv_head, kv_start); q_tiles.valid(); q_tiles.next()) {
      int head = q_tiles.head;
      int2 start = {q_tiles.start, kv_start};
      Score score(p, sequence, head);
      Dropout dropout(p, sequence.batch, head);
      __syncthreads();
      load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(start.x), q_tiles.visible);
      load_dO(dO_smem, p, sequence, head, start.x, q_tiles.visible);
      load_rows(lse_smem, delta_smem, p, sequence, head, start.x);
      __syncthreads();
      real S_rmem[ROWS][COLS] = {}, dP_rmem[ROWS][COLS] = {};
      scores<ROWS, COLS, HEAD_DIM>(S_rmem, K_smem, Q_smem);
      scores<ROWS, COLS, HEAD_DIM_V>(dP_rmem, V_smem, dO_smem);
      if (q_tiles.masked())
        differentiate<true, true, true>(S_rmem, dP_rmem, score, band, dropout, lse_smem, delta_smem, start);
      else
        differentiate<false, true, true>(S_rmem, dP_rmem, score, band, dropout, lse_smem, delta_smem, start);
      store_p(P_smem, S_rmem);
      __syncthreads();
      accumulate<ROWS, BLOCK_Q, HEAD_DIM_V>(dV_rmem, P_smem, dO_smem);
      __syncthreads();
      store_p(P_smem, dP_rmem);
      __syncthreads();
      accumulate<ROWS, BLOCK_Q, HEAD_DIM>(dK_rmem, P_smem, Q_smem);
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int j = kv_start + row_y() + r * ROW_THREADS;
      if (j >= sequence.kv_rows) continue;
      store_row<HEAD_DIM>(sequence.keys<element>(p.dk, kv_head) + j * p.dk.row, dK_rmem[r], (real)p.scale);
      store_row<HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head) + j * p.dv.row, dV_rmem[r], (real)1);
    }
  }
}
