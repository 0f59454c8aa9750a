// Storage dtypes and their conversions to the accumulation dtype, without a CUDA header: fp16 and bf16 are 16 bits,
// e4m3 is 8.
#pragma once

struct half16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};
struct e4m3 {  // float8_e4m3fn: no infinities, NaN is 0x7F
  unsigned char bits;
};

#if SCALED_KV
struct int8 {
  unsigned char bits;
};
struct e5m2 {  // float8_e5m2: the upper half of an fp16
  unsigned char bits;
};
struct nibbles {  // two codes of 4 bits, the even column in the lower half
  unsigned char bits;
};
#endif

#include "config.cuh"

__device__ inline float to_real(float x) {
  return x;
}
__device__ inline double to_real(double x) {
  return x;
}
__device__ inline float to_real(half16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ inline float to_real(bfloat16 x) {
  return __uint_as_float((unsigned int)x.bits << 16);
}

// Round to nearest even.
__device__ inline void store(float* x, real y) {
  *x = (float)y;
}
__device__ inline void store(double* x, real y) {
  *x = y;
}
__device__ inline void store(half16* x, real y) {
  float narrow = (float)y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x->bits) : "f"(narrow));
}
__device__ inline void store(bfloat16* x, real y) {
  // Integer arithmetic, because cvt.rn.bf16.f32 requires sm_80: add half a unit of the last kept bit, ties to even.
  unsigned int bits = __float_as_uint((float)y);
  bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  x->bits = is_nan ? (bits >> 16) | 0x40 : (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
}

// Magnitudes above 448 saturate. Integer arithmetic, because cvt to e4m3 requires sm_89.
__device__ inline void store(e4m3* x, real y) {
  unsigned int bits = __float_as_uint((float)y), magnitude = bits & 0x7FFFFFFFu;
  unsigned int code = 0x7F;  // NaN
  if (magnitude <= 0x7F800000u) {
    float z = min(__uint_as_float(magnitude), 448.0f);  // @saturate
    // A subnormal code counts units of 2^-9; the first code after them is 2^-6. All other codes are the upper bits of a
    // float with another exponent bias.
    unsigned int rounded = (__float_as_uint(z) + 0x7FFFF + (__float_as_uint(z) >> 20 & 1)) >> 20;  // @round-to-even
    code = z < 0x1p-6f ? __float2uint_rn(z * 0x1p9f) : rounded - ((127 - 7) << 3);                 // @fp8-code
  }
  x->bits = bits >> 24 & 0x80 | code;
}

__device__ inline real infinity() {
  return (real)__int_as_float(0x7F800000);
}
