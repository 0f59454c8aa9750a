// The backward of attention to selected keys or, if DIRECTION, its double backward, on tiles whose rows and keys a
// ListTile locates. The products of a tile are `Gradients`, those of dense attention.
//
//   sum_listed_dQ     dQ, by blocks that own rows of a list
//   sum_listed_dK_dV  dK and dV, by blocks that own keys
#pragma once
#include "../inverse_lists.cuh"
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
#if DIRECTION
  if constexpr (TQ) load_tile<BLOCK_Q, HEAD_DIM>(queries.tQ, ListedQueries<element>(tile, sequence, p.tq), exists);
#endif
  load_tile<BLOCK_Q, HEAD_DIM_V>(queries.dO, ListedQueries<element>(tile, sequence, p.dout), sees);
  for (int row = threadIdx.x; row < BLOCK_Q; row += THREADS) {
    bool has_key = sees(row);
    queries.lse[row] = has_key ? number(p.lse, row) : infinity();
    queries.delta[row] = has_key ? number(p.delta, row) : 0;
#if DIRECTION
    queries.lse_tangent[row] = has_key ? number(p.tlse, row) : 0;
    queries.delta_tangent[row] = has_key ? number(p.delta_tangent, row) : 0;  // @delta-tangent-of-listed-row
#endif
  }
}

__device__ inline void load_keys(KeyTile& keys, const ListTile& tile, const Params& p, const Sequence& sequence,
                                 int kv_head) {
  auto rows = [&](const Operand& x) { return ListedKeys<element>(tile, sequence, x, kv_head); };
  auto exists = [](int) { return true; };
  load_tile<BLOCK_KV, HEAD_DIM>(keys.K, rows(p.k), exists);
  load_tile<BLOCK_KV, HEAD_DIM_V>(keys.V, rows(p.v), exists);
#if DIRECTION
  if constexpr (TK) load_tile<BLOCK_KV, HEAD_DIM>(keys.tK, rows(p.tk), exists);
  if constexpr (TV) load_tile<BLOCK_KV, HEAD_DIM_V>(keys.tV, rows(p.tv), exists);  // @listed-tV
#endif
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
      real factor = 1;
      if constexpr (DROPOUT) {
        Dropout of_row = of_head(dropout, p, sequence.batch, tile.head[query]);
        factor = of_row.keeps(of_row.bits(i, j), i, j) ? (real)dropout.keep_scale : 0;
      }
#if DIRECTION
      Score::Moved x = {-infinity()};
      if (sees<true>(score, band, i, j)) x = score.moved(products.dS[r][c], products.dtS[r][c], i, j);
      PairGradients gradients = score_gradients(x, products.W[r][c], products.dtP[r][c], factor, queries, query);
      score.second_gradient(gradients.dS, gradients.dtS, x);  // @second-gradient-of-listed-key
      products.dS[r][c] = gradients.dS, products.dtS[r][c] = gradients.dtS, products.W[r][c] = gradients.W;
#else
      real derivative = 0, product = products.P[r][c];
      real s = sees<true>(score, band, i, j) ? score.apply(product, i, j, derivative) : -infinity();
      real probability = exp(s - queries.lse[query]);
      real ds = probability * (products.dS[r][c] * factor - queries.delta[query]);
      products.P[r][c] = probability * factor;
      products.dS[r][c] = score.gradient(ds, derivative);
#endif
    }
}

// A block owns BLOCK_Q rows that share a list, (query, head) pairs, and visits the keys of the list.
template <int ROWS, int COLS>
__device__ void sum_listed_dQ(const Params& p, real* smem) {
  __shared__ ListTile tile;
  real* P_smem = smem + ByQuery::P;
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

// A block owns at most BLOCK_KV keys that an entry names together, and visits the rows of all lists that name them, in
// ascending order, so that every sum is deterministic.
template <int ROWS, int COLS>
__device__ void sum_listed_dK_dV(const Params& p, real* smem) {
  __shared__ ListTile tile;
  real* P_smem = smem + ByKey::P;
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
