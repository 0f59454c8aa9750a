// The tile of dbias that a block computes, and the dimensions that it reduces over. The grid is (tiles of the bias, its
// heads, its batch entries); a broadcast dimension counts as one tile, head or entry, and the block sums over all of
// it.
#pragma once
#include "number.cuh"
#include "walk.cuh"

struct BiasTile {
  const Params& p;
  bool all_rows;
  bool all_columns;
  Range batches;
  Range heads;
  Range queries;
  Range keys;

  __device__ BiasTile(const Params& p) : p(p), all_rows(p.dbias.row == 0), all_columns(p.dbias.column == 0) {
    int kv_tiles = all_columns ? 1 : (p.kv_len + BLOCK_KV - 1) / BLOCK_KV;
    queries = slice(all_rows, p.q_len, blockIdx.x / kv_tiles * BLOCK_Q, BLOCK_Q);
    keys = slice(all_columns, p.kv_len, blockIdx.x % kv_tiles * BLOCK_KV, BLOCK_KV);
    heads = slice(p.dbias.head == 0, p.heads, blockIdx.y, 1);
    batches = slice(p.dbias.batch == 0, p.batch, blockIdx.z, 1);
  }
  __device__ static Range slice(bool all, int length, int first, int size) {
    return all ? Range{0, length} : Range{first, first + size};
  }

  // The key tiles of the block that queries from q_start visit.
  __device__ KvTiles<Order::FIRST_TO_LAST> kv_tiles(const Band& band, int head, int q_start) const {
    KvTiles<Order::FIRST_TO_LAST> tiles(band, head, q_start);
    tiles.clip(keys);
    return tiles;
  }

  // Reduces dS [BLOCK_Q][stride] over the rows and columns that the bias broadcasts over, and stores it.
  __device__ void store(const real* dS, int stride) const {
    int rows = all_rows ? 1 : min(BLOCK_Q, p.q_len - queries.begin);
    int columns = all_columns ? 1 : min(BLOCK_KV, p.kv_len - keys.begin);
    bias_element* dbias = (bias_element*)p.dbias.data + blockIdx.z * p.dbias.batch + blockIdx.y * p.dbias.head;
    for (int n = threadIdx.x; n < rows * columns; n += THREADS) {
      int row = n / columns, column = n % columns;
      real sum = 0;
      for (int r = row; r < (all_rows ? BLOCK_Q : row + 1); ++r)
        for (int c = column; c < (all_columns ? BLOCK_KV : column + 1); ++c) sum += dS[r * stride + c];
      ::store(dbias + (queries.begin + row) * p.dbias.row + (keys.begin + column) * p.dbias.column, sum);
    }
  }
};
