// The loop of the kernels that sum the gradients of the arrays that a score_mod reads.
#pragma once
#include "mainloop.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

// Offsets, in elements of type real.
struct SharedMemory {
  static constexpr int QUERIES = 0;
  static constexpr int KEYS = QUERIES + QuerySlot::END;
  static constexpr int BYTES = sizeof(real) * (KEYS + KeySlot::END);
};

// A block owns tiles of BLOCK_Q queries of one head, and visits all keys that they see. add_gradients(sums, tile,
// masked, score, band, dropout, queries, start) adds the gradients of the elements that the scores of a tile read;
// elements that all keys of a row read are summed in `sums`, and added to the array once per row.
template <typename Products, typename AddGradients>
__device__ void sum_captured(const Params& p, real* smem, AddGradients add_gradients) {
  QueryTile queries(smem + SharedMemory::QUERIES);
  KeyTile keys(smem + SharedMemory::KEYS);

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_len; q_start += gridDim.x * BLOCK_Q) {
    // Prologue.
    __syncthreads();
    queries.load(p, sequence, head, q_start, Range{0, sequence.q_len});
    Mod::RowSums sums[ROWS] = {};

    KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start);
    visit_keys<Products>(p, sequence, kv_head, q_start, kv_tiles, queries, keys,
                         [&](const Products& tile, int2 start, bool masked) {
                           add_gradients(sums, tile, masked, score, band, dropout, queries, start);
                         });

    // Epilogue.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int i = q_start + row_y() + r * ROW_THREADS;
      auto total = [](real x) { return row_sum(x); };
      band.mod.add_row(sums[r], band.mod.query(head, band.query(i)), i < sequence.q_len && lane_x() == 0, total);
    }
  }
}
