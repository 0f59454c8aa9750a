// Scales and zeros of a quantised cache: their loads, beside those of the codes, and the steps that apply them to
// fragments of the keys of a warp, after the products.
//
//   S = scale_k (Q K^T - zero_k sum(Q))        P' = P scale_v        O = P' V - sum(P' zero_v)
//
// Only codes of 4 bits have zeros; without them their arrays compile to nothing.
#pragma once
#include "cvt_codes.cuh"
#include "load.cuh"

constexpr float UNIT = UNIT_OF_CODES<kv_element, element>;

// Loads the numbers of the keys of a tile, each thread those of one key of K or V. They pass through registers, because
// cp.async copies at least 4 bytes: a load is issued with that of the codes, and stored at the end of the step.
struct ScaleLoads {
  static_assert(THREADS >= 2 * BLOCK_KV, "a thread for each key of K and of V");

  const Sequence& sequence;
  KeyRows<scale_element> scales;
  KeyRows<scale_element> zeros;
  float scale, zero;
  unsigned int to = 0;  // address of the scale; 0 if none is to be stored

  __device__ ScaleLoads(const Params& p, const Sequence& sequence, int kv_head)
      : sequence(sequence),
        scales(sequence.key_rows<scale_element>(threadIdx.x < BLOCK_KV ? p.k_scale : p.v_scale, kv_head)),
        zeros(sequence.key_rows<scale_element>(threadIdx.x < BLOCK_KV ? p.k_zero : p.v_zero, kv_head)) {}
  // Numbers of keys that are not read are 0.
  __device__ void load(unsigned int slot, int start, Range keys, const int* pages) {
    if (THREADS > 2 * BLOCK_KV && threadIdx.x >= 2 * BLOCK_KV) return;
    int row = threadIdx.x % BLOCK_KV;
    auto tile = scales.tile(start, pages);
    bool read = sequence.readable(keys)(start + row) && tile.has(start + row);
    scale = read ? to_real(*tile(row)) : 0;  // @scale-of-key
    if constexpr (CODES_OF_4_BITS) zero = read ? to_real(*zeros.tile(start, pages)(row)) : 0;
    to = slot + KeySlot::SCALES + 4 * threadIdx.x;
  }
  __device__ void store() {
    if (!to) return;
    st_shared(to, __float_as_int(scale));
    if constexpr (CODES_OF_4_BITS) st_shared(to + 8 * BLOCK_KV, __float_as_int(zero));
    to = 0;
  }
};

// The numbers of this lane's columns of S, whose first key is `key` of the tile; `array` counts those of
// KeySlot::SCALES.
template <int N>
struct OfColumns {
  float of[N][2];

  __device__ OfColumns(unsigned int slot, int array, int key) {
    unsigned int first = slot + KeySlot::SCALES + 4 * (array * BLOCK_KV + key);
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) of[n / 2][n % 2] = __int_as_float(ld_shared(first + 4 * column_of(n / 2, n % 2)));
  }
};

__device__ inline float low_of(unsigned int x) {
  return to_real(element{(unsigned short)x});
}
__device__ inline float high_of(unsigned int x) {
  return to_real(element{(unsigned short)(x >> 16)});
}

// The sums of this lane's rows of Q in shared memory, from `row` on.
template <int M>
__device__ void sum_Q(float (&sums)[M][2], unsigned int Q_smem, int row = 0) {
#pragma unroll
  for (int m = 0; m < 2 * M; ++m) {
    float sum = 0;
    for (int chunk = lane_id() % 4; chunk < padded(HEAD_DIM) / 8; chunk += 4) {
      uint4 x = ld_shared_v4(Q_smem + Tile<HEAD_DIM>::at(row + row_of(m / 2, m % 2 * 2), chunk));
      sum += low_of(x.x) + high_of(x.x) + low_of(x.y) + high_of(x.y);
      sum += low_of(x.z) + high_of(x.z) + low_of(x.w) + high_of(x.w);
    }
    sums[m / 2][m % 2] = row_sum(sum);
  }
}

