// attention_weights: one block per tile of BLOCK_Q of the rows that are asked for and BLOCK_KV keys, of one head or
// (MEAN) for the mean over all heads. Each element of the result is written by one block, also those of keys that no
// row sees. grid (row tiles x key tiles, heads of the result, sequences)
#include "weights.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

// Offsets, in elements of type real.
struct SharedMemory {
  static constexpr int Q = 0;                                   // [BLOCK_Q][HEAD_DIM]
  static constexpr int K = Q + BLOCK_Q * row_stride(HEAD_DIM);  // [BLOCK_KV][HEAD_DIM]
  static constexpr int BYTES = sizeof(real) * (K + BLOCK_KV * row_stride(HEAD_DIM));
};

// Addresses of rows in any order, for load_tile.
struct ChosenRows {
  static constexpr int first = 0;

  const element* data;
  long long stride;
  int aligned;
  const int* positions;

  __device__ const element* operator()(int row) const { return data + positions[row] * stride; }
  __device__ bool has(int row) const { return true; }
};

// The number of a row or head of the result in the arrays.
__device__ inline int number(const int* list, int first, int step, int n) {
  return list ? list[n] : first + n * step;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_weights(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ int pages_smem[2][BLOCK_KV];
  __shared__ int positions_smem[BLOCK_Q];  // of the rows in the sequence; -1 for a row that it does not have
  real* smem = (real*)shared;
  real *Q_smem = smem + SharedMemory::Q, *K_smem = smem + SharedMemory::K;

  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  TilePages pages{sequence, pages_smem};
  int row_tiles = (p.result_rows + BLOCK_Q - 1) / BLOCK_Q, kv_tiles = (p.result_columns + BLOCK_KV - 1) / BLOCK_KV;
  int only = MEAN ? 0 : number(p.asked_heads, p.head_first, p.head_step, blockIdx.y);

  for (long long tile = blockIdx.x; tile < (long long)row_tiles * kv_tiles; tile += gridDim.x) {
    int first = (int)(tile / kv_tiles) * BLOCK_Q, kv_start = (int)(tile % kv_tiles) * BLOCK_KV;
    __syncthreads();
    for (int n = threadIdx.x; n < BLOCK_Q; n += THREADS) {
      int place = first + n, i = -1;
      if (place < p.result_rows) i = number(p.asked_rows, p.row_first, p.row_step, place) - sequence.q_start;
      positions_smem[n] = i >= 0 && i < sequence.q_rows ? i : -1;
    }
    __syncthreads();
    Range queries = {p.q_len, -1};
    for (int n = 0; n < BLOCK_Q; ++n) {
      int i = positions_smem[n];
      if (i >= 0) queries = {min(queries.begin, i), max(queries.end, i + 1)};
    }
    if (queries.end < 0) continue;  // the rows of the tile belong to other sequences

    int q_stop = min(queries.end, sequence.q_len);
    Range visible = {band.kv_begin(queries.begin), queries.begin < q_stop ? band.kv_end(q_stop) : 0};
    real P_rmem[ROWS][COLS] = {};
    if (max(visible.begin, kv_start) < min(visible.end, kv_start + BLOCK_KV)) {
      for (int head = only; head < (MEAN ? p.heads : only + 1); ++head) {
        int kv_head = head / p.group;
        Score score(p, sequence, head);
        __syncthreads();
        if (head % p.group == 0 || head == only) load_keys(K_smem, p, sequence, kv_head, pages, kv_start, visible);
        ChosenRows rows{sequence.queries<element>(p.q, head), p.q.row, p.q.aligned, positions_smem};
        load_tile<BLOCK_Q, HEAD_DIM>(
            Q_smem, rows, [&](int row) { return positions_smem[row] >= 0 && positions_smem[row] < sequence.q_len; });
        __syncthreads();
        real S_rmem[ROWS][COLS] = {};
        scores<ROWS, COLS, HEAD_DIM>(S_rmem, Q_smem, K_smem);
        modify(S_rmem, score, band, [&](int r, int c) {
          return int2{positions_smem[row_y() + r * ROW_THREADS], kv_start + lane_x() + c * LANES};
        });
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          real lse = lse_of(p, sequence, head, positions_smem[row_y() + r * ROW_THREADS]);
#pragma unroll
          for (int c = 0; c < COLS; ++c) P_rmem[r][c] += probability(S_rmem[r][c], lse);
        }
      }
    }

    // Epilogue.
    element* result = (element*)p.result.data + (PACKED ? 0 : sequence.batch * p.result.batch);
    result += blockIdx.y * p.result.head;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      int row = row_y() + r * ROW_THREADS;
      if (positions_smem[row] < 0) continue;
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        int j = kv_start + lane_x() + c * LANES;
        real P = MEAN ? P_rmem[r][c] / (real)p.heads : P_rmem[r][c];  // @weights.mean
        if (j < p.result_columns) store(result + (first + row) * p.result.row + j, P);
      }
    }
  }
}
