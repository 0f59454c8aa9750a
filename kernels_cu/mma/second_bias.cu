// Double backward, dbias: blocks and loops of backward_bias.cu, for the bias and, CAPTURED_GRADIENT, an array that
// score_mod reads. grid (tiles of the bias, its heads, its batch entries)
#include "../dbias.cuh"
#include "second.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and by columns

extern "C" __global__ void __launch_bounds__(THREADS, 1) second_bias(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  unsigned char* smem = (unsigned char*)shared;
  // Shared memory: the tile of queries, then that of keys. The epilogue reuses all of it for dS [BLOCK_Q][BLOCK_KV].
  QueryTile queries(smem_address(smem));
  KeyTile keys(queries.Q + QueryTile::BYTES);
  float* dS_smem = (float*)smem;
  int row = row_warp() * M * 16;
  ProductLanes lanes(row);
  auto numbers = (const RowNumbers*)(smem + (queries.numbers - queries.Q)) + row;

  for (int tile = blockIdx.x; tile < BiasTile::tiles(p); tile += gridDim.x) {
    BiasTile bias(p, tile);
    float dS_rmem[M][N][4] = {};
    for (int b = bias.batches.begin; b < bias.batches.end; ++b) {
      Sequence sequence(p, b);
      Band band(p, sequence);
      for (int head = bias.heads.begin; head < bias.heads.end; ++head) {
        Score score(p, sequence, head);
        Dropout dropout(p, b, head);
        for (int q_start = bias.queries.begin; q_start < min(bias.queries.end, sequence.q_len); q_start += BLOCK_Q) {
          for (auto kv_tiles = bias.kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
            __syncthreads();
            QueryLoads(p, sequence).load(queries, head, q_start, Range{0, sequence.q_len});
            KeyLoads(p, sequence, head / p.group, kv_tiles.start).load(keys, kv_tiles.visible);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncthreads();
            SecondGradients<M, N, false, false> gradients(queries, keys, lanes, [] {});
            gradients.differentiate<true>(0, score, band, dropout, numbers, q_start + row, kv_tiles.start);
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
              for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dS_rmem[m][n][e] += gradients.dS[m][n][e];
          }
        }
      }
    }

    __syncthreads();
    store_dS(dS_smem, dS_rmem, row);
    __syncthreads();
    bias.store(dS_smem, dS_ROW);
  }
}
