// Steps of the backward of attention to selected keys, on tiles whose rows and keys a ListTile locates.
#pragma once
#include "../selection.cuh"
#include "mainloop.cuh"

__device__ inline void load_queries(QueryTile& queries, const ListTile& tile, const Params& p,
                                    const Sequence& sequence) {
  auto number = [&](const Operand& x, int row) {
    return sequence.queries<real>(x, tile.head[row])[tile.query[row] * x.row];
  };
  auto exists = [&](int row) { return tile.query[row] < sequence.q_len; };
  // A row that sees no key must not contribute, whatever its dO is.
  auto sees = [&](int row) { return exists(row) && number(p.lse, row) != -infinity(); };
  load_tile<BLOCK_Q, HEAD_DIM>(queries.Q, ListedQueries<element>(tile, sequence, p.q), exists);
  load_tile<BLOCK_Q, HEAD_DIM_V>(queries.dO, ListedQueries<element>(tile, sequence, p.dout), sees);
  for (int row = threadIdx.x; row < BLOCK_Q; row += THREADS) {
    bool has_key = sees(row);
    queries.lse[row] = has_key ? number(p.lse, row) : infinity();
    queries.delta[row] = has_key ? number(p.delta, row) : 0;
  }
}

__device__ inline void load_keys(KeyTile& keys, const ListTile& tile, const Params& p, const Sequence& sequence,
                                 int kv_head) {
  auto exists = [](int) { return true; };
  load_tile<BLOCK_KV, HEAD_DIM>(keys.K, ListedKeys<element>(tile, sequence, p.k, kv_head), exists);
  load_tile<BLOCK_KV, HEAD_DIM_V>(keys.V, ListedKeys<element>(tile, sequence, p.v, kv_head), exists);
}

// Replaces the products of a tile by its probabilities and gradients.
template <int ROWS, int COLS, bool TRANSPOSED>
__device__ void differentiate(Gradients<ROWS, COLS, TRANSPOSED, true>& products, const ListTile& tile, const Params& p,
                              const Sequence& sequence, const Band& band, const Dropout& dropout,
                              const QueryTile& queries) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int row = row_y() + r * ROW_THREADS, column = lane_x() + c * LANES;
      int query = TRANSPOSED ? column : row, i = tile.query[query], j = tile.key[TRANSPOSED ? row : column];
      Score score(p, sequence, tile.head[query], band.mod);
      real derivative = 0, product = products.P[r][c];
      real s = sees<true>(score, band, i, j) ? score.apply(product, i, j, derivative) : -infinity();
      real probability = exp(s - queries.lse[query]), factor = 1;
      if constexpr (DROPOUT) {
        Dropout of_row = of_head(dropout, p, sequence.batch, tile.head[query]);
        factor = of_row.keeps(of_row.bits(i, j), i, j) ? (real)dropout.keep_scale : 0;
      }
      real ds = probability * (products.dS[r][c] * factor - queries.delta[query]);
      products.P[r][c] = probability * factor;
      products.dS[r][c] = score.gradient(ds, derivative);
    }
}
