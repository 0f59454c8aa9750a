// Merges the partial results of every unit that decode.cu has computed in several parts: one warp per row, in the order
// of the keys. A unit of one part needs no merge: decode.cu has written its result. grid (units of a sequence,
// sequences)
#include "merge_row.cuh"
#include "split_kv.cuh"

__device__ void merge_unit(const Params& p, const Sequence& sequence, int unit, int place, int each, int run) {
  int first = SPLIT_SIZE ? place : place / run, last = SPLIT_SIZE ? place + each - 1 : (place + each - 1) / run;
  int row_tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
  int kv_head = unit / row_tiles, first_row = unit % row_tiles * BLOCK_Q;
  for (int row = threadIdx.x / WARP; row < BLOCK_Q; row += THREADS / WARP) {
    if ((first_row + row) / p.group >= sequence.q_len) return;
    auto part = [&](int c) { return (long long)part_of(first + c, first + c, c == 0) * BLOCK_Q + row; };
    merge_row(
        p, sequence, kv_head, first_row + row, last - first + 1, [&](int c) { return p.part_lse[part(c)]; },
        [&](int c) { return p.part_out + part(c) * PART_COLUMNS; });  // @merge-parts
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ Params p) {
  int b = blockIdx.y, found = -1;
  Line line(p, [&](int sequence, int start, int) {
    if (sequence == b) found = start;
  });
  int start = __shfl_sync(0xFFFFFFFF, found, b % WARP);
  Sequence sequence(p, b);
  Places places(p, sequence, Band(p, sequence));
  int run = line.run(line_blocks(p, 1));
  for (int unit = blockIdx.x; unit < places.units; unit += gridDim.x) {
    int place = start + unit * places.each;
    bool whole = SPLIT_SIZE ? places.each == 1 : place / run == (place + places.each - 1) / run;
    if (whole || (SPLIT_SIZE && place + places.each > p.places)) continue;
    merge_unit(p, sequence, unit, place, places.each, run);
  }
}
