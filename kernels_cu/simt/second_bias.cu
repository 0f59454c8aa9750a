// Double backward, dbias: the blocks and loops are those of backward_bias.cu. CAPTURED_GRADIENT: the gradient of an
// array that score_mod reads instead of the bias. grid (tiles of the bias, its heads, its batch entries)
#include "../dbias.cuh"
#include "second.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_bias(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  QueryTile queries((real*)smem);
  KeyTile keys(queries.end);
  real* dS_smem = keys.end;  // [BLOCK_Q][BLOCK_KV]

  for (int tile = blockIdx.x; tile < BiasTile::tiles(p); tile += gridDim.x) {
    BiasTile bias(p, tile);
    real dS_rmem[ROWS][COLS] = {};
    for (int b = bias.batches.begin; b < bias.batches.end; ++b) {
      Sequence sequence(p, b);
      Band band(p, sequence);
      for (int head = bias.heads.begin; head < bias.heads.end; ++head) {
        Score score(p, sequence, head);
        Dropout dropout(p, b, head);
        for (int q_start = bias.queries.begin; q_start < min(bias.queries.end, sequence.q_len); q_start += BLOCK_Q) {
          __syncthreads();
          queries.load(p, sequence, head, q_start, Range{0, sequence.q_len});
          for (auto kv_tiles = bias.kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
            int2 start = {q_start, kv_tiles.start};
            __syncthreads();
            keys.load(p, sequence, head / p.group, start.y, kv_tiles.visible);
            __syncthreads();
            SecondGradients<ROWS, COLS, false, false> gradients(queries, keys);
            gradients.differentiate<true>(score, band, dropout, queries, start);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
              for (int c = 0; c < COLS; ++c) dS_rmem[r][c] += gradients.dS[r][c];
          }
        }
      }
    }

    __syncthreads();
    store_p(dS_smem, dS_rmem);
    __syncthreads();
    bias.store(dS_smem, p_stride(BLOCK_KV));
  }
}
