// Exact conversions of the codes of a quantised cache to pairs of 16 bits, by permutations of bytes, logic and at most
// one addition a pair.
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

__device__ inline unsigned int half_to_bfloat_x2(unsigned int x) {
  half16 low = {(unsigned short)x}, high = {(unsigned short)(x >> 16)};
  return cvt_rn_x2<bfloat16>(to_real(low), to_real(high));
}
#endif

// x & mask | bits, in one instruction even if both are constants.
__device__ inline unsigned int and_or(unsigned int x, unsigned int mask, unsigned int bits) {
  unsigned int y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// The codes `low` and `high` of the four of a word. A byte below the exponent of 1024 is 1024 + byte in fp16.
__device__ inline unsigned int cvt_codes_x2(unsigned int x, int low, int high, int8, half16) {
  x ^= 0x80808080;  // code + 128
  return fma_rn_x2<half16>(__byte_perm(x, 0x64646464, 0x4040 | high << 8 | low), 0x3C003C00, 0xE480E480);
}
__device__ inline unsigned int cvt_codes_x2(unsigned int x, int low, int high, e5m2, half16) {
  return __byte_perm(x, 0, 0x0404 | high << 12 | low << 4);
}
#if __CUDA_ARCH__ >= 800
// Seven bits below the exponent of 128 are 128 + bits in bf16; the sign of the code turns the -128 that is added to
// them into -256.
__device__ inline unsigned int cvt_codes_x2(unsigned int x, int low, int high, int8, bfloat16) {
  unsigned int bytes = high - low == 2 ? x >> 8 * low : __byte_perm(x, 0, 0x4040 | high << 8 | low);
  unsigned int number = and_or(bytes, 0x007F007F, 0x43004300), offset = and_or(bytes, 0x00800080, 0xC300C300);
  return fma_rn_x2<bfloat16>(number, 0x3F803F80, offset);  // @sign-of-int8
}
__device__ inline unsigned int cvt_codes_x2(unsigned int x, int low, int high, e5m2 code, bfloat16) {
  return half_to_bfloat_x2(cvt_codes_x2(x, low, high, code, half16()));
}
#endif
#if __CUDA_ARCH__ < 890
// The bits of an e4m3 in the exponent and mantissa of T, which is then multiplied by the difference of the biases.
template <typename T>
struct E4m3In;
template <>
struct E4m3In<half16> {
  static constexpr unsigned int SHIFT = 1, NAN_CODE = 0x3F80, POWER = 0x5C005C00;  // 2^8
};
template <>
struct E4m3In<bfloat16> {
  static constexpr unsigned int SHIFT = 4, NAN_CODE = 0x07F0, POWER = 0x7B807B80;  // 2^120
};
template <typename T>
__device__ unsigned int cvt_codes_x2(unsigned int x, int low, int high, e4m3, T) {
  using In = E4m3In<T>;
  constexpr unsigned int NAN_CODES = In::NAN_CODE * 0x10001;
  unsigned int bytes = __byte_perm(x, 0, 0x0404 | high << 12 | low << 4);  // in the upper halves
  unsigned int magnitude = bytes >> In::SHIFT & NAN_CODES, nan;
  // The NaN alone carries into the upper bit, which becomes all 16: a NaN, which is added.
  asm("prmt.b32 %0, %1, %1, 0xBB99;" : "=r"(nan) : "r"(magnitude + 0x80008000 - NAN_CODES));
  return fma_rn_x2<T>(and_or(bytes, 0x80008000, magnitude), In::POWER, nan);  // @nan-of-e4m3
}
#endif

// Four codes of a word as two pairs, the two low ones first.
template <typename Code, typename T>
__device__ void cvt_codes_x4(unsigned int (&y)[2], unsigned int x, Code code, T) {
  y[0] = cvt_codes_x2(x, 0, 1, code, T()), y[1] = cvt_codes_x2(x, 2, 3, code, T());
}
#if __CUDA_ARCH__ >= 890
template <typename T>
__device__ void cvt_codes_x4(unsigned int (&y)[2], unsigned int x, e4m3, T) {
  cvt_e4m3x4<T>(y, x);
}
#endif

// The codes of column 0 or 1 of four keys, of which each word has two columns of two keys.
template <typename Code, typename T>
__device__ void cvt_column(unsigned int (&y)[2], unsigned int x0, unsigned int x1, int column, Code code, T) {
  y[0] = cvt_codes_x2(x0, column, column + 2, code, T());  // @column-of-codes
  y[1] = cvt_codes_x2(x1, column, column + 2, code, T());
}
#if __CUDA_ARCH__ >= 890
template <typename T>
__device__ void cvt_column(unsigned int (&y)[2], unsigned int x0, unsigned int x1, int column, e4m3, T) {
  cvt_e4m3x4<T>(y, __byte_perm(x0, x1, column ? 0x7531 : 0x6420));
}
#endif

// The factor that products of converted codes still need. In fp16 a 4-bit code is used unchanged, as the bits of a
// denormal number, whose value is the code times 2^-24.
template <typename Code, typename T>
constexpr float UNIT_OF_CODES = 1;
template <>
constexpr float UNIT_OF_CODES<nibbles, half16> = 0x1p24f;

// Codes n and n + 4 of the eight of a word.
__device__ inline unsigned int cvt_nibbles(unsigned int x, int n, half16) {
  return x >> 4 * n & 0x000F000F;
}
#if __CUDA_ARCH__ >= 800
__device__ inline unsigned int cvt_nibbles(unsigned int x, int n, bfloat16) {
  return fma_rn_x2<bfloat16>(and_or(x >> 4 * n, 0x000F000F, 0x43004300), 0x3F803F80, 0xC300C300);
}
#endif
