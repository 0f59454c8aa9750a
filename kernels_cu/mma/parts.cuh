// Enumerates the parts that one block of a decode computes, and the key tiles of a part. split_kv.cuh defines
// output tiles, iterations and their space.
#pragma once
#include "../descales.cuh"
#if KV_CACHE
#include "../split_kv.cuh"
#endif
#if PREFIXES
#include "../prefixes.cuh"
#endif
#include "../walk.cuh"
#if CLUSTER_MERGE
#include "../hopper.cuh"
#endif

// The part of an output tile that one block computes in one mainloop: a range of keys for the rows of one tile.
struct Part {
  Sequence sequence;
  Band band;
  int kv_head;
  int first_row;
  Range keys;
  bool whole;          // the part has all keys of the tile: nothing to merge
  int partial_result;  // index of its result in the workspace; unused if `whole`, and in a cluster
#if PREFIX_PASS
  int first_query;  // place of the group's first query
  Range unmasked;   // the keys that all queries of the tile see
#endif

  __device__ Descales descales(const Params& p) const { return Descales(p, sequence.batch, kv_head); }
  __device__ int query(const Params& p, int row) const { return (first_row + row) / p.group; }
  __device__ Range queries(const Params& p) const {
    return {query(p, 0), min(query(p, BLOCK_Q - 1) + 1, sequence.q_len)};
  }
  // @head-of-row
  __device__ int head(const Params& p, int row) const { return kv_head * p.group + (first_row + row) % p.group; }
};

// The key tiles of a part, first to last. Hidden tiles add zeros, so skipping them changes no bit.
struct PartTiles : Walk<BLOCK_KV, Order::FIRST_TO_LAST, ClassifyKeys> {
  __device__ PartTiles(const Params& p, const Part& part)
      : Walk(unmasked_keys(p, part), part.keys,
             {part.band, {part.kv_head * p.group, (part.kv_head + 1) * p.group}, part.queries(p)}) {  // @heads-of-tile
    skip_hidden();
  }
  __device__ static Range unmasked_keys(const Params& p, const Part& part) {
#if PREFIX_PASS
    Range keys = part.unmasked;
#else
    Range queries = part.queries(p), keys = part.band.sees_all(queries.begin, queries.end);
#endif
    return {keys.begin, min(keys.end, part.keys.end)};
  }
};

#if PREFIX_PASS
// The part of the sequence to which the query of a row belongs.
__device__ inline Part part_of_row(const Params& p, const Part& part, int row) {
  int place = part.first_query + min(part.query(p, row), part.sequence.q_len - 1), b = p.prefix_rows[place];
  Sequence sequence = Sequence(p, b).on_prefix(p);
  int first_row = part.first_row + (part.first_query - p.prefix_places[b]) * p.group;  // @row-of-sequence
  return {sequence, Band(p, sequence), part.kv_head, first_row, part.keys};
}

// Restricts a part to the keys that a query of its tile sees, and finds those that all of them see.
__device__ inline void restrict_to_visible(const Params& p, Part& part) {
  Range seen{part.keys.end, part.keys.begin};
  part.unmasked = part.keys;
  Range queries = part.queries(p);
  for (int query = queries.begin + lane_id(); query < queries.end; query += WARP) {
    int row = query * p.group - part.first_row;
    Part own = part_of_row(p, part, max(row, 0));
    int i = own.query(p, max(row, 0));
    Range keys = own.band.keys(i), all = own.band.sees_all(i, i + 1);
    if (keys.begin < keys.end) seen = {min(seen.begin, keys.begin), max(seen.end, keys.end)};
    part.unmasked = {max(part.unmasked.begin, all.begin), min(part.unmasked.end, all.end)};  // @unmasked-by-group
  }
#pragma unroll
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
    auto other = [&](int x) { return __shfl_xor_sync(0xFFFFFFFF, x, lanes); };
    seen = {min(seen.begin, other(seen.begin)), max(seen.end, other(seen.end))};
    part.unmasked = {max(part.unmasked.begin, other(part.unmasked.begin)),
                     min(part.unmasked.end, other(part.unmasked.end))};
  }
  part.keys = {max(part.keys.begin, seen.begin), min(part.keys.end, seen.end)};
  if (part.keys.begin >= part.keys.end) part.keys = {0, 0};
}

