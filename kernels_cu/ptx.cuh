// PTX instructions without a CUDA C++ equivalent, one function each, named like the instruction. A register with two
// 16-bit numbers is an unsigned int, the first number in its low half.
#pragma once
#include "number.cuh"

constexpr int WARP = 32;

__device__ inline unsigned int smem_address(const void* x) {
  return (unsigned int)__cvta_generic_to_shared(x);
}

// 2^x to 2 units in the last place; denormal results flush to 0, and -inf gives 0.
#if STATISTICS
// The larger number; NaN if one is NaN.
__device__ inline float max_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#else
  return x > y || x != x ? x : y;
#endif
}
#endif

__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers rounded to nearest even and packed: cvt.rn.f16x2.f32 or cvt.rn.bf16x2.f32.
template <typename T>
__device__ unsigned int cvt_rn_x2(float low, float high);
template <>
__device__ inline unsigned int cvt_rn_x2<half16>(float low, float high) {
  unsigned int y;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
  half16 x[2];
  store(&x[0], low), store(&x[1], high);
  y = x[0].bits | (unsigned int)x[1].bits << 16;
#endif
  return y;
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ inline unsigned int cvt_rn_x2<bfloat16>(float low, float high) {
  unsigned int y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
#endif

// Products of two pairs of numbers, rounded to nearest even.
template <typename T>
__device__ unsigned int mul_rn_x2(unsigned int x, unsigned int y);
template <>
__device__ inline unsigned int mul_rn_x2<half16>(unsigned int x, unsigned int y) {
  unsigned int z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Four numbers of e4m3 as two pairs of T: y[0] has the two low bytes of x. Exact. Before sm_89, which has an
// instruction, an fp16 gets the bits of the byte and is multiplied by 2^8, the difference of the biases.
template <typename T>
__device__ void cvt_e4m3x4(unsigned int (&y)[2], unsigned int x);
template <>
__device__ inline void cvt_e4m3x4<half16>(unsigned int (&y)[2], unsigned int x) {
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 low, high;"
      "mov.b32 {low, high}, %2;"
      "cvt.rn.f16x2.e4m3x2 %0, low;"
      "cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(y[0]), "=r"(y[1])
      : "r"(x));
#else
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    unsigned int bytes = __byte_perm(x, 0, n ? 0x3424 : 0x1404);  // in the upper halves
    unsigned int magnitude = bytes >> 1 & 0x3F803F80;
    // @fp8-nan
    unsigned int nan = magnitude + 0x00800080 & 0x40004000;  // 0x7F alone carries into the last bit of the exponent
    y[n] = mul_rn_x2<half16>(bytes & 0x80008000 | magnitude | nan, 0x5C005C00);  // @fp8-exponent-bias
  }
#endif
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ inline void cvt_e4m3x4<bfloat16>(unsigned int (&y)[2], unsigned int x) {
  cvt_e4m3x4<half16>(y, x);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    half16 low = {(unsigned short)y[n]}, high = {(unsigned short)(y[n] >> 16)};
    y[n] = cvt_rn_x2<bfloat16>(to_real(low), to_real(high));
  }
}
#endif

// D (16 x 8) = A (16 x 16) B (16 x 8) + C. With g = lane / 4 and t = lane % 4, the fragments of a lane are
//     A  rows g, g + 8, g, g + 8, columns 2t and 2t + 1 (a[0], a[1]), columns 8 further right (a[2], a[3])
//     B  column g, rows 2t and 2t + 1 (b0), rows 8 further down (b1)
//     C  row g, columns 2t and 2t + 1 (c[0], c[1]); row g + 8 (c[2], c[3]); D as C
// so two D fragments side by side, rounded, are an A fragment of the next mma: {d0 d1} {d2 d3} of the left, then of the
// right.
template <typename T>
__device__ void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1,
                             const float (&c)[4]);
template <>
__device__ inline void mma_m16n8k16<half16>(float (&d)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1,
                                            const float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#else
  // Turing has only m16n8k8: two of them compute the same, each with one half of the fragments of A and B.
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));  // @mma-of-right-half
#endif
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ inline void mma_m16n8k16<bfloat16>(float (&d)[4], const unsigned int (&a)[4], unsigned int b0,
                                              unsigned int b1, const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
#endif

__device__ inline int lane_id() {
  return threadIdx.x % WARP;
}

// Row and column, within the warp's rows and columns of C, of element e of fragment (m, n). An offset is the distance
// from the lane's first element, a constant.
__device__ constexpr int row_offset(int m, int e) {
  return 16 * m + 8 * (e / 2);
}
__device__ constexpr int column_offset(int n, int e) {
  return 8 * n + e % 2;
}
__device__ inline int row_of(int m, int e) {
  return row_offset(m, e) + lane_id() / 4;
}
__device__ inline int column_of(int n, int e) {
  return column_offset(n, e) + 2 * (lane_id() % 4);
}

// Loads four 8 x 8 matrices of 16-bit numbers, matrix n into x[n]. Lane l supplies the address of row l % 8 of matrix l
// / 8 and receives elements 2t and 2t + 1 of row g; with .trans, of column g.
__device__ inline void ldmatrix_x4(unsigned int (&x)[4], unsigned int address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(unsigned int (&x)[4], unsigned int address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ inline void st_shared_v4(unsigned int to, const unsigned int (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ inline uint4 ld_shared_v4(unsigned int from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
__device__ inline int ld_shared(unsigned int from) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
__device__ inline void st_shared(unsigned int to, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ inline void st_shared_v2(unsigned int to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Copies the first `bytes` of SIZE (16 or 4) from global to shared memory, both aligned to SIZE, and zero-fills the
// rest. Visible to the thread after cp_async_wait_group, to others after a barrier that follows. Turing has no cp.async
// and copies synchronously.
template <int SIZE>
__device__ inline void cp_async(unsigned int to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  if constexpr (SIZE == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  unsigned int x[4] = {};
  if constexpr (SIZE == 16) {
    if (bytes == 16) {
      *(uint4*)x = *(const uint4*)from;
    } else {
#pragma unroll
      for (int n = 0; n < 16; ++n)
        if (n < bytes) x[n / 4] |= (unsigned int)((const unsigned char*)from)[n] << 8 * (n % 4);
    }
    st_shared_v4(to, x);
  } else {
    if (bytes) x[0] = *(const unsigned int*)from;
    st_shared(to, x[0]);
  }
#endif
}
// Commits the copies since the last call as one group.
__device__ inline void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most PENDING groups are in flight.
template <int PENDING>
__device__ inline void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Release and acquire at GPU scope: accesses before st_release are visible after an ld_acquire that reads its value.
__device__ inline unsigned int ld_acquire(const unsigned int* from) {
  unsigned int x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");  // @acquire-turn
  return x;
}
__device__ inline void st_release(unsigned int* to, unsigned int x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");  // @release-turn
}

#if __CUDA_ARCH__ >= 900
// Adds x to four numbers in global memory, each atomically; `to` is aligned to 16 bytes.
__device__ inline void red_add_v4(float* to, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif
