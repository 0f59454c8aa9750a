// Tiles of selection_loss and of its backward: the rows are heads of one query, the columns keys of its list.
#pragma once
#include "steps.cuh"
// The tiles of this engine are above.
#include "../indexer/listed_scores.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

// Offsets, in elements of type real.
struct SharedMemory {
  static constexpr int Q = 0;                                    // [BLOCK_Q][HEAD_DIM]
  static constexpr int K = Q + BLOCK_Q * row_stride(HEAD_DIM);   // [BLOCK_KV][HEAD_DIM]
  static constexpr int S = K + BLOCK_KV * row_stride(HEAD_DIM);  // [BLOCK_Q][BLOCK_KV]
  static constexpr int BYTES = sizeof(real) * (S + BLOCK_Q * p_stride(BLOCK_KV));
};
