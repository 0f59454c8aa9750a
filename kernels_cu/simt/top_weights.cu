// top_weights: one block per tile of BLOCK_Q queries of one head, over all keys that they see, in the order of the
// keys. A thread has the list of a row's largest scores so far, in global memory, in descending order; of equal scores
// the lower key comes first. grid (query tiles, heads, sequences)
#include "weights.cuh"

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLS = BLOCK_KV / LANES;

// Offsets, in elements of type real.
struct SharedMemory {
  static constexpr int Q = 0;                                    // [BLOCK_Q][HEAD_DIM]
  static constexpr int K = Q + BLOCK_Q * row_stride(HEAD_DIM);   // [BLOCK_KV][HEAD_DIM]
  static constexpr int S = K + BLOCK_KV * row_stride(HEAD_DIM);  // [BLOCK_Q][BLOCK_KV]
  static constexpr int BYTES = sizeof(real) * (S + BLOCK_Q * p_stride(BLOCK_KV));
};

// The n largest scores of a row so far, and their keys.
struct Best {
  real* scores;
  int* keys;
  int n;
  int count = 0;
  real last = -infinity();  // the n-th score; -inf while there are fewer

  // Keys come in ascending order, so that of equal scores the one that is in the list remains before. A NaN counts as
  // +inf.
  __device__ void add(real s, int key) {
    if (s != s) s = infinity();
    if (!(s > last)) return;  // @weights.enters-list
    int place = min(count, n - 1);
    for (; place > 0 && scores[place - 1] < s; --place) {  // @weights.ties
      scores[place] = scores[place - 1];
      keys[place] = keys[place - 1];
    }
    scores[place] = s;
    keys[place] = key;
    count = min(count + 1, n);
    if (count == n) last = scores[n - 1];
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) top_weights(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ int pages_smem[2][BLOCK_KV];
  real* smem = (real*)shared;
  real *Q_smem = smem + SharedMemory::Q, *K_smem = smem + SharedMemory::K, *S_smem = smem + SharedMemory::S;

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  TilePages pages{sequence, pages_smem};
  for (int q_start = blockIdx.x * BLOCK_Q; q_start < sequence.q_rows; q_start += gridDim.x * BLOCK_Q) {
    // Prologue.
    __syncthreads();
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, sequence.query_rows<element>(p.q, head).tile(q_start),
                                 Range{0, sequence.q_len});
    int row = threadIdx.x, i = q_start + row;
    bool has_row = row < BLOCK_Q && i < sequence.q_rows;
    long long first = (PACKED ? 0 : sequence.batch * p.result.batch) + head * p.result.head +
                      (sequence.q_start + (has_row ? i : 0)) * p.result.row;
    Best best{(real*)p.best_scores + first, p.result_keys + first, p.result_columns};

    // Mainloop.
    for (KvTiles<Order::FIRST_TO_LAST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      int kv_start = kv_tiles.start;
      load_keys(K_smem, p, sequence, kv_head, pages, kv_start, kv_tiles.visible);
      __syncthreads();
      real S_rmem[ROWS][COLS] = {};
      scores<ROWS, COLS, HEAD_DIM>(S_rmem, Q_smem, K_smem);
      modify(S_rmem, score, band,
             [&](int r, int c) { return int2{q_start + row_y() + r * ROW_THREADS, kv_start + lane_x() + c * LANES}; });
      store_p(S_smem, S_rmem);
      __syncthreads();
      for (int c = 0; has_row && c < BLOCK_KV; ++c) best.add(S_smem[row * p_stride(BLOCK_KV) + c], kv_start + c);
    }

    // Epilogue.
    real lse = has_row ? lse_of(p, sequence, head, i) : 0;
    element* values = (element*)p.result.data + first;
    for (int place = 0; has_row && place < best.n; ++place) {
      bool has_key = place < best.count;
      store(values + place, has_key ? probability(best.scores[place], lse) : 0);
      if (!has_key) best.keys[place] = -1;
    }
  }
}
