// Enumerates the parts that one block of a decode computes, and the key tiles of a part. split_kv.cuh defines unit,
// place and line.
#pragma once
#include "../descales.cuh"
#include "../split_kv.cuh"
#include "../walk.cuh"
#if CLUSTER_MERGE
#include "../hopper.cuh"
#endif

// The part of a unit that one block computes in one mainloop: a range of keys for the rows of one tile.
struct Part {
  Sequence sequence;
  Band band;
  int kv_head;
  int first_row;
  Range keys;
  bool whole;  // the part has all keys of the unit: nothing to merge
  int place;   // index of the partial result in the workspace; unused if `whole`, and in a cluster

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

// The part that has `count` places of a unit from `begin` on; `place` is the index of its partial result.
__device__ inline Part part_of_unit(const Params& p, const Sequence& sequence, const Band& band, const Places& places,
                                    int unit, int begin, int count, int place) {
  int row_tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
  Range keys{max(places.keys.begin, (places.first + begin) * PLACE_KEYS),
             min(places.keys.end, (places.first + begin + count) * PLACE_KEYS)};
  Part part{sequence, band, unit / row_tiles, unit % row_tiles * BLOCK_Q, keys, count == places.each, place};
  // Skip the keys that no row of this tile sees: `keys` are those that any row of the sequence sees. Hidden keys add
  // zeros, so this changes no bit.
  Range queries = part.queries(p);
  part.keys.begin = max(keys.begin, band.kv_begin(queries.begin));
  part.keys.end = min(keys.end, band.kv_end(queries.end));
  if (part.keys.begin >= part.keys.end) part.keys = {0, 0};
  return part;
}

#if CLUSTER_MERGE
// Calls visit(part) for this block's part of every unit of its cluster, and merge(part, parts) in all blocks of the
// cluster if the unit has more than one part. Part n is that of the block of rank n: the lengths on the device decide
// how many tiles it has, and whether there are fewer parts than blocks.
template <typename Visit, typename Merge>
__device__ void for_each_part(const Params& p, Visit visit, Merge merge) {
  Sequence sequence(p, blockIdx.y);
  Band band(p, sequence);
  // The mainloop leaves few registers: what only the start of a part needs is computed anew for every unit.
  for (int unit = blockIdx.x / CLUSTER;; unit += gridDim.x / CLUSTER) {
    Places places(p, sequence, band);
    if (unit >= places.units) return;
    int run = max((places.each + CLUSTER - 1) / CLUSTER, SHORTEST_RUN), rank = cluster_ctarank();  // @run-length
    int parts = (places.each + run - 1) / run, begin = rank * run;                                 // @run-of-rank
    Part part = part_of_unit(p, sequence, band, places, unit, begin, min(run, places.each - begin), 0);
    if (rank < parts) visit(part);
    if (parts > 1) merge(part, parts);
  }
}
#else
// Calls visit(part) for all parts of this block, in their order. All lanes of a warp must take part.
template <typename Visit>
__device__ void for_each_part(const Params& p, Visit visit) {
  // Two passes over the sequences: the first counts the places of the line, from which the run of this block follows;
  // the second finds the sequence in which the run begins.
  int run, place, b = 0, start = 0;
  {
    Line line(p, [](int, int, int) {});
    run = line.run(line_blocks(p, gridDim.x));
    place = blockIdx.x * run;
    if (place >= line.total) return;
    int found = -1, found_start = 0;
    Line(p, [&](int sequence, int at, int count) {
      if (at <= place && place < at + count) found = sequence, found_start = at;
    });
    int lane = __ffs(__ballot_sync(0xFFFFFFFF, found >= 0)) - 1;
    b = __shfl_sync(0xFFFFFFFF, found, lane), start = __shfl_sync(0xFFFFFFFF, found_start, lane);
    run = min(run, line.total - place);
  }
  for (int at = place - start; run > 0; ++b, at = 0) {
    Sequence sequence(p, b);
    Band band(p, sequence);
    Places places(p, sequence, band);
    while (at < places.count() && run > 0) {
      int unit = at / places.each, begin = at - unit * places.each;
      int count = SPLIT_SIZE ? 1 : min(places.each - begin, run);
      visit(part_of_unit(p, sequence, band, places, unit, begin, count, part_of(start + at, blockIdx.x, begin == 0)));
      at += count, run -= count;
    }
    start += places.count();
  }
}
#endif
