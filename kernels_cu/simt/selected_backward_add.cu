// Backward of attention to selected keys, dK and dV by atomic additions: one block per BLOCK_Q rows that share a list,
// (query, head) pairs, over the keys of the list. grid (tiles of all lists, groups of heads that share a list,
// sequences)
#include "selected_backward.cuh"

constexpr int ROWS = BLOCK_KV / ROW_THREADS;  // score tiles are transposed: rows are keys
constexpr int COLS = BLOCK_Q / LANES;
using SharedMemory = ByKey;

template <int DIM>
__device__ void add_row(real* sums, const real (&x)[columns_of(DIM)]) {
#pragma unroll
  for (int n = 0; n < columns_of(DIM); ++n)
    if (column_of(n) < DIM) atomicAdd(sums + column_of(n), x[n]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_backward_add(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ ListTile tile;
  real *smem = (real*)shared, *P_smem = smem + ByKey::P;
  QueryTile queries(smem + ByKey::QUERIES);
  KeyTile keys(smem + ByKey::KEYS);

  int head = blockIdx.y * HEADS_OF_LIST, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, head);
  KeySums sums(p, sequence, kv_head);

  for (ListTiles tiles(p, sequence, band, head); tiles.valid(); tiles.next()) {
    // Prologue.
    tiles.find_rows(tile);
    load_queries(queries, tile, p, sequence);

    // Mainloop.
    tiles.visit_keys(tile, [&] {
      load_keys(keys, tile, p, sequence, kv_head);
      __syncthreads();
      Gradients<ROWS, COLS, true, true> products(queries, keys);
      differentiate(products, tile, p, sequence, band, dropout, queries);
      real dK_rmem[ROWS][columns_of(HEAD_DIM)] = {}, dV_rmem[ROWS][columns_of(HEAD_DIM_V)] = {};
      products.add_to(dK_rmem, dV_rmem, queries, P_smem);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        int j = tile.key[row_y() + r * ROW_THREADS];
        if (j >= sequence.kv_len) continue;  // @add-to-listed-keys
        add_row<HEAD_DIM>(sums.of_K(j), dK_rmem[r]);
        add_row<HEAD_DIM_V>(sums.of_V(j), dV_rmem[r]);
      }
    });
  }
}
