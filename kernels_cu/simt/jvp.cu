// Forward and its derivative in one direction (JVP): one block per tile of BLOCK_Q queries of one head. grid (query
// tiles, heads, sequences)
#include "jvp.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) jvp(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  real* smem = (real*)shared;

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  real sink = SINK ? to_real(((const sink_element*)p.sink)[head]) : -infinity();
  real tsink = TSINK ? to_real(((const sink_element*)p.tsink)[head]) : 0;

  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    // Prologue.
    auto queries = [&](const Operand& x) { return sequence.query_rows<element>(x, head).tile(q_start); };
    Range existing = {0, sequence.q_len};
    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(smem + SharedMemory::Q, queries(p.q), existing);
    if constexpr (TQ) load_tile<BLOCK_Q, HEAD_DIM>(smem + SharedMemory::tQ, queries(p.tq), existing);
    Softmax softmax[ROWS];
    Mean mean[ROWS];
    real O_rmem[ROWS][SUMS] = {}, T_rmem[ROWS][SUMS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) softmax[r].init(sink), mean[r] = {tsink * softmax[r].l, 0, tsink * softmax[r].l};

    // Mainloop.
    for (KvTiles<Order::LAST_TO_FIRST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      int kv_start = kv_tiles.start;
      auto keys = [&](const Operand& x) { return sequence.key_rows<element>(x, kv_head).tile(kv_start); };
      real S_rmem[ROWS][COLS] = {}, tS_rmem[ROWS][COLS] = {};
      __syncthreads();
      add_scores(S_rmem, tS_rmem, smem, p, keys, kv_tiles.visible);
      __syncthreads();
      load_tile<BLOCK_KV, HEAD_DIM_V>(smem + SharedMemory::X, keys(p.v), kv_tiles.visible);
      if (kv_tiles.masked())
        modify<true>(S_rmem, tS_rmem, score, band, q_start, kv_start);
      else
        modify<false>(S_rmem, tS_rmem, score, band, q_start, kv_start);
      update(S_rmem, tS_rmem, softmax, mean, O_rmem, T_rmem, dropout, q_start, kv_start);
      add_values(O_rmem, T_rmem, S_rmem, tS_rmem, smem, p, keys, kv_tiles.visible);
    }

    // Epilogue.
    for_each_row<ROWS>(q_start, sequence.q_rows, [&](int r, int i) {
      store_query(p, sequence, head, i, softmax[r], mean[r], O_rmem[r], T_rmem[r]);
    });
  }
}
