// Split-KV in the manner of stream-K: divides the KV tiles of all sequences among the blocks. Only the device reads
// lengths.
//
// A row is a pair of a query and a head of its GQA group, row = query * group + head. A unit is an output tile:
// (sequence, key/value head, tile of BLOCK_Q rows). A Line is the iteration space of stream-K, in which the KV tiles of
// all units follow each other; a place is the index of one iteration. A unit has the tiles that any query of its
// sequence sees, or one place if there is none, because a block must still write its zeros.
//
//   equal runs   block c computes the places [c * run, (c + 1) * run). A unit may begin and end inside a run, so every
//                block writes at most two partial results: those of its first and of its last unit
//   SPLIT_SIZE   a place is a piece of SPLIT_SIZE keys, which ends at a multiple of SPLIT_SIZE and has a partial result
//                of its own. The pieces of a row and their order depend only on its own sequence
//   cluster      the blocks of a cluster divide the places of one unit into equal runs (mma/parts.cuh), without a line
#pragma once
#include "mask.cuh"
#include "ptx.cuh"

constexpr int PLACE_KEYS = SPLIT_SIZE ? SPLIT_SIZE : BLOCK_KV;  // keys of one place
constexpr int SHORTEST_RUN = SPLIT_SIZE ? 1 : 4;  // in places: shorter runs cost more in the merge than they save
constexpr int PART_COLUMNS = (HEAD_DIM_V + 15) / 16 * 16;  // columns of a row of a partial result

// The places of a sequence.
struct Places {
  Range keys;  // the keys that any query sees
  int units;
  int first;  // index of the first visited place of a unit, if places are counted from key 0
  int each;   // places per unit, at least 1

  __device__ Places(const Params& p, const Sequence& sequence, const Band& band) {
    int row_tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
    units = row_tiles * (p.heads / p.group);
    keys = {band.kv_begin(0), sequence.q_len ? band.kv_end(sequence.q_len) : 0};
    if (keys.begin >= keys.end) keys = {0, 0};
    first = keys.begin / PLACE_KEYS;
    each = max((keys.end + PLACE_KEYS - 1) / PLACE_KEYS - first, 1);
  }
  __device__ int count() const { return units * each; }

  __device__ static Places of(const Params& p, int b) {
    Sequence sequence(p, b);
    return Places(p, sequence, Band(p, sequence));
  }
};

struct Line {
  const Params& p;
  int sequences;  // a packed batch has one more: the rows past its last sequence
  int total = 0;  // places of all sequences

  // Sums the places of all sequences, 32 at a time, and calls seen(b, start, count) in the lane of sequence b. All
  // lanes of a warp must take part.
  template <typename Seen>
  __device__ Line(const Params& p, Seen seen) : p(p), sequences(p.batch + (PACKED ? 1 : 0)) {
    for (int first = 0; first < sequences; first += WARP) {
      int b = first + lane_id(), count = b < sequences ? Places::of(p, b).count() : 0, sum = count;
#pragma unroll
      for (int step = 1; step < WARP; step *= 2) {
        int other = __shfl_up_sync(0xFFFFFFFF, sum, step);
        if (lane_id() >= step) sum += other;
      }
      if (b < sequences) seen(b, total + sum - count, count);
      total += __shfl_sync(0xFFFFFFFF, sum, WARP - 1);
    }
  }
  // Places of one block if `blocks` blocks share the line.
  __device__ int run(int blocks) const { return max((total + blocks - 1) / blocks, SHORTEST_RUN); }
};

// Number of blocks that share the line. Without SPLIT_SIZE the workspace has two partial results per block; with it,
// one per piece, and results do not depend on the number of blocks.
__device__ inline int line_blocks(const Params& p, int grid) {
  return SPLIT_SIZE ? grid : p.places / 2;
}

// Index of the partial result of the part of a unit that starts at `place`. Without SPLIT_SIZE block `c` has two: 2 c
// for the unit that began in an earlier block, 2 c + 1 for one that begins in its run.
__device__ inline int part_of(int place, int c, bool first_of_unit) {
  return SPLIT_SIZE ? place : 2 * c + first_of_unit;  // @place-of-part
}
