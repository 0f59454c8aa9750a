// What a forward does whatever the numbers of Q, K and V:
//
//   KvTiles   the tiles of keys that a tile of queries sees
//   store_O  O leaves through the place of Q
#pragma once
#include "tile.cuh"

constexpr int N = BLOCK_KV / 8;                // fragments of scores in a row
constexpr int N_V = fragments_of(HEAD_DIM_V);  // and of O
// The warpgroup that brings tiles needs few registers: two others share what it gives back, or three.
constexpr int PRODUCER_REGISTERS = THREADS == 384 ? 24 : 32, CONSUMER_REGISTERS = THREADS == 384 ? 240 : 160;

// From the last, through which a mask cuts, to the first.
struct KvTiles {
  int first;
  int last;  // before the first: none

  __device__ KvTiles(const Band& band, int q_start) {
    int q_stop = min(q_start + BLOCK_Q, band.q_len);
    int begin = band.kv_begin(q_start), end = q_start < q_stop ? band.kv_end(q_stop) : 0;
    first = begin / BLOCK_KV * BLOCK_KV;
    last = begin < end ? (end - 1) / BLOCK_KV * BLOCK_KV : first - BLOCK_KV;
  }
};

// All DIM columns in boxes of 16 rows, which nothing but the end of the tensor may cut. One thread asks for them, and
// waits until they have been read from the tile.
template <int ROWS, int DIM, int K>
__device__ void tma_store_rows(const TensorMap& map, unsigned int tile, const unsigned int (&A)[1][K][4], int row,
                               int first, int head, int batch) {
  store_fragments<ROWS>(tile, A, row, 0);
  fence_proxy_async();
  __syncwarp();
  if (lane_id() == 0) {
#pragma unroll
    for (int n = 0; n < panels_of(DIM); ++n)
      tma_store(map, tile + (n * ROWS + row) * PANEL_ROW, n * PANEL, first, head, batch);
    bulk_commit_group();
    bulk_wait_group_read<0>();
  }
}

// The 16 rows of this warp from row `row` of a tile, row `first` of the sequence, multiplied by `factors` and rounded.
// Then nothing reads or writes their place any more.
template <typename Maps>
__device__ void store_O(float (&O)[1][N_V][4], const float (&factors)[1][2], const Params& p, const Maps& maps,
                        unsigned char* tile, const Sequence& sequence, int head, int row, int first) {
  unsigned int rounded[1][N_V / 2][4];
  rescale(O, factors);
  round_fragments(rounded, O);
  if constexpr (TMA_STORE_O) {
    tma_store_rows<BLOCK_Q, HEAD_DIM_V>(maps.out, smem_address(tile), rounded, row, first, head, sequence.batch);
  } else {
    element* rows = sequence.queries<element>(p.out, head);
    store_rows<BLOCK_Q, HEAD_DIM_V>(rows, p.out, tile, rounded, row, 0, first, sequence.q_rows);
    fence_proxy_async();
    __syncwarp();
  }
}
