// Products of the K and V tiles of a KV cache with 16-bit fragments of Q and P: CacheGemm<T> for 16-bit caches, and
// CacheGemm<e4m3>, which converts fragments to 16 bits. A warp multiplies 16 keys and all columns.
#pragma once
#include "gemm.cuh"
#if SCALED_KV
#include "cvt_codes.cuh"
#endif
#if TMA_KV
#include "../slot_ring.cuh"
#endif

// Layout of K and V tiles in shared memory: panels if TMA loads them, else rows of swizzled chunks.
#if TMA_KV
template <int DIM, typename T>
using KvTile = PanelTile<BLOCK_KV, 8 * TileOf<DIM, T>::CHUNKS>;
#else
template <int DIM, typename T>
using KvTile = TileOf<DIM, T>;
#endif

// Barrier of the consumer warps.
__device__ inline void sync_consumers() {
#if TMA_KV
  named_barrier_sync(1, CONSUMERS);
#else
  __syncthreads();
#endif
}

// Columns of a row of O in shared memory, for caches with elements of `size` bytes; their padding prevents bank
// conflicts in store_row.
#if CODES_OF_4_BITS
__device__ constexpr int columns_of_O(int size) {
  return round_up(HEAD_DIM_V, 64) + 16;
}
#else
__device__ constexpr int columns_of_O(int size) {
  return size == 1 ? round_up(HEAD_DIM_V, 32) + 16 : round_up(HEAD_DIM_V, 16) + 8;
}
#endif

template <typename T>
struct CacheGemm {
  using K = KvTile<HEAD_DIM, T>;
  using V = KvTile<HEAD_DIM_V, T>;
  static constexpr int FRAGMENTS = fragments_of(HEAD_DIM_V);  // fragments of O along its columns, for 16 rows

  // Permutes the columns of Q in shared memory to the order in which ldmatrix returns the columns of K. 16-bit caches
  // need no permutation. The caller has waited for Q at a barrier.
  __device__ static void arrange_Q(unsigned int Q_smem) {}

  // S = Q K^T
  template <int M>
  __device__ static void scores(float (&S)[M][2][4], const unsigned int (&Q)[padded(HEAD_DIM) / 16][M][4],
                                unsigned int K_smem, const typename K::Lane& lane) {
    ::scores<M, 2, HEAD_DIM>(S, Q, K_smem, lane);
  }
  template <int M>
  __device__ static void scores(float (&S)[M][2][4], unsigned int Q_smem, const Tile<HEAD_DIM>::Lane& Q_lane,
                                unsigned int K_smem, const typename K::Lane& lane) {
    ::scores<M, 2, HEAD_DIM>(S, Q_smem, Q_lane, K_smem, lane);
  }
  // O += P V
  template <int M>
  __device__ static void accumulate(float (&O)[M][FRAGMENTS][4], const unsigned int (&P)[M][1][4], unsigned int V_smem,
                                    const typename V::Lane& lane) {
    ::accumulate<M, 1, HEAD_DIM_V>(O, P, V_smem, lane);
  }
  // Stores the lower (0) or upper (1) `half` of the 16 rows of O: `row` is the address of this lane's row.
  __device__ static void store_row(unsigned int row, const float (&O)[FRAGMENTS][4], int half) {
#pragma unroll
    for (int n = 0; n < FRAGMENTS; ++n) st_shared_v2(row + 4 * column_of(n, 0), O[n][2 * half], O[n][2 * half + 1]);
  }
};

// ldmatrix moves pairs of bytes, so lane t (of the four lanes of a row) gets columns 4t .. 4t + 3 of each 16 of K
// instead of an operand's 2t, 2t + 1, 2t + 8 and 2t + 9. A sum may take the columns in any order, so arrange_Q permutes
// Q in the same way. With .trans a lane gets two adjacent columns of V per key: the even and the odd columns of each 16
// become separate fragments, and a lane accumulates columns 4t .. 4t + 3 of O.
template <>
struct CacheGemm<e4m3> {
  using K = KvTile<HEAD_DIM, e4m3>;
  using V = KvTile<HEAD_DIM_V, e4m3>;
  static constexpr int FRAGMENTS = round_up(HEAD_DIM_V, 32) / 8;

