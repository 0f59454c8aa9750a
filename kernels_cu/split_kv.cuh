// Split-KV: how the keys of all sequences are divided between blocks, by the lengths on the device alone.
//
// A row is a pair of a query and a head of its GQA group, row = query * group + head; a unit is (sequence, key/value
// head, tile of BLOCK_Q rows). The line of work has the tiles of keys of one unit after those of the other: those that
// any query of the sequence sees, or one place if there is none, because a block must write the zeros.
//
//   equal runs   block c has the places [c * run, (c + 1) * run): a unit may begin and end inside runs, and leaves at
//                most two partial results per block, of its first and of its last unit
//   SPLIT_SIZE   places are pieces of SPLIT_SIZE keys, which end at its multiples and have a partial result each: what
//                a row's pieces are, and their order, depends on its own sequence alone
#pragma once
#include "mask.cuh"
#include "softmax2.cuh"

constexpr int PLACE_KEYS = SPLIT_SIZE ? SPLIT_SIZE : BLOCK_KV;  // of one place on the line
constexpr int SHORTEST_RUN = SPLIT_SIZE ? 1 : 4;           // places: fewer would leave more to merge than they save
constexpr int PART_COLUMNS = (HEAD_DIM_V + 15) / 16 * 16;  // of a row of a partial result

// The places of a sequence.
struct Places {
  Range keys;  // that any query sees
  int units;
  int first;  // of every unit, in places from key 0
  int each;   // at least 1

  __device__ Places(const Params& p, const Sequence& sequence, const Band& band) {
    int row_tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
    units = row_tiles * (p.heads / p.group);
    keys = {max(band.kv_begin(0), sequence.leftpad), sequence.q_len ? band.kv_end(sequence.q_len) : 0};
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
  int total = 0;  // places

  // Whole warps: sums the places of all sequences, 32 at a time, and calls seen(b, start, count) in the lane of each.
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
  // Places of a block, if `blocks` share the line.
  __device__ int run(int blocks) const { return max((total + blocks - 1) / blocks, SHORTEST_RUN); }
};

// Blocks that share the line. With SPLIT_SIZE results do not depend on it, and p.places counts pieces.
__device__ inline int line_blocks(const Params& p, int grid) {
  return SPLIT_SIZE ? grid : p.places / 2;
}

// Where the part of a unit from `place` on leaves its partial result, if block `c` computes it.
__device__ inline int part_of(int place, int c, bool first_of_unit) {
  return SPLIT_SIZE ? place : 2 * c + first_of_unit;
}

// The sink, which enters the result of a row once; lse and factor of the others.
__device__ inline Softmax2::Ending with_sink(const Params& p, int head, float lse) {
  Softmax2::Ending ending{lse, 1};
  if constexpr (SINK) ending.add_sink(to_real(((const sink_element*)p.sink)[head]));
  return ending;
}
