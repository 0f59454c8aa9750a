// Backward of selection_loss, dK: one block per key, over the entries that name it and all heads, in order. A warp has
// a head of an entry at a time. grid (keys, 1, sequences)
#include "../inverse_lists.cuh"
#include "listed_scores.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = (HEAD_DIM + 31) / 32;  // of a lane

extern "C" __global__ void __launch_bounds__(THREADS) loss_k(const __grid_constant__ Params p) {
  __shared__ real sums[WARPS][HEAD_DIM];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sequence sequence(p, blockIdx.z);
  InverseLists inverse(p, sequence, Lists(p, sequence, 0), 0);
  const real* dI = listed_scores(p, sequence, 0);
  auto load = [&](real(&x)[COLUMNS], const element* row) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) x[c] = lane + 32 * c < HEAD_DIM ? to_real(row[lane + 32 * c]) : 0;
  };
  for (int j = blockIdx.x; j < sequence.kv_rows; j += gridDim.x) {
    real k[COLUMNS], dK_rmem[COLUMNS] = {};
    load(k, sequence.keys<element>(p.k, 0) + j * p.k.row);
    Range places = inverse.of_block(j);
    for (long long n = warp; n < (long long)(places.end - places.begin) * p.heads; n += WARPS) {
      int entry = inverse.lists[places.begin + n / p.heads], head = n % p.heads, i = entry / p.selected_entries;
      real q[COLUMNS], a = 0;
      load(q, sequence.queries<element>(p.q, head) + i * p.q.row);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) a += q[c] * k[c];
#pragma unroll
      for (int other = 16; other > 0; other /= 2) a += __shfl_xor_sync(0xFFFFFFFF, a, other);
      real da = a > 0 ? dI[entry] * weight_of(p, sequence, i, head) : 0;  // @loss.relu-of-dK
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) dK_rmem[c] += da * q[c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      if (lane + 32 * c < HEAD_DIM) sums[warp][lane + 32 * c] = dK_rmem[c];
    __syncthreads();
    element* to = sequence.keys<element>(p.dk, 0) + j * p.dk.row;
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
      real sum = 0;
      for (int of = 0; of < WARPS; ++of) sum += sums[of][d];  // @loss.warps
      store(to + d, sum);
    }
  }
}
