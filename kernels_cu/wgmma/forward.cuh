// Forward, for every dtype of Q, K and V:
//
//   BlockKvTiles   the tiles of keys that producer and consumers visit
//   store_O        epilogue: O -> the shared memory of Q -> global memory
#pragma once
#include "../walk.cuh"
#include "tile.cuh"

constexpr int N = BLOCK_KV / 8;                // score fragments, by columns
constexpr int N_V = fragments_of(HEAD_DIM_V);  // fragments of O, by columns
// Registers per thread: the producer gives registers to two or three consumer warpgroups.
constexpr int PRODUCER_REGISTERS = THREADS == 384 ? 24 : 32, CONSUMER_REGISTERS = THREADS == 384 ? 240 : 160;

using BlockKvTiles = KvTiles<Order::LAST_TO_FIRST>;

// Stores 16 rows x DIM columns by TMA, one box per panel; TMA clips rows past the end of the tensor. One lane issues
// the stores and waits until they have read the tile.
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

// Normalises and rounds this warp's 16 rows, from row `row` of the tile and row `first` of the sequence, and stores
// them. When it returns, the warp's shared memory may be reused.
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
