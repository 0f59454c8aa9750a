// Instructions that CUDA C++ has no word for, one function each. A register that holds two 16-bit numbers is an
// unsigned int, the first number in its low half.
#pragma once
#include "number.cuh"

constexpr int WARP = 32;

__device__ inline unsigned int smem_address(const void* x) {
  return (unsigned int)__cvta_generic_to_shared(x);
}

// 2^x to 2 units in the last place, denormal results 0; 0 for -inf.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers rounded to nearest even.
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

// D (16 x 8) = A (16 x 16) B (16 x 8) + C. With g = lane / 4 and t = lane % 4, a lane holds
//     A  rows g, g + 8, g, g + 8, columns 2t and 2t + 1 (a[0], a[1]), 8 further (a[2], a[3])
//     B  column g, rows 2t and 2t + 1 (b0), 8 further (b1)
//     C  row g, columns 2t and 2t + 1 (c[0], c[1]); row g + 8 (c[2], c[3]); D as C
// so the D of two products side by side, rounded, is the A of the next: {d0 d1} {d2 d3} of the left, then of the right.
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
  // Turing multiplies half of the depth at a time; its fragments are the halves of these.
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
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

// The position of this thread in its warp.
__device__ inline int lane_id() {
  return threadIdx.x % WARP;
}

// Element e of fragment (m, n) of C: its row and column among those of the warp.
__device__ inline int row_of(int m, int e) {
  return 16 * m + 8 * (e / 2) + lane_id() / 4;
}
__device__ inline int column_of(int n, int e) {
  return 8 * n + 2 * (lane_id() % 4) + e % 2;
}

// Four 8 x 8 matrices of 16-bit numbers, matrix n in x[n]: lane l names the address of row l % 8 of matrix l / 8, and
// gets elements 2t and 2t + 1 of row g; transposed, of column g.
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

// From global to shared memory: the first `bytes` of SIZE (16 or 4), aligned to SIZE, and zeros after them. Seen by
// the thread after cp_async_wait_group, by others after a barrier then. Turing copies at once.
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
      for (int n = 0; n < 8; ++n)
        if (2 * n < bytes) x[n / 2] |= (unsigned int)((const unsigned short*)from)[n] << 16 * (n % 2);
    }
    st_shared_v4(to, x);
  } else {
    if (bytes) x[0] = *(const unsigned int*)from;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x[0]) : "memory");
  }
#endif
}
// The copies since the last call are one group.
__device__ inline void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until all but the last PENDING groups are there.
template <int PENDING>
__device__ inline void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// A number in global memory by which blocks tell each other what they have done: what was written before it was stored
// is seen after it is loaded.
__device__ inline unsigned int ld_acquire(const unsigned int* from) {
  unsigned int x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ inline void st_release(unsigned int* to, unsigned int x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// x is added to four numbers in global memory, each in one piece; `to` is a multiple of 16 bytes.
__device__ inline void red_add_v4(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) atomicAdd(to + n, x[n]);
#endif
}
