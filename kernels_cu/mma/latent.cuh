// The decode of values that are the first columns of the keys (multi-head latent attention): a tile of keys is loaded
// once, and both products read it. Rows of O are too long for the registers of a warp: the four warps of a group have
// 16 M rows, divide the columns of O, and pass the scores through shared memory:
//
//   S = Q K^T    a warp has 16 keys, and every second step of 16 columns of Q and K; two warps exchange the halves of
//                their sums, so that each owns the scores of eight keys
//   softmax      of owned scores; the warps exchange their row max
//   O += P V     all keys, and the columns of a warp
//
// Two groups take turns: one computes S and its softmax while the other computes P V. A warp owns the same keys in
// every tile, so that the arithmetic of a row does not depend on the rows of its tile.
#pragma once
#include "../hopper.cuh"
#include "part_row.cuh"

constexpr int GROUPS = WARPS / SLICES;
constexpr int STEPS = padded(HEAD_DIM) / 16;     // of 16 columns of Q and K
constexpr int BLOCKS = padded(HEAD_DIM_V) / 16;  // of 16 columns of O, dealt round-robin to the warps of a group
constexpr int MOST_BLOCKS = (BLOCKS + SLICES - 1) / SLICES;
static_assert(M > 0 && (GROUPS == 1 || (GROUPS == 2 && STAGES > 1)), "the groups divide the rows of a tile");

// The scores of this warp: the rows of its group, from `row` on, and of each tile eight keys.
struct Share {
  int group;
  int row;
  int slice;

  __device__ Share() : group(threadIdx.x / WARP / SLICES), row(group * 16 * M), slice(threadIdx.x / WARP % SLICES) {}
  __device__ int half() const { return slice % 2; }
  // Barriers of the two warps that share 16 keys, and of the group.
  __device__ void sync_pair() const { named_barrier_sync(1 + threadIdx.x / (2 * WARP), 2 * WARP); }
  __device__ void sync_group() const { named_barrier_sync(1 + WARPS / 2 + group, SLICES * WARP); }
  __device__ int row_of(int m, int half) const { return row + ::row_of(m, 2 * half); }
};

// Lanes of ldmatrix that read every second step of columns.
struct ScoreLanes {
  using T = Tile<HEAD_DIM>;
  typename T::Lane Q;
  typename T::Lane K;

  __device__ ScoreLanes(const Share& share)
      : Q(share.row + lane_id() % 16, 2 * share.half() + lane_id() / 16),
        K(share.slice / 2 * 16 + lane_id() % 8 + lane_id() / 16 * 8, 2 * share.half() + lane_id() / 8 % 2) {}
};

// Q, the steps of a warp.
using Queries = unsigned int[(STEPS + 1) / 2][M][4];

__device__ void load_queries(Queries& Q, int k, unsigned int Q_smem, const ScoreLanes& lanes) {
#pragma unroll
  for (int m = 0; m < M; ++m) ldmatrix_x4(Q[k][m], Q_smem + lanes.Q.at(16 * m, 4 * k));
}

// S += Q K^T, of the keys and steps of a warp
__device__ void add_scores(float (&sums)[M][2][4], Queries& Q, unsigned int Q_smem, unsigned int K_smem,
                           const ScoreLanes& lanes, const Share& share) {
#pragma unroll
  for (int k = 0; k < (STEPS + 1) / 2; ++k) {
    if (STEPS % 2 && 2 * k + share.half() >= STEPS) continue;
    if constexpr (!Q_IN_REGISTERS) load_queries(Q, k, Q_smem, lanes);
    unsigned int b[4];
    ldmatrix_x4(b, K_smem + lanes.K.at(0, 4 * k));
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_m16n8k16<element>(sums[m][n], Q[k][m], b[2 * n], b[2 * n + 1], sums[m][n]);
  }
}

// O, the columns of a warp: block n is block n * SLICES + slice of the row.
using Accumulator = float[M][2 * MOST_BLOCKS][4];

__device__ inline bool has_block(const Share& share, int n) {
  return BLOCKS % SLICES == 0 || n * SLICES + share.slice < BLOCKS;
}

