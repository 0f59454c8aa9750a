// Storage dtypes and their conversions to the accumulation dtype, without a CUDA header: fp16 and bf16 are 16 bits.
#pragma once

struct half16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

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

__device__ inline real infinity() {
  return (real)__int_as_float(0x7F800000);
}
