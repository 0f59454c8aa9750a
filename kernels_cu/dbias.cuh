// The tile of a dense gradient that a block computes, and the dimensions over which the block sums. It is the gradient
// of the bias or, with CAPTURED_GRADIENT, of one read of an array that score_mod captures. The grid is (tiles, heads,
// batch entries) of the gradient; a broadcast dimension counts as one tile, head or entry, and the block sums over all
// of it.
#pragma once
#include "number.cuh"
#include "walk.cuh"

__device__ inline DenseGradient dense_gradient(const Params& p) {
#if MODS
  if constexpr (CAPTURED_GRADIENT) return Mod::gradient(p);
#endif
  return {p.dbias, p.q_len, p.kv_len};
}

struct BiasTile {
  const Params& p;
  DenseGradient gradient;
  bool all_rows;
  bool all_columns;
  Range batches;
  Range heads;
  Range queries;
  Range keys;

  __device__ BiasTile(const Params& p, int tile)
      : p(p), gradient(dense_gradient(p)), all_rows(gradient.array.row == 0), all_columns(gradient.array.column == 0) {
    int kv_tiles = all_columns ? 1 : (gradient.columns + BLOCK_KV - 1) / BLOCK_KV;
    queries = slice(all_rows, p.q_len, tile / kv_tiles * BLOCK_Q, BLOCK_Q);
    keys = slice(all_columns, p.kv_len, tile % kv_tiles * BLOCK_KV, BLOCK_KV);
    heads = slice(gradient.array.head == 0, p.heads, blockIdx.y, 1);
    batches = slice(gradient.array.batch == 0, p.batch, blockIdx.z, 1);
  }
  __device__ static Range slice(bool all, int length, int first, int size) {
    return all ? Range{0, length} : Range{first, first + size};
  }
  __device__ static int tiles(const Params& p) {
    DenseGradient gradient = dense_gradient(p);
    int q_tiles = gradient.array.row == 0 ? 1 : (gradient.rows + BLOCK_Q - 1) / BLOCK_Q;
    int kv_tiles = gradient.array.column == 0 ? 1 : (gradient.columns + BLOCK_KV - 1) / BLOCK_KV;
    return q_tiles * kv_tiles;
  }

  // Those key tiles of this block that the queries from q_start on visit.
  __device__ KvTiles<Order::FIRST_TO_LAST> kv_tiles(const Band& band, int head, int q_start) const {
    KvTiles<Order::FIRST_TO_LAST> tiles(band, head, q_start);
    tiles.clip(keys);
    return tiles;
  }

  // Sums dS [BLOCK_Q][stride] over the rows and columns over which the input broadcasts, and stores the sums. For a
  // captured array they are added to the array's gradient instead, because several reads may contribute to it.
  __device__ void store(const real* dS, int stride) const {
    int rows = all_rows ? 1 : min(BLOCK_Q, gradient.rows - queries.begin);
    int columns = all_columns ? 1 : min(BLOCK_KV, gradient.columns - keys.begin);
    const Dense& x = gradient.array;
    long long first = blockIdx.z * x.batch + blockIdx.y * x.head + queries.begin * x.row + keys.begin * x.column;
    for (int n = threadIdx.x; n < rows * columns; n += THREADS) {
      int row = n / columns, column = n % columns;
      real sum = 0;
      for (int r = row; r < (all_rows ? BLOCK_Q : row + 1); ++r) {
        real of_row = 0;  // a single running sum over the tile would round more often
        for (int c = column; c < (all_columns ? BLOCK_KV : column + 1); ++c) of_row += dS[r * stride + c];
        sum += of_row;
      }
      long long element = first + row * x.row + column * x.column;
      if constexpr (CAPTURED_GRADIENT)
        ((Mod::Sum*)x.data)[element] += sum;
      else
        ::store((bias_element*)x.data + element, sum);
    }
  }
};
