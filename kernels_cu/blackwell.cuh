// Instructions of sm_100a and sm_103a, one function each: tensor memory, tcgen05, and pairs of fp32 numbers.
//
// A block has 128 lanes x 512 columns of 32 bits of tensor memory. An address is lane << 16 | column. Warp w of a block
// reaches the lanes from 32 (w % 4) to 32 (w % 4) + 31. Where an mma with M 128 accumulates, or reads operand A, row r
// is in lane r; a column has a number of fp32, or two neighbouring ones of 16 bits.
#pragma once
#include "hopper.cuh"

constexpr int TENSOR_MEMORY_ROWS = 128, TENSOR_MEMORY_COLUMNS = 512;

// Allocates all columns, the first of which is 0, for a block that has the SM for itself; called by one warp. `to` is a
// word of shared memory that receives the address.
__device__ inline void tmem_alloc(unsigned int to) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "n"(TENSOR_MEMORY_COLUMNS)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
// Frees the columns, after all accesses, in the warp that has allocated them.
__device__ inline void tmem_dealloc(unsigned int tmem) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "n"(TENSOR_MEMORY_COLUMNS)
               : "memory");
}

// Fences around every synchronisation that orders accesses of different threads to tensor memory.
__device__ inline void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");  // @fence-before-sync
}
__device__ inline void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");  // @fence-after-sync
}

// Waits until the loads, or the stores, of this warp have accessed tensor memory.
__device__ inline void tmem_wait_ld() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}
__device__ inline void tmem_wait_st() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// tmem_ld loads COLUMNS columns of this warp's 32 lanes, and tmem_st stores them: thread l has lane l, a whole row.
#define LOADED_4(n) "=f"(x[n]), "=f"(x[n + 1]), "=f"(x[n + 2]), "=f"(x[n + 3])
#define LOADED_16(n) LOADED_4(n), LOADED_4(n + 4), LOADED_4(n + 8), LOADED_4(n + 12)
#define LOADED_32(n) LOADED_16(n), LOADED_16(n + 16)
#define STORED_4(n) "r"(x[n]), "r"(x[n + 1]), "r"(x[n + 2]), "r"(x[n + 3])
#define STORED_16(n) STORED_4(n), STORED_4(n + 4), STORED_4(n + 8), STORED_4(n + 12)
#define STORED_32(n) STORED_16(n), STORED_16(n + 16)
#define DEFINE_TENSOR_MEMORY_ACCESSES(COLUMNS, NAMES, ADDRESS)                                    \
  __device__ inline void tmem_ld(float (&x)[COLUMNS], unsigned int tmem) {                        \
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x" #COLUMNS ".b32 {" NAMES "}, [%" #ADDRESS "];" \
                 : LOADED_##COLUMNS(0)                                                            \
                 : "r"(tmem)                                                                      \
                 : "memory");                                                                     \
  }                                                                                               \
  __device__ inline void tmem_st(unsigned int tmem, const unsigned int (&x)[COLUMNS]) {           \
    asm volatile("tcgen05.st.sync.aligned.32x32b.x" #COLUMNS ".b32 [%" #ADDRESS "], {" NAMES      \
                 "};" ::STORED_##COLUMNS(0),                                                      \
                 "r"(tmem)                                                                        \
                 : "memory");                                                                     \
  }
DEFINE_TENSOR_MEMORY_ACCESSES(16, NAMES_4, 16)
DEFINE_TENSOR_MEMORY_ACCESSES(32, NAMES_8, 32)

// Loads 16 of this warp's lanes and 16, 32 or 64 columns as fragments of mma_m16n8k16 in ptx.cuh: element e of fragment
// n is x[4 n + e].
template <int N>
__device__ void tmem_ld_fragments(float (&x)[N], unsigned int tmem) {
  static_assert(N == 8 || N == 16 || N == 32);
  if constexpr (N == 8)
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : LOADED_4(0), LOADED_4(4)
                 : "r"(tmem)
                 : "memory");
  else if constexpr (N == 16)
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x4.b32 {" NAMES_4 "}, [%16];" : LOADED_16(0) : "r"(tmem) : "memory");
  else
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x8.b32 {" NAMES_8 "}, [%32];" : LOADED_32(0) : "r"(tmem) : "memory");
}

