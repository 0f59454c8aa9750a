// Merges the partial results of every output tile that decode.cu has computed in several parts: one warp per row, in
// the order of the keys. A tile of one part needs no merge: decode.cu has written its result. grid (output tiles of a
// sequence, sequences)
#include "merge_row.cuh"
#include "split_kv.cuh"

__device__ void merge_tile(const Params& p, const Sequence& sequence, int tile, int iteration, int per_tile, int run) {
  int first = SPLIT_SIZE ? iteration : iteration / run,
      last = SPLIT_SIZE ? iteration + per_tile - 1 : (iteration + per_tile - 1) / run;
  int row_tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
  int kv_head = tile / row_tiles, first_row = tile % row_tiles * BLOCK_Q;
  for (int row = threadIdx.x / WARP; row < BLOCK_Q; row += THREADS / WARP) {
    if ((first_row + row) / p.group >= sequence.q_len) return;
    auto part = [&](int c) { return (long long)partial_result_of(first + c, first + c, c == 0) * BLOCK_Q + row; };
    merge_row(
        p, sequence, kv_head, first_row + row, last - first + 1, [&](int c) { return p.part_lse[part(c)]; },
        [&](int c) { return p.part_out + part(c) * PART_COLUMNS; }
#if STATISTICS
        ,
        [&](int c) { return ((const PartStatistics*)p.part_statistics)[part(c)]; }
#endif
    );  // @merge-parts
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ Params p) {
  int b = blockIdx.y, found = -1;
  IterationSpace space(p, [&](int sequence, int start, int) {
    if (sequence == b) found = start;
  });
  int start = __shfl_sync(0xFFFFFFFF, found, b % WARP);
  Sequence sequence(p, b);
  Iterations iterations(p, sequence, Band(p, sequence));
  int run = space.run(sharing_blocks(p, 1));
  for (int tile = blockIdx.x; tile < iterations.output_tiles; tile += gridDim.x) {
    int iteration = start + tile * iterations.per_tile;
    bool whole = SPLIT_SIZE ? iterations.per_tile == 1 : iteration / run == (iteration + iterations.per_tile - 1) / run;
    if (whole || (SPLIT_SIZE && iteration + iterations.per_tile > p.partial_results)) continue;
    merge_tile(p, sequence, tile, iteration, iterations.per_tile, run);
  }
}
