// Forward of attention to selected keys: one block per BLOCK_Q rows that share a list, (query, head) pairs. Each tile
// of keys is gathered by its list. grid (tiles of all lists, groups of heads that share a list, sequences)
#include "selected.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // score fragments of a warp, by columns

// Offsets in bytes. Q_IN_REGISTERS: Q passes through the memory of the first slots on its way to registers. The
// epilogue stages O in the same memory.
struct SharedMemory {
  static constexpr int Q = 0, Q_END = BLOCK_Q * row_bytes(HEAD_DIM);    // [BLOCK_Q][HEAD_DIM]
  static constexpr int KV = Q_IN_REGISTERS ? 0 : Q_END;                 // STAGES x KeySlot
  static constexpr int O = 0, O_END = BLOCK_Q * row_bytes(HEAD_DIM_V);  // [BLOCK_Q][HEAD_DIM_V]
  static constexpr int BYTES = maximum(KV + STAGES * KeySlot::BYTES, maximum(Q_END, O_END));
};

// Walks over the tiles of a list that have a visible key. find() locates the next tile, and load() loads it.
struct ListLoads {
  const ListTiles& tiles;
  const Params& p;
  ListKeys* keys;  // of each slot
  int kv_head;
  long long start;  // place in the list of the tile to find next
  int slot = 0;     // of the tile that was found last
  bool valid = true;

  // All threads must call it together: it is a barrier.
  __device__ void find() {
    slot = slot == STAGES - 1 ? 0 : slot + 1;
    valid = false;
    for (; !valid && start < tiles.lists.keys(); start += BLOCK_KV)  // @pass-lists-of-no-key
      valid = keys[slot].find_keys(tiles.lists, tiles.sequence, tiles.list, start, tiles.visible);
  }
  __device__ void load(unsigned int to) const {
    const ListKeys& found = keys[slot];
    ListedKeys<element> K(found, tiles.sequence, p.k, kv_head), V(found, tiles.sequence, p.v, kv_head);
    load_tile<BLOCK_KV, HEAD_DIM>(to + KeySlot::K, K, Range{0, BLOCK_KV});
    load_tile<BLOCK_KV, HEAD_DIM_V>(to + KeySlot::V, V, Range{0, BLOCK_KV});
  }
};

// Loads Q to shared memory; Q_IN_REGISTERS: and its fragments to registers.
__device__ void load_Q(unsigned int (&Q)[padded(HEAD_DIM) / 16][M][4], unsigned int Q_smem, const ListRows& rows,
                       const Params& p, const Sequence& sequence, int row) {
  load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, ListedQueries<element>(rows, sequence, p.q), Range{0, BLOCK_Q});
  if constexpr (Q_IN_REGISTERS) {
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    load_fragments<M, HEAD_DIM>(Q, Q_smem, row);
    __syncthreads();
  }
}

// Turns q.k into scores; keys that a query does not see get -inf.
__device__ void modify(float (&S)[M][N][4], const ListRows& rows, const ListKeys& keys, const Params& p,
                       const Sequence& sequence, const Band& band, int row) {
  for_each_score<false, M, N>(rows, keys, p, sequence, band, row,
                              [&](int m, int n, int e, int, const Score& score, bool seen, int i, int j) {
                                float derivative, s = S[m][n][e];
                                if constexpr (MODIFIED) s = seen ? score.apply(s, i, j, derivative) : s;
                                S[m][n][e] = seen ? s : -infinity();
                              });
}

// Drops probabilities.
__device__ void drop(float (&P)[M][N][4], const ListRows& rows, const ListKeys& keys, const Params& p,
                     const Sequence& sequence, const Band& band, const Dropout& dropout, int row) {
  for_each_score<false, M, N>(rows, keys, p, sequence, band, row,
                              [&](int m, int n, int e, int, const Score& score, bool, int i, int j) {
                                if (!keeps(dropout, p, sequence, score.head, i, j)) P[m][n][e] = 0;
                              });
}