// Turns products of Q and the codes of keys into those of Q and the keys.
template <int M, int N>
__device__ void scale_products(float (&S)[M][N][4], unsigned int slot, int key, const float (&Q_sums)[M][2]) {
  OfColumns<N> scales(slot, 0, key), zeros(slot, CODES_OF_4_BITS ? 2 : 0, key);
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (CODES_OF_4_BITS)
          S[m][n][e] = S[m][n][e] * UNIT - Q_sums[m][e / 2] * zeros.of[n][e % 2];  // @subtract-zero
        S[m][n][e] *= scales.of[n][e % 2];
      }
}

template <int M, int N>
__device__ void multiply_all(float (&X)[M][N][4], float by) {
#pragma unroll
  for (int t = 0; t < M * N * 4; ++t) X[t / (4 * N)][t / 4 % N][t % 4] *= by;
}

template <typename T>
constexpr bool HAS_UNIT = false;
template <>
constexpr bool HAS_UNIT<half16> = true;

// P times the scales of values, rounded, in a unit of the largest scale of the warp's keys: in fp16 a product with a
// small scale would be denormal. O is in that unit too; its change is exact, so that the bits of O do not depend on
// tiles that a row does not see. bf16 has the range of fp32 and needs no unit.
struct ScaledP {
  static constexpr int LARGEST_UNIT = 60;

  int unit = 0;  // log2

  __device__ static float power_of_two(int exponent) { return __int_as_float(127 + exponent << 23); }

  // Rounds P', and adds its products with the zeros of values to `zeros`, of which elements 0 and 2 are used.
  template <int M, int N, int FRAGMENTS>
  __device__ void round(unsigned int (&P)[M][N / 2][4], float (&S)[M][N][4], float (&O)[M][FRAGMENTS][4],
                        float (&zeros)[M][1][4], unsigned int slot, int key) {
    OfColumns<N> scales(slot, 1, key);
    if constexpr (HAS_UNIT<element>) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) largest = max(largest, max(abs(scales.of[n][0]), abs(scales.of[n][1])));
      largest = row_max(largest);
      int exponent = min(max((__float_as_int(largest) >> 23) - 127, -LARGEST_UNIT), LARGEST_UNIT);
      if (largest > 0 && exponent != unit) {             // the same in all lanes
        multiply_all(O, power_of_two(unit - exponent));  // @unit-of-O
        if constexpr (CODES_OF_4_BITS) multiply_all(zeros, power_of_two(unit - exponent));
        unit = exponent;
      }
#pragma unroll
      for (int n = 0; n < 2 * N; ++n) scales.of[n / 2][n % 2] *= power_of_two(-unit);
    }
#pragma unroll
    for (int t = 0; t < M * 4 * N; ++t) S[t / (4 * N)][t / 4 % N][t % 4] *= scales.of[t / 4 % N][t % 2];
    round_fragments(P, S);
    if constexpr (CODES_OF_4_BITS) {
      OfColumns<N> of_values(slot, 3, key);
#pragma unroll
      for (int t = 0; t < M * 2 * N; ++t) {  // the products are of rounded numbers
        unsigned int pair = P[t / (2 * N)][t / 4 % (N / 2)][t % 4];
        const float (&zero)[2] = of_values.of[t / 4 % (N / 2) * 2 + t % 4 / 2];
        zeros[t / (2 * N)][0][t % 2 * 2] += low_of(pair) * zero[0] + high_of(pair) * zero[1];  // @sum-zeros
      }
    }
  }
  // Subtracts the zeros of values, and takes O back to the unit 1.
  template <int M, int FRAGMENTS>
  __device__ void end(float (&O)[M][FRAGMENTS][4], const float (&zeros)[M][1][4]) const {
    if constexpr (CODES_OF_4_BITS)
#pragma unroll
      for (int m = 0; m < 2 * M; ++m) {
        float sum = row_sum(zeros[m / 2][0][m % 2 * 2]);
#pragma unroll
        for (int n = 0; n < 2 * FRAGMENTS; ++n) {
          float& o = O[m / 2][n / 2][m % 2 * 2 + n % 2];
          o = o * UNIT - sum;
        }
      }
    if constexpr (HAS_UNIT<element>) multiply_all(O, power_of_two(unit));
  }
};
