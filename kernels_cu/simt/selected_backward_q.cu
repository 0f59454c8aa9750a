// Backward of attention to selected keys, dQ: one block per BLOCK_Q rows that share a list, (query, head) pairs, over
// the keys of the list. grid (tiles of all lists, groups of heads that share a list, sequences)
#include "selected_backward.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;
using SharedMemory = ByQuery;

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_backward_q(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ ListTile tile;
  real *smem = (real*)shared, *P_smem = smem + ByQuery::P;
  QueryTile queries(smem + ByQuery::QUERIES);
  KeyTile keys(smem + ByQuery::KEYS);

  int head = blockIdx.y * HEADS_OF_LIST, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, head);

  for (ListTiles tiles(p, sequence, band, head); tiles.valid(); tiles.next()) {
    // Prologue.
    tiles.find_rows(tile);
    load_queries(queries, tile, p, sequence);
    real dQ_rmem[ROWS][columns_of(HEAD_DIM)] = {};

    // Mainloop.
    tiles.visit_keys(tile, [&] {
      load_keys(keys, tile, p, sequence, kv_head);
      __syncthreads();
      Gradients<ROWS, COLS, false, true> products(queries, keys);
      differentiate(products, tile, p, sequence, band, dropout, queries);
      products.add_to(dQ_rmem, keys, P_smem);
    });

    // Epilogue.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int i = tile.query[row_y() + r * ROW_THREADS], of = tile.head[row_y() + r * ROW_THREADS];
      if (i < sequence.q_rows)
        store_row<HEAD_DIM>(sequence.queries<element>(p.dq, of) + i * p.dq.row, dQ_rmem[r], (real)p.scale);
    }
  }
}
