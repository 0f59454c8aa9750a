// Tiles of the codes of a quantised cache in shared memory -> tiles of 16-bit numbers, each code once for all rows of a
// block.
#pragma once
#include "cvt_codes.cuh"
#include "load.cuh"

// Offsets in bytes.
struct NumberTiles {
  static constexpr int K = 0, V = K + BLOCK_KV * row_bytes(HEAD_DIM), BYTES = V + BLOCK_KV * row_bytes(HEAD_DIM_V);
};

// Stores the numbers of a word of codes as a part of a chunk, or the chunk `n` of its row; chunks past a row of DIM
// numbers are dropped.
template <int DIM>
__device__ void convert_tile(unsigned int to, unsigned int from) {
  using Codes = TileOf<CODES_OF_4_BITS ? DIM / 2 : DIM, kv_element>;
  for (int n = threadIdx.x; n < BLOCK_KV * Codes::CHUNKS; n += THREADS) {
    int row = n / Codes::CHUNKS, chunk = n % Codes::CHUNKS;
    uint4 codes = ld_shared_v4(from + Codes::at(row, chunk));
    const unsigned int words[4] = {codes.x, codes.y, codes.z, codes.w};
    auto store = [&](int at, const unsigned int (&pairs)[4]) {
      if (at < Tile<DIM>::CHUNKS) st_shared_v4(to + Tile<DIM>::at(row, at), pairs);  // @store-numbers
    };
#if CODES_OF_4_BITS
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      unsigned int apart[4], pairs[4];  // codes n and n + 4, and codes 2 n and 2 n + 1
#pragma unroll
      for (int n = 0; n < 4; ++n) apart[n] = cvt_nibbles(words[word], n, element());
#pragma unroll
      for (int n = 0; n < 4; ++n)
        pairs[n] = __byte_perm(apart[n % 2 * 2], apart[n % 2 * 2 + 1], n < 2 ? 0x5410 : 0x7632);
      store(4 * chunk + word, pairs);
    }
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned int low[2], high[2];
      cvt_codes_x4(low, words[2 * half], kv_element(), element());
      cvt_codes_x4(high, words[2 * half + 1], kv_element(), element());
      const unsigned int pairs[4] = {low[0], low[1], high[0], high[1]};
      store(2 * chunk + half, pairs);
    }
#endif
  }
}
