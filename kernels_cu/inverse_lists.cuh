// The lists that name each block of keys, in ascending order, from a stable counting sort in three kernels: the lists
// are cut into CHUNKS, whose entries selected/count_entries.cu counts by block, selected/scan_counts.cu sums over
// blocks and chunks, and selected/fill_lists.cu sorts. The result depends on the lists alone.
#pragma once
#include "selection.cuh"

// The queries that may see a key of a range.
__device__ inline Range queries_of(const Band& band, Range keys) {
  return {band.q_begin(keys.begin), keys.begin < keys.end ? band.q_end(keys.end) : 0};
}

struct InverseLists {
  static constexpr int CHUNKS = 32;

  int* ends;   // [blocks][CHUNKS]: counts, then where the lists of a chunk begin, then, after the fill, where they end
  int* lists;  // that name a block, block after block
  int blocks;  // of the sequence's keys
  int count;   // lists of the sequence with a query

  // `head` is the index of the lists among those of all heads.
  __device__ InverseLists(const Params& p, const Sequence& sequence, const Lists& of_sequence, int head)
      : blocks(sequence.kv_len / KEYS_OF_ENTRY + (sequence.kv_len % KEYS_OF_ENTRY > 0)),
        count(of_sequence.count(sequence.q_len)) {
    long long all_lists = PACKED ? p.q_len / p.selected_rows + p.batch : (p.q_len - 1) / p.selected_rows + 1;
    long long all_blocks = PACKED ? p.kv_len / KEYS_OF_ENTRY + p.batch : (p.kv_len - 1) / KEYS_OF_ENTRY + 1;
    long long row = PACKED ? head : (long long)sequence.batch * p.selected_heads + head;
    long long list = PACKED ? sequence.q_start / p.selected_rows + sequence.batch : 0;
    long long block = PACKED ? sequence.kv_start / KEYS_OF_ENTRY + sequence.batch : 0;
    ends = p.inverse_ends + (row * all_blocks + block) * CHUNKS;
    lists = p.inverse_lists + (row * all_lists + list) * p.selected_entries;
  }
  // The lists of a chunk.
  __device__ Range chunk(int n) const {
    int size = (count + CHUNKS - 1) / CHUNKS;
    return {min(n * size, count), min((n + 1) * size, count)};
  }
  __device__ bool names(int entry) const { return entry >= 0 && entry < blocks; }  // @inverse-entry-exists
  // The places of the lists that name a block.
  __device__ Range of_block(int block) const {
    return {block ? ends[block * CHUNKS - 1] : 0, ends[block * CHUNKS + CHUNKS - 1]};  // @lists-of-block
  }
  // Finds the rows from `start` on of the lists at `places`, of those queries that may see a key of the block; returns
  // whether there is one. It is a barrier, before which no thread may read the rows of an earlier tile.
  __device__ bool find_rows(ListRows& tile, const Lists& of_sequence, Range places, int start, Range visible,
                            int head) const {
    bool any = false;
    for (int n = threadIdx.x; n < BLOCK_Q; n += THREADS) {
      int place = places.begin + (start + n) / of_sequence.rows, row = (start + n) % of_sequence.rows, i = -1;
      // @rows-of-inverse-list
      if (place < places.end) i = lists[place] * of_sequence.queries + row / HEADS_OF_LIST;
      bool seen = visible(i);
      tile.query[n] = seen ? i : of_sequence.q_rows;
      tile.head[n] = head + row % HEADS_OF_LIST;
      any |= seen;
    }
    return __syncthreads_or(any);
  }
};

// Calls visit() for the tiles of rows whose lists name a block of keys and that may see one, list after list, for the
// query heads of a key/value head.
template <typename Visit>
__device__ void visit_rows(ListRows& tile, const Params& p, const Sequence& sequence, int kv_head, int block,
                           Range visible, Visit visit) {
  for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; head += HEADS_OF_LIST) {
    Lists lists(p, sequence, head);
    InverseLists inverse(p, sequence, lists, p.selected_heads == 1 ? 0 : head / HEADS_OF_LIST);
    Range places = visible.begin < visible.end ? inverse.of_block(block) : Range{0, 0};
    for (int start = 0; start < (places.end - places.begin) * lists.rows; start += BLOCK_Q) {
      __syncthreads();
      if (inverse.find_rows(tile, lists, places, start, visible, head)) visit();
    }
  }
}

// Calls visit(place in `ends`, list) for the entries of a chunk that name a block, list after list.
template <typename Visit>
__device__ void for_each_entry(const Params& p, const Sequence& sequence, int head, int chunk, Visit visit) {
  Lists lists(p, sequence, head * HEADS_OF_LIST);
  InverseLists inverse(p, sequence, lists, head);
  Range range = inverse.chunk(chunk);
  for (int list = range.begin; list < range.end; ++list) {
    for (int n = threadIdx.x; n < lists.length; n += THREADS) {
      int entry = lists.entry(list, n);
      if (inverse.names(entry)) visit(inverse, entry * InverseLists::CHUNKS + chunk, list);
    }
    __syncthreads();  // those of a block are in ascending order
  }
}
