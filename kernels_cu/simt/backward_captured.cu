// Backward, the gradients of the arrays that a score_mod reads at computed indices, or at neither a query nor a key;
// backward_bias.cu computes those of other reads. One block per tile of BLOCK_Q queries of one head recomputes the
// scores of all keys they see. Any score may read any element, so gradients are added atomically, in any order; an
// element that all keys of a row read is added to once per row. A deterministic backward launches this kernel twice,
// with two Mods: the first finds the largest contribution of a row, and the second adds in fixed point with a unit that
// follows from it. grid (query tiles, heads, sequences)
#include "captured_gradients.cuh"

using Products = Gradients<ROWS, COLS, false, false>;

// Adds the gradients of the elements that the scores of a tile read.
__device__ void add_gradients(Mod::RowSums (&sums)[ROWS], const Products& tile, bool masked, const Score& score,
                              const Band& band, const Dropout& dropout, const QueryTile& queries, int2 start) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    Kept kept;
    int row = row_y() + r * ROW_THREADS, i = start.x + row;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int j = start.y + lane_x() + c * LANES;
      real factor = DROPOUT ? kept.factor(dropout, c, i, j) : 1;
      if (masked ? !sees<true>(score, band, i, j) : !sees<false>(score, band, i, j)) continue;
      real derivative, by_score;
      bool hidden = false;
      real s = score.unmodified<true>(tile.P[r][c], i, j, derivative, hidden);
      if (hidden) continue;
      Mod::Query q = band.mod.query(score.head, i);
      Mod::Key k = band.mod.key(j);
      real probability = exp(band.mod.score(s, q, k, by_score) - queries.lse[row]);
#if WEIGHTS
      ResultGradient gradient(score);
      real ds = probability == 0 ? 0 : probability * gradient(i, j) * (GRADIENT_OF == 2 ? gradient.weight(i) : 1);
#else
      real ds = probability * (tile.dS[r][c] * factor - queries.delta[row]);
#endif
#if DSTATISTICS
      ds += queries.statistics().of_score(row, j, probability, log(probability));
#endif
      if (ds != 0) band.mod.add_gradients(ds, s, q, k, sums[r]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_captured(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_captured<Products>(p, (real*)smem, add_gradients);
}