// Adds the sums of the two warps that share 16 keys: each sends the fragment of the other, and keeps its own. A barrier
// lies between the two functions.
__device__ void send_sums(const float (&sums)[M][2][4], unsigned int smem, const Share& share) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    unsigned int sent[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) sent[e] = __float_as_uint(share.half() ? sums[m][0][e] : sums[m][1][e]);
    st_shared_v4(smem + ((threadIdx.x / WARP * M + m) * WARP + lane_id()) * 16, sent);
  }
}
__device__ void receive_sums(float (&S)[M][1][4], const float (&sums)[M][2][4], unsigned int smem, const Share& share) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    uint4 x = ld_shared_v4(smem + (((threadIdx.x / WARP ^ 1) * M + m) * WARP + lane_id()) * 16);
    const unsigned int received[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      S[m][0][e] = (share.half() ? sums[m][1][e] : sums[m][0][e]) + __uint_as_float(received[e]);
  }
}

// Lazy rescaling per row, by the row max of all keys of the tile, so that the warps of a group agree on it.
__device__ void update_rows(Accumulator& O, Softmax2 (&softmax)[M][2], const float (&S)[M][1][4], float scale_log2,
                            float* maxima, const Share& share
#if STATISTICS
                            ,
                            RowStatistics (&statistics)[M][2], int kv_start
#endif
) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = row_max(max(S[m][0][2 * half], S[m][0][2 * half + 1]));
      if (lane_id() % 4 == 0) maxima[share.row_of(m, half) * SLICES + share.slice] = largest;
    }
  share.sync_group();  // @wait-maxima
  float largest[M][2], factors[M][2];
  bool exceeds = false;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 x = *(const float4*)(maxima + share.row_of(m, half) * SLICES);
      largest[m][half] = max(max(x.x, x.y), max(x.z, x.w));
      exceeds |= softmax[m][half].exceeds_reference(largest[m][half], scale_log2);
#if STATISTICS
      if constexpr (FIND_MAX) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) statistics[m][half].take(S[m][0][e], kv_start + column_of(0, e));
      }
#endif
    }
  if (!__any_sync(0xFFFFFFFF, exceeds)) return;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors[m][half] = 1;
      if (softmax[m][half].exceeds_reference(largest[m][half], scale_log2)) {  // @if-row-grows
#if STATISTICS
        Softmax2 previous = softmax[m][half];
#endif
        factors[m][half] = softmax[m][half].update(largest[m][half], scale_log2);
#if STATISTICS
        if constexpr (ENTROPY)
          statistics[m][half].rescale(previous.reference, softmax[m][half].reference, factors[m][half], previous.l);
#endif
      }
    }
  rescale(O, factors);
}

// Stores P, rounded, where the warps of the group read it.
__device__ void store_P(unsigned char* P_smem, const float (&P)[M][1][4], const Share& share) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *(unsigned int*)(P_smem + Tile<BLOCK_KV>::at(share.row_of(m, half), share.slice) + lane_id() % 4 * 4) =
          cvt_rn_x2<element>(P[m][0][2 * half], P[m][0][2 * half + 1]);
}

// O += P V
__device__ void accumulate_values(Accumulator& O, unsigned int P_smem, const Tile<BLOCK_KV>::Lane& P_lane,
                                  unsigned int V_smem, const Tile<HEAD_DIM>::Lane& V_lane, const Share& share) {
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 16; ++k) {
    unsigned int P[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(P[m], P_smem + P_lane.at(16 * m, 2 * k));
#pragma unroll
    for (int n = 0; n < MOST_BLOCKS; ++n) {
      if (!has_block(share, n)) continue;
      ldmatrix_x4_trans(b, V_smem + V_lane.at(16 * k, 2 * SLICES * n));  // @columns-of-warp
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<element>(O[m][2 * n], P[m], b[0], b[1], O[m][2 * n]);
        mma_m16n8k16<element>(O[m][2 * n + 1], P[m], b[2], b[3], O[m][2 * n + 1]);
      }
    }
  }
}

