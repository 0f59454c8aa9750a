// Backward of attention to selected keys, dQ: one block per BLOCK_Q rows that share a list, (query, head) pairs, over
// the keys of the list. grid (tiles of all lists, groups of heads that share a list, sequences)
#include "selected_backward.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and by columns

// Offsets in bytes.
struct SharedMemory {
  static constexpr int QUERIES = 0;                        // QuerySlot
  static constexpr int KEYS = QUERIES + QuerySlot::BYTES;  // KeySlot
  static constexpr int dQ = QUERIES + QuerySlot::Q;        // staging memory of the epilogue
  static constexpr int BYTES = KEYS + KeySlot::BYTES;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_backward_q(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  __shared__ ListTile tile;
  unsigned char* smem = (unsigned char*)shared;
  QueryTile queries(smem_address(smem) + SharedMemory::QUERIES);
  KeyTile keys(smem_address(smem) + SharedMemory::KEYS);

  int head = blockIdx.y * HEADS_OF_LIST, kv_head = head / p.group, row = row_warp() * M * 16;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, head);
  ProductLanes lanes(row);
  auto KT_lane = Tile<HEAD_DIM>::lane_of_X();
  Scale scale(p);

  for (ListTiles tiles(p, sequence, band, head); tiles.valid(); tiles.next()) {
    // Prologue.
    tiles.find_rows(tile);
    load_queries(queries, tile, p, sequence);
    float dQ_rmem[M][fragments_of(HEAD_DIM)][4] = {};

    // Mainloop.
    tiles.visit_keys(tile, [&] {
      load_keys(keys, tile, p, sequence, kv_head);
      wait_for_loads();
      Gradients<M, N, false, true> products(queries, keys, lanes, [] {});
      differentiate(products, tile, tile, p, sequence, band, dropout, queries.numbers_of(smem, 0), row);
      products.add_to(dQ_rmem, scale, keys, KT_lane);
    });

    // Epilogue.
    wait_for_loads();  // the queries may be in flight if no key was visited
    store_fragments<M, HEAD_DIM>(smem + SharedMemory::dQ, dQ_rmem, row, [&](int, int) { return (float)p.scale; });
    __syncthreads();
    store_rows<HEAD_DIM>(tile, sequence, p.dq, smem + SharedMemory::dQ);
  }
}