// Computes the factors that normalise O in the rows from `row` on, and stores their lse.
__device__ void finish(float (&factors)[M][2], Softmax2 (&softmax)[M][2], const ListRows& rows, const Params& p,
                       const Sequence& sequence, const Dropout& dropout, int row) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int at = row + row_of(m, 2 * half), i = rows.query[at], of = rows.head[at];
      softmax[m][half].l = row_sum(softmax[m][half].l);
      Softmax2::Ending ending = softmax[m][half].end(log2_scale_of(p), SCALE_IN_EXPONENT ? (float)p.scale : 1.0f);
      if constexpr (SINK) ending.add_sink(to_real(((const sink_element*)p.sink)[of]));
      factors[m][half] = i < sequence.q_len ? ending.factor * (DROPOUT ? (float)dropout.keep_scale : 1.0f) : 0;
      if (column_warp() == 0 && lane_id() % 4 == 0 && i < sequence.q_rows)
        sequence.queries<float>(p.lse, of)[i * p.lse.row] = i < sequence.q_len ? ending.lse : -infinity();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_forward(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  __shared__ ListRows rows;
  __shared__ ListKeys keys[STAGES];
  unsigned char* O_smem = (unsigned char*)shared + SharedMemory::O;
  unsigned int smem = smem_address(shared), Q_smem = smem + SharedMemory::Q;

  int head = blockIdx.y * HEADS_OF_LIST;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Dropout dropout(p, sequence.batch, head);
  float scale_log2 = log2_scale_of(p);
  int row = row_warp() * M * 16;
  auto Q_lane = Tile<HEAD_DIM>::lane_of_A(row).kept(), K_lane = Tile<HEAD_DIM>::lane_of_B().kept();
  auto V_lane = Tile<HEAD_DIM_V>::lane_of_X().kept();

  for (ListTiles tiles(p, sequence, band, head); tiles.valid(); tiles.next()) {
    // Prologue.
    tiles.find_rows(rows);
    ListLoads loads{tiles, p, keys, head / p.group, tiles.visible.begin < tiles.visible.end ? 0 : tiles.lists.keys()};
    Pipeline<STAGES, KeySlot::BYTES> stages(smem + SharedMemory::KV);
    unsigned int Q_rmem[padded(HEAD_DIM) / 16][M][4];
    load_Q(Q_rmem, Q_smem, rows, p, sequence, row);
    int found = 0;  // tiles that are loaded and not yet used
    auto load = [&] {
      loads.find();
      if (loads.valid) loads.load(stages.next()), ++found;
      stages.commit();
    };
    for (int stage = 0; stage < STAGES - 1; ++stage) load();

    Softmax2 softmax[M][2];
#pragma unroll
    for (int n = 0; n < 2 * M; ++n) softmax[n / 2][n % 2].init();
    float O_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};
#if STATISTICS
    RowStatistics statistics[M][2];
    init(statistics);
#endif

    // Mainloop.
    int used = 0;  // slot of the keys of the current tile
    while (true) {
      if constexpr (STAGES == 1) {
        __syncthreads();
        load();
      }
      if (found == 0) break;
      --found;
      used = used == STAGES - 1 ? 0 : used + 1;
      unsigned int slot = stages.wait(), K_smem = slot + KeySlot::K, V_smem = slot + KeySlot::V;

      float S_rmem[M][N][4];
      if constexpr (Q_IN_REGISTERS)
        scores<M, N, HEAD_DIM>(S_rmem, Q_rmem, K_smem, K_lane);
      else
        scores<M, N, HEAD_DIM>(S_rmem, Q_smem, Q_lane, K_smem, K_lane);
      if constexpr (STAGES > 1) load();
      modify(S_rmem, rows, keys[used], p, sequence, band, row);
      float O_scale[M][2];
#if STATISTICS
      if (observe(O_scale, softmax, statistics, S_rmem, keys[used], scale_log2)) rescale(O_rmem, O_scale);
      exponentiate<true>(S_rmem, softmax, statistics, scale_log2);
#else
      if (update_max(O_scale, softmax, S_rmem, scale_log2)) rescale(O_rmem, O_scale);
      exponentiate(S_rmem, softmax, scale_log2);
#endif
      if constexpr (DROPOUT) drop(S_rmem, rows, keys[used], p, sequence, band, dropout, row);
      unsigned int P_rmem[M][N / 2][4];
      round_fragments(P_rmem, S_rmem);
      accumulate<M, N / 2, HEAD_DIM_V>(O_rmem, P_rmem, V_smem, V_lane);
    }

    // Epilogue.
    float factors[M][2];
    finish(factors, softmax, rows, p, sequence, dropout, row);
#if STATISTICS
    store_statistics(statistics, softmax, p, sequence, column_warp() == 0, [&](int m, int half, int& of, int& i) {
      int at = row + row_of(m, 2 * half);
      of = rows.head[at];
      i = rows.query[at];
    });
#endif
    cp_async_wait_group<0>();
    __syncthreads();
    store_fragments<M, HEAD_DIM_V>(O_smem, O_rmem, row, [&](int m, int half) { return factors[m][half]; });
    __syncthreads();
    store_rows<HEAD_DIM_V>(rows, sequence, p.out, O_smem);
  }
}
