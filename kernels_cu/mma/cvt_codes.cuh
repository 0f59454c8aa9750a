// Exact conversions of the codes of a quantised cache to 16 bits, by permutations of bytes, logic and one subtraction.
#pragma once
#include "../codes.cuh"
#include "../ptx.cuh"

// x y + z of two pairs of numbers, rounded to nearest even.
template <typename T>
__device__ unsigned int fma_rn_x2(unsigned int x, unsigned int y, unsigned int z);
template <>
__device__ inline unsigned int fma_rn_x2<half16>(unsigned int x, unsigned int y, unsigned int z) {
  asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z));
  return x;
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ inline unsigned int fma_rn_x2<bfloat16>(unsigned int x, unsigned int y, unsigned int z) {
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z));
  return x;
}
#endif

// Four codes of a word as two pairs, the two low ones first. A byte below the exponent of 1024 is 1024 + byte in fp16.
__device__ inline void cvt_codes_x4(unsigned int (&y)[2], unsigned int x, int8, half16) {
  x ^= 0x80808080;  // code + 128
#pragma unroll
  for (int n = 0; n < 2; ++n)
    y[n] = fma_rn_x2<half16>(__byte_perm(x, 0x64646464, n ? 0x4342 : 0x4140), 0x3C003C00, 0xE480E480);
}
__device__ inline void cvt_codes_x4(unsigned int (&y)[2], unsigned int x, e5m2, half16) {
  y[0] = __byte_perm(x, 0, 0x1404), y[1] = __byte_perm(x, 0, 0x3424);
}
__device__ inline void cvt_codes_x4(unsigned int (&y)[2], unsigned int x, e4m3, half16) {
  cvt_e4m3x4<half16>(y, x);
}
#if __CUDA_ARCH__ >= 800
template <typename Code>
__device__ void cvt_codes_x4(unsigned int (&y)[2], unsigned int x, Code code, bfloat16) {
  cvt_codes_x4(y, x, code, half16());
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    half16 low = {(unsigned short)y[n]}, high = {(unsigned short)(y[n] >> 16)};
    y[n] = cvt_rn_x2<bfloat16>(to_real(low), to_real(high));
  }
}
#endif

// Codes n and n + 4 of the eight of a word. Those of odd n are 16 times too large in fp16, which one fma undoes too.
__device__ inline unsigned int cvt_nibbles(unsigned int x, int n, half16) {
  unsigned int shifted = n < 2 ? x : x >> 8;
  if (n % 2) return fma_rn_x2<half16>(shifted & 0x00F000F0 | 0x64006400, 0x2C002C00, 0xD400D400);
  return fma_rn_x2<half16>(shifted & 0x000F000F | 0x64006400, 0x3C003C00, 0xE400E400);
}
#if __CUDA_ARCH__ >= 800
__device__ inline unsigned int cvt_nibbles(unsigned int x, int n, bfloat16) {
  return fma_rn_x2<bfloat16>(x >> 4 * n & 0x000F000F | 0x43004300, 0x3F803F80, 0xC300C300);
}
#endif
