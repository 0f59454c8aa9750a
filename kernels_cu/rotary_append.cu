// Before attention: appends the rows of k and v to the KV cache, in its dtype, and, with rotary tables, rotates the
// appended keys and copies q, rotated, to a workspace. One warp per row of a head. grid (row blocks, heads, sequences)
#include "descales.cuh"
#include "ptx.cuh"
#if SCALED_KV
#include "codes.cuh"
#endif
#include "sequence.cuh"

constexpr int WARPS = THREADS / WARP;

__device__ inline float mul_rn(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ inline double mul_rn(double a, double b) {
  return __dmul_rn(a, b);
}
__device__ inline float add_rn(float a, float b) {
  return __fadd_rn(a, b);
}
__device__ inline double add_rn(double a, double b) {
  return __dadd_rn(a, b);
}

// Column d of a row, rotated by a position: a pair (x, y) becomes (x cos - y sin, x sin + y cos). Products and sums are
// rounded one by one, so that the CPU engine writes the same bits.
__device__ inline real rotated(const Params& p, const element* row, int d, int position) {
  real own = to_real(row[d]);
  if (d >= ROTARY_DIM) return own;
  constexpr int HALF = ROTARY_DIM / 2;
  bool second = ROTARY_INTERLEAVED ? d % 2 : d >= HALF;
  int pair = ROTARY_INTERLEAVED ? d / 2 : d - second * HALF;
  real other = to_real(row[ROTARY_INTERLEAVED ? d ^ 1 : second ? d - HALF : d + HALF]);
  int at = min(max(position, 0), p.rotary_rows - 1);  // @row-of-tables
  real cos = (real)to_real(((const cos_element*)p.rotary_cos)[at * p.cos_row + pair]);
  real sin = (real)to_real(((const sin_element*)p.rotary_sin)[at * p.sin_row + pair]);
  return second ? add_rn(mul_rn(other, sin), mul_rn(own, cos)) : add_rn(mul_rn(own, cos), -mul_rn(other, sin));
}

// The position of row i of q or k, whose first row has position `first`.
__device__ inline int position_of(const Params& p, const Sequence& sequence, int first, int i) {
  if (sequence.batch == p.batch) return 0;  // rows past the last sequence of a packed batch
#if PREFIXES
  first += sequence.keys_before;  // @position-after-prefix
#endif
  return p.positions ? p.positions[(PACKED ? sequence.q_start : sequence.batch * p.positions_row) + i] : first + i;
}

// The place of an appended row in the cache: block, and row in the block. The block is -1 if the row is dropped.
struct Place {
  int block;
  int row;

  __device__ Place(const Params& p, const Sequence& sequence, int i) : block(-1), row(0) {
    if (p.slots) {
      long long slot = p.slots[(PACKED ? sequence.q_start : (long long)sequence.batch * p.appended) + i];
      if (slot < 0 || slot >= (long long)p.cache_blocks * p.cache_rows) return;  // @drop-slots
      block = slot / p.cache_rows, row = slot % p.cache_rows;
    } else {
      int key = sequence.kv_len - sequence.appended + i;  // @appended-key
      if (key < 0 || key >= p.cache_capacity) return;
      block = sequence.blocks.block_of(key), row = sequence.blocks.row_in_block(key);
      if (!sequence.blocks.has(block)) block = -1;
    }
  }
};

#if SCALED_KV
// Appends a row as codes with its scale. The operations are those of the CPU engine, each rounded by itself, so that
// the bits are the same.
template <bool ROTATES, int DIM>
__device__ void append_codes(const Params& p, const element* row, int position, kv_element* codes, scale_element* scale,
                             scale_element* zero) {
  auto number = [&](int d) { return (float)(ROTATES ? rotated(p, row, d, position) : to_real(row[d])); };
  float low = infinity(), high = -infinity();
  bool has_nan = false;
  for (int d = lane_id(); d < DIM; d += WARP) {
    float x = number(d);
    low = min(low, x), high = max(high, x), has_nan |= x != x;
  }
#pragma unroll
  for (int other = WARP / 2; other > 0; other /= 2) {
    low = min(low, __shfl_xor_sync(0xFFFFFFFF, low, other));
    high = max(high, __shfl_xor_sync(0xFFFFFFFF, high, other));
  }
  Quantiser quantiser(low, high, __any_sync(0xFFFFFFFF, has_nan));
  for (int n = lane_id(); n < DIM / CODES_PER_BYTE; n += WARP) {
    unsigned int byte = 0;
#pragma unroll
    for (int half = 0; half < CODES_PER_BYTE; ++half)
      byte |= quantiser.code(number(CODES_PER_BYTE * n + half)) << 4 * half;
    codes[n].bits = byte;
  }
  if (lane_id() == 0) {
    *scale = quantiser.scale;
    if (CODES_OF_4_BITS) *zero = quantiser.zero;
  }
}

// The number of a key and head in an array that has one for each.
__device__ inline scale_element* scale_at(const Operand& x, const Place& place, int head) {
  return (scale_element*)x.data + place.block * x.batch + head * x.head + place.row * x.row;  // @place-of-scale
}
#else
// Appends number d of a row, rotated if the row is a key. Numbers that keep their dtype and value keep their bits;
// those of an fp8 cache are divided by the descale and rounded once.
template <bool ROTATES>
__device__ void append(element* to, const Params& p, const element* row, int d, int position, float) {
  if constexpr (ROTATES)
    store(to, rotated(p, row, d, position));
  else
    *to = row[d];
}
template <bool ROTATES>
__device__ void append(e4m3* to, const Params& p, const element* row, int d, int position, float descale) {
  // @descale-appended
  store(to, __fdiv_rn((float)(ROTATES ? rotated(p, row, d, position) : to_real(row[d])), descale));
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) rotary_append(const __grid_constant__ Params p) {
  int head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  for (int i = blockIdx.x * WARPS + threadIdx.x / WARP; i < max(sequence.appended, sequence.q_rows);
       i += gridDim.x * WARPS) {
    if (head < p.heads / p.group && i < sequence.appended) {
      Place place(p, sequence, i);
      int position = position_of(p, sequence, sequence.kv_len - sequence.appended, i);
      const element* k = sequence.queries<element>(p.k_new, head) + i * p.k_new.row;
      const element* v = sequence.queries<element>(p.v_new, head) + i * p.v_new.row;
      // @row-of-keys
      kv_element* K = (kv_element*)p.k.data + place.block * p.k.batch + head * p.k.head + place.row * p.k.row;
#if !SHARED_KV
      kv_element* V = (kv_element*)p.v.data + place.block * p.v.batch + head * p.v.head + place.row * p.v.row;
#endif
#if SCALED_KV
      if (place.block >= 0) {
        append_codes<ROTARY_DIM != 0, HEAD_DIM>(p, k, position, K, scale_at(p.k_scale, place, head),
                                                scale_at(p.k_zero, place, head));
#if !SHARED_KV
        append_codes<false, HEAD_DIM_V>(p, v, position, V, scale_at(p.v_scale, place, head),
                                        scale_at(p.v_zero, place, head));
#endif
      }
#else
      if (place.block >= 0) {
        Descales descales(p, sequence.batch, head);
        for (int d = lane_id(); d < HEAD_DIM; d += WARP) append<ROTARY_DIM != 0>(K + d, p, k, d, position, descales.qk);
#if !SHARED_KV
        for (int d = lane_id(); d < HEAD_DIM_V; d += WARP) append<false>(V + d, p, v, d, position, descales.v);
#endif
      }
#endif
    }
    if (ROTARY_DIM && p.q_unrotated.data && i < sequence.q_rows) {
      int position = position_of(p, sequence, sequence.kv_len - sequence.q_len, i);  // @position-of-rotated-q
      const element* from = sequence.queries<element>(p.q_unrotated, head) + i * p.q_unrotated.row;
      element* to = sequence.queries<element>(p.q, head) + i * p.q.row;
      for (int d = lane_id(); d < HEAD_DIM; d += WARP) store(to + d, rotated(p, from, d, position));
    }
  }
}
