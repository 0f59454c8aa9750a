// Computes the exact class of each BLOCK_Q x BLOCK_KV block of a mask_mod: 0 if no pair is visible, 2 if all are, 1
// otherwise. If interval arithmetic cannot decide, the thread block evaluates all pairs.
// out: uint8 (b, block of queries, h, block of keys). grid (blocks of keys, blocks of queries, sequences x heads),
// where a thread block computes several blocks if this exceeds the limits of a grid
#include "walk.cuh"

__device__ void classify_block(const Params& p, int batch, int head, int row, int column) {
  int q_start = row * BLOCK_Q, kv_start = column * BLOCK_KV;
  Sequence sequence(p, batch);
  Band band(p, sequence);
  ClassifyKeys classify = {band, {head, head + 1}, {q_start, min(q_start + BLOCK_Q, p.q_len)}};
  Truth seen = classify({kv_start, min(kv_start + BLOCK_KV, p.kv_len)});
  if (seen.may && seen.may_not) {  // @count-pairs
    seen = {false, false};
    for (int n = threadIdx.x; n < BLOCK_Q * BLOCK_KV; n += THREADS) {
      int i = q_start + n / BLOCK_KV, j = kv_start + n % BLOCK_KV;
      if (i >= p.q_len || j >= p.kv_len) continue;  // @existing-pairs
      bool visible = band.mod_sees(head, i, j);
      seen.may |= visible, seen.may_not |= !visible;
    }
    seen = {__syncthreads_or(seen.may) != 0, __syncthreads_or(seen.may_not) != 0};  // @truth-of-block
  }
  if (threadIdx.x > 0) return;
  unsigned char* classes = (unsigned char*)p.out.data;
  classes += batch * p.out.batch + row * p.out.row + head * p.out.head;  // @class-of-block
  classes[column] = seen.may ? 2 - seen.may_not : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) block_classes(const __grid_constant__ Params p) {
  for (long long n = blockIdx.z; n < (long long)p.batch * p.heads; n += gridDim.z)
    for (int row = blockIdx.y; row * BLOCK_Q < p.q_len; row += gridDim.y)
      classify_block(p, n / p.heads, n % p.heads, row, blockIdx.x);
}
