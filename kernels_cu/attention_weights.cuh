// attention_weights: one block per tile of BLOCK_Q of the rows that are asked for and BLOCK_KV keys, of one head or
// (MEAN) for the mean over all heads. Each element of the result is written by one block, also those of keys that no
// row sees. grid (row tiles x key tiles, heads of the result, sequences)
#pragma once
#include "weights.cuh"

using Scores = ScoreTile<BLOCK_Q, BLOCK_KV>;

// Offsets in bytes.
struct SharedMemory {
  static constexpr int Q = 0;                                    // [BLOCK_Q][HEAD_DIM]
  static constexpr int K = Q + operand_bytes(BLOCK_Q);           // [BLOCK_KV][HEAD_DIM]
  static constexpr int POSITIONS = K + operand_bytes(BLOCK_KV);  // int [BLOCK_Q]
  static constexpr int BYTES = POSITIONS + 4 * BLOCK_Q;
};

// Addresses of rows in any order, for load_operand.
struct ChosenRows {
  static constexpr bool EQUIDISTANT = false;
  static constexpr int first = 0;

  const element* data;
  long long stride;
  int aligned;
  const int* positions;

  __device__ const element* operator()(int row) const { return data + positions[row] * stride; }
  __device__ bool has(int row) const { return true; }
};

// The number of a row or head of the result in the arrays.
__device__ inline int number(const int* list, int first, int step, int n) {
  return list ? list[n] : first + n * step;
}

__device__ inline void sum_weights(const Params& p, unsigned char* smem) {
  __shared__ int pages_smem[2][BLOCK_KV];
  int* positions_smem = (int*)(smem + SharedMemory::POSITIONS);  // in the sequence; -1 for a row that it does not have
  OperandAddress Q_smem = operand_at(smem, SharedMemory::Q), K_smem = operand_at(smem, SharedMemory::K);

  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  TilePages pages{sequence, pages_smem};
  int row_tiles = (p.result_rows + BLOCK_Q - 1) / BLOCK_Q, kv_tiles = (p.result_columns + BLOCK_KV - 1) / BLOCK_KV;
  int only = MEAN ? 0 : number(p.asked_heads, p.head_first, p.head_step, blockIdx.y);

  for (long long tile = blockIdx.x; tile < (long long)row_tiles * kv_tiles; tile += gridDim.x) {
    int first = (int)(tile / kv_tiles) * BLOCK_Q, kv_start = (int)(tile % kv_tiles) * BLOCK_KV;
    __syncthreads();
    for (int n = threadIdx.x; n < BLOCK_Q; n += THREADS) {
      int place = first + n, i = -1;
      if (place < p.result_rows) i = number(p.asked_rows, p.row_first, p.row_step, place) - sequence.q_start;
      positions_smem[n] = i >= 0 && i < sequence.q_rows ? i : -1;
    }
    __syncthreads();
    Range queries = {p.q_len, -1};
    for (int n = 0; n < BLOCK_Q; ++n) {
      int i = positions_smem[n];
      if (i >= 0) queries = {min(queries.begin, i), max(queries.end, i + 1)};
    }
    if (queries.end < 0) continue;  // the rows of the tile belong to other sequences

    int q_stop = min(queries.end, sequence.q_len);
    Range visible = {band.kv_begin(queries.begin), queries.begin < q_stop ? band.kv_end(q_stop) : 0};
    real P_rmem[Scores::ROWS][Scores::COLS] = {};
    if (max(visible.begin, kv_start) < min(visible.end, kv_start + BLOCK_KV)) {
      for (int head = only; head < (MEAN ? p.heads : only + 1); ++head) {
        int kv_head = head / p.group;
        Score score(p, sequence, head);
        __syncthreads();
        if (head % p.group == 0 || head == only) load_keys(K_smem, p, sequence, kv_head, pages, kv_start, visible);
        ChosenRows rows{sequence.queries<element>(p.q, head), p.q.row, p.q.aligned, positions_smem};
        load_operand<BLOCK_Q>(
            Q_smem, rows, 0, [&](int row) { return positions_smem[row] >= 0 && positions_smem[row] < sequence.q_len; });
        wait_for_operands();
        Scores S(Q_smem, K_smem);
        modify(S.s, score, band,
               [&](int r, int c) { return int2{positions_smem[Scores::row(r)], kv_start + Scores::column(c)}; });
#pragma unroll
        for (int r = 0; r < Scores::ROWS; ++r) {
          real lse = lse_of(p, sequence, head, positions_smem[Scores::row(r)]);
#pragma unroll
          for (int c = 0; c < Scores::COLS; ++c) P_rmem[r][c] += probability(S.s[r][c], lse);
        }
      }
    }

    // Epilogue.
    element* result = (element*)p.result.data + (PACKED ? 0 : sequence.batch * p.result.batch);
    result += blockIdx.y * p.result.head;
#pragma unroll
    for (int r = 0; r < Scores::ROWS; ++r) {
      int row = Scores::row(r);
      if (positions_smem[row] < 0) continue;
#pragma unroll
      for (int c = 0; c < Scores::COLS; ++c) {
        int j = kv_start + Scores::column(c);
        real P = MEAN ? P_rmem[r][c] / (real)p.heads : P_rmem[r][c];  // @weights.mean
        if (j < p.result_columns) store(result + (first + row) * p.result.row + j, P);
      }
    }
  }
}
