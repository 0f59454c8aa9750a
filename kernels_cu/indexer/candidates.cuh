// The n best entries (keys, or blocks of keys) of a row so far: a list of a warp, in global memory. Entries come in
// ascending order and stay in it. One whose score exceeds the n-th best is appended, and when the list is full, all but
// the n best are removed, so that of equal scores the lower entries remain, and the result needs no sort. (The lists of
// ../top_weights.cuh are in the order of the scores: a thread moves half of its list for a new score.)
#pragma once
#include "../number.cuh"
#include "../params.cuh"

// The bits of a number as an unsigned integer of the same order, above 0.
__device__ inline unsigned int ordered(float x) {
  int bits = __float_as_int(x);
  return bits ^ (bits >> 31 | 0x80000000);
}
__device__ inline unsigned long long ordered(double x) {
  long long bits = __double_as_longlong(x);
  return bits ^ (bits >> 63 | 0x8000000000000000);
}
using Ordered = decltype(ordered(real()));
constexpr Ordered LARGEST = ~(Ordered)0;  // above all numbers; 0 is below

// The bits of a score: NaN counts as infinity, and both zeros are equal.
__device__ inline Ordered bits_of_score(real s) {
  return ordered(s != s ? infinity() : s == 0 ? 0 : s);  // @indexer.nan
}

__device__ inline int lane() {
  return threadIdx.x % 32;
}
__device__ inline int rank_in(unsigned int lanes) {
  return __popc(lanes & (1u << lane()) - 1);
}

// The state of a row that its warp carries from one tile of keys to the next.
struct Chosen {
  Ordered nth;   // the n-th best score when entries were last removed, before that 0
  Ordered open;  // the best score of the block of keys that the last tile has not ended
  int count;
};

struct Candidates {
  Chosen& row;  // in shared memory
  Ordered* scores;
  int* entries;
  int places;  // at least n + 32
  int n;

  // Takes an entry of each lane, in ascending order; with a score of 0 there is none.
  __device__ void add(Ordered score, int entry) {
    if (row.count + 32 > places) keep_best();
    bool enters = score > row.nth;
    unsigned int entering = __ballot_sync(0xFFFFFFFF, enters);
    int place = row.count + rank_in(entering);
    if (enters) scores[place] = score, entries[place] = entry;
    __syncwarp();
    if (lane() == 0) row.count += __popc(entering);
    __syncwarp();
  }

  template <typename Which>
  __device__ int count_if(Which is_counted) const {
    int count = 0;
    for (int place = lane(); place < row.count; place += 32) count += is_counted(scores[place]);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) count += __shfl_xor_sync(0xFFFFFFFF, count, other);
    return count;
  }

  // Removes all but the n best entries.
  __device__ void keep_best() {
    Ordered nth = 0;  // the largest number that n scores reach
    for (int bit = 8 * sizeof(Ordered) - 1; bit >= 0; --bit) {
      Ordered larger = nth | (Ordered)1 << bit;
      if (count_if([&](Ordered score) { return score >= larger; }) >= n) nth = larger;
    }
    int ties = n - count_if([&](Ordered score) { return score > nth; }), kept = 0;
    for (int first = 0; first < row.count; first += 32) {
      int place = first + lane();
      bool exists = place < row.count;
      Ordered score = exists ? scores[place] : 0;
      int entry = exists ? entries[place] : 0;
      unsigned int tied = __ballot_sync(0xFFFFFFFF, exists && score == nth);
      bool stays = exists && (score > nth || (score == nth && rank_in(tied) < ties));  // @indexer.ties
      unsigned int staying = __ballot_sync(0xFFFFFFFF, stays);
      __syncwarp();  // a lower place is written than all that were read
      int to = kept + rank_in(staying);
      if (stays) scores[to] = score, entries[to] = entry;
      kept += __popc(staying), ties -= __popc(tied);
    }
    __syncwarp();
    if (lane() == 0) row.count = kept, row.nth = nth;  // @indexer.nth
    __syncwarp();
  }

  // Removes all but the n best entries, and returns their number.
  __device__ int finish() {
    if (row.count > n) keep_best();
    return row.count;
  }
  // Writes the n best entries, -1 behind them.
  __device__ void store(int* list) {
    int count = finish();
    for (int place = lane(); place < n; place += 32) list[place] = place < count ? entries[place] : -1;
  }
};

// The candidates of a row of a block in global memory; `block` counts the blocks of all parts.
__device__ inline Candidates candidates_at(Chosen& row, const Params& p, long long block, int row_of_block) {
  long long place = (block * BLOCK_Q + row_of_block) * p.candidate_places;
  return {row, (Ordered*)p.candidate_scores + place, p.candidates + place, p.candidate_places, p.list_entries};
}
__device__ inline int* list_of(const Params& p, int batch, int i) {
  return p.lists + ((long long)batch * p.q_len + i) * p.list_entries;
}