  // Columns 4t and 4t + 1 of each 16 move to 2t and 2t + 1, and 4t + 2 and 4t + 3 to 2t + 8 and 2t + 9.
  __device__ static void arrange_Q(unsigned int Q_smem) {
    for (int n = threadIdx.x; n < BLOCK_Q * padded(HEAD_DIM) / 16; n += THREADS) {
      int row = n % BLOCK_Q, chunk = n / BLOCK_Q * 2;
      unsigned int left = Q_smem + Tile<HEAD_DIM>::at(row, chunk), right = Q_smem + Tile<HEAD_DIM>::at(row, chunk + 1);
      uint4 a = ld_shared_v4(left), b = ld_shared_v4(right);
      st_shared_v4(left, {a.x, a.z, b.x, b.z});
      st_shared_v4(right, {a.y, a.w, b.y, b.w});
    }
    sync_consumers();
  }

  template <int M>
  __device__ static void add_product(float (&S)[M][2][4], const unsigned int (&Q)[M][4], const unsigned int (&K)[4],
                                     int k) {
    const float zeros[4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      unsigned int b[2];
#if SCALED_KV
      cvt_codes_x4(b, K[2 * n + k % 2], kv_element(), element());
#else
      cvt_e4m3x4<element>(b, K[2 * n + k % 2]);  // @word-of-columns
#endif
#pragma unroll
      for (int m = 0; m < M; ++m)
        if (k == 0)
          mma_m16n8k16<element>(S[m][n], Q[m], b[0], b[1], zeros);
        else
          mma_m16n8k16<element>(S[m][n], Q[m], b[0], b[1], S[m][n]);
    }
  }
  template <int M>
  __device__ static void scores(float (&S)[M][2][4], const unsigned int (&Q)[padded(HEAD_DIM) / 16][M][4],
                                unsigned int K_smem, const K::Lane& lane) {
    unsigned int bytes[4];
#pragma unroll
    for (int k = 0; k < padded(HEAD_DIM) / 16; ++k) {
      if (k % 2 == 0) ldmatrix_x4(bytes, K_smem + lane.at(0, k));
      add_product(S, Q[k], bytes, k);
    }
  }
  template <int M>
  __device__ static void scores(float (&S)[M][2][4], unsigned int Q_smem, const Tile<HEAD_DIM>::Lane& Q_lane,
                                unsigned int K_smem, const K::Lane& lane) {
    unsigned int bytes[4], Q[M][4];
#pragma unroll
    for (int k = 0; k < padded(HEAD_DIM) / 16; ++k) {
      if (k % 2 == 0) ldmatrix_x4(bytes, K_smem + lane.at(0, k));
#pragma unroll
      for (int m = 0; m < M; ++m) ldmatrix_x4(Q[m], Q_smem + Q_lane.at(16 * m, 2 * k));
      add_product(S, Q, bytes, k);
    }
  }
  template <int M>
  __device__ static void accumulate(float (&O)[M][FRAGMENTS][4], const unsigned int (&P)[M][1][4], unsigned int V_smem,
                                    const V::Lane& lane) {
    unsigned int bytes[4], b[2];
#pragma unroll
    for (int n = 0; n < FRAGMENTS; ++n) {
      if (n % 4 == 0) ldmatrix_x4_trans(bytes, V_smem + lane.at(0, n / 2));
#if SCALED_KV
      cvt_column(b, bytes[n % 4 / 2 * 2], bytes[n % 4 / 2 * 2 + 1], n % 2, kv_element(), element());
#else
      // @convert-columns
      cvt_e4m3x4<element>(b, __byte_perm(bytes[n % 4 / 2 * 2], bytes[n % 4 / 2 * 2 + 1], n % 2 ? 0x7531 : 0x6420));
#endif
#pragma unroll
      for (int m = 0; m < M; ++m) mma_m16n8k16<element>(O[m][n], P[m][0], b[0], b[1], O[m][n]);
    }
  }
  __device__ static void store_row(unsigned int row, const float (&O)[FRAGMENTS][4], int half) {
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n += 2) {
      const float (&even)[4] = O[n], (&odd)[4] = O[n + 1];
      st_shared_v4(row + 4 * (8 * n + 4 * (lane_id() % 4)),
                   {__float_as_uint(even[2 * half]), __float_as_uint(odd[2 * half]),
                    __float_as_uint(even[2 * half + 1]), __float_as_uint(odd[2 * half + 1])});
    }
  }
};

#if CODES_OF_4_BITS
// A word of K has eight numbers of a key, columns 8t .. 8t + 7 of each 32; of V, four columns of two keys, 4g .. 4g + 3
// of each 32 for the eight g. Numbers that are four apart are converted together, and arrange_Q permutes the columns of
// Q to the order in which the numbers of a word of K come. Each column of a word of V is a fragment of its own.
template <>
struct CacheGemm<nibbles> {
  static_assert(HEAD_DIM % 32 == 0, "a word has eight numbers of each 32");
  using K = KvTile<HEAD_DIM / 2, nibbles>;
  using V = KvTile<HEAD_DIM_V / 2, nibbles>;
  static constexpr int FRAGMENTS = round_up(HEAD_DIM_V, 64) / 8;

