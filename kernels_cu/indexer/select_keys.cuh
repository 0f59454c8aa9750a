// select_keys: a block has BLOCK_Q queries and visits all keys of its part that they see, in order. Scores of all heads
// of the indexer are summed in registers, and a warp adds those of a row to its list. If there are several parts,
// merge_parts.cu merges their lists. grid (query tiles, parts of the keys, sequences)
#pragma once
#include "../weights.cuh"
#include "candidates.cuh"

using Scores = ScoreTile<BLOCK_Q, BLOCK_KV>;
constexpr int S_ROW = BLOCK_KV + 8;  // numbers of a row, padded: the rows of a warp begin at different banks

// Offsets in bytes.
struct SharedMemory {
  static constexpr int Q = 0;                            // [BLOCK_Q][HEAD_DIM], of one head
  static constexpr int K = Q + operand_bytes(BLOCK_Q);   // [BLOCK_KV][HEAD_DIM]
  static constexpr int S = K + operand_bytes(BLOCK_KV);  // Ordered [BLOCK_Q][S_ROW]
  static constexpr int BYTES = S + sizeof(real) * BLOCK_Q * S_ROW;
};

// Lanes that share an entry: the largest power of two of at most its keys.
__device__ constexpr int lanes_of(int keys) {
  return keys < 2 ? 1 : keys < 4 ? 2 : keys < 8 ? 4 : keys < 16 ? 8 : keys < 32 ? 16 : 32;
}

// Adds a query's tile of scores S to its candidates: the largest score of each block of keys that ends in the tile, or
// with the last key. Of the blocks up to position `own`, `local` ones come before all others.
__device__ inline void add_tile(Candidates& candidates, const Ordered* S, Range keys, bool last, long long own,
                                int local) {
  constexpr int LANES_OF_ENTRY = lanes_of(KEYS_OF_ENTRY);
  for (int first = keys.begin / KEYS_OF_ENTRY; (long long)first * KEYS_OF_ENTRY < keys.end;
       first += 32 / LANES_OF_ENTRY) {
    int entry = first + lane() / LANES_OF_ENTRY;
    long long begin = (long long)entry * KEYS_OF_ENTRY, end = begin + KEYS_OF_ENTRY;
    Ordered best = begin < keys.begin ? candidates.row.open : 0;  // @indexer.open-block
    long long stop = min(end, (long long)keys.end);
    for (long long j = max(begin, (long long)keys.begin) + lane() % LANES_OF_ENTRY; j < stop; j += LANES_OF_ENTRY)
      best = max(best, S[j - keys.begin]);
#pragma unroll
    for (int other = LANES_OF_ENTRY / 2; other > 0; other /= 2)
      best = max(best, __shfl_xor_sync(0xFFFFFFFF, best, other));
    bool exists = begin < keys.end, ends = last || end <= keys.end;  // @indexer.last-block
    bool first_lane = lane() % LANES_OF_ENTRY == 0;
    if (exists && !ends && first_lane) candidates.row.open = best;
    long long behind = own / KEYS_OF_ENTRY - entry;
    if (best > 0 && own >= 0 && behind >= 0 && behind < local) best = LARGEST;  // @indexer.local
    candidates.add(exists && ends && first_lane ? best : 0, entry);
  }
}

// Sums the scores of all heads for the keys of a tile in shared memory.
__device__ inline void sum_heads(real (&I)[Scores::ROWS][Scores::COLS], const Params& p, const Sequence& sequence,
                                 int q_start, OperandAddress Q_smem, OperandAddress K_smem) {
  for (int head = 0; head < p.heads; ++head) {  // @indexer.heads
    if (head > 0) __syncthreads();
    load_operand<BLOCK_Q>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start), p.q.row,
                          Range{0, sequence.q_len});
    wait_for_operands();
    Scores S(Q_smem, K_smem);
    const head_element* weights = sequence.queries<head_element>(p.head_weights, head);
#pragma unroll
    for (int r = 0; r < Scores::ROWS; ++r) {
      int i = q_start + Scores::row(r);
      real weight = i < sequence.q_len ? to_real(weights[i * p.head_weights.row]) : 0;
#pragma unroll
      for (int c = 0; c < Scores::COLS; ++c) {
        real a = S.s[r][c] * (real)p.scale;
        I[r][c] += weight * (a <= 0 ? 0 : a);  // a NaN stays
      }
    }
  }
}

__device__ inline void select(const Params& p, unsigned char* smem) {
  __shared__ int pages_smem[2][BLOCK_KV];
  __shared__ Chosen rows_smem[BLOCK_Q];
  OperandAddress Q_smem = operand_at(smem, SharedMemory::Q), K_smem = operand_at(smem, SharedMemory::K);
  Ordered* S_smem = (Ordered*)(smem + SharedMemory::S);

  Sequence sequence(p, blockIdx.z);
  if (TOP_LEFT) sequence.offset = 0;
  Band band(p, sequence);
  TilePages pages{sequence, pages_smem};
  long long block = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    // Prologue.
    int rows = min(sequence.q_rows - q_start, BLOCK_Q);
    for (int row = threadIdx.x / 32; row < rows; row += THREADS / 32)
      if (lane() == 0) rows_smem[row] = {0, 0, 0};

    // Mainloop.
    long long begin = (long long)blockIdx.y * p.part_keys, end = begin + p.part_keys;
    int seen = band.kv_end(q_start + rows);
    Range visible = {(int)min(begin, (long long)seen), (int)min(end, (long long)seen)};  // @indexer.part
    for (int kv_start = visible.begin; kv_start < visible.end; kv_start += BLOCK_KV) {
      load_keys(K_smem, p, sequence, 0, pages, kv_start, visible);
      real I[Scores::ROWS][Scores::COLS] = {};
      sum_heads(I, p, sequence, q_start, Q_smem, K_smem);
#pragma unroll
      for (int r = 0; r < Scores::ROWS; ++r)
#pragma unroll
        for (int c = 0; c < Scores::COLS; ++c) {
          int row = Scores::row(r), column = Scores::column(c);
          bool seen = band.sees(q_start + row, kv_start + column);  // @indexer.visible
          S_smem[row * S_ROW + column] = seen ? bits_of_score(I[r][c]) : 0;
        }
      __syncthreads();
      Range keys = {kv_start, min(kv_start + BLOCK_KV, visible.end)};
      for (int row = threadIdx.x / 32; row < rows; row += THREADS / 32) {
        Candidates candidates = candidates_at(rows_smem[row], p, block, row);
        long long own = (long long)q_start + row + sequence.offset;
        add_tile(candidates, S_smem + row * S_ROW, keys, keys.end == visible.end, own, p.local_entries);
      }
    }

    // Epilogue.
    for (int row = threadIdx.x / 32; row < rows; row += THREADS / 32) {
      __syncwarp();
      Candidates candidates = candidates_at(rows_smem[row], p, block, row);
      if (gridDim.y == 1) {
        candidates.store(list_of(p, sequence.batch, q_start + row));
      } else {
        int count = candidates.finish();
        if (lane() == 0) p.candidate_counts[block * BLOCK_Q + row] = count;
      }
    }
  }
}
