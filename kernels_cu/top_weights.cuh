// top_weights: one block per tile of BLOCK_Q queries of one head, over all keys that they see, in the order of the
// keys. A thread has the list of a row's largest scores so far, in global memory, in descending order; of equal scores
// the lower key comes first. grid (query tiles, heads, sequences)
#pragma once
#include "weights.cuh"

static_assert(BLOCK_Q <= THREADS, "a thread has the list of one row");
using Scores = ScoreTile<BLOCK_Q, BLOCK_KV>;
constexpr int S_ROW = BLOCK_KV + 8;  // numbers of a row, padded: the rows of a warp begin at different banks

// Offsets in bytes.
struct SharedMemory {
  static constexpr int Q = 0;                            // [BLOCK_Q][HEAD_DIM]
  static constexpr int K = Q + operand_bytes(BLOCK_Q);   // [BLOCK_KV][HEAD_DIM]
  static constexpr int S = K + operand_bytes(BLOCK_KV);  // [BLOCK_Q][S_ROW]
  static constexpr int BYTES = S + sizeof(real) * BLOCK_Q * S_ROW;
};

// The n largest scores of a row so far, and their keys.
struct Best {
  real* scores;
  int* keys;
  int n;
  int count = 0;
  real last = -infinity();  // the n-th score; -inf while there are fewer

  // Keys come in ascending order, so that of equal scores the one that is in the list remains before. A NaN counts as
  // +inf.
  __device__ void add(real s, int key) {
    if (s != s) s = infinity();
    if (!(s > last)) return;  // @weights.enters-list
    int place = min(count, n - 1);
    for (; place > 0 && scores[place - 1] < s; --place) {  // @weights.ties
      scores[place] = scores[place - 1];
      keys[place] = keys[place - 1];
    }
    scores[place] = s;
    keys[place] = key;
    count = min(count + 1, n);
    if (count == n) last = scores[n - 1];
  }
};

__device__ inline void find_top(const Params& p, unsigned char* smem) {
  __shared__ int pages_smem[2][BLOCK_KV];
  OperandAddress Q_smem = operand_at(smem, SharedMemory::Q), K_smem = operand_at(smem, SharedMemory::K);
  real* S_smem = (real*)(smem + SharedMemory::S);

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  TilePages pages{sequence, pages_smem};
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    // Prologue.
    __syncthreads();
    load_operand<BLOCK_Q>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start), p.q.row,
                          Range{0, sequence.q_len});
    int row = threadIdx.x, i = q_start + row;
    bool has_row = row < BLOCK_Q && i < sequence.q_rows;
    long long first = (PACKED ? 0 : sequence.batch * p.result.batch) + head * p.result.head +
                      (sequence.q_start + (has_row ? i : 0)) * p.result.row;
    Best best{(real*)p.best_scores + first, p.result_keys + first, p.result_columns};

    // Mainloop.
    for (KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      int kv_start = kv_tiles.start;
      load_keys(K_smem, p, sequence, kv_head, pages, kv_start, kv_tiles.visible);
      wait_for_operands();
      Scores S(Q_smem, K_smem);
      modify(S.s, score, band, [&](int r, int c) { return int2{q_start + S.row(r), kv_start + S.column(c)}; });
#pragma unroll
      for (int r = 0; r < S.ROWS; ++r)
#pragma unroll
        for (int c = 0; c < S.COLS; ++c) S_smem[S.row(r) * S_ROW + S.column(c)] = S.s[r][c];
      __syncthreads();
      for (int c = 0; has_row && c < BLOCK_KV; ++c) best.add(S_smem[row * S_ROW + c], kv_start + c);
    }

    // Epilogue.
    real lse = has_row ? lse_of(p, sequence, head, i) : 0;
    element* values = (element*)p.result.data + first;
    for (int place = 0; has_row && place < best.n; ++place) {
      bool has_key = place < best.count;
      store(values + place, has_key ? probability(best.scores[place], lse) : 0);
      if (!has_key) best.keys[place] = -1;
    }
  }
}
