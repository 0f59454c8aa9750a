// A small warp-specialised bf16 attention for Hopper: one producer warp and two consumer warpgroups, with TMA, wgmma
// and mbarriers. The caller prepends definitions of D, BLOCK_Q, BLOCK_KV and STAGES, and of ACCUMULATORS and
// CONSTRAINTS: the 32 registers of `d` as operands of an asm statement.
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap {
  u64 opaque[16];
};
struct Params {
  float* lse;
  int q_len, kv_len, q_tiles, tiles;
  float scale_log2;
};

__device__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ void mbarrier_init(u32 b, u32 n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ void expect(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ void arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
__device__ void wait(u32 b, u32 parity) {
  asm volatile(
      "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra WAIT; DONE: }" ::"r"(
          b),
      "r"(parity)
      : "memory");
}
__device__ void load(u32 to, const TensorMap* map, u32 b, int row, int head) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(b), "r"(0), "r"(row), "r"(head)
      : "memory");
}
__device__ void store(const TensorMap* map, u32 from, int row, int head) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(0), "r"(row), "r"(head)
               : "memory");
}
__device__ void fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ void sync(int id, int n) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}
__device__ bool elected() {
  u32 p;
  asm volatile("{.reg .pred p; elect.sync _|p, -1; selp.b32 %0, 1, 0, p; }" : "=r"(p));
  return p;
}
__device__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ void keep(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
// Descriptor with 128-byte swizzle. wgmma reads the leading offset only if an operand has several panels.
__device__ u64 descriptor(u32 address) {
  return (u64)(address >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
__device__ void multiply_kk(float (&d)[32], u64 a, u64 b, int adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" ACCUMULATORS "}, %32, %33, p, 1, 1, 0, 0; }"
      : CONSTRAINTS
      : "l"(a), "l"(b), "r"(adds));
}
__device__ void multiply_rn(float (&d)[32], u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" ACCUMULATORS "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
      : CONSTRAINTS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ float exp2_(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
__device__ float log2_(float x) {
  asm("lg2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
__device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

constexpr int ROW = 2 * D, Q_BYTES = BLOCK_Q * ROW, KV_BYTES = BLOCK_KV * ROW;

// Shared memory: Q (then O), K and V of each stage, mbarriers.
__device__ void produce(const TensorMap* q, const TensorMap* k, const TensorMap* v, const Params& p, u32 smem,
                        u32 bars) {
  const int kv_tiles = (p.kv_len + BLOCK_KV - 1) / BLOCK_KV;
  int stage = 0, parity = 1, q_parity = 1;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int head = tile / p.q_tiles;
    wait(bars + 8, q_parity);
    expect(bars, Q_BYTES);
    load(smem, q, bars, tile % p.q_tiles * BLOCK_Q, head);
    q_parity ^= 1;
    for (int i = 0; i < kv_tiles; i++) {
      const u32 K_smem = smem + Q_BYTES + stage * 2 * KV_BYTES, full = bars + 16 + 8 * stage;
      wait(full + 8 * STAGES, parity);
      expect(full, 2 * KV_BYTES);
      load(K_smem, k, full, i * BLOCK_KV, head);
      load(K_smem + KV_BYTES, v, full, i * BLOCK_KV, head);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
}

__device__ void consume(const TensorMap* o, const Params& p, u32 smem, u32 bars) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const bool first = threadIdx.x % 128 == 0;
  const u32 Q_smem = smem + group * 64 * ROW;
  const int kv_tiles = (p.kv_len + BLOCK_KV - 1) / BLOCK_KV;
  int stage = 0, parity = 0, q_parity = 0;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    float O_rmem[32] = {}, maximum[2] = {-1e30f, -1e30f}, sum[2] = {};
    wait(bars, q_parity);
    q_parity ^= 1;
    for (int i = 0; i < kv_tiles; i++) {
      const u32 K_smem = smem + Q_BYTES + stage * 2 * KV_BYTES, full = bars + 16 + 8 * stage;
      float S_rmem[32];
      u32 P_rmem[4][4];
      wait(full, parity);
      keep(S_rmem);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < D / 16; k++)
        multiply_kk(S_rmem, descriptor(Q_smem) + 2 * k, descriptor(K_smem) + 2 * k, k != 0);
      wgmma_commit();
      wgmma_wait<0>();
      keep(S_rmem);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float m = maximum[r];
#pragma unroll
        for (int j = 0; j < 32; j++) {
          const int key = i * BLOCK_KV + j / 4 * 8 + lane % 4 * 2 + j % 2;
          if (j / 2 % 2 == r) m = fmaxf(m, S_rmem[j] = key < p.kv_len ? S_rmem[j] : -1e30f);
        }
        m = row_max(m);
        const float rescale = exp2_((maximum[r] - m) * p.scale_log2);
        maximum[r] = m;
        sum[r] *= rescale;
#pragma unroll
        for (int j = 0; j < 32; j++)
          if (j / 2 % 2 == r) {
            sum[r] += S_rmem[j] = exp2_((S_rmem[j] - m) * p.scale_log2);
            O_rmem[j] *= rescale;
          }
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
        for (int j = 0; j < 4; j++) P_rmem[k][j] = pack(S_rmem[8 * k + 2 * j], S_rmem[8 * k + 2 * j + 1]);
      keep(O_rmem);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_rn(O_rmem, P_rmem[k], descriptor(K_smem + KV_BYTES) + 128 * k);
      wgmma_commit();
      wgmma_wait<0>();
      keep(O_rmem);
      if (first) arrive(full + 8 * STAGES);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    const int head = tile / p.q_tiles, row0 = tile % p.q_tiles * BLOCK_Q + group * 64;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] = row_sum(sum[r]);
      const int row = warp * 16 + lane / 4 + 8 * r;
      if (lane % 4 == 0 && row0 + row < p.q_len)
        p.lse[head * p.q_len + row0 + row] = (maximum[r] * p.scale_log2 + log2_(sum[r])) * 0.6931471805599453f;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const u32 place = Q_smem + row * ROW + ((j ^ row % 8) << 4) + lane % 4 * 4;
        const u32 pair = pack(O_rmem[4 * j + 2 * r] / sum[r], O_rmem[4 * j + 2 * r + 1] / sum[r]);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(pair) : "memory");
      }
    }
    fence();
    sync(1 + group, 128);
    if (warp == 0 && elected()) {
      store(o, Q_smem, row0, head);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      arrive(bars + 8);
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
            const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o, const Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 smem = shared_address(memory), bars = smem + Q_BYTES + 2 * STAGES * KV_BYTES;
  if (threadIdx.x == 0) {
    mbarrier_init(bars, 1);
    mbarrier_init(bars + 8, 2);
    for (int i = 0; i < STAGES; i++)
      mbarrier_init(bars + 16 + 8 * i, 1), mbarrier_init(bars + 16 + 8 * (STAGES + i), 2);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < 32 && elected()) produce(&q, &k, &v, p, smem, bars);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume(&o, p, smem, bars);
  }
}
