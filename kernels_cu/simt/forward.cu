// Forward: one block per tile of BLOCK_Q queries of one head. grid (query tiles, heads, sequences)
#include "../softmax.cuh"
#if STATISTICS
#include "row_statistics.cuh"
#endif
#include "steps.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

// Turns q.k into scores; keys that a query does not see get -inf.
template <bool MASKED>
__device__ void modify(real (&S)[ROWS][COLS], const Score& score, const Band& band, int q_start, int kv_start) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int i = q_start + row_y() + r * ROW_THREADS, j = kv_start + lane_x() + c * LANES;
      real derivative;
      S[r][c] = sees<MASKED>(score, band, i, j) ? score.apply(S[r][c], i, j, derivative) : -infinity();
    }
}

// Online-softmax step: rescales O and l to the new row max, and stores the probabilities to shared memory.
__device__ void update(real (&S)[ROWS][COLS], Softmax (&softmax)[ROWS], real (&O)[ROWS][columns_of(HEAD_DIM_V)],
                       real* P_smem, const Dropout& dropout, int q_start, int kv_start
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
      for (int c = COLS - 1; c >= 0; --c) statistics[r].take_descending(S[r][c], kv_start + lane_x() + c * LANES);
    }
    sum = exponentiate(S[r], softmax[r], statistics[r], previous_m, rescale);
#else
#pragma unroll
    for (int c = 0; c < COLS; ++c) sum += S[r][c] = softmax[r].probability(S[r][c]);
#endif
    softmax[r].l = softmax[r].l * rescale + row_sum(sum);
#pragma unroll
    for (int n = 0; n < columns_of(HEAD_DIM_V); ++n) O[r][n] *= rescale;
    int row = row_y() + r * ROW_THREADS;
    if constexpr (DROPOUT) {
      Kept kept;
#pragma unroll
      for (int c = 0; c < COLS; ++c) S[r][c] *= kept.factor(dropout, c, q_start + row, kv_start + lane_x() + c * LANES);
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ int pages_smem[2][BLOCK_KV];
  real* smem = (real*)shared;
  real *Q_smem = smem + SharedMemory::Q, *X_smem = smem + SharedMemory::X, *P_smem = smem + SharedMemory::P;

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  auto K = sequence.key_rows<element>(p.k, kv_head), V = sequence.key_rows<element>(p.v, kv_head);
  TilePages pages{sequence, pages_smem};
#if PREFIXES
  const Sequence& own = sequence;
#endif
  real sink = SINK ? to_real(((const sink_element*)p.sink)[head]) : -infinity();

  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    // Prologue.
    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start),
                                 Range{0, sequence.q_len});
    Softmax softmax[ROWS];
    real O_rmem[ROWS][columns_of(HEAD_DIM_V)] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) softmax[r].init(sink);  // @init-softmax
#if STATISTICS
    RowStatistics statistics[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) statistics[r].init();
#endif

    // Mainloop.
#if PREFIXES
    // The sequence's own keys, and then those of the prefix.
    for (int on_prefix = 0; on_prefix < 1 + (own.group >= 0); ++on_prefix) {
      Sequence sequence = on_prefix ? own.on_prefix(p) : own;  // @keys-of-prefix
      Band band(p, sequence);
      Score score(p, sequence, head);
      auto K = sequence.key_rows<element>(p.k, kv_head), V = sequence.key_rows<element>(p.v, kv_head);
      TilePages pages{sequence, pages_smem};
#endif
      for (KvTiles<Order::LAST_TO_FIRST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
        int kv_start = kv_tiles.start;
        Range readable = sequence.readable(kv_tiles.visible);
        pages.look_up(kv_start, readable);
        pages.store();
        __syncthreads();
        load_tile<BLOCK_KV, HEAD_DIM>(X_smem, K.tile(kv_start, pages.stored()), readable);
        __syncthreads();
        real S_rmem[ROWS][COLS] = {};
        scores<ROWS, COLS, HEAD_DIM>(S_rmem, Q_smem, X_smem);
        __syncthreads();  // @barrier-before-V
        load_tile<BLOCK_KV, HEAD_DIM_V>(X_smem, V.tile(kv_start, pages.stored()), readable);
        if (kv_tiles.masked())
          modify<true>(S_rmem, score, band, q_start, kv_start);
        else
          modify<false>(S_rmem, score, band, q_start, kv_start);
#if STATISTICS
#if PREFIXES
        kv_start += sequence.keys_before;  // the number of the key that argmax returns
#endif
        update(S_rmem, softmax, O_rmem, P_smem, dropout, q_start, kv_start, statistics);
#else
      update(S_rmem, softmax, O_rmem, P_smem, dropout, q_start, kv_start);
#endif
        __syncthreads();  // @barrier-before-PV
        accumulate<ROWS, BLOCK_KV, HEAD_DIM_V>(O_rmem, P_smem, X_smem);
      }
#if PREFIXES
    }
#endif

    // Epilogue.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#if STATISTICS
      statistics[r].reduce(LANES);
#endif
      int i = q_start + row_y() + r * ROW_THREADS;
      if (i >= sequence.q_rows) continue;  // @rows-to-write
      element* out = sequence.queries<element>(p.out, head) + i * p.out.row;
      store_row<HEAD_DIM_V>(out, O_rmem[r], softmax[r].inverse_sum());  // @store-O-row
      if (lane_x() == 0)
        sequence.queries<real>(p.lse, head)[i * p.lse.row] = i < sequence.q_len ? softmax[r].lse() : -infinity();
#if STATISTICS
      if (lane_x() == 0) statistics[r].store(p, sequence, head, i, statistics[r].entropy(softmax[r].l));
#endif
    }
  }
}
