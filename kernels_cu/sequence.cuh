// Rows and positions of one sequence of a padded or packed batch. Lengths are read once, here.
#pragma once
#include "number.cuh"
#include "params.cuh"
#if KV_CACHE
#include "kv_cache.cuh"
#endif

struct Range {
  int begin;
  int end;

  __device__ bool operator()(int n) const { return n >= begin && n < end; }
};

// Addresses of the rows of a tile in global memory.
template <typename T>
struct TileRows {
  static constexpr bool EQUIDISTANT = true;

  T* data;  // the row of position 0 of the sequence
  long long stride;
  int first;    // position of the tile's row 0
  int aligned;  // Operand::aligned

  __device__ T* operator()(int row) const { return data + (long long)(first + row) * stride; }
  __device__ bool has(int position) const { return true; }  // in PagedTileRows a page may not exist
};

// The rows of one head of a tensor; tile(first) returns those from position `first`.
template <typename T>
struct HeadRows {
  T* data;
  long long stride;
  int aligned;

  // `pages` is an argument for CacheRows, which have the same interface.
  __device__ TileRows<T> tile(int first, const int* pages = nullptr) const { return {data, stride, first, aligned}; }
};

#if KV_CACHE
template <typename T>
using KeyRows = CacheRows<T>;
#else
template <typename T>
using KeyRows = HeadRows<T>;
#endif

// TMA coordinates of a tile, beside its column and head.
struct Box {
  int row;
  int batch;
};

struct Sequence {
  int batch;
  int q_len;  // valid queries and keys
  int kv_len;
  int q_rows;  // rows of the sequence, padding included; every row of an output is written
  int kv_rows;
  int q_start;  // first row; 0 in a padded batch
  int kv_start;
  int offset;  // the diagonal offset o that causal, window and ALiBi share
  int step;    // query i is i * step + offset - j * step positions past key j

#if KV_CACHE
  int appended;  // rows of k_new that this sequence appends
  int leftpad;   // keys before this position are padding
  Blocks blocks;
#if PREFIXES
  int group;        // of the prefix; -1: none
  int prefix;       // keys of the prefix
  int keys_before;  // keys of the sequence before key 0 of `blocks`: those of the prefix, or none
  int keys_after;   // and after kv_len: none, or the sequence's own
#endif

  // Lengths and bounds are clamped, so that wrong contents of an array cause no access out of bounds.
  __device__ Sequence(const Params& p, int b)
      : batch(b), q_rows(p.q_len), kv_start(0), q_start(0), step(1), leftpad(0), blocks(p, b) {
    bool past_the_end = PACKED && b == p.batch;
    if (PACKED && p.cu_seqlens_q) {
      int end = past_the_end ? p.q_len : p.cu_seqlens_q[b + 1];
      q_start = min(max(p.cu_seqlens_q[b], 0), p.q_len);
      q_rows = min(max(end, q_start), p.q_len) - q_start;
    } else if (past_the_end) {
      q_rows = 0;
    }
    q_len = past_the_end ? 0 : q_rows;
    kv_len = appended = 0;
    if (p.k_new.data && (!past_the_end || p.slots)) appended = PACKED ? q_rows : p.appended;
    if (!past_the_end) {
      int added = p.slots ? 0 : appended;
      int before = p.cache_seqlens ? p.cache_seqlens[b] : p.cache_length;
      kv_len = min(max(before, 0), max(p.cache_capacity - added, 0)) + min(added, p.cache_capacity);  // @clamp-length
      if (p.cache_leftpad) leftpad = max(p.cache_leftpad[b], 0);
    }
    kv_rows = kv_len;
    offset = kv_len - q_len;
#if PREFIXES
    group = past_the_end ? -1 : p.prefix_group[b];
    if (group >= p.prefix_groups) group = -1;
    prefix = group < 0 ? 0 : min(max(p.prefix_lengths[group], 0), p.prefix_capacity);
    if (prefix == 0) group = -1;
    keys_before = prefix, keys_after = 0;
#endif
  }
#if PREFIXES
  // The same queries on the keys of the prefix.
  __device__ Sequence on_prefix(const Params& p) const {
    Sequence of_prefix = *this;
    of_prefix.blocks.table = p.prefix_table + max(group, 0) * p.prefix_table_row;  // @table-of-group
    of_prefix.kv_len = of_prefix.kv_rows = prefix;
    of_prefix.offset += prefix;  // @offset-on-prefix
    of_prefix.keys_before = 0, of_prefix.keys_after = kv_len;
    return of_prefix;
  }
#endif
#else
  __device__ Sequence(const Params& p, int b) : batch(b) {
    if constexpr (PACKED) {
      // The grid has one sequence more than the batch: the rows past cu_seqlens[-1], without valid queries or keys.
      bool past_the_end = b == p.batch;
      q_start = p.cu_seqlens_q[b];
      kv_start = p.cu_seqlens_k[b];
      q_rows = (past_the_end ? p.q_len : p.cu_seqlens_q[b + 1]) - q_start;
      kv_rows = (past_the_end ? p.kv_len : p.cu_seqlens_k[b + 1]) - kv_start;
      q_len = past_the_end ? 0 : q_rows;
      kv_len = past_the_end ? 0 : kv_rows;
    } else {
      q_start = kv_start = 0;
      q_rows = p.q_len;
      kv_rows = p.kv_len;
      q_len = Q_LENGTHS ? p.q_lengths[b] : q_rows;
      kv_len = KV_LENGTHS ? p.kv_lengths[b] : kv_rows;
    }
    offset = TOP_LEFT ? 0 : kv_len - q_len;
    step = 1;
    if constexpr (SHARD) {
      step = p.step;
      if (b < p.batch) offset = p.starts[3 * b + 2];
    }
  }
#endif

  // The address of this sequence's row 0 in a tensor whose rows are queries; keys(): in a tensor whose rows are keys.
  template <typename T>
  __device__ T* queries(const Operand& x, int head) const {
    return (T*)x.data + (PACKED ? 0 : batch * x.batch) + head * x.head + q_start * x.row;
  }
  template <typename T>
  __device__ T* keys(const Operand& x, int kv_head) const {
    return (T*)x.data + (PACKED ? 0 : batch * x.batch) + kv_head * x.head + kv_start * x.row;
  }

  // Rows that are loaded tile by tile. All loads of K and V take addresses from key_rows or, with TMA, coordinates from
  // key_box, so that another layout of keys changes these two functions only. (vt.cu, which transposes V for fp8, reads
  // rows through keys() instead.)
  template <typename T>
  __device__ HeadRows<T> query_rows(const Operand& x, int head) const {
    return {queries<T>(x, head), x.row, x.aligned};
  }
#if KV_CACHE
  template <typename T>
  __device__ KeyRows<T> key_rows(const Operand& x, int kv_head) const {
    return {blocks, (T*)x.data + kv_head * x.head + (PAGED ? 0 : blocks.row() * x.batch), x.batch, x.row, x.aligned};
  }
  // The keys of a range that are in memory: none if the sequence has no valid row of a contiguous cache.
  __device__ Range readable(Range keys) const { return blocks.exists() ? keys : Range{0, 0}; }
#else
  template <typename T>
  __device__ KeyRows<T> key_rows(const Operand& x, int kv_head) const {
    return {keys<T>(x, kv_head), x.row, x.aligned};  // @key-rows
  }
  __device__ Range readable(Range keys) const { return keys; }
#endif
  __device__ Box key_box(int first) const { return {kv_start + first, PACKED ? 0 : batch}; }
};
