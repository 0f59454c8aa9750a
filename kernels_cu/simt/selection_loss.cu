// selection_loss: one block per query, over the keys of its list. It writes the loss of the row, and the gradients of
// the scores. grid (queries, 1, sequences)
#include "selection_loss.cuh"
// The tiles of this engine are above.
#include "../indexer/row_loss.cuh"

static_assert(BLOCK_KV <= THREADS, "a thread has the score of one key");

extern "C" __global__ void __launch_bounds__(THREADS, 1) selection_loss(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ ListKeys tile;
  real *smem = (real*)shared, *S_smem = smem + SharedMemory::S;
  Sequence sequence(p, blockIdx.z);
  Lists lists(p, sequence, 0);
  for (int i = blockIdx.x; i < sequence.q_rows; i += gridDim.x) {
    real* I = listed_scores(p, sequence, i);
    for (int start = 0; start < lists.length; start += BLOCK_KV) {
      __syncthreads();
      bool any = tile.find_keys(lists, sequence, i, start, Range{0, sequence.kv_len});
      if (any)
        load_tile<BLOCK_KV, HEAD_DIM>(smem + SharedMemory::K, ListedKeys<element>(tile, sequence, p.k, 0),
                                      [](int) { return true; });
      real sum = 0;
      for (int head = 0; any && head < p.heads; head += BLOCK_Q) {
        load_tile<BLOCK_Q, HEAD_DIM>(smem + SharedMemory::Q, heads_of(p, sequence, i, head), Range{0, p.heads});
        __syncthreads();
        real S[ROWS][COLS] = {};
        scores<ROWS, COLS, HEAD_DIM>(S, smem + SharedMemory::Q, smem + SharedMemory::K);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          real weight = weight_of(p, sequence, i, head + row_y() + r * ROW_THREADS);
#pragma unroll
          for (int c = 0; c < COLS; ++c) S[r][c] = weight * relu(S[r][c]);
        }
        store_p(S_smem, S);
        __syncthreads();
        for (int row = 0; threadIdx.x < BLOCK_KV && row < BLOCK_Q; ++row)  // @loss.heads
          sum += S_smem[row * p_stride(BLOCK_KV) + threadIdx.x];
      }
      int n = start + threadIdx.x;
      if (threadIdx.x < BLOCK_KV && n < lists.length)
        I[n] = tile.key[threadIdx.x] < sequence.kv_len ? sum : -infinity();  // @loss.hidden
    }
    __syncthreads();
    finish_row(p, sequence, lists, i);
  }
}
