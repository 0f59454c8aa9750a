// Enumerates the parts that one block of a decode computes, and the key tiles of a part. split_kv.cuh defines
// output tiles, iterations and their space.
#pragma once
#include "../descales.cuh"
#include "../split_kv.cuh"
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
    Range queries = part.queries(p), keys = part.band.sees_all(queries.begin, queries.end);
    return {keys.begin, min(keys.end, part.keys.end)};
  }
};

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
    run = space.run(sharing_blocks(p, gridDim.x));
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
      visit(part_of_tile(p, sequence, band, iterations, tile, begin, count,
                         partial_result_of(start + at, blockIdx.x, begin == 0)));
      at += count, run -= count;
    }
    start += iterations.count();
  }
}
#endif
