// Forward of attention to selected keys and its derivative in one direction (JVP): one block per BLOCK_Q rows that
// share a list, (query, head) pairs. Each tile of keys is gathered by its list. grid (tiles of all lists, groups of
// heads that share a list, sequences)
#include "../selection.cuh"
#include "jvp.cuh"

// Turns q.k and its tangent into scores and their tangents; keys that a query does not see get -inf.
__device__ void modify(real (&S)[ROWS][COLS], real (&tS)[ROWS][COLS], const ListTile& tile, const Params& p,
                       const Sequence& sequence, const Band& band) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int row = row_y() + r * ROW_THREADS;
    Score score(p, sequence, tile.head[row], band.mod);
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int i = tile.query[row], j = tile.key[lane_x() + c * LANES];
      Score::Moved x = {-infinity()};
      if (sees<true>(score, band, i, j)) x = score.moved(S[r][c], tS[r][c], i, j);  // @listed-tangent
      S[r][c] = x.score, tS[r][c] = x.tangent;
    }
  }
}

// Multiplies the weights of V in both sums by the dropout factors of their rows' heads.
__device__ void drop(real (&S)[ROWS][COLS], real (&tS)[ROWS][COLS], const ListTile& tile, const Params& p, int batch,
                     const Dropout& dropout) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int row = row_y() + r * ROW_THREADS;
    Dropout of_row = of_head(dropout, p, batch, tile.head[row]);
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int i = tile.query[row], j = tile.key[lane_x() + c * LANES];
      real factor = of_row.keeps(of_row.bits(i, j), i, j) ? (real)dropout.keep_scale : 0;
      S[r][c] *= factor, tS[r][c] *= factor;  // @simt.drop-tangent
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_jvp(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ ListTile tile;
  real* smem = (real*)shared;

  int head = blockIdx.y * HEADS_OF_LIST, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, head);
  auto queries = [&](const Operand& x) { return ListedQueries<element>(tile, sequence, x); };
  auto keys = [&](const Operand& x) { return ListedKeys<element>(tile, sequence, x, kv_head); };
  auto exists = [](int) { return true; };

  for (ListTiles tiles(p, sequence, band, head); tiles.valid(); tiles.next()) {
    // Prologue.
    tiles.find_rows(tile);
    load_tile<BLOCK_Q, HEAD_DIM>(smem + SharedMemory::Q, queries(p.q), exists);
    if constexpr (TQ) load_tile<BLOCK_Q, HEAD_DIM>(smem + SharedMemory::tQ, queries(p.tq), exists);
    Softmax softmax[ROWS];
    Mean mean[ROWS];
    real O_rmem[ROWS][SUMS] = {}, T_rmem[ROWS][SUMS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int of = tile.head[row_y() + r * ROW_THREADS];
      softmax[r].init(SINK ? to_real(((const sink_element*)p.sink)[of]) : -infinity());
      real tsink = TSINK ? to_real(((const sink_element*)p.tsink)[of]) : 0;  // @tsink-of-listed-row
      mean[r] = {tsink * softmax[r].l, 0, tsink * softmax[r].l};
    }

    // Mainloop.
    tiles.visit_keys(tile, [&] {
      real S_rmem[ROWS][COLS] = {}, tS_rmem[ROWS][COLS] = {};
      add_scores(S_rmem, tS_rmem, smem, p, keys, exists);
      __syncthreads();
      load_tile<BLOCK_KV, HEAD_DIM_V>(smem + SharedMemory::X, keys(p.v), exists);
      modify(S_rmem, tS_rmem, tile, p, sequence, band);
      update(S_rmem, tS_rmem, softmax, mean, O_rmem, T_rmem);
      if constexpr (DROPOUT) drop(S_rmem, tS_rmem, tile, p, sequence.batch, dropout);
      add_values(O_rmem, T_rmem, S_rmem, tS_rmem, smem, p, keys, exists);
    });

    // Epilogue.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int i = tile.query[row_y() + r * ROW_THREADS], of = tile.head[row_y() + r * ROW_THREADS];
      if (i < sequence.q_rows) store_query(p, sequence, of, i, softmax[r], mean[r], O_rmem[r], T_rmem[r]);
    }
  }
}
