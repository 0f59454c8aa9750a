// Split-KV in the manner of stream-K: divides the KV tiles of all sequences among the blocks. Only the device reads
// lengths.
//
// A row is a pair of a query and a head of its GQA group, row = query * group + head. An output tile is (sequence,
// key/value head, tile of BLOCK_Q rows); its iterations are the KV tiles that any query of its sequence sees, or one if
// there is none, because a block must still write its zeros. The iterations of all output tiles, one tile after the
// other, are the iteration space.
//
//   equal runs   block c computes the iterations [c * run, (c + 1) * run). An output tile may begin and end inside a
//                run, so every block writes at most two partial results: of its first and of its last tile
//   SPLIT_SIZE   an iteration is a piece of SPLIT_SIZE keys, which ends at a multiple of SPLIT_SIZE and has a partial
//                result of its own. The pieces of a row and their order depend only on its own sequence
//   cluster      the blocks of a cluster divide the iterations of one output tile into equal runs (mma/parts.cuh)
#pragma once
#include "mask.cuh"
#include "ptx.cuh"

constexpr int ITERATION_KEYS = SPLIT_SIZE ? SPLIT_SIZE : BLOCK_KV;  // keys of one iteration
constexpr int SHORTEST_RUN = SPLIT_SIZE ? 1 : 4;  // in iterations: the merge of shorter runs costs more than they save
constexpr int PART_COLUMNS = (HEAD_DIM_V + 15) / 16 * 16;  // columns of a row of a partial result

// The iterations of a sequence.
struct Iterations {
  Range keys;  // the keys that any query sees
  int output_tiles;
  int first;     // the first iteration of an output tile; iterations are numbered from key 0
  int per_tile;  // iterations of an output tile, at least 1

  __device__ Iterations(const Params& p, const Sequence& sequence, const Band& band) {
    int row_tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
    output_tiles = row_tiles * (p.heads / p.group);
    keys = {band.kv_begin(0), sequence.q_len ? band.kv_end(sequence.q_len) : 0};
    if (keys.begin >= keys.end) keys = {0, 0};
    first = keys.begin / ITERATION_KEYS;
    per_tile = max((keys.end + ITERATION_KEYS - 1) / ITERATION_KEYS - first, 1);
  }
  __device__ int count() const { return output_tiles * per_tile; }

  __device__ static Iterations of(const Params& p, int b) {
    Sequence sequence(p, b);
    return Iterations(p, sequence, Band(p, sequence));
  }
};

struct IterationSpace {
  const Params& p;
  int sequences;  // the rows past the last packed sequence count as one more
  int total = 0;  // iterations of all sequences

  // Sums the iterations of all sequences, 32 at a time, and calls seen(b, start, count) in the lane of sequence b. All
  // lanes of a warp must take part.
  template <typename Seen>
  __device__ IterationSpace(const Params& p, Seen seen) : p(p), sequences(p.batch + (PACKED ? 1 : 0)) {
    for (int first = 0; first < sequences; first += WARP) {
      int b = first + lane_id(), count = b < sequences ? Iterations::of(p, b).count() : 0, sum = count;
#pragma unroll
      for (int step = 1; step < WARP; step *= 2) {
        int other = __shfl_up_sync(0xFFFFFFFF, sum, step);
        if (lane_id() >= step) sum += other;
      }
      if (b < sequences) seen(b, total + sum - count, count);
      total += __shfl_sync(0xFFFFFFFF, sum, WARP - 1);
    }
  }
  // Iterations of one block if `blocks` blocks share the space.
  __device__ int run(int blocks) const { return max((total + blocks - 1) / blocks, SHORTEST_RUN); }
};

#if !PREFIXES
// Number of blocks that share the space. Without SPLIT_SIZE the workspace has two partial results per block; with it,
// one per piece, and results do not depend on the number of blocks.
__device__ inline int sharing_blocks(const Params& p, int grid) {
  return SPLIT_SIZE ? grid : p.partial_results / 2;
}

// Index of the partial result of the part of a tile that starts at `iteration`. Without SPLIT_SIZE block `c` has two
// partial results: 2 c for a tile that began in an earlier block, and 2 c + 1 for a tile that begins in its run.
__device__ inline int partial_result_of(int iteration, int c, bool first_of_tile) {
  return SPLIT_SIZE ? iteration : 2 * c + first_of_tile;  // @result-of-part
}
#endif
