// Double backward, dK and dV: the blocks and loops are those of backward_kv.cu. grid (key tiles, key/value heads,
// sequences)
#include "second.cuh"

constexpr int ROWS = BLOCK_KV / ROW_THREADS;  // score tiles are transposed: rows are keys
constexpr int COLS = BLOCK_Q / LANES;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_kv(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  KeyTile keys((real*)smem);
  QueryTile queries(keys.end);
  real* P_smem = queries.end;  // [BLOCK_KV][BLOCK_Q]: W^T, dS^T, then dtS^T

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    __syncthreads();
    keys.load(p, sequence, kv_head, kv_start, Range{0, sequence.kv_len});
    real dK_rmem[ROWS][columns_of(HEAD_DIM)] = {}, dV_rmem[ROWS][columns_of(HEAD_DIM_V)] = {};
    for (QTiles q_tiles(p, band, kv_head, kv_start); q_tiles.valid(); q_tiles.next()) {
      int head = q_tiles.head;
      int2 start = {q_tiles.start, kv_start};
      Score score(p, sequence, head);
      Dropout dropout(p, sequence.batch, head);
      __syncthreads();
      queries.load(p, sequence, head, start.x, q_tiles.visible);
      __syncthreads();
      SecondGradients<ROWS, COLS, true, true> tile(queries, keys);
      tile.differentiate(q_tiles.masked(), score, band, dropout, queries, start);
      if constexpr (SCORES_MOVE) add_product<HEAD_DIM_V>(dV_rmem, tile.W, P_smem, queries.dO);
      add_product<HEAD_DIM>(dK_rmem, tile.dS, P_smem, queries.Q);
      if constexpr (TQ) add_product<HEAD_DIM>(dK_rmem, tile.dtS, P_smem, queries.tQ);  // @dtP-of-tQ
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
