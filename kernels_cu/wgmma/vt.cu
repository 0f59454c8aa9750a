// Transposes V of fp8 into the workspace (vt.cuh) before the forward. A thread transposes 16 keys x 4 columns and four
// neighbours 64 keys, so that together they read and write whole 32-byte sectors. grid (key tiles, key/value heads,
// sequences)
#include "vt.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) vt(const __grid_constant__ Params p) {
  constexpr int WORDS = HEAD_DIM_V / 4;
  Sequence sequence(p, blockIdx.z);
  const unsigned char* V = sequence.keys<unsigned char>(p.v, blockIdx.y);
  unsigned char* VT = (unsigned char*)p.vt.data + (PACKED ? 0 : sequence.batch * p.vt.batch) + blockIdx.y * p.vt.head +
                      vt_start(sequence);
  int groups = (sequence.kv_len + BLOCK_KV - 1) / BLOCK_KV * (BLOCK_KV / 16);
  for (int n = blockIdx.x * THREADS + threadIdx.x; n < groups * WORDS; n += gridDim.x * THREADS) {
    int key = (n / (4 * WORDS) * 4 + n % 4) * 16, column = n / 4 % WORDS * 4;
    unsigned int turned[4][4];  // (column, four keys)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      unsigned int row[4];  // four columns of a key
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int j = key + 8 * (e / 2) + 2 * t + e % 2;                                            // @key-order
        row[e] = j < sequence.kv_len ? *(const unsigned int*)(V + j * p.v.row + column) : 0;  // @keys-of-VT
      }
      unsigned int left01 = __byte_perm(row[0], row[1], 0x5140), right01 = __byte_perm(row[0], row[1], 0x7362);
      unsigned int left23 = __byte_perm(row[2], row[3], 0x5140), right23 = __byte_perm(row[2], row[3], 0x7362);
      turned[0][t] = __byte_perm(left01, left23, 0x5410);
      turned[1][t] = __byte_perm(left01, left23, 0x7632);
      turned[2][t] = __byte_perm(right01, right23, 0x5410);
      turned[3][t] = __byte_perm(right01, right23, 0x7632);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) *(uint4*)(VT + (column + c) * p.vt.row + key) = *(uint4*)turned[c];
  }
}
