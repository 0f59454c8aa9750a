// Prefixes that sequences share. A decode has two passes: one on the own keys of each sequence, and one on the keys of
// each prefix, whose rows are those of all sequences of its group, so that a key is read once for the group. Both store
// partial results, of which merge.cu merges those of a row, prefix first.
//
// The queries of a group are numbered sequence after sequence; its output tiles, and their iterations, are those of a
// sequence with these queries (split_kv.cuh). prefix_rows.cu computes the numbers.
#pragma once
#include "split_kv.cuh"

// A group and its place among all groups.
struct PrefixGroup {
  int first;  // place of its first query
  int queries;
  int start;     // its first iteration
  int per_tile;  // iterations of an output tile

  __device__ PrefixGroup(const Params& p, int g)
      : first(p.prefix_starts[2 * g]),
        queries(p.prefix_starts[2 * g + 2] - first),
        start(p.prefix_starts[2 * g + 1]),
        per_tile(iterations_of_prefix(p, g)) {}
  __device__ static int iterations_of_prefix(const Params& p, int g) {
    int keys = min(max(p.prefix_lengths[g], 0), p.prefix_capacity);
    return (keys + ITERATION_KEYS - 1) / ITERATION_KEYS;
  }
  __device__ int row_tiles(const Params& p) const { return (queries * p.group + PREFIX_BLOCK_Q - 1) / PREFIX_BLOCK_Q; }
};

// All queries, of which any may be of a group.
__device__ inline int all_queries(const Params& p) {
  return PACKED ? p.q_len : p.batch * p.q_len;
}

// A number for each output tile: the tiles of sequence or group `n`, whose first query has `before` queries before it,
// have the numbers from this one on. Those of different sequences are disjoint, but not without gaps.
__device__ inline int first_tile_of(const Params& p, int n, int before, int block_q) {
  return (before * p.group / block_q + n) * (p.heads / p.group);
}
// Index of the partial result of a part. Without SPLIT_SIZE a part has one number of a tile and one of a block, and
// from part to part at least one of them grows: their sum is an index.
__device__ inline int result_of_part(int iteration, int tile, int block) {
  return SPLIT_SIZE ? iteration : tile + block;  // @result-beside-prefix
}
// Number of blocks of a pass whose workspace has `results` partial results, for the tiles of `n` sequences or groups.
__device__ inline int blocks_of_pass(const Params& p, int results, int n, int block_q) {
  return results - first_tile_of(p, n, all_queries(p), block_q);
}
