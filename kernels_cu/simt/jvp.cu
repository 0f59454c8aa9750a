// Forward and its derivative in one direction (JVP): one block per tile of BLOCK_Q queries of one head. grid (query
// tiles, heads, sequences)
#include "jvp.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) jvp(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  real* smem = (real*)shared;
  real *Q_smem = smem + SharedMemory::Q, *tQ_smem = smem + SharedMemory::tQ, *X_smem = smem + SharedMemory::X;
  real *P_smem = smem + SharedMemory::P, *tP_smem = smem + SharedMemory::tP;

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  real sink = SINK ? to_real(((const sink_element*)p.sink)[head]) : -infinity();
  real tsink = TSINK ? to_real(((const sink_element*)p.tsink)[head]) : 0;

  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    // Prologue.
    Range existing = {0, sequence.q_len};
    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start), existing);
    if constexpr (TQ)
      load_tile<BLOCK_Q, HEAD_DIM>(tQ_smem, sequence.query_rows<element>(p.tq, head).tile(q_start), existing);
    Softmax softmax[ROWS];
    Mean mean[ROWS];
    real O_rmem[ROWS][SUMS] = {}, T_rmem[ROWS][SUMS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) softmax[r].init(sink), mean[r] = {tsink * softmax[r].l, 0, tsink * softmax[r].l};

    // Mainloop.
    for (KvTiles<Order::LAST_TO_FIRST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      int kv_start = kv_tiles.start;
      auto rows = [&](const Operand& x) { return sequence.key_rows<element>(x, kv_head).tile(kv_start); };
      __syncthreads();
      load_tile<BLOCK_KV, HEAD_DIM>(X_smem, rows(p.k), kv_tiles.visible);
      __syncthreads();
      real S_rmem[ROWS][COLS] = {}, tS_rmem[ROWS][COLS] = {};
      scores<ROWS, COLS, HEAD_DIM>(S_rmem, Q_smem, X_smem);
      if constexpr (TQ) scores<ROWS, COLS, HEAD_DIM>(tS_rmem, tQ_smem, X_smem);
      if constexpr (TK) {
        __syncthreads();
        load_tile<BLOCK_KV, HEAD_DIM>(X_smem, rows(p.tk), kv_tiles.visible);
        __syncthreads();
        scores<ROWS, COLS, HEAD_DIM>(tS_rmem, Q_smem, X_smem);
      }
      __syncthreads();
      load_tile<BLOCK_KV, HEAD_DIM_V>(X_smem, rows(p.v), kv_tiles.visible);
      if (kv_tiles.masked())
        modify<true>(S_rmem, tS_rmem, score, band, q_start, kv_start);
      else
        modify<false>(S_rmem, tS_rmem, score, band, q_start, kv_start);
      update(S_rmem, tS_rmem, softmax, mean, O_rmem, T_rmem, dropout, q_start, kv_start);
      store_p(P_smem, S_rmem);
      if constexpr (SCORES_MOVE) store_p(tP_smem, tS_rmem);
      __syncthreads();
      accumulate<ROWS, BLOCK_KV, HEAD_DIM_V>(O_rmem, P_smem, X_smem);
      if constexpr (SCORES_MOVE) accumulate<ROWS, BLOCK_KV, HEAD_DIM_V>(T_rmem, tP_smem, X_smem);
      if constexpr (TV) {
        __syncthreads();
        load_tile<BLOCK_KV, HEAD_DIM_V>(X_smem, rows(p.tv), kv_tiles.visible);
        __syncthreads();
        accumulate<ROWS, BLOCK_KV, HEAD_DIM_V>(T_rmem, P_smem, X_smem);
      }
    }

    // Epilogue.
    for_each_row<ROWS>(q_start, sequence.q_rows, [&](int r, int i) {
      real factor = softmax[r].inverse_sum();
      store_row<HEAD_DIM_V>(sequence.queries<element>(p.out, head) + i * p.out.row, O_rmem[r], factor);
      store_row<HEAD_DIM_V>(sequence.queries<element>(p.tout, head) + i * p.tout.row, T_rmem[r], factor);
      if (lane_x() > 0) return;
      bool exists = i < sequence.q_len;
      sequence.queries<real>(p.lse, head)[i * p.lse.row] = exists ? softmax[r].lse() : -infinity();
      sequence.queries<real>(p.tlse, head)[i * p.tlse.row] = exists ? mean[r].lse_tangent : 0;
    });
  }
}