  // Column 8t + 2h + 4e + f of each 32 moves to 16h + 8f + 2t + e.
  __device__ static void arrange_Q(unsigned int Q_smem) {
    for (int n = threadIdx.x; n < BLOCK_Q * HEAD_DIM / 32; n += THREADS) {
      int row = n % BLOCK_Q, chunk = n / BLOCK_Q * 4;
      unsigned int from[4][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint4 x = ld_shared_v4(Q_smem + Tile<HEAD_DIM>::at(row, chunk + t));
        from[t][0] = x.x, from[t][1] = x.y, from[t][2] = x.z, from[t][3] = x.w;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          unsigned int to[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) to[t] = __byte_perm(from[t][h], from[t][h + 2], f ? 0x7632 : 0x5410);
          st_shared_v4(Q_smem + Tile<HEAD_DIM>::at(row, chunk + 2 * h + f), to);  // @arrange-Q-of-nibbles
        }
    }
    sync_consumers();
  }

  // k counts steps of 16 columns: a word has two of them.
  template <int M>
  __device__ static void add_product(float (&S)[M][2][4], const unsigned int (&Q)[M][4], const unsigned int (&K)[4],
                                     int k) {
    const float zeros[4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      unsigned int word = K[2 * n + k / 2 % 2];
      unsigned int b0 = cvt_nibbles(word, k % 2 * 2, element()), b1 = cvt_nibbles(word, k % 2 * 2 + 1, element());
#pragma unroll
      for (int m = 0; m < M; ++m)
        if (k == 0)
          mma_m16n8k16<element>(S[m][n], Q[m], b0, b1, zeros);
        else
          mma_m16n8k16<element>(S[m][n], Q[m], b0, b1, S[m][n]);
    }
  }
  template <int M>
  __device__ static void scores(float (&S)[M][2][4], const unsigned int (&Q)[padded(HEAD_DIM) / 16][M][4],
                                unsigned int K_smem, const K::Lane& lane) {
    unsigned int words[4];
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      if (k % 4 == 0) ldmatrix_x4(words, K_smem + lane.at(0, k / 2));
      add_product(S, Q[k], words, k);
    }
  }
  template <int M>
  __device__ static void scores(float (&S)[M][2][4], unsigned int Q_smem, const Tile<HEAD_DIM>::Lane& Q_lane,
                                unsigned int K_smem, const K::Lane& lane) {
    unsigned int words[4], Q[M][4];
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      if (k % 4 == 0) ldmatrix_x4(words, K_smem + lane.at(0, k / 2));
#pragma unroll
      for (int m = 0; m < M; ++m) ldmatrix_x4(Q[m], Q_smem + Q_lane.at(16 * m, 2 * k));
      add_product(S, Q, words, k);
    }
  }
  template <int M>
  __device__ static void accumulate(float (&O)[M][FRAGMENTS][4], const unsigned int (&P)[M][1][4], unsigned int V_smem,
                                    const V::Lane& lane) {
    unsigned int words[4];
#pragma unroll
    for (int n = 0; n < FRAGMENTS; ++n) {
      if (n % 8 == 0) ldmatrix_x4_trans(words, V_smem + lane.at(0, n / 4));
      const unsigned int* half = words + n % 8 / 4 * 2;  // keys of the warp: the first eight, and the others
      unsigned int b0 = cvt_nibbles(half[0], n % 4, element()), b1 = cvt_nibbles(half[1], n % 4, element());
#pragma unroll
      for (int m = 0; m < M; ++m) mma_m16n8k16<element>(O[m][n], P[m][0], b0, b1, O[m][n]);
    }
  }
  // A lane has columns 8t .. 8t + 7 of each 32: four fragments, and two elements of each.
  __device__ static void store_row(unsigned int row, const float (&O)[FRAGMENTS][4], int half) {
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        st_shared_v4(row + 4 * (8 * n + 8 * (lane_id() % 4) + 4 * e),
                     {__float_as_uint(O[n][2 * half + e]), __float_as_uint(O[n + 1][2 * half + e]),
                      __float_as_uint(O[n + 2][2 * half + e]), __float_as_uint(O[n + 3][2 * half + e])});
  }
};
#endif
