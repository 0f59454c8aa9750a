// Hopper's instructions, one function each: TMA, mbarriers, clusters and wgmma. Addresses are 32-bit shared-memory
// addresses, from smem_address.
#pragma once
#include "ptx.cuh"

// CUtensorMap, encoded by the driver (cupy_flash/gpu/tensor_map.py).
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// True in one lane of the warp, the same at every call.
__device__ inline bool elect_one() {
  unsigned int is;
  asm volatile(
      "{ .reg .pred p;"
      "elect.sync _|p, -1;"
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(is));
  return is;
}

// Triggers a performance-monitor event if x < 0. With an x that is never negative it has one effect: ptxas computes x
// before it, and moves no later wait above it. (It hoists a wgmma wait above every instruction that neither reads the
// accumulators nor has a side effect, so that instructions that should overlap the products run after them.)
__device__ inline void pmevent_if_negative(float x) {
  asm volatile(
      "{ .reg .pred p;"
      "setp.lt.f32 p, %0, 0f00000000;"
      "@p pmevent 0; }" ::"f"(x)
      : "memory");
}

// Sets the register count per thread of a warpgroup. All its warps must execute it.
template <int REGISTERS>
__device__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Waits at named barrier `id` (1 to 15) until `threads` threads have arrived.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at a named barrier without waiting.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Initialises an mbarrier (8 bytes): a phase completes after `arrivals` arrivals and all expected bytes.
__device__ inline void mbarrier_init(unsigned int mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
// Makes the initialisation by this thread visible to TMA and to the cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void mbarrier_arrive(unsigned int mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
__device__ inline void mbarrier_arrive_expect_tx(unsigned int mbarrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
// Waits until the phase with this parity has completed. Phases start at parity 0; the phase before the first, of parity
// 1, counts as complete.
__device__ inline void mbarrier_wait(unsigned int mbarrier, unsigned int parity) {
  asm volatile(
      "{ .reg .pred p;"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
      "@p bra DONE;"
      "bra AGAIN;"
      "DONE: }" ::"r"(mbarrier),
      "r"(parity)
      : "memory");  // @try-wait-again
}

// Clusters: the rank of this block, a barrier of all threads, and an arrival at the mbarrier at the same offset in
// block `rank`.
__device__ inline unsigned int cluster_ctarank() {
  unsigned int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// The default .release.cta is enough: only TMA and wgmma accesses need ordering, and they have been waited for.
// `.release.cluster` would add a fence of all global memory to every arrival.
__device__ inline void mbarrier_arrive_cluster(unsigned int mbarrier, unsigned int rank) {
  asm volatile(
      "{ .reg .b32 there;"
      "mapa.shared::cluster.u32 there, %0, %1;"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(mbarrier),
      "r"(rank)
      : "memory");
}

// The address, in block `rank` of the cluster, that corresponds to `address` in this block; and a load from it.
__device__ inline unsigned int mapa(unsigned int address, unsigned int rank) {
  unsigned int there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ inline float ld_shared_cluster(unsigned int address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// Orders this thread's accesses to shared memory before later ones through the async proxy (TMA, wgmma).
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// L2 eviction policies, as createpolicy encodes them.
constexpr unsigned long long EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12F0000000000000,
                             EVICT_LAST = 0x14F0000000000000;

// Loads the box at (x, y, z, w), innermost first, of a 4-dimensional tensor; out-of-bounds elements are zeros.
__device__ inline void tma_load(unsigned int to, const TensorMap& map, unsigned int mbarrier, int x, int y, int z,
                                int w, unsigned long long policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(&map), "r"(mbarrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
}

// Loads the box to the same offset in both blocks of a cluster; the mbarrier of each counts the bytes.
__device__ inline void tma_load_multicast(unsigned int to, const TensorMap& map, unsigned int mbarrier, int x, int y,
                                          int z, int w, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(to),
      "l"(&map), "r"(mbarrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"((unsigned short)3), "l"(policy)
      : "memory");
}

// Stores four 8 x 8 matrices of 16-bit numbers: the inverse of ldmatrix_x4.
__device__ inline void stmatrix_x4(unsigned int address, const unsigned int (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
// Stores a box; out-of-bounds elements are not written.
__device__ inline void tma_store(const TensorMap& map, unsigned int from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
// Adds `bytes` of fp32 numbers to global memory; both addresses and the size are multiples of 16 bytes.
__device__ inline void bulk_reduce_add(float* to, unsigned int from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// Commits the bulk stores of this thread since the last call as one group.
__device__ inline void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most PENDING groups still read shared memory. Their writes complete by the end of the kernel.
template <int PENDING>
__device__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// wgmma_fence orders register accesses before the wgmmas that follow; wgmma_commit_group commits those since the last
// call as one group; wgmma_wait_group waits until at most PENDING groups are in flight.
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Register fence (CUTLASS's warpgroup_fence_operand): keeps the compiler from moving accesses across an in-flight
// wgmma.
template <int N>
__device__ void fence_operand(float (&x)[1][N][4]) {
#pragma unroll
  for (int n = 0; n < 4 * N; ++n) asm volatile("" : "+f"(x[0][n / 4][n % 4])::"memory");
}
template <int N>
__device__ void fence_operand(unsigned int (&x)[1][N][4]) {
#pragma unroll
  for (int n = 0; n < 4 * N; ++n) asm volatile("" : "+r"(x[0][n / 4][n % 4])::"memory");
}

// Shared-memory descriptors of a matrix in panels with rows of SWIZZLE bytes, in which chunk c of row r is at c ^ r % 8
// with the 128-byte swizzle, and at c ^ r / 2 % 4 with the 64-byte one. The address is a multiple of 8 SWIZZLE, the
// distance from 8 rows to the next 8 (SBO).
template <int SWIZZLE>
__device__ unsigned long long swizzled_descriptor(unsigned int address, int leading) {
  static_assert(SWIZZLE == 128 || SWIZZLE == 64);
  // @descriptor-swizzle
  return (unsigned long long)(address >> 4 & 0x3FFF) | (unsigned long long)(leading >> 4) << 16 |
         (unsigned long long)(8 * SWIZZLE >> 4) << 32 | (unsigned long long)(128 / SWIZZLE) << 62;
}
// K-major: a wgmma reads within one panel, so hardware ignores the leading offset (LBO), which is 1, as in CUTLASS.
template <int SWIZZLE = 128>
__device__ unsigned long long k_major_descriptor(unsigned int address) {
  return swizzled_descriptor<SWIZZLE>(address, 16);  // @K-major-LBO
}
// MN-major: the leading offset is the distance in bytes to the next panel of 64 columns.
__device__ inline unsigned long long mn_major_descriptor(unsigned int address, int panel) {
  return swizzled_descriptor<128>(address, panel);
}
// Hides from the compiler that the low bits of a descriptor are zeros, so that it adds an offset with one 64-bit
// addition instead of an OR of the low word and a move of the high one.
__device__ inline unsigned long long opaque(unsigned long long descriptor) {
  asm("" : "+l"(descriptor));
  return descriptor;
}
constexpr int NEXT_16_COLUMNS = 32 >> 4;  // added to a descriptor: 16 columns to the right within a panel; 32 of e4m3
constexpr int NEXT_16_ROWS = 2048 >> 4;   // 16 rows down

// Layout of an operand: K_MAJOR if the summed dimension is contiguous, MN_MAJOR if M or N is.
constexpr bool K_MAJOR = false, MN_MAJOR = true;

// wgmma with 8 N columns, specialised by DEFINE_WGMMA.
template <typename T, int N>
struct Wgmma;

// D (64 x 8 N) = A (64 x 16) B (16 x 8 N), or += if `adds`; A and B in shared memory. Warp w of the warpgroup has rows
// [16 w, 16 w + 16) of D, in 16 x 8 fragments laid out like those of mma_m16n8k16.
template <typename T, bool A_MAJOR = K_MAJOR, bool B_MAJOR = K_MAJOR, int N>
__device__ void wgmma(float (&d)[1][N][4], unsigned long long a, unsigned long long b, bool adds) {
  Wgmma<T, N>::template add<A_MAJOR, B_MAJOR>(d, a, b, adds);
}
// D += A B; A in registers, as the A fragments of mma_m16n8k16, B in shared memory, MN_MAJOR.
template <typename T, int N>
__device__ void wgmma(float (&d)[1][N][4], const unsigned int (&a)[4], unsigned long long b) {
  Wgmma<T, N>::add(d, a, b);
}

// The operand list of D for 8 N = 32, 64 .. columns: names, then constraints.
#define NAMES_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_8 \
  NAMES_4       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_10 \
  NAMES_8        \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_12 \
  NAMES_10       \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_14 \
  NAMES_12       \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_16 \
  NAMES_14       \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_18 \
  NAMES_16       \
  ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_24                                                 \
  NAMES_18                                                       \
  ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83" \
  ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_32                                                                                 \
  NAMES_24                                                                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FRAGMENT(n) "+f"(d[0][n][0]), "+f"(d[0][n][1]), "+f"(d[0][n][2]), "+f"(d[0][n][3])
#define FRAGMENTS_4 FRAGMENT(0), FRAGMENT(1), FRAGMENT(2), FRAGMENT(3)
#define FRAGMENTS_8 FRAGMENTS_4, FRAGMENT(4), FRAGMENT(5), FRAGMENT(6), FRAGMENT(7)
#define FRAGMENTS_10 FRAGMENTS_8, FRAGMENT(8), FRAGMENT(9)
#define FRAGMENTS_12 FRAGMENTS_10, FRAGMENT(10), FRAGMENT(11)
#define FRAGMENTS_14 FRAGMENTS_12, FRAGMENT(12), FRAGMENT(13)
#define FRAGMENTS_16 FRAGMENTS_14, FRAGMENT(14), FRAGMENT(15)
#define FRAGMENTS_18 FRAGMENTS_16, FRAGMENT(16), FRAGMENT(17)
#define FRAGMENTS_24 FRAGMENTS_18, FRAGMENT(18), FRAGMENT(19), FRAGMENT(20), FRAGMENT(21), FRAGMENT(22), FRAGMENT(23)
#define FRAGMENTS_32                                                                                              \
  FRAGMENTS_24, FRAGMENT(24), FRAGMENT(25), FRAGMENT(26), FRAGMENT(27), FRAGMENT(28), FRAGMENT(29), FRAGMENT(30), \
      FRAGMENT(31)

#define DEFINE_WGMMA(T, TYPE, N, COLUMNS, R0, R1, R2, R3, R4)                                                \
  template <>                                                                                                \
  struct Wgmma<T, N> {                                                                                       \
    template <bool A_MAJOR, bool B_MAJOR>                                                                    \
    static __device__ void add(float (&d)[1][N][4], unsigned long long a, unsigned long long b, bool adds) { \
      asm volatile(                                                                                          \
          "{ .reg .pred p;"                                                                                  \
          "setp.ne.b32 p, %" #R2                                                                             \
          ", 0;"                                                                                             \
          "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES_##N               \
          "}, %" #R0 ", %" #R1 ", p, 1, 1, %" #R3 ", %" #R4 "; }"                                            \
          : FRAGMENTS_##N                                                                                    \
          : "l"(a), "l"(b), "r"((int)adds), "n"((int)A_MAJOR), "n"((int)B_MAJOR));                           \
    }                                                                                                        \
    static __device__ void add(float (&d)[1][N][4], const unsigned int (&a)[4], unsigned long long b) {      \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES_##N      \
                   "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4 ", 1, 1, 1, 1;"                      \
                   : FRAGMENTS_##N                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
    }                                                                                                        \
  };
#define DEFINE_WGMMA_SHAPES(T, TYPE)                  \
  DEFINE_WGMMA(T, TYPE, 4, 32, 16, 17, 18, 19, 20)    \
  DEFINE_WGMMA(T, TYPE, 8, 64, 32, 33, 34, 35, 36)    \
  DEFINE_WGMMA(T, TYPE, 10, 80, 40, 41, 42, 43, 44)   \
  DEFINE_WGMMA(T, TYPE, 12, 96, 48, 49, 50, 51, 52)   \
  DEFINE_WGMMA(T, TYPE, 14, 112, 56, 57, 58, 59, 60)  \
  DEFINE_WGMMA(T, TYPE, 16, 128, 64, 65, 66, 67, 68)  \
  DEFINE_WGMMA(T, TYPE, 18, 144, 72, 73, 74, 75, 76)  \
  DEFINE_WGMMA(T, TYPE, 24, 192, 96, 97, 98, 99, 100) \
  DEFINE_WGMMA(T, TYPE, 32, 256, 128, 129, 130, 131, 132)
DEFINE_WGMMA_SHAPES(half16, "f16")
DEFINE_WGMMA_SHAPES(bfloat16, "bf16")

// Four numbers rounded to e4m3, to nearest even; magnitudes above 448 saturate.
__device__ inline unsigned int cvt_rn_satfinite_e4m3x4(float x0, float x1, float x2, float x3) {
  unsigned int y;
  asm("{ .reg .b16 low, high;"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      "mov.b32 %0, {low, high}; }"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}

// D (64 x 8 N) = A (64 x 32) B^T, or += if `adds`: e4m3, K-major operands, accumulated with 14 bits of precision. A in
// shared memory, or in registers: with g = lane / 4 and t = lane % 4, a lane has four bytes of rows g, g + 8, g, g + 8
// from column 4t (a[0], a[1]) and from column 4t + 16 (a[2], a[3]).
template <int N>
__device__ void wgmma_e4m3(float (&d)[1][N][4], unsigned long long a, unsigned long long b, bool adds);
template <int N>
__device__ void wgmma_e4m3(float (&d)[1][N][4], const unsigned int (&a)[4], unsigned long long b, bool adds);

#define DEFINE_WGMMA_E4M3(N, COLUMNS, R0, R1, R2, R3, R4, R5)                                                        \
  template <>                                                                                                        \
  __device__ inline void wgmma_e4m3<N>(float (&d)[1][N][4], unsigned long long a, unsigned long long b, bool adds) { \
    asm volatile(                                                                                                    \
        "{ .reg .pred p;"                                                                                            \
        "setp.ne.b32 p, %" #R2                                                                                       \
        ", 0;"                                                                                                       \
        "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3 {" NAMES_##N "}, %" #R0 ", %" #R1            \
                                                                                     ", p, 1, 1; }"                  \
        : FRAGMENTS_##N                                                                                              \
        : "l"(a), "l"(b), "r"((int)adds));                                                                           \
  }                                                                                                                  \
  template <>                                                                                                        \
  __device__ inline void wgmma_e4m3<N>(float (&d)[1][N][4], const unsigned int (&a)[4], unsigned long long b,        \
                                       bool adds) {                                                                  \
    asm volatile(                                                                                                    \
        "{ .reg .pred p;"                                                                                            \
        "setp.ne.b32 p, %" #R5                                                                                       \
        ", 0;"                                                                                                       \
        "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3 {" NAMES_##N                                 \
        "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4 ", p, 1, 1; }"                                          \
        : FRAGMENTS_##N                                                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));                                       \
  }
DEFINE_WGMMA_E4M3(8, 64, 32, 33, 34, 35, 36, 37)
DEFINE_WGMMA_E4M3(12, 96, 48, 49, 50, 51, 52, 53)
DEFINE_WGMMA_E4M3(16, 128, 64, 65, 66, 67, 68, 69)
DEFINE_WGMMA_E4M3(24, 192, 96, 97, 98, 99, 100, 101)
