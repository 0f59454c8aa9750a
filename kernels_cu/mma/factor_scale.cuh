// Factors of the products of derivatives, rounded to 16 bits, and their power of two in fp16.
//
// P (tS - mu), dS and the like grow with the tangents and with dO beyond 2^16, or shrink below 2^-24. In fp16 each warp
// therefore has a power of two by which it multiplies factors before they are rounded, and the epilogue divides the
// sums by it. It starts large, which keeps the digits of small factors, and is lowered when a factor would be infinite,
// as an online softmax moves its reference. bf16 has the range of fp32 and needs none.
#pragma once
#include "gemm.cuh"

template <typename T>
constexpr bool HAS_RANGE_OF_FLOAT = true;
template <>
constexpr bool HAS_RANGE_OF_FLOAT<half16> = false;

// A factor and its rounded copy, which is the left operand of a matrix product. USED is false if there is no such
// product.
template <bool USED, int M, int N>
struct Factor {
  float (&exact)[M][N][4];
  unsigned int rounded[M][N / 2][4];

  __device__ void round() {
    if constexpr (USED) round_fragments(rounded, exact);
  }
  // Finds infinities: the product of a factor with zeros is NaN in a row that has an infinity, else 0. One mma tests
  // eight numbers of each lane. Two alternating sums halve the latency.
  __device__ void add_zeros(float (&zeros)[2][4]) const {
    if constexpr (USED)
#pragma unroll
      for (int t = 0; t < M * N / 2; ++t)
        mma_m16n8k16<element>(zeros[t % 2], rounded[t / (N / 2)][t % (N / 2)], 0, 0, zeros[t % 2]);
  }
  // The largest finite magnitude.
  __device__ float largest() const {
    float y = 0;
#pragma unroll
    for (int t = 0; t < M * N * 4; ++t) {
      float x = abs(exact[t / (4 * N)][t / 4 % N][t % 4]);
      if (USED && x < infinity()) y = max(y, x);
    }
    return y;
  }
};
template <bool USED = true, int M, int N>
__device__ Factor<USED, M, N> factor(float (&exact)[M][N][4]) {
  return {exact};
}

template <int M, int N>
__device__ void multiply(float (&C)[M][N][4], float by) {
#pragma unroll
  for (int t = 0; t < M * N * 4; ++t) C[t / (4 * N)][t / 4 % N][t % 4] *= by;
}

// The power of two by which the factors and sums of a warp are scaled; 1 in bf16.
struct FactorScale {
  static constexpr bool ON = !HAS_RANGE_OF_FLOAT<element>;
  static constexpr int FIRST = 15, LEAST = -14;  // @first-power: the largest and the least normal exponent of fp16
  static constexpr int LOWERED = 12;  // lowered factors are less than 2^LOWERED, to leave room for later ones

  float log2 = ON ? FIRST : 0;

  __device__ float power() const { return ON ? power_of_two((int)log2) : 1; }
  __device__ float inverse() const { return power_of_two(-(int)log2); }

  // Multiplies two rounded numbers.
  __device__ unsigned int times(unsigned int x) const {
    if constexpr (ON) return mul_rn_x2<element>(x, cvt_rn_x2<element>(power(), power()));
    return x;
  }

  // Rounds factors. If one would be infinite, the power and the factors are lowered first, and lower(by) must multiply
  // the sums by `by`.
  template <typename Lower, typename... Factors>
  __device__ void round(Lower lower, Factors&&... factors) {
    (factors.round(), ...);
    if constexpr (ON) {
      float zeros[2][4] = {};
      (factors.add_zeros(zeros), ...);  // @find-infinities
      if (!__any_sync(0xFFFFFFFF, zeros[0][0] + zeros[0][2] + zeros[1][0] + zeros[1][2] != 0)) return;  // @any-infinity
      float largest = 0;
      ((largest = max(largest, factors.largest())), ...);
#pragma unroll
      for (int other = WARP / 2; other > 0; other /= 2)
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, other));
      int exponent = (__float_as_int(largest) >> 23) - 126;           // largest < 2^exponent
      int down = max(0, min(exponent - LOWERED, (int)log2 - LEAST));  // @lower-power
      log2 -= down;
      float by = power_of_two(-down);
      (multiply(factors.exact, by), ...);  // @lower-factors
      lower(by);                           // @lower-sums
      (factors.round(), ...);              // @round-lowered-factors
    }
  }

 private:
  __device__ static float power_of_two(int exponent) { return __int_as_float(127 + exponent << 23); }
};
