// Steps of attention to selected keys on mma fragments, on tiles whose rows ListRows and whose keys ListKeys locate.
#pragma once
#include "../selection.cuh"
#include "gemm.cuh"
#include "load.cuh"

// Calls visit(score, element) for the scores of this lane, which belong to rows of the tile from `row` on; `score` has
// the head of the row. The visit gets whether the query sees the key, and both positions.
//
// TRANSPOSED: rows of the fragments are keys, and columns are rows of the tile.
template <bool TRANSPOSED, int M, int N, typename Visit>
__device__ void for_each_score(const ListRows& rows, const ListKeys& keys, const Params& p, const Sequence& sequence,
                               const Band& band, int row, Visit visit) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int of_row = row + row_of(m, e), column = column_of(n, e), at = TRANSPOSED ? column : of_row;
        int i = rows.query[at], head = rows.head[at], j = keys.key[TRANSPOSED ? of_row : column];
        Score score(p, sequence, head, band.mod);
        bool seen = band.sees(i, j);
        if constexpr (MASK_MOD) seen = seen && band.mod_sees(head, i, j);
        if constexpr (DENSE_MASK) seen = seen && DenseMask::sees(p, band, sequence.batch, head, i, j);
        visit(m, n, e, at, score, seen, i, j);
      }
}

#if STATISTICS
// update_max, with statistics of scores whose keys a list names in any order.
template <int M, int N>
__device__ bool observe(float (&factors)[M][2], Softmax2 (&softmax)[M][2], RowStatistics (&statistics)[M][2],
                        const float (&S)[M][N][4], const ListKeys& keys, float scale_log2) {
  float largest[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[m][half] = -infinity();
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          largest[m][half] = max(largest[m][half], S[m][n][e]);
          if constexpr (FIND_MAX)
            statistics[m][half].take(S[m][n][e], keys.key[column_of(n, e)]);  // @listed-key-of-fragment
        }
    }
  return update_max(factors, softmax, statistics, largest, scale_log2);
}
#endif

// The factor of dropout of a score: 0, or 1.
__device__ inline bool keeps(const Dropout& dropout, const Params& p, const Sequence& sequence, int head, int i,
                             int j) {
  Dropout of_row = of_head(dropout, p, sequence.batch, head);
  return of_row.keeps(of_row.bits(i, j), i, j);
}

// Copies the rows of a tile to a tensor whose rows are queries.
template <int DIM>
__device__ void store_rows(const ListRows& rows, const Sequence& sequence, const Operand& x,
                           const unsigned char* smem) {
  constexpr int CHUNKS = round_up(DIM, 8) / 8;
  for (int n = threadIdx.x; n < BLOCK_Q * CHUNKS; n += THREADS) {
    int row = n / CHUNKS, chunk = n % CHUNKS;
    if (rows.query[row] >= sequence.q_rows) continue;
    uint4 numbers = *(const uint4*)(smem + Tile<DIM>::at(row, chunk));
    element* to = sequence.queries<element>(x, rows.head[row]) + rows.query[row] * x.row;
    store_chunk<DIM>(to, x, chunk, numbers);
  }
}
