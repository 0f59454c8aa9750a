// Double backward, dQ: the blocks and loops are those of backward_q.cu. grid (query tiles, heads, sequences)
#include "second.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_q(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  QueryTile queries((real*)smem);
  KeyTile keys(queries.end);
  real* P_smem = keys.end;  // [BLOCK_Q][BLOCK_KV]: dS, then dtS

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    __syncthreads();
    queries.load(p, sequence, head, q_start, Range{0, sequence.q_len});
    real dQ_rmem[ROWS][columns_of(HEAD_DIM)] = {};
    for (KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      int2 start = {q_start, kv_tiles.start};
      __syncthreads();
      keys.load(p, sequence, kv_head, start.y, kv_tiles.visible);
      __syncthreads();
      SecondGradients<ROWS, COLS, false, true> tile(queries, keys);
      tile.differentiate(kv_tiles.masked(), score, band, dropout, queries, start);
      add_product<HEAD_DIM>(dQ_rmem, tile.dS, P_smem, keys.K);
      if constexpr (TK) add_product<HEAD_DIM>(dQ_rmem, tile.dtS, P_smem, keys.tK);  // @dtP-of-tK
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int i = q_start + row_y() + r * ROW_THREADS;
      if (i < sequence.q_rows)
        store_row<HEAD_DIM>(sequence.queries<element>(p.dq, head) + i * p.dq.row, dQ_rmem[r], (real)p.scale);
    }
  }
}
