// Forward of attention to selected keys: one block per BLOCK_Q rows that share a list, (query, head) pairs. Each tile
// of keys is gathered by its list. grid (tiles of all lists, groups of heads that share a list, sequences)
#include "../selection.cuh"
#include "../softmax.cuh"
#if STATISTICS
#include "row_statistics.cuh"
#endif
#include "steps.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

// Turns q.k into scores; keys that a query does not see get -inf.
__device__ void modify(real (&S)[ROWS][COLS], const ListTile& tile, const Params& p, const Sequence& sequence,
                       const Band& band) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int row = row_y() + r * ROW_THREADS;
    Score score(p, sequence, tile.head[row], band.mod);
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int i = tile.query[row], j = tile.key[lane_x() + c * LANES];
      real derivative;
      S[r][c] = sees<true>(score, band, i, j) ? score.apply(S[r][c], i, j, derivative) : -infinity();
    }
  }
}

// Online-softmax step: rescales O and l to the new row max, and stores the probabilities to shared memory.
__device__ void update(real (&S)[ROWS][COLS], Softmax (&softmax)[ROWS], real (&O)[ROWS][columns_of(HEAD_DIM_V)],
                       real* P_smem, const ListTile& tile, const Params& p, int batch, const Dropout& dropout
#if STATISTICS
                       ,
                       RowStatistics (&statistics)[ROWS]
#endif
) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    real largest = -infinity(), sum = 0;
#pragma unroll
    for (int c = 0; c < COLS; ++c) largest = max(largest, S[r][c]);
#if STATISTICS
    real previous_m = softmax[r].m;
#endif
    real rescale = softmax[r].rescale(row_max(largest));
#if STATISTICS
    if constexpr (FIND_MAX) {
#pragma unroll
      for (int c = 0; c < COLS; ++c)
        statistics[r].take(S[r][c], tile.key[lane_x() + c * LANES]);  // @listed-key-of-lane
    }
    sum = exponentiate(S[r], softmax[r], statistics[r], previous_m, rescale);
#else
#pragma unroll
    for (int c = 0; c < COLS; ++c) sum += S[r][c] = softmax[r].probability(S[r][c]);
#endif
    softmax[r].l = softmax[r].l * rescale + row_sum(sum);
#pragma unroll
    for (int n = 0; n < columns_of(HEAD_DIM_V); ++n) O[r][n] *= rescale;
    if constexpr (DROPOUT) {
      int row = row_y() + r * ROW_THREADS;
      Dropout of_row = of_head(dropout, p, batch, tile.head[row]);
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        int i = tile.query[row], j = tile.key[lane_x() + c * LANES];
        S[r][c] *= of_row.keeps(of_row.bits(i, j), i, j) ? (real)dropout.keep_scale : 0;
      }
    }
  }
  store_p(P_smem, S);
}

// Offsets, in elements of type real.
struct SharedMemory {
  static constexpr int Q = 0;                                   // [BLOCK_Q][HEAD_DIM]
  static constexpr int X = Q + BLOCK_Q * row_stride(HEAD_DIM);  // [BLOCK_KV][HEAD_DIM or HEAD_DIM_V]: K, then V
  static constexpr int P = X + BLOCK_KV * row_stride(MAX_DIM);  // [BLOCK_Q][BLOCK_KV]
  static constexpr int BYTES = sizeof(real) * (P + BLOCK_Q * p_stride(BLOCK_KV));
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_forward(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ ListTile tile;
  real* smem = (real*)shared;
  real *Q_smem = smem + SharedMemory::Q, *X_smem = smem + SharedMemory::X, *P_smem = smem + SharedMemory::P;

  int head = blockIdx.y * HEADS_OF_LIST, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, head);
  ListedQueries<element> Q(tile, sequence, p.q);
  ListedKeys<element> K(tile, sequence, p.k, kv_head), V(tile, sequence, p.v, kv_head);
  auto exists = [](int) { return true; };

  for (ListTiles tiles(p, sequence, band, head); tiles.valid(); tiles.next()) {
    // Prologue.
    tiles.find_rows(tile);
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, Q, exists);
    Softmax softmax[ROWS];
    real O_rmem[ROWS][columns_of(HEAD_DIM_V)] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      softmax[r].init(SINK ? to_real(((const sink_element*)p.sink)[tile.head[row_y() + r * ROW_THREADS]])
                           : -infinity());
#if STATISTICS
    RowStatistics statistics[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) statistics[r].init();
#endif

    // Mainloop.
    tiles.visit_keys(tile, [&] {
      load_tile<BLOCK_KV, HEAD_DIM>(X_smem, K, exists);
      __syncthreads();
      real S_rmem[ROWS][COLS] = {};
      scores<ROWS, COLS, HEAD_DIM>(S_rmem, Q_smem, X_smem);
      __syncthreads();
      load_tile<BLOCK_KV, HEAD_DIM_V>(X_smem, V, exists);
      modify(S_rmem, tile, p, sequence, band);
#if STATISTICS
      update(S_rmem, softmax, O_rmem, P_smem, tile, p, sequence.batch, dropout, statistics);
#else
      update(S_rmem, softmax, O_rmem, P_smem, tile, p, sequence.batch, dropout);
#endif
      __syncthreads();
      accumulate<ROWS, BLOCK_KV, HEAD_DIM_V>(O_rmem, P_smem, X_smem);
    });

    // Epilogue.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int i = tile.query[row_y() + r * ROW_THREADS], of = tile.head[row_y() + r * ROW_THREADS];
#if STATISTICS
      statistics[r].reduce(LANES);
#endif
      if (i >= sequence.q_rows) continue;
      element* out = sequence.queries<element>(p.out, of) + i * p.out.row;
      store_row<HEAD_DIM_V>(out, O_rmem[r], softmax[r].inverse_sum());
      if (lane_x() == 0)
        sequence.queries<real>(p.lse, of)[i * p.lse.row] = i < sequence.q_len ? softmax[r].lse() : -infinity();
#if STATISTICS
      if (lane_x() == 0) statistics[r].store(p, sequence, of, i, statistics[r].entropy(softmax[r].l));
#endif
    }
  }
}
