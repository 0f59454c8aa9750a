// The sequences of a packed batch in descending order of their tiles of keys, as a warp finds them.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

// Each lane has the numbers of tiles of LANE_SEQUENCES sequences. All lanes of a warp call all functions together.
struct TileCounts {
  static constexpr int LANE_SEQUENCES = 4, SEQUENCES = LANE_SEQUENCES * WARP;  // in larger batches no tail is long

  int most;
  int tiles[LANE_SEQUENCES];

  // A sequence has at most `most` tiles: that of a longer one, if max_seqlen_k is wrong, is computed by their blocks.
  __device__ TileCounts(const Params& p, int most) : most(most) {
#pragma unroll
    for (int n = 0; n < LANE_SEQUENCES; ++n) {
      int batch = n * WARP + lane_id(), keys = 0;
      if (batch < p.batch) keys = p.cu_seqlens_k[batch + 1] - p.cu_seqlens_k[batch];
      tiles[n] = min((keys + BLOCK_KV - 1) / BLOCK_KV, most);  // @most-tiles
    }
  }
  // The tiles of all sequences with more than `count` tiles.
  __device__ int of_longer(int count) const {
    int sum = 0;
#pragma unroll
    for (int n = 0; n < LANE_SEQUENCES; ++n)
      if (tiles[n] > count) sum += tiles[n];
    return __reduce_add_sync(0xFFFFFFFF, sum);
  }
  // The number of tiles of the sequence that has the tile at a place of the order; 0 past the last.
  __device__ int of_place(int place) const {
    int count = 0;
    for (int high = most; count < high;) {
      int middle = (count + high) / 2;
      if (of_longer(middle) <= place)
        high = middle;
      else
        count = middle + 1;
    }
    return count;
  }
  // The n-th of the sequences with `count` tiles.
  __device__ int sequence(int count, int n) const {
#pragma unroll
    for (int k = 0; k < LANE_SEQUENCES; ++k) {
      unsigned int equal = __ballot_sync(0xFFFFFFFF, tiles[k] == count);
      int here = __popc(equal);
      if (n < here) {
        for (; n > 0; --n) equal &= equal - 1;
        return k * WARP + __ffs(equal) - 1;
      }
      n -= here;
    }
    return 0;
  }
};
