// Backward of selection_loss, dQ and the gradient of the weights: one block per BLOCK_Q heads of a query, over the keys
// of its list. grid (queries, tiles of heads, sequences)
#include "selection_loss.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) selection_loss_q(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ ListKeys tile;
  real *smem = (real*)shared, *S_smem = smem + SharedMemory::S;
  int first = blockIdx.y * BLOCK_Q;
  Sequence sequence(p, blockIdx.z);
  Lists lists(p, sequence, 0);
  for (int i = blockIdx.x; i < sequence.q_rows; i += gridDim.x) {
    // Prologue.
    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(smem + SharedMemory::Q, heads_of(p, sequence, i, first), Range{0, p.heads});
    const real* dI = listed_scores(p, sequence, i);
    real dQ_rmem[ROWS][columns_of(HEAD_DIM)] = {}, weights[ROWS], dweights[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) weights[r] = weight_of(p, sequence, i, first + row_y() + r * ROW_THREADS);

    // Mainloop.
    for (int start = 0; start < lists.length; start += BLOCK_KV) {
      __syncthreads();
      if (!tile.find_keys(lists, sequence, i, start, Range{0, sequence.kv_len})) continue;
      load_tile<BLOCK_KV, HEAD_DIM>(smem + SharedMemory::K, ListedKeys<element>(tile, sequence, p.k, 0),
                                    [](int) { return true; });
      __syncthreads();
      real S[ROWS][COLS] = {};
      scores<ROWS, COLS, HEAD_DIM>(S, smem + SharedMemory::Q, smem + SharedMemory::K);
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        int n = start + lane_x() + c * LANES;
        real gradient = n < lists.length ? dI[n] : 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          dweights[r] += gradient * relu(S[r][c]);
          S[r][c] = S[r][c] > 0 ? gradient * weights[r] : 0;  // @loss.relu-of-dQ
        }
      }
      store_p(S_smem, S);
      __syncthreads();
      accumulate<ROWS, BLOCK_KV, HEAD_DIM>(dQ_rmem, S_smem, smem + SharedMemory::K);
    }

    // Epilogue.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int head = first + row_y() + r * ROW_THREADS;
      real dweight = row_sum(dweights[r]);  // @loss.dweight
      if (head >= p.heads) continue;
      store_row<HEAD_DIM>(sequence.queries<element>(p.dq, head) + i * p.dq.row, dQ_rmem[r], 1);
      head_element* to = sequence.queries<head_element>(p.dhead_weights, head) + i * p.dhead_weights.row;
      if (lane_x() == 0) store(to, dweight);
    }
  }
}
