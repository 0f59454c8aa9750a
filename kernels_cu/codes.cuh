// Codes of a quantised KV cache: a key is scale * (code - zero), with one scale, and for codes of 4 bits one zero, for
// each key and head. Scales and zeros are fp16 or fp32.
#pragma once
#include "number.cuh"

#if SCALES_OF_16_BITS
using scale_element = half16;
#else
using scale_element = float;
#endif
constexpr int CODES_PER_BYTE = CODES_OF_4_BITS ? 2 : 1;

// The largest code, by which the largest number of a row is divided.
template <typename Code>
constexpr float LARGEST_CODE = 127;
template <>
constexpr float LARGEST_CODE<e4m3> = 448;
template <>
constexpr float LARGEST_CODE<e5m2> = 57344;
template <>
constexpr float LARGEST_CODE<nibbles> = 15;

// The bits of a finite number as a code, ties to even.
__device__ inline unsigned int code_of(float x, int8) {
  return __float2int_rn(min(max(x, -128.0f), 127.0f)) & 0xFF;
}
__device__ inline unsigned int code_of(float x, nibbles) {
  return __float2int_rn(min(max(x, 0.0f), 15.0f));
}
__device__ inline unsigned int code_of(float x, e4m3 y) {
  store(&y, x);
  return y.bits;
}
// As e4m3 (number.cuh): a subnormal code counts units of 2^-16, and the first code after them is 2^-14.
__device__ inline unsigned int code_of(float x, e5m2) {
  float z = min(abs(x), LARGEST_CODE<e5m2>);
  unsigned int rounded = (__float_as_uint(z) + 0xFFFFF + (__float_as_uint(z) >> 21 & 1)) >> 21;
  unsigned int code = z < 0x1p-14f ? __float2uint_rn(z * 0x1p16f) : rounded - ((127 - 15) << 2);
  return __float_as_uint(x) >> 24 & 0x80 | code;
}

// The one quiet NaN that all engines write.
__device__ inline void store_scale(float* x, float y) {
  *x = y == y ? y : __uint_as_float(0x7FC00000);
}
__device__ inline void store_scale(half16* x, float y) {
  store(x, y);
  if (y != y) x->bits = 0x7E00;
}

// The scale and zero of a row, and its codes. A code whose quotient is NaN is 0; so is each of a row with a NaN.
struct Quantiser {
  scale_element scale;
  scale_element zero;

  __device__ Quantiser(float low, float high, bool has_nan) {
    float span = CODES_OF_4_BITS ? __fadd_rn(high, -low) : max(abs(low), abs(high));
    store_scale(&scale, has_nan ? __uint_as_float(0x7FC00000) : __fdiv_rn(span, LARGEST_CODE<kv_element>));
    if (to_real(scale) == 0) store(&scale, 1);
    store_scale(&zero, __fdiv_rn(__fadd_rn(0, -low), to_real(scale)));
  }
  __device__ unsigned int code(float x) const {
    float y = __fdiv_rn(x, to_real(scale));
    if (CODES_OF_4_BITS) y = __fadd_rn(y, to_real(zero));
    return code_of(y == y ? y : 0, kv_element());
  }
};
