// Backward of attention to selected keys, dK and dV: one block per at most BLOCK_KV keys that an entry names together,
// over the rows of all lists that name them, in ascending order, so that every sum is deterministic. grid (tiles of all
// blocks of keys, key/value heads, sequences)
#include "../inverse_lists.cuh"
#include "selected_backward.cuh"

constexpr int ROWS = BLOCK_KV / ROW_THREADS;  // score tiles are transposed: rows are keys
constexpr int COLS = BLOCK_Q / LANES;
using SharedMemory = ByKey;

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_backward_kv(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ ListTile tile;
  real *smem = (real*)shared, *P_smem = smem + ByKey::P;
  KeyTile keys(smem + ByKey::KEYS);
  QueryTile queries(smem + ByKey::QUERIES);

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, kv_head * p.group);
  BlockTile blocks(sequence);
  for (int n = blockIdx.x; n < blocks.tiles; n += gridDim.x) {
    // Prologue.
    Range keys_of_tile = blocks.keys(n, sequence.kv_len), visible = queries_of(band, keys_of_tile);
    __syncthreads();
    tile.take(keys_of_tile, sequence.kv_len);
    __syncthreads();
    load_keys(keys, tile, p, sequence, kv_head);
    real dK_rmem[ROWS][columns_of(HEAD_DIM)] = {}, dV_rmem[ROWS][columns_of(HEAD_DIM_V)] = {};

    // Mainloop.
    visit_rows(tile, p, sequence, kv_head, blocks.block(n), visible, [&] {
      load_queries(queries, tile, p, sequence);
      __syncthreads();
      Gradients<ROWS, COLS, true, true> products(queries, keys);
      differentiate(products, tile, p, sequence, band, dropout, queries);
      products.add_to(dK_rmem, dV_rmem, queries, P_smem);
    });

    // Epilogue.
    Range written = blocks.keys(n, sequence.kv_rows);
#if SHARED_KV
    add_dV<ROWS>(dK_rmem, dV_rmem, (real)p.scale);
#endif
    for_each_row<ROWS>(written.begin, written.end, [&](int r, int j) {
      element* dk = sequence.keys<element>(p.dk, kv_head) + j * p.dk.row;
      store_row<HEAD_DIM>(dk, dK_rmem[r], SHARED_KV ? (real)1 : (real)p.scale);
#if !SHARED_KV
      store_row<HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head) + j * p.dv.row, dV_rmem[r], (real)1);
#endif
    });
  }
}
