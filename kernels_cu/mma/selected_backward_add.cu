// Backward of attention to selected keys, dK and dV by atomic additions: one block per BLOCK_Q rows that share a list,
// (query, head) pairs, over the keys of the list. grid (tiles of all lists, groups of heads that share a list,
// sequences)
#include "selected_backward.cuh"

constexpr int M = BLOCK_KV / ROW_WARPS / 16;  // fragments of a warp, by rows; score tiles are transposed: rows are keys
constexpr int N = BLOCK_Q / 8;                // and by columns

// Offsets in bytes.
struct SharedMemory {
  static constexpr int QUERIES = 0;                        // QuerySlot
  static constexpr int KEYS = QUERIES + QuerySlot::BYTES;  // KeySlot
  static constexpr int BYTES = KEYS + KeySlot::BYTES;
};

// Adds the rows of an accumulator to the sums that `of(key)` returns.
template <int DIM, typename Of>
__device__ void add_rows(const ListKeys& keys, const float (&x)[M][fragments_of(DIM)][4], int row, int kv_len, Of of) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int j = keys.key[row + row_of(m, e)];
      if (j >= kv_len) continue;  // @add-to-listed-keys
#pragma unroll
      for (int n = 0; n < fragments_of(DIM); ++n) {
        int column = first_column(n) + column_of(0, e);
        if (column < DIM) atomicAdd(of(j) + column, x[m][n][e]);
      }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_backward_add(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  __shared__ ListTile tile;
  unsigned char* smem = (unsigned char*)shared;
  QueryTile queries(smem_address(smem) + SharedMemory::QUERIES);
  KeyTile keys(smem_address(smem) + SharedMemory::KEYS);

  int head = blockIdx.y * HEADS_OF_LIST, kv_head = head / p.group, row = row_warp() * M * 16;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, head);
  KeySums sums(p, sequence, kv_head);
  ProductLanes lanes(row);
  auto QT_lane = Tile<HEAD_DIM>::lane_of_X();
  auto dOT_lane = Tile<HEAD_DIM_V>::lane_of_X();
  Scale scale(p);

  for (ListTiles tiles(p, sequence, band, head); tiles.valid(); tiles.next()) {
    // Prologue.
    tiles.find_rows(tile);
    load_queries(queries, tile, p, sequence);

    // Mainloop.
    tiles.visit_keys(tile, [&] {
      load_keys(keys, tile, p, sequence, kv_head);
      wait_for_loads();
      Gradients<M, N, true, true> products(queries, keys, lanes, [] {});
      differentiate(products, tile, tile, p, sequence, band, dropout, queries.numbers_of(smem, 0), row);
      float dK_rmem[M][fragments_of(HEAD_DIM)][4] = {}, dV_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};
      products.add_to(dK_rmem, dV_rmem, scale, queries, QT_lane, dOT_lane, [](const unsigned int (&)[M][N / 2][4]) {});
      add_rows<HEAD_DIM>(tile, dK_rmem, row, sequence.kv_len, [&](int j) { return sums.of_K(j); });
      add_rows<HEAD_DIM_V>(tile, dV_rmem, row, sequence.kv_len, [&](int j) { return sums.of_V(j); });
    });
    cp_async_wait_group<0>();  // the queries may be in flight if no key was visited
  }
}