// Stores a row of the result of a part: this lane's columns of it.
__device__ void store_row(const Params& p, const Part& part, const Share& share, const Softmax2& softmax,
                          const Accumulator& O, int m, int half, float scale, float scale_log2
#if STATISTICS
                          ,
                          const RowStatistics (*statistics_smem)[BLOCK_Q]
#endif
) {
  int row = share.row_of(m, half), i = part.query(p, row), head = part.head(p, row);
  if (i >= part.sequence.q_rows) return;
  bool first = share.slice == 0 && lane_id() % 4 == 0;  // one lane stores the numbers of a row
  Softmax2::Ending ending = softmax.end(scale_log2, SCALE_IN_EXPONENT ? scale : 1.0f);
#if STATISTICS
  PartStatistics statistics;
  if (first) {
    RowStatistics total;
    total.init();
#pragma unroll
    for (int n = 0; n < SLICES; ++n) {
      total.take(statistics_smem[n][row].top, statistics_smem[n][row].key);
      total.w += statistics_smem[n][row].w;
    }
    statistics = {{total.top * (SCALE_IN_EXPONENT ? scale : 1.0f), total.key}, softmax.entropy(total.w)};
  }
#endif
  PartRow result(p, part, row, i, head, ending, first
#if STATISTICS
                 ,
                 statistics
#endif
  );
  if (!result.exists()) return;
#pragma unroll
  for (int n = 0; n < 2 * MOST_BLOCKS; ++n) {
    if (!has_block(share, n / 2)) continue;
    int column = 16 * (n / 2 * SLICES + share.slice) + column_of(n % 2, 0);  // @columns-of-O
    result.store(column, O[m][n][2 * half], O[m][n][2 * half + 1]);
  }
}

// Stores the result of a part. The sum of a row is that of its slices, in their order.
__device__ void store_part(const Params& p, const Part& part, unsigned char* smem, Softmax2 (&softmax)[M][2],
                           const Accumulator& O, const Share& share, float scale_log2
#if STATISTICS
                           ,
                           RowStatistics (&statistics)[M][2]
#endif
) {
  float* sums = (float*)(smem + SharedMemory::ROWS);
  float scale = part.descales(p).scale(p, SCALE_IN_EXPONENT);  // again, for a register of the mainloop
#if STATISTICS
  auto statistics_smem = (RowStatistics(*)[BLOCK_Q])(smem + SharedMemory::SUMS);
#endif
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = share.row_of(m, half);
      float l = row_sum(softmax[m][half].l);
      if (lane_id() % 4 == 0) sums[row * SLICES + share.slice] = l;
#if STATISTICS
      statistics[m][half].reduce(4);
      statistics[m][half].w = row_sum(statistics[m][half].w);
      if (lane_id() % 4 == 0) statistics_smem[share.slice][row] = statistics[m][half];
#endif
    }
  share.sync_group();  // @wait-rows
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 x = *(const float4*)(sums + share.row_of(m, half) * SLICES);
      softmax[m][half].l = x.x + x.y + x.z + x.w;
      store_row(p, part, share, softmax[m][half], O, m, half, scale, scale_log2
#if STATISTICS
                ,
                statistics_smem
#endif
      );
    }
}

// Passes the tiles of keys to the groups. With two of them a tile takes two turns: in the first, group 0 computes its
// scores, and group 1 accumulates the values of the tile before; in the second the other way round. Between the turns
// the tile before is no longer read, and group 0 loads another one into its slot.
struct Turns {
  KvStages& stages;
  const Share& share;
  unsigned int slot = 0;
  unsigned int next = 0;  // group 1: slot of the tile after the current one

  __device__ Turns(KvStages& stages, const Share& share) : stages(stages), share(share) {
    if (share.group == 1) next = stages.slots.wait();
  }
  // Returns the slot of the tile at `start`.
  __device__ unsigned int begin(int start) {
    if constexpr (GROUPS == 1) return stages.next(start);
    slot = next;
    if (share.group == 0)
      slot = stages.slots.wait();
    else
      __syncthreads();
    return slot;
  }
  // The products of the scores are computed, and their sums sent.
  __device__ void accumulate() {
    if (GROUPS == 1)
      share.sync_pair();  // @wait-sums
    else if (share.group == 1)
      next = stages.slots.wait();
    else
      __syncthreads();  // @turn-of-values
  }
  __device__ void load_ahead() {
    if (GROUPS == 2 && share.group == 0) stages.load_ahead();
  }
  __device__ void end() {
    if (GROUPS == 2 && share.group == 0) __syncthreads();
    stages.end();
  }
};