// Calls visit(part) for all parts of this block on the keys of prefixes. All lanes of a warp must take part.
template <typename Visit>
__device__ void for_each_part(const Params& p, Visit visit) {
  int total = p.prefix_starts[2 * p.prefix_groups + 1], blocks = SPLIT_SIZE ? gridDim.x : 0;
  if (!SPLIT_SIZE) blocks = blocks_of_pass(p, p.prefix_results, p.prefix_groups, BLOCK_Q);
  int run = max((total + blocks - 1) / blocks, SHORTEST_RUN), at = blockIdx.x * run, end = min(at + run, total), g = 0;
  while (at < end) {
    while (p.prefix_starts[2 * g + 3] <= at) ++g;
    PrefixGroup group(p, g);
    int tile = (at - group.start) / group.per_tile, begin = at - group.start - tile * group.per_tile;
    int count = SPLIT_SIZE ? 1 : min(group.per_tile - begin, end - at), row_tiles = group.row_tiles(p);
    Sequence sequence = Sequence(p, p.prefix_rows[group.first]).on_prefix(p);
    sequence.q_len = sequence.q_rows = group.queries;
    Range keys{begin * ITERATION_KEYS, min((begin + count) * ITERATION_KEYS, sequence.kv_len)};
    int result = result_of_part(at, first_tile_of(p, g, group.first, BLOCK_Q) + tile, blockIdx.x);
    Part part{sequence, Band(p, sequence), tile / row_tiles, tile % row_tiles * BLOCK_Q, keys, false,
              result,   group.first};
    restrict_to_visible(p, part);
    visit(part);
    at += count;
  }
}
#else
#if KV_CACHE
// The part that has `count` iterations of an output tile from `begin` on; `partial_result` is the index of its result.
__device__ inline Part part_of_tile(const Params& p, const Sequence& sequence, const Band& band,
                                    const Iterations& iterations, int tile, int begin, int count, int partial_result) {
  int row_tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
  Range keys{max(iterations.keys.begin, (iterations.first + begin) * ITERATION_KEYS),
             min(iterations.keys.end, (iterations.first + begin + count) * ITERATION_KEYS)};
  Part part{sequence,      band, tile / row_tiles, tile % row_tiles * BLOCK_Q, keys, count == iterations.per_tile,
            partial_result};
  // Skip the keys that no row of this tile sees: `keys` are those that any row of the sequence sees. Hidden keys add
  // zeros, so this changes no bit.
  Range queries = part.queries(p);
  part.keys.begin = max(keys.begin, band.kv_begin(queries.begin));
  part.keys.end = min(keys.end, band.kv_end(queries.end));
  if (part.keys.begin >= part.keys.end) part.keys = {0, 0};
  return part;
}

#if CLUSTER_MERGE
// Calls visit(part) for this block's part of every output tile of its cluster, and merge(part, parts) in all blocks of
// the cluster if the tile has more than one part. The block of rank n computes part n. The lengths on the device decide
// how many keys a part has, and whether there are fewer parts than blocks.
template <typename Visit, typename Merge>
__device__ void for_each_part(const Params& p, Visit visit, Merge merge) {
  Sequence sequence(p, blockIdx.y);
  Band band(p, sequence);
  // The mainloop leaves few registers, so values that only the start of a part needs are computed anew for every tile.
  for (int tile = blockIdx.x / CLUSTER;; tile += gridDim.x / CLUSTER) {
    Iterations iterations(p, sequence, band);
    if (tile >= iterations.output_tiles) return;
    int run = max((iterations.per_tile + CLUSTER - 1) / CLUSTER, SHORTEST_RUN),
        rank = cluster_ctarank();                                           // @run-length
    int parts = (iterations.per_tile + run - 1) / run, begin = rank * run;  // @run-of-rank
    Part part = part_of_tile(p, sequence, band, iterations, tile, begin, min(run, iterations.per_tile - begin), 0);
    if (rank < parts) visit(part);
    if (parts > 1) merge(part, parts);
  }
}
#else
// Calls visit(part) for all parts of this block, in their order. All lanes of a warp must take part.
template <typename Visit>
__device__ void for_each_part(const Params& p, Visit visit) {
  // Two passes over the sequences: the first counts all iterations, from which the run of this block follows;
  // the second finds the sequence in which the run begins.
  int run, iteration, b = 0, start = 0;
  {
    IterationSpace space(p, [](int, int, int) {});
#if PREFIXES
    run = space.run(SPLIT_SIZE ? gridDim.x : blocks_of_pass(p, p.partial_results, space.sequences, BLOCK_Q));
#else
    run = space.run(sharing_blocks(p, gridDim.x));
#endif
    iteration = blockIdx.x * run;
    if (iteration >= space.total) return;
    int found = -1, found_start = 0;
    IterationSpace(p, [&](int sequence, int at, int count) {
      if (at <= iteration && iteration < at + count) found = sequence, found_start = at;
    });
    int lane = __ffs(__ballot_sync(0xFFFFFFFF, found >= 0)) - 1;
    b = __shfl_sync(0xFFFFFFFF, found, lane), start = __shfl_sync(0xFFFFFFFF, found_start, lane);
    run = min(run, space.total - iteration);
  }
  for (int at = iteration - start; run > 0; ++b, at = 0) {
    Sequence sequence(p, b);
    Band band(p, sequence);
    Iterations iterations(p, sequence, band);
    while (at < iterations.count() && run > 0) {
      int tile = at / iterations.per_tile, begin = at - tile * iterations.per_tile;
      int count = SPLIT_SIZE ? 1 : min(iterations.per_tile - begin, run);
#if PREFIXES
      int first_tile = first_tile_of(p, b, PACKED ? sequence.q_start : b * p.q_len, BLOCK_Q);
      Part part = part_of_tile(p, sequence, band, iterations, tile, begin, count,
                               result_of_part(start + at, first_tile + tile, blockIdx.x));
      part.whole = part.whole && sequence.group < 0;  // @merge-with-prefix
      visit(part);
#else
      visit(part_of_tile(p, sequence, band, iterations, tile, begin, count,
                         partial_result_of(start + at, blockIdx.x, begin == 0)));
#endif
      at += count, run -= count;
    }
    start += iterations.count();
  }
}
#endif
#endif
#endif
