// Visibility of keys: by position (the band of causal and window masks), by a mask_mod and by the dense mask. mask.py
// has the same arithmetic.
#pragma once
#include "mod.cuh"

// Query i sees the existing keys j with i + low <= j <= i + high.
struct Band {
  int low;
  int high;
  int q_len;
  int kv_len;
#if KV_CACHE
  int leftpad;  // no query sees the keys before it
#endif
#if PREFIXES
  int keys_after;  // keys of the sequence after kv_len
#endif
  Mod mod;

  __device__ Band(const Params& p, const Sequence& sequence)
      : q_len(sequence.q_len), kv_len(sequence.kv_len), mod(p, sequence) {
    // The bound of an unbounded side is just larger than every distance of two positions. Other bounds are clamped to
    // it, so that no sum overflows.
    low = -q_len - 1;
    high = kv_len + 1;
    if (WINDOW_LEFT) low = inside(-floor_div((long long)p.window_left - sequence.offset, sequence.step));
    // @band-high
    if (WINDOW_RIGHT) high = inside(floor_div((long long)sequence.offset + p.window_right, sequence.step));
#if KV_CACHE
    leftpad = sequence.leftpad;
#endif
#if PREFIXES
    keys_after = sequence.keys_after;
#endif
  }

  __device__ int inside(long long bound) const {
    return min(max(bound, (long long)(-q_len - 1)), (long long)(kv_len + 1));
  }

  // The first key from `j` on that is no padding.
  __device__ int key_after_padding(int j) const {
#if KV_CACHE
    return max(j, leftpad);  // @after-padding
#else
    return j;
#endif
  }

  // Rounds down. Without a shard b is 1, and the compiler removes the division.
  __device__ static long long floor_div(long long a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

  __device__ bool sees(int i, int j) const {
    return key_after_padding(i + low) <= j && j <= i + high && i < q_len && j < kv_len;
  }

  // Clamps a position to the last one, so that a mod reads its captured arrays in bounds without a branch.
  __device__ int query(int i) const { return min(i, q_len - 1); }
  __device__ int key(int j) const { return min(j, kv_len - 1); }

  // Whether the mask_mod lets a query of `head` see a key. The caller ensures that both positions exist.
  __device__ bool mod_sees(int head, int i, Position j) const {
#if MODS
    return mod.sees(mod.query(head, i), mod.key(j));
#else
    return true;
#endif
  }

  // The keys that query i sees; the queries that see key j.
  __device__ Range keys(int i) const {
    return i < q_len ? Range{max(key_after_padding(i + low), 0), min(i + high, kv_len - 1) + 1} : Range{0, 0};
  }
  __device__ Range queries(int j) const {
    return j < kv_len ? Range{max(j - high, 0), min(j - low, q_len - 1) + 1} : Range{0, 0};
  }

  // Bounds of the keys seen by queries [q_start, q_stop), and of the queries that see keys [kv_start, kv_stop).
  __device__ int kv_begin(int q_start) const { return min(max(key_after_padding(q_start + low), 0), kv_len); }
  __device__ int kv_end(int q_stop) const { return max(min(q_stop + high, kv_len), 0); }  // @kv-end
  __device__ int q_begin(int kv_start) const { return min(max(kv_start - high, 0), q_len); }
  __device__ int q_end(int kv_stop) const { return max(min(kv_stop - low, q_len), 0); }

  // The keys that every query of the tile sees; empty if the tile exceeds the sequence.
  __device__ Range sees_all(int q_start, int q_stop) const {
    // @keys-all-see
    return q_stop <= q_len ? Range{key_after_padding(q_stop - 1 + low), min(q_start + high + 1, kv_len)} : Range{0, 0};
  }
  // The queries that see every key of the tile; empty if the tile exceeds the sequence.
  __device__ Range seen_by_all(int kv_start, int kv_stop) const {
    return kv_stop <= kv_len ? Range{kv_stop - 1 - high, min(kv_start - low + 1, q_len)} : Range{0, 0};
  }
};

struct DenseMask {
  // Whether the mask lets query i of head h see key j. The caller has checked that the band does.
  __device__ static bool sees(const Params& p, const Band& band, int b, int h, int i, int j) {
    const unsigned char* mask = (const unsigned char*)p.mask.data;
#if KV_CACHE
    j -= band.kv_len - p.mask_keys;  // @shift-mask: with a cache the mask has only the last keys
#if PREFIXES
    j -= band.keys_after;  // @mask-on-prefix
#endif
    if (j < 0) return true;
#endif
    return mask[b * p.mask.batch + h * p.mask.head + i * p.mask.row + j * p.mask.column] != 0;
  }
};