// Loads Q and the first tiles of keys, and Q into registers if they have room for it.
__device__ void prologue(const Params& p, const Part& part, KvStages& stages, Queries& Q_rmem, unsigned int Q_smem,
                         const ScoreLanes& lanes, const Share& share) {
  stages.reuse_memory();
#if PREFIX_PASS
  RowsOfGroup Q{(const element*)p.q.data, p, part, part.first_row, p.q.aligned};
#else
  PackedRows Q{part.sequence.queries<element>(p.q, part.kv_head * p.group), p.q, p.group, part.first_row, p.q.aligned};
#endif
  Loader<BLOCK_Q, HEAD_DIM>(0).load(Q_smem, Q, false, [&](int row) { return row < part.sequence.q_len * p.group; });
  cp_async_commit_group();
  stages.begin();
  stages.wait_for_Q();
  __syncthreads();
  if constexpr (Q_IN_REGISTERS) {
#pragma unroll
    for (int k = 0; k < (STEPS + 1) / 2; ++k)
      if (2 * k + share.half() < STEPS) load_queries(Q_rmem, k, Q_smem, lanes);
  }
}

__device__ void attend(const Params& p, const Part& part, unsigned char* smem, KvStages::Shared& shared) {
  unsigned int Q_smem = smem_address(smem + SharedMemory::Q);
  float scale = part.descales(p).scale(p, SCALE_IN_EXPONENT), scale_log2 = log2_scale_of(scale);
  float* maxima = (float*)(smem + SharedMemory::ROWS);
  Share share;
  ScoreLanes lanes(share);
  auto P_lane = Tile<BLOCK_KV>::lane_of_A(share.row);
  Tile<HEAD_DIM>::Lane V_lane(lane_id() % 16, 2 * share.slice + lane_id() / 16);
  Part own = part;  // the rows of this group
  own.first_row += share.row;
  PartTiles tiles(p, part);
  KvStages stages(p, part, tiles, smem_address(smem), shared);

  Queries Q_rmem;
  prologue(p, part, stages, Q_rmem, Q_smem, lanes, share);

  Softmax2 softmax[M][2];
#pragma unroll
  for (int n = 0; n < 2 * M; ++n) softmax[n / 2][n % 2].init();
  Accumulator O_rmem = {};
#if STATISTICS
  RowStatistics statistics[M][2];
  init(statistics);
#endif

  // Mainloop.
  Turns turns(stages, share);
  for (; tiles.valid(); tiles.next()) {
    unsigned int K_smem = turns.begin(tiles.start) + KeySlot::K;
    float sums[M][2][4] = {}, S_rmem[M][1][4];
    add_scores(sums, Q_rmem, Q_smem, K_smem, lanes, share);
    send_sums(sums, smem_address(smem + SharedMemory::SUMS), share);
    turns.accumulate();
    receive_sums(S_rmem, sums, smem_address(smem + SharedMemory::SUMS), share);
    turns.load_ahead();
    int first_key = tiles.start + 8 * share.slice;  // @keys-of-warp
    if (tiles.masked())
      modify_rows<true>(S_rmem, p, own, scale, first_key);
    else if constexpr (MODIFIED || DENSE_MASK)
      modify_rows<false>(S_rmem, p, own, scale, first_key);
#if STATISTICS
    update_rows(O_rmem, softmax, S_rmem, scale_log2, maxima, share, statistics, first_key);
    if constexpr (ENTROPY)
      exponentiate<true>(S_rmem, softmax, statistics, scale_log2);
    else
      exponentiate(S_rmem, softmax, scale_log2);
#else
    update_rows(O_rmem, softmax, S_rmem, scale_log2, maxima, share);
    exponentiate(S_rmem, softmax, scale_log2);
#endif
    store_P(smem + SharedMemory::P, S_rmem, share);
    share.sync_group();  // @wait-P
    accumulate_values(O_rmem, smem_address(smem + SharedMemory::P), P_lane, K_smem, V_lane,
                      share);  // @values-of-tile
    stages.release();
  }

  // Epilogue.
  turns.end();
  store_part(p, part, smem, softmax, O_rmem, share, scale_log2
#if STATISTICS
             ,
             statistics
#endif
  );
}
