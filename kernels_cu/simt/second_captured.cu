// Double backward, the gradients of the arrays that a score_mod reads at computed indices, or at neither a query nor a
// key. The blocks, loops and launches are those of backward_captured.cu. grid (query tiles, heads, sequences)
#include "second.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;
using Products = SecondGradients<ROWS, COLS, false, false>;

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
      PairGradients d = queries.differentiate(x, tile.W[r][c], tile.dtP[r][c], factor, row);
      if (d.dS != 0 || d.dtS != 0) band.mod.add_gradients(d.dS, d.dtS, read.score, read.tangent, q, k, sums[r]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_captured(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  QueryTile queries((real*)smem);
  KeyTile keys(queries.end);

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_len; q_start += gridDim.x * BLOCK_Q) {
    __syncthreads();
    queries.load(p, sequence, head, q_start, Range{0, sequence.q_len});
    Mod::RowSums sums[ROWS] = {};

    for (KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      int2 start = {q_start, kv_tiles.start};
      __syncthreads();
      keys.load(p, sequence, kv_head, start.y, kv_tiles.visible);
      __syncthreads();
      Products tile(queries, keys);
      add_gradients(sums, tile, kv_tiles.masked(), score, band, dropout, queries, start);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int i = q_start + row_y() + r * ROW_THREADS;
      auto total = [](real x) { return row_sum(x); };
      band.mod.add_row(sums[r], band.mod.query(head, band.query(i)), i < sequence.q_len && lane_x() == 0, total);
    }
  }
}
