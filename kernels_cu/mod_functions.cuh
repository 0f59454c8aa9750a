// Device functions that the generated struct Mod of traced.cuh calls (cupy_flash/mods/cuda_code.py). It is included
// only under `#if MODS`.
#pragma once
#include "number.cuh"
#include "params.cuh"
#include "range.cuh"

// Integers wrap as in NumPy. The arithmetic is unsigned because signed overflow is undefined in C++.
template <typename T>
struct UnsignedOf;
template <>
struct UnsignedOf<int> {
  using type = unsigned int;
};
template <>
struct UnsignedOf<long long> {
  using type = unsigned long long;
};
template <typename T>
__device__ T wrapping_add(T a, T b) {
  using U = typename UnsignedOf<T>::type;
  return (T)((U)a + (U)b);
}
template <typename T>
__device__ T wrapping_sub(T a, T b) {
  using U = typename UnsignedOf<T>::type;
  return (T)((U)a - (U)b);
}
template <typename T>
__device__ T wrapping_mul(T a, T b) {
  using U = typename UnsignedOf<T>::type;
  return (T)((U)a * (U)b);
}
// A shift count of at least the width gives 0 (left) or the sign (right), where C++ leaves it undefined.
template <typename T, typename Count>
__device__ T mod_shl(T a, Count b) {
  using U = typename UnsignedOf<T>::type;
  return b < 8 * sizeof(T) ? (T)((U)a << b) : 0;
}
template <typename T, typename Count>
__device__ T mod_shr(T a, Count b) {
  return a >> (b < 8 * sizeof(T) ? b : 8 * sizeof(T) - 1);
}

// Division rounds down as in Python; an integer divided by 0 gives 0.
template <typename T>
__device__ T mod_floor_divide(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return wrapping_sub<T>(0, a);
  T q = a / b;
  return q * b != a && (a < 0) != (b < 0) ? q - 1 : q;
}
template <typename T>
__device__ T mod_remainder(T a, T b) {
  if (b == 0 || b == -1) return 0;
  T rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <>
__device__ inline real mod_remainder<real>(real a, real b) {
  real rest = fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <>
__device__ inline real mod_floor_divide<real>(real a, real b) {
  if (b == 0) return a / b;
  return rint((a - mod_remainder(a, b)) / b);
}

// Minimum, maximum and sign propagate NaN, as in NumPy and torch.
__device__ inline real mod_min(real x, real y) {
  return x < y || x != x ? x : y;
}
__device__ inline real mod_max(real x, real y) {
  return x > y || x != x ? x : y;
}
__device__ inline real mod_sign(real x) {
  return x != x ? x : (real)((x > 0) - (x < 0));
}
__device__ inline int mod_sign(int x) {
  return (x > 0) - (x < 0);
}
__device__ inline long long mod_sign(long long x) {
  return (x > 0) - (x < 0);
}

// With FAST_MATH, which the 16-bit engines set, functions have errors of a few 2^-23 and no branches.
__device__ inline float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline real mod_exp2(real x) {
  return FAST_MATH ? (real)ex2_approx_ftz((float)x) : exp2(x);
}
__device__ inline real mod_exp(real x) {
  return FAST_MATH ? mod_exp2(x * (real)1.4426950408889634) : exp(x);
}
__device__ inline real mod_tanh(real x) {
  return FAST_MATH ? 1 - 2 * (real)rcp_approx((float)(1 + mod_exp2(x * (real)2.8853900817779268))) : tanh(x);
}
__device__ inline real mod_divide(real x, real y) {
  return FAST_MATH ? x * (real)rcp_approx((float)y) : x / y;
}

// Indices of captured arrays are clamped, as on every backend; `below` is for indices that are not negative.
template <typename T>
__device__ int clamped(T i, int size) {
  return (int)min(max(i, (T)0), (T)(size - 1));  // @clamp-index
}
template <typename T>
__device__ int below(T i, int size) {
  return (int)min(i, (T)(size - 1));
}
__device__ inline Interval<int> narrowed(Interval<long long> x) {
  return {(int)min(max(x.lo, 0ll), 2147483647ll), (int)min(max(x.hi, 0ll), 2147483647ll)};
}

// The element `bytes` after the first one of a row. The empty asm keeps the row's address in a register: otherwise the
// compiler adds the terms in another order, which takes one more 64-bit addition per score.
template <typename Element>
__device__ Element element_of(const Element* row, long long bytes) {
  const char* first = (const char*)row;
  asm("" : "+l"(first));
  __builtin_assume(__isGlobal(first));
  return *(const Element*)(first + bytes);
}

// Adds to the contiguous sums of a captured array's gradient, which are double unless few scores read an element.
template <typename Sum>
__device__ void add_to(Sum* sums, long long place, real x) {
  atomicAdd(sums + place, (Sum)x);
}
// Deterministic sums of a captured array's gradient in fixed point, because integer sums do not depend on the order of
// additions. `largest` is the largest sum of |contributions| of a row; the unit keeps the sum of all rows below 2^62.
struct FixedPoint {
  int exponent;  // the unit is 2^-exponent
  bool is_finite;
  __device__ FixedPoint(const Params& p, const void* largest) {
    int biased = (int)(__double_as_longlong(*(const double*)largest) >> 52);  // largest < 2^(biased - 1022)
    int of_rows = 64 - __clzll((long long)p.batch * p.heads * p.q_len);       // rows < 2^of_rows
    exponent = min(max(61 - of_rows - (biased - 1022), -1022), 1022);         // @fixed-point-unit
    is_finite = biased != 0x7FF;
  }
  static __device__ double power_of_two(int n) { return __longlong_as_double((long long)(1023 + n) << 52); }
  __device__ void add_to(long long* sums, long long place, real x) const {
    long long units = (long long)rint((double)x * power_of_two(exponent));
    atomicAdd((unsigned long long*)sums + place, (unsigned long long)units);  // @add-units
  }
  // If a contribution is infinite or NaN, no unit can hold the sum, and the gradient is NaN.
  __device__ real value(long long sum) const {
    // @value-of-units
    return is_finite ? (real)((double)sum * power_of_two(-exponent)) : (real)__int_as_float(0x7FC00000);
  }
};
// Non-negative doubles, inf and NaN are ordered as their bits, so an integer maximum serves.
__device__ inline void raise_to(double* largest, real x) {
  atomicMax((unsigned long long*)largest, (unsigned long long)__double_as_longlong(abs((double)x)));  // @measure-row
}
template <typename Element>
__device__ void round_fixed(Element* gradient, const long long* sums, long long count, FixedPoint fixed, int thread,
                            int threads) {
  for (long long n = thread; n < count; n += threads) store(gradient + n, fixed.value(sums[n]));
}

template <typename Sum>
__device__ void clear(Sum* sums, long long count, int thread, int threads) {
  for (long long n = thread; n < count; n += threads) sums[n] = 0;
}
template <typename Element, typename Sum>
__device__ void round_to(Element* gradient, const Sum* sums, long long count, int thread, int threads) {
  for (long long n = thread; n < count; n += threads) store(gradient + n, (real)sums[n]);
}
