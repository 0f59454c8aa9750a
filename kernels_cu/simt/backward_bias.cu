// Backward, dbias: one block per tile of the bias, over all dimensions that it broadcasts over, deterministic. The
// scores are recomputed a third time, and only if the bias has a gradient: the alternatives are atomic additions, or a
// gradient of the broadcast shape. CAPTURED_GRADIENT: the same for an array that score_mod reads, whose gradient is a
// sum of dS times a derivative. grid (tiles of the bias, its heads, its batch entries); a broadcast dimension counts as
// one tile, head or entry.
#include "../dbias.cuh"
#include "steps.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_bias(const __grid_constant__ Params p) {
  extern __shared__ Chunk smem[];
  real* Q_smem = (real*)smem;                                  // [BLOCK_Q][HEAD_DIM]
  real* dO_smem = Q_smem + BLOCK_Q * row_stride(HEAD_DIM);     // [BLOCK_Q][HEAD_DIM_V]
  real* K_smem = dO_smem + BLOCK_Q * row_stride(HEAD_DIM_V);   // [BLOCK_KV][HEAD_DIM]
  real* V_smem = K_smem + BLOCK_KV * row_stride(HEAD_DIM);     // [BLOCK_KV][HEAD_DIM_V]
  real* dS_smem = V_smem + BLOCK_KV * row_stride(HEAD_DIM_V);  // [BLOCK_Q][BLOCK_KV]
  real* lse_smem = dS_smem + BLOCK_Q * p_stride(BLOCK_KV);     // [BLOCK_Q]
  real* delta_smem = lse_smem + BLOCK_Q;                       // [BLOCK_Q]

  for (int tile = blockIdx.x; tile < BiasTile::tiles(p); tile += gridDim.x) {
    BiasTile bias(p, tile);
    real dS_rmem[ROWS][COLS] = {};
    for (int b = bias.batches.begin; b < bias.batches.end; ++b) {
      Sequence sequence(p, b);
      Band band(p, sequence);
      for (int head = bias.heads.begin; head < bias.heads.end; ++head) {
        int kv_head = head / p.group;
        Score score(p, sequence, head);
        Dropout dropout(p, b, head);
        for (int q_start = bias.queries.begin; q_start < min(bias.queries.end, sequence.q_len); q_start += BLOCK_Q) {
          for (auto kv_tiles = bias.kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
            int2 start = {q_start, kv_tiles.start};
            Range existing = {0, sequence.q_len};
            __syncthreads();
            load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start), existing);
            load_dO(dO_smem, p, sequence, head, q_start, existing);
            load_tile<BLOCK_KV, HEAD_DIM>(K_smem, sequence.key_rows<element>(p.k, kv_head).tile(start.y),
                                          kv_tiles.visible);
            load_tile<BLOCK_KV, HEAD_DIM_V>(V_smem, sequence.key_rows<element>(p.v, kv_head).tile(start.y),
                                            kv_tiles.visible);
            load_rows(lse_smem, delta_smem, p, sequence, head, q_start);
            __syncthreads();
            real S_rmem[ROWS][COLS] = {}, dP_rmem[ROWS][COLS] = {};
            scores<ROWS, COLS, HEAD_DIM>(S_rmem, Q_smem, K_smem);
            scores<ROWS, COLS, HEAD_DIM_V>(dP_rmem, dO_smem, V_smem);
            differentiate<true, false, false>(S_rmem, dP_rmem, score, band, dropout, lse_smem, delta_smem, start);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
              for (int c = 0; c < COLS; ++c) dS_rmem[r][c] += dP_rmem[r][c];
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
