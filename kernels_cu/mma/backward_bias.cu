// Backward, dbias: one block per tile of the bias, over all dimensions that it broadcasts over, deterministic. The
// scores are recomputed a third time, and only if the bias has a gradient: the alternatives are atomic additions, or a
// gradient of the broadcast shape. CAPTURED_GRADIENT: the same for an array that score_mod reads, whose gradient is a
// sum of dS times a derivative. grid (tiles of the bias, its heads, its batch entries); a broadcast dimension counts as
// one tile, head or entry.
#include "../dbias.cuh"
#include "steps.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // and by columns
constexpr int Q_BYTES = BLOCK_Q * Tile<HEAD_DIM>::ROW;
constexpr int dO_BYTES = BLOCK_Q * Tile<HEAD_DIM_V>::ROW;
constexpr int K_BYTES = BLOCK_KV * Tile<HEAD_DIM>::ROW;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_bias(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  unsigned char* smem = (unsigned char*)shared;
  // Shared memory: Q [BLOCK_Q][HEAD_DIM], dO [BLOCK_Q][HEAD_DIM_V], lse2 [BLOCK_Q], delta [BLOCK_Q], K
  // [BLOCK_KV][HEAD_DIM], V [BLOCK_KV][HEAD_DIM_V]. The epilogue reuses all of it for dS [BLOCK_Q][BLOCK_KV].
  unsigned int Q_smem = smem_address(smem), dO_smem = Q_smem + Q_BYTES, lse2_smem = dO_smem + dO_BYTES;
  unsigned int K_smem = lse2_smem + 2 * 4 * BLOCK_Q, V_smem = K_smem + K_BYTES;
  int row = row_warp() * M * 16;
  const float* lse2 = (const float*)(smem + Q_BYTES + dO_BYTES);
  Rows rows = {lse2 + row, lse2 + BLOCK_Q + row};
  float* dS_smem = (float*)smem;
  Loader<BLOCK_Q, HEAD_DIM_V> dO_loader(p.dout.row);
  auto Q_lane = Tile<HEAD_DIM>::lane_of_A(row), K_lane = Tile<HEAD_DIM>::lane_of_B();
  auto dO_lane = Tile<HEAD_DIM_V>::lane_of_A(row), V_lane = Tile<HEAD_DIM_V>::lane_of_B();
  float scale_log2 = log2_scale_of(p);

  for (int tile = blockIdx.x; tile < BiasTile::tiles(p); tile += gridDim.x) {
    BiasTile bias(p, tile);
    float dS_rmem[M][N][4] = {};
    for (int b = bias.batches.begin; b < bias.batches.end; ++b) {
      Sequence sequence(p, b);
      Band band(p, sequence);
      for (int head = bias.heads.begin; head < bias.heads.end; ++head) {
        int kv_head = head / p.group;
        Score score(p, sequence, head);
        Dropout dropout(p, b, head);
        for (int q_start = bias.queries.begin; q_start < min(bias.queries.end, sequence.q_len); q_start += BLOCK_Q) {
          Range queries = {0, sequence.q_len};
          for (auto kv_tiles = bias.kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
            int kv_start = kv_tiles.start;
            __syncthreads();
            load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start), queries);
            load_dO(dO_smem, dO_loader, sequence.query_rows<element>(p.dout, head).tile(q_start), p, sequence, head,
                    queries);
            load_numbers<BLOCK_Q>(lse2_smem, sequence.queries<float>(p.lse2, head) + q_start, q_start, queries);
            load_numbers<BLOCK_Q>(lse2_smem + 4 * BLOCK_Q, sequence.queries<float>(p.delta, head) + q_start, q_start,
                                  queries);
            load_tile<BLOCK_KV, HEAD_DIM>(K_smem, sequence.key_rows<element>(p.k, kv_head).tile(kv_start),
                                          kv_tiles.visible);
            load_tile<BLOCK_KV, HEAD_DIM_V>(V_smem, sequence.key_rows<element>(p.v, kv_head).tile(kv_start),
                                            kv_tiles.visible);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncthreads();
            float S_rmem[M][N][4], dP_rmem[M][N][4];
            scores<M, N, HEAD_DIM>(S_rmem, Q_smem, Q_lane, K_smem, K_lane);
            scores<M, N, HEAD_DIM_V>(dP_rmem, dO_smem, dO_lane, V_smem, V_lane);
            differentiate<false, true>(S_rmem, dP_rmem, true, score, band, dropout, scale_log2, rows, q_start + row,
                                       kv_start);  // @differentiate-by-bias
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
              for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dS_rmem[m][n][e] += dP_rmem[m][n][e];
          }
        }
      }
    }

    __syncthreads();
    store_dS(dS_smem, dS_rmem, row);
    __syncthreads();  // @barrier-before-dbias
    bias.store(dS_smem, dS_ROW);
  }
}
