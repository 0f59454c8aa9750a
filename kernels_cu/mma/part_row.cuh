// A row of the result of a part, whose columns several lanes store.
#pragma once
#include "../softmax2.cuh"
#include "parts.cuh"

// A row of the output, if the part has all keys of its tile, or else of a partial result.
struct PartRow {
  float* part_out = nullptr;
  element* out = nullptr;
  float factor;  // normalises O

  // `ending` is that of the keys of the part. The lane that is `first` stores lse and the statistics.
  __device__ PartRow(const Params& p, const Part& part, int row, int i, int head, const Softmax2::Ending& ending,
                     bool first
#if STATISTICS
                     ,
                     const PartStatistics& statistics
#endif
                     )
      : factor(ending.factor) {
    if (part.whole) {
#if STATISTICS
      if (first) statistics.store(p, part.sequence, head, i, entropy_with_sink(p, head, ending, statistics.entropy));
#endif
      // Rows past the last sequence of a packed batch have no sink.
      Softmax2::Ending joined =
          i < part.sequence.q_len ? with_sink(p, head, ending.lse) : Softmax2::Ending{-infinity(), 0};
      factor *= joined.factor;
      out = part.sequence.queries<element>(p.out, head) + i * p.out.row;
      if (first) part.sequence.queries<float>(p.lse, head)[i * p.lse.row] = joined.lse;
      return;
    }
#if KV_CACHE
    // If the lengths exceed those of the plan, the workspace has no room for the last parts: they are dropped.
    long long at = (long long)part.partial_result * BLOCK_Q + row;
#if PREFIX_PASS
    if (SPLIT_SIZE && part.partial_result >= p.prefix_results) return;
    part_out = p.prefix_out + at * PART_COLUMNS;
    if (first) p.prefix_lse[at] = ending.lse;  // @store-lse-of-prefix
#if STATISTICS
    if (first) ((PartStatistics*)p.prefix_statistics)[at] = statistics;
#endif
#else
    if (SPLIT_SIZE && part.partial_result >= p.partial_results) return;
    part_out = p.part_out + at * PART_COLUMNS;
    if (first) p.part_lse[at] = ending.lse;
#if STATISTICS
    if (first) ((PartStatistics*)p.part_statistics)[at] = statistics;
#endif
#endif
#endif
  }
  __device__ bool exists() const { return out || part_out; }
  // Stores two neighbouring columns of O, of which the row may have fewer.
  __device__ void store(int column, float x, float y) const {
    if (part_out) {
      *(float2*)(part_out + column) = {x * factor, y * factor};
    } else {
      if (column < HEAD_DIM_V) ::store(out + column, x * factor);
      if (column + 1 < HEAD_DIM_V) ::store(out + column + 1, y * factor);
    }
  }
};
