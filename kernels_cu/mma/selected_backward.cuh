// Steps of the backward of attention to selected keys.
#pragma once
#include "backward.cuh"
#include "selected.cuh"

__device__ inline void load_queries(const QueryTile& to, const ListRows& rows, const Params& p,
                                    const Sequence& sequence) {
  auto numbers = [&](const Operand& x, int row) {
    return sequence.queries<float>(x, rows.head[row]) + rows.query[row] * x.row;
  };
  auto exists = [&](int row) { return rows.query[row] < sequence.q_len; };
  // A row that sees no key must not contribute, whatever its dO is.
  auto sees = [&](int row) { return exists(row) && *numbers(p.lse, row) != -infinity(); };
  ListedQueries<element> Q(rows, sequence, p.q), dO(rows, sequence, p.dout);
  Loader<BLOCK_Q, HEAD_DIM>(Q.stride).load(to.Q, Q, false, exists);
  Loader<BLOCK_Q, HEAD_DIM_V>(dO.stride).load(to.dO, dO, false, sees);
  for (int row = threadIdx.x; row < BLOCK_Q; row += THREADS) {
    bool valid = exists(row);
    cp_async<4>(to.numbers + 4 * row, numbers(p.lse2, valid ? row : 0), valid ? 4 : 0);
    cp_async<4>(to.numbers + 4 * (BLOCK_Q + row), numbers(p.delta, valid ? row : 0), valid ? 4 : 0);
  }
}

__device__ inline void load_keys(const KeyTile& to, const ListKeys& keys, const Params& p, const Sequence& sequence,
                                 int kv_head) {
  load_tile<BLOCK_KV, HEAD_DIM>(to.K, ListedKeys<element>(keys, sequence, p.k, kv_head), Range{0, BLOCK_KV});
  load_tile<BLOCK_KV, HEAD_DIM_V>(to.V, ListedKeys<element>(keys, sequence, p.v, kv_head), Range{0, BLOCK_KV});
}

__device__ inline void wait_for_loads() {
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
}

// Replaces the products of a tile by its probabilities and gradients.
template <int M, int N, bool TRANSPOSED>
__device__ void differentiate(Gradients<M, N, TRANSPOSED, true>& products, const ListRows& rows, const ListKeys& keys,
                              const Params& p, const Sequence& sequence, const Band& band, const Dropout& dropout,
                              const Rows& numbers, int row) {
  float scale_log2 = log2_scale_of(p);
  for_each_score<TRANSPOSED, M, N>(
      rows, keys, p, sequence, band, row,
      [&](int m, int n, int e, int at, const Score& score, bool seen, int i, int j) {
        float &s = products.P[m][n][e], &ds = products.dS[m][n][e];
        float derivative = 0, factor = 1;
        if constexpr (MODIFIED)
          s = seen ? score.apply(s, i, j, derivative) : -infinity();
        else
          s = seen ? s : -infinity();
        float probability = ex2_approx(s * scale_log2 - numbers.lse2[at]);
        if constexpr (DROPOUT) factor = keeps(dropout, p, sequence, score.head, i, j) ? (float)dropout.keep_scale : 0;
        ds = score.gradient(probability * (ds * factor - numbers.delta[at]), derivative);
        s = probability * factor;
      });
}
