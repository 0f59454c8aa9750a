// Dropout as a pure function of (seed, batch, head, query, key): Philox 4x32-10. The bits equal those of dropout.py.
#pragma once
#include "sequence.cuh"

struct Philox {
  unsigned int word[4];

  Philox() = default;
  __device__ Philox(unsigned int c0, unsigned int c1, unsigned int c2, unsigned int c3, unsigned long long seed) {
    unsigned int key0 = (unsigned int)seed, key1 = (unsigned int)(seed >> 32);
#pragma unroll 1  // a tile has many calls: unrolled, they would dominate the compile time
    for (int round = 0; round < 10; ++round) {
      unsigned long long product0 = 0xD2511F53ull * c0, product1 = 0xCD9E8D57ull * c2;
      c0 = (unsigned int)(product1 >> 32) ^ c1 ^ key0;
      c2 = (unsigned int)(product0 >> 32) ^ c3 ^ key1;
      c1 = (unsigned int)product1;
      c3 = (unsigned int)product0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
  }

  // The 16 random bits of element (i, j) of the counter's 16 x 16 block.
  __device__ unsigned int half(int i, int j) const {
    // Word 2 * (i / 8 % 2) + j / 8 % 2, by selection: an indexed array would go to local memory.
    unsigned int bits = i & 8 ? (j & 8 ? word[3] : word[2]) : (j & 8 ? word[1] : word[0]);
    return bits >> (16 * (j & 1)) & 0xFFFFu;
  }
};

struct Dropout {
  unsigned long long seed;
  unsigned int drop_below;
  unsigned int head_index;  // b * Hq + h
  double keep_scale;
  int q_first;  // query i of the call has position q_first + i * step
  int kv_first;
  int step;

  __device__ Dropout(const Params& p, int b, int h)
      : seed(p.seed),
        drop_below(p.drop_below),
        head_index(b * p.whole_heads + p.first_head + h),
        keep_scale(p.keep_scale),
        q_first(0),
        kv_first(0),
        step(1) {
    if (DROPOUT && p.seed_array) seed = (unsigned long long)*p.seed_array;
    if constexpr (SHARD) {
      step = p.step;
      if (b < p.batch) q_first = p.starts[3 * b], kv_first = p.starts[3 * b + 1];
    }
  }

  // The Philox words of query i and key j. In an unsharded sequence they also serve seven other elements: rows i, i ^ 8
  // by columns j, j ^ 1, j ^ 8, j ^ 9.
  __device__ Philox bits(int i, int j) const {
    i = q_first + i * step, j = kv_first + j * step;
    return Philox(i >> 4, j >> 4, head_index, 4 * (i & 7) + ((j & 7) >> 1), seed);
  }
  __device__ bool keeps(const Philox& bits, int i, int j) const {
    return bits.half(q_first + i * step, kv_first + j * step) >= drop_below;
  }
};
