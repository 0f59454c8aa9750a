// Backward of attention to selected keys, dK and dV: one block per at most BLOCK_KV keys that an entry names together,
// over the rows of all lists that name them, in ascending order, so that every sum is deterministic. grid (tiles of all
// blocks of keys, key/value heads, sequences)
#include "../inverse_lists.cuh"
#include "selected_backward.cuh"
#if SHARED_KV
#include "mainloop.cuh"
#endif

constexpr int M = BLOCK_KV / ROW_WARPS / 16;  // fragments of a warp, by rows; score tiles are transposed: rows are keys
constexpr int N = BLOCK_Q / 8;                // and by columns

// Offsets in bytes.
struct SharedMemory {
  static constexpr int KEYS = 0;                                        // KeySlot
  static constexpr int QUERIES = KEYS + KeySlot::BYTES;                 // QuerySlot
  static constexpr int dK = KEYS + KeySlot::K, dV = KEYS + KeySlot::V;  // staging memory of the epilogue
  static constexpr int BYTES = QUERIES + QuerySlot::BYTES;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_backward_kv(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  __shared__ ListTile tile;
  unsigned char* smem = (unsigned char*)shared;
  KeyTile keys(smem_address(smem) + SharedMemory::KEYS);
  QueryTile queries(smem_address(smem) + SharedMemory::QUERIES);

  int kv_head = blockIdx.y, row = row_warp() * M * 16;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, kv_head * p.group);
  ProductLanes lanes(row);
  auto QT_lane = Tile<HEAD_DIM>::lane_of_X();
  auto dOT_lane = Tile<HEAD_DIM_V>::lane_of_X();
  Scale scale(p);

  BlockTile blocks(sequence);
  for (int n = blockIdx.x; n < blocks.tiles; n += gridDim.x) {
    // Prologue.
    Range keys_of_tile = blocks.keys(n, sequence.kv_len), visible = queries_of(band, keys_of_tile);
    __syncthreads();
    tile.take(keys_of_tile, sequence.kv_len);
    __syncthreads();
    load_keys(keys, tile, p, sequence, kv_head);
    float dK_rmem[M][fragments_of(HEAD_DIM)][4] = {}, dV_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};

    // Mainloop.
    visit_rows(tile, p, sequence, kv_head, blocks.block(n), visible, [&] {
      load_queries(queries, tile, p, sequence);
      wait_for_loads();
      Gradients<M, N, true, true> products(queries, keys, lanes, [] {});
      differentiate(products, tile, tile, p, sequence, band, dropout, queries.numbers_of(smem, 0), row);
      products.add_to(dK_rmem, dV_rmem, scale, queries, QT_lane, dOT_lane, [](const unsigned int (&)[M][N / 2][4]) {});
    });

    // Epilogue.
    wait_for_loads();  // the keys may be in flight if no query was visited
    Range written = blocks.keys(n, sequence.kv_rows);
    float by = SHARED_KV ? 1 : (float)p.scale;
#if SHARED_KV
    add_dV<M>(dK_rmem, dV_rmem, (float)p.scale);
#endif
    store_fragments<M, HEAD_DIM>(smem + SharedMemory::dK, dK_rmem, row, [&](int, int) { return by; });
    if constexpr (!SHARED_KV)
      store_fragments<M, HEAD_DIM_V>(smem + SharedMemory::dV, dV_rmem, row, [](int, int) { return 1.0f; });
    __syncthreads();
    store_tile<BLOCK_KV, HEAD_DIM>(sequence.keys<element>(p.dk, kv_head), p.dk, smem + SharedMemory::dK, written.begin,
                                   written.end);
    if constexpr (!SHARED_KV)
      store_tile<BLOCK_KV, HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head), p.dv, smem + SharedMemory::dV,
                                       written.begin, written.end);
  }
}