// Keeps the uses of loaded registers behind the tmem_wait_ld before.
template <int N>
__device__ void fence_loaded(float (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+f"(x[n])::"memory");
}

// The address of this warp's quarter of the lanes.
__device__ inline unsigned int lanes_of_warp(unsigned int tmem) {
  return tmem + (threadIdx.x / WARP % 4 * WARP << 16);  // @lanes-of-warp
}

// Loads columns of this warp's lanes, and waits for them.
template <int N>
__device__ void load(float (&x)[N], unsigned int tmem) {
  tmem_ld(x, tmem);
  tmem_wait_ld();  // @wait-loaded
  fence_loaded(x);
}

// Arrives at the mbarrier once all mma are complete that this thread has issued before.
__device__ inline void tcgen05_commit(unsigned int mbarrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(mbarrier)
               : "memory");
}

// Instruction descriptor of 128 x N x 16 products of T, summed in fp32. A is K-major.
template <typename T>
constexpr unsigned int TYPE_CODE = 0;
template <>
constexpr unsigned int TYPE_CODE<bfloat16> = 1;
template <typename T>
__device__ constexpr unsigned int instruction_descriptor(int n, bool b_major) {
  return 1u << 4 | TYPE_CODE<T> << 7 | TYPE_CODE<T> << 10 | (unsigned int)b_major << 16 | (unsigned int)n / 8 << 17 |
         128u / 16 << 24;  // @instruction-descriptor
}
// Matrix descriptor of tcgen05 from one of wgmma with the 128-byte swizzle: the version follows the stride.
__device__ inline unsigned long long tcgen05_descriptor(unsigned long long wgmma) {
  return wgmma | 1ull << 46;  // @tcgen05-version
}

// D (128 x N) = A (128 x 16) B (16 x N), or += if `adds`: A in shared memory, or in 8 columns of tensor memory. The mma
// of a thread run in the order in which it issues them.
__device__ inline void tcgen05_mma(unsigned int d, unsigned long long a, unsigned long long b, unsigned int shape,
                                   bool adds) {
  asm volatile(
      "{ .reg .pred p;"
      "setp.ne.b32 p, %4, 0;"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d),
      "l"(a), "l"(b), "r"(shape), "r"((int)adds)
      : "memory");
}
__device__ inline void tcgen05_mma(unsigned int d, unsigned int a, unsigned long long b, unsigned int shape,
                                   bool adds) {
  asm volatile(
      "{ .reg .pred p;"
      "setp.ne.b32 p, %4, 0;"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p; }" ::"r"(d),
      "r"(a), "l"(b), "r"(shape), "r"((int)adds)
      : "memory");
}

#if !STATISTICS
// The larger number, or NaN if one is.
__device__ inline float max_nan(float x, float y) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
}
#endif

// Two fp32 numbers, for one instruction.
struct Pair {
  unsigned long long bits;

  __device__ Pair(float x, float y) { asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "f"(x), "f"(y)); }
  __device__ void get(float& x, float& y) const { asm("mov.b64 {%0, %1}, %2;" : "=f"(x), "=f"(y) : "l"(bits)); }
  __device__ Pair& operator+=(const Pair& x) {
    asm("add.rn.f32x2 %0, %0, %1;" : "+l"(bits) : "l"(x.bits));
    return *this;
  }
};
// x y
__device__ inline Pair mul_rn(Pair x, const Pair& y) {
  asm("mul.rn.f32x2 %0, %0, %1;" : "+l"(x.bits) : "l"(y.bits));
  return x;
}
// x y + z
__device__ inline Pair fma_rn(Pair x, const Pair& y, const Pair& z) {
  asm("fma.rn.f32x2 %0, %0, %1, %2;" : "+l"(x.bits) : "l"(y.bits), "l"(z.bits));
  return x;
}
