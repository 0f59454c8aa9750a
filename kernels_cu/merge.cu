// Merges the partial results of every output tile that decode.cu has computed in several parts: one warp per row, in
// the order of the keys. A tile of one part needs no merge, unless its sequence has a prefix: decode.cu has written its
// result. grid (output tiles of a
// sequence, sequences)
#include "merge_row.cuh"
#include "split_kv.cuh"
#if PREFIXES
#include "prefixes.cuh"
#endif

#if PREFIXES
// The partial results of a row on the keys of its prefix, and those on its own keys: numbers of the first ones and
// their rows, of PREFIX_BLOCK_Q or BLOCK_Q.
struct ResultsOfRow {
  int of_prefix;  // results on the prefix
  long long prefix_row;
  long long own_row;
};

// The results of query i of a sequence on its prefix.
__device__ void find_on_prefix(ResultsOfRow& results, const Params& p, const Sequence& sequence, int head, int i) {
  results.of_prefix = 0;
  if (sequence.group < 0) return;
  PrefixGroup group(p, sequence.group);
  int row = (p.prefix_places[sequence.batch] + i - group.first) * p.group + head % p.group;
  int tile = head / p.group * group.row_tiles(p) + row / PREFIX_BLOCK_Q;
  int iteration = group.start + tile * group.per_tile, last = iteration + group.per_tile - 1, block = 0;
  results.of_prefix = group.per_tile;
  if constexpr (!SPLIT_SIZE) {
    int total = p.prefix_starts[2 * p.prefix_groups + 1];
    int blocks = blocks_of_pass(p, p.prefix_results, p.prefix_groups, PREFIX_BLOCK_Q);
    int run = max((total + blocks - 1) / blocks, SHORTEST_RUN);
    block = iteration / run;
    results.of_prefix = last / run - block + 1;
  }
  int first_tile = first_tile_of(p, sequence.group, group.first, PREFIX_BLOCK_Q);
  long long result = result_of_part(iteration, first_tile + tile, block);
  if (SPLIT_SIZE && result + group.per_tile > p.prefix_results) results.of_prefix = 0;
  results.prefix_row = result * PREFIX_BLOCK_Q + row % PREFIX_BLOCK_Q;  // @row-on-prefix
}
#endif

__device__ void merge_tile(const Params& p, const Sequence& sequence, int tile, int iteration, int per_tile, int run) {
  int first = SPLIT_SIZE ? iteration : iteration / run,
      last = SPLIT_SIZE ? iteration + per_tile - 1 : (iteration + per_tile - 1) / run;
  int row_tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
  int kv_head = tile / row_tiles, first_row = tile % row_tiles * BLOCK_Q;
  for (int row = threadIdx.x / WARP; row < BLOCK_Q; row += THREADS / WARP) {
    if ((first_row + row) / p.group >= sequence.q_len) return;
#if PREFIXES
    int before = PACKED ? sequence.q_start : sequence.batch * p.q_len;
    ResultsOfRow results;
    results.own_row =
        (long long)result_of_part(iteration, first_tile_of(p, sequence.batch, before, BLOCK_Q) + tile, first) *
            BLOCK_Q +
        row;
    find_on_prefix(results, p, sequence, kv_head * p.group + (first_row + row) % p.group, (first_row + row) / p.group);
    // Result c of all: those on the prefix come first.
    auto of_prefix = [&](int c) { return results.prefix_row + (long long)c * PREFIX_BLOCK_Q; };
    auto own = [&](int c) { return results.own_row + (long long)(c - results.of_prefix) * BLOCK_Q; };
    merge_row(
        p, sequence, kv_head, first_row + row, results.of_prefix + last - first + 1,
        [&](int c) { return c < results.of_prefix ? p.prefix_lse[of_prefix(c)] : p.part_lse[own(c)]; },
        [&](int c) {
          return c < results.of_prefix ? p.prefix_out + of_prefix(c) * PART_COLUMNS
                                       : p.part_out + own(c) * PART_COLUMNS;
        }
#if STATISTICS
        ,
        [&](int c) {
          if (c < results.of_prefix) return ((const PartStatistics*)p.prefix_statistics)[of_prefix(c)];
          PartStatistics of_part = ((const PartStatistics*)p.part_statistics)[own(c)];
          if (of_part.top != -infinity()) of_part.key += sequence.keys_before;  // @key-after-prefix
          return of_part;
        }
#endif
    );
#else
    auto part = [&](int c) { return (long long)partial_result_of(first + c, first + c, c == 0) * BLOCK_Q + row; };
    merge_row(
        p, sequence, kv_head, first_row + row, last - first + 1, [&](int c) { return p.part_lse[part(c)]; },
        [&](int c) { return p.part_out + part(c) * PART_COLUMNS; }
#if STATISTICS
        ,
        [&](int c) { return ((const PartStatistics*)p.part_statistics)[part(c)]; }
#endif
    );  // @merge-parts
#endif
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
#if PREFIXES
  int run = space.run(SPLIT_SIZE ? 1 : blocks_of_pass(p, p.partial_results, space.sequences, BLOCK_Q));
#else
  int run = space.run(sharing_blocks(p, 1));
#endif
  for (int tile = blockIdx.x; tile < iterations.output_tiles; tile += gridDim.x) {
    int iteration = start + tile * iterations.per_tile;
    bool whole = SPLIT_SIZE ? iterations.per_tile == 1 : iteration / run == (iteration + iterations.per_tile - 1) / run;
#if PREFIXES
    whole = whole && sequence.group < 0;
#endif
    if (whole || (SPLIT_SIZE && iteration + iterations.per_tile > p.partial_results)) continue;
    merge_tile(p, sequence, tile, iteration, iterations.per_tile, run);
  }
}
