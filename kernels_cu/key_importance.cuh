// key_importance: one block per tile of BLOCK_KV keys of one query head, over all queries that see them, so that every
// sum is deterministic. Tiles past the last key of a sequence write zeros. grid (key tiles, heads, sequences)
#pragma once
#include "row_weights.cuh"
#include "weights.cuh"

using Scores = ScoreTile<BLOCK_KV, BLOCK_Q>;  // transposed: rows are keys

// Offsets in bytes.
struct SharedMemory {
  static constexpr int K = 0;                            // [BLOCK_KV][HEAD_DIM]
  static constexpr int Q = K + operand_bytes(BLOCK_KV);  // [BLOCK_Q][HEAD_DIM]
  static constexpr int BYTES = Q + operand_bytes(BLOCK_Q);
};

// The query tiles of a key tile, of one head.
struct HeadTiles : Walk<BLOCK_Q, Order::FIRST_TO_LAST, ClassifyQueries> {
  __device__ HeadTiles(const Band& band, int head, int kv_start)
      : Walk(band.seen_by_all(kv_start, kv_start + BLOCK_KV), QTiles::visible_queries(band, kv_start),
             {band, head, {kv_start, min(kv_start + BLOCK_KV, band.kv_len)}}) {
    if (visible.begin < visible.end) skip_hidden();
  }
};

__device__ inline void sum_importance(const Params& p, unsigned char* smem) {
  __shared__ int pages_smem[2][BLOCK_KV];
  OperandAddress K_smem = operand_at(smem, SharedMemory::K), Q_smem = operand_at(smem, SharedMemory::Q);

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  TilePages pages{sequence, pages_smem};
  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < p.result_columns; kv_start += gridDim.x * BLOCK_KV) {
    // Prologue.
    __syncthreads();
    Range keys = {band.kv_begin(0), sequence.q_len > 0 ? band.kv_end(sequence.q_len) : 0};
    load_keys(K_smem, p, sequence, kv_head, pages, kv_start, keys);
    real sums[Scores::ROWS] = {};

    // Mainloop.
    for (HeadTiles q_tiles(band, head, kv_start); q_tiles.valid(); q_tiles.next()) {
      int q_start = q_tiles.start;
      __syncthreads();
      load_operand<BLOCK_Q>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start), p.q.row, q_tiles.visible);
      wait_for_operands();
      Scores S(K_smem, Q_smem);
      modify(S.s, score, band, [&](int r, int c) { return int2{q_start + S.column(c), kv_start + S.row(r)}; });
      real of_tile[S.ROWS] = {};  // a single running sum over all queries would round more often
#pragma unroll
      for (int c = 0; c < S.COLS; ++c) {
        int i = q_start + S.column(c);
        real lse = lse_of(p, sequence, head, i),
             weight = i < sequence.q_len ? row_weight(p, sequence.batch, head, sequence.q_start + i) : 0;
        // A row of weight 0 adds nothing, whatever its scores are.
#pragma unroll
        for (int r = 0; r < S.ROWS; ++r)
          if (weight != 0) of_tile[r] += weight * probability(S.s[r][c], lse);  // @weights.weight-of-row
      }
#pragma unroll
      for (int r = 0; r < S.ROWS; ++r) sums[r] += of_tile[r];
    }

    // Epilogue.
    real* result = (real*)p.result.data + sequence.batch * p.result.batch + head * p.result.head;
#pragma unroll
    for (int r = 0; r < Scores::ROWS; ++r) {
      real sum = row_sum(sums[r]);
      int j = kv_start + Scores::row(r);
      if (Scores::is_first_of_row() && j < p.result_columns) result[j] = sum;
    }
  }
}
