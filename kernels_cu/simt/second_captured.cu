// Double backward, the gradients of the arrays that a score_mod reads at computed indices, or at neither a query nor a
// key, with the loop and the launches of backward_captured.cu. grid (query tiles, heads, sequences)
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
      bool hidden = false;
      Score::Moved read = score.unmodified_moved<true>(tile.dS[r][c], tile.dtS[r][c], i, j, hidden), x = read;
      if (hidden) continue;
      Mod::Query q = band.mod.query(score.head, i);
      Mod::Key k = band.mod.key(j);
      x.score = band.mod.moved(read.score, read.tangent, q, k, x.tangent, x.slope, x.curve);
      PairGradients d = score_gradients(x, tile.W[r][c], tile.dtP[r][c], factor, queries, row);
      if (d.dS != 0 || d.dtS != 0) band.mod.add_gradients(d.dS, d.dtS, read.score, read.tangent, q, k, sums[r]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_captured(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  sum_captured<Products>(p, (real*)smem, add_gradients);
}
