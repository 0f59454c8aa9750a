// Backward: one block per tile of BLOCK_KV keys of one key/value head, over all queries that see them, head after head
// of the GQA group. dK and dV accumulate in registers; the block's part of dQ is added to the workspace. grid (key
// tiles, key/value heads, sequences)
//
// Warp-specialised: in warpgroup 0 one thread issues the TMA loads of K, V, Q_i and dO_i, and one warp loads lse2 and
// delta. The consumer warpgroups have 64 keys each. Score tiles are transposed: rows are keys, columns are queries.
// SHARES consumers have the same keys: each computes its part of the queries of S^T, and of the columns of dK and dV.
#include "../dq_sums.cuh"
#include "../gradients.cuh"
#include "tile.cuh"

constexpr int QUERIES = BLOCK_Q / SHARES;  // of one consumer that shares keys
constexpr int N = QUERIES / 8;             // score fragments, by columns
// A consumer computes dQ of 64 queries; consumers with the same queries split its columns.
constexpr int DQ_SHARES = CONSUMERS / WARPGROUP / (BLOCK_Q / 64);
// Columns of tiles: whole panels for every share.
constexpr int DIM = round_up(HEAD_DIM, PANEL*(SHARES > DQ_SHARES ? SHARES : DQ_SHARES));
constexpr int DIM_V = round_up(HEAD_DIM_V, PANEL* SHARES);
constexpr int N_K = fragments_of(SHARES == 1 ? HEAD_DIM : DIM / SHARES);  // fragments of dK, dV and dQ, by columns
constexpr int N_V = fragments_of(SHARES == 1 ? HEAD_DIM_V : DIM_V / SHARES);
constexpr int N_Q = fragments_of(DQ_SHARES == 1 ? HEAD_DIM : DIM / DQ_SHARES);

// Tensor maps; the box of each is one panel of a tile.
struct Maps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
};

// lse2 and delta of a tile of queries.
using RowRing = SlotRing<2, 2 * 4 * BLOCK_Q, WARP>;

// Shared memory: K and V (reused to stage dK and dV); STAGES x Q; STAGES x dO; two buffers of dS^T and, if consumers
// share keys, P^T; DQ_IN_BULK: dQ; lse2 and delta; mbarriers.
struct Rings {
  static constexpr int dS_BYTES = 2 * BLOCK_KV * BLOCK_Q, P_BYTES = SHARES == 1 ? 0 : dS_BYTES;
  static constexpr int dQ_BYTES = DQ_IN_BULK ? 4 * BLOCK_Q * 8 * N_Q * DQ_SHARES : 0;

  TileRing<1, BLOCK_KV, DIM> K;
  TileRing<1, BLOCK_KV, DIM_V> V;
  TileRing<STAGES, BLOCK_Q, DIM> Q;
  TileRing<STAGES, BLOCK_Q, DIM_V> dO;
  unsigned int dS;
  unsigned int dQ;
  RowRing rows;

  __device__ Rings(unsigned int smem)
      : K(smem, smem + MBARRIERS),
        V(K.start + K.BYTES, K.mbarriers + K.MBARRIER_BYTES),
        Q(V.start + V.BYTES, V.mbarriers + V.MBARRIER_BYTES),
        dO(Q.start + Q.BYTES, Q.mbarriers + Q.MBARRIER_BYTES),
        dS(dO.start + dO.BYTES),
        dQ(dS + 2 * (dS_BYTES + P_BYTES)),
        rows(dQ + dQ_BYTES, dO.mbarriers + dO.MBARRIER_BYTES) {}
  static constexpr int MBARRIERS = decltype(K)::BYTES + decltype(V)::BYTES + decltype(Q)::BYTES + decltype(dO)::BYTES +
                                   2 * (dS_BYTES + P_BYTES) + dQ_BYTES + RowRing::BYTES;

  __device__ void init() const { K.init(), V.init(), Q.init(), dO.init(), rows.init(); }
};

// Iterator over the tiles of queries that see a tile of keys, head after head of the GQA group.
struct QTiles {
  Range queries;
  int head;
  int head_end;
  int q_start;

  __device__ QTiles(const Params& p, const Sequence& sequence, const Band& band, int kv_head, int kv_start) {
    int kv_stop = min(kv_start + BLOCK_KV, sequence.kv_len);
    queries = {band.q_begin(kv_start), kv_start < kv_stop ? band.q_end(kv_stop) : 0};
    head = kv_head * p.group;
    head_end = queries.begin < queries.end ? head + p.group : head;
    q_start = first();
  }
  __device__ int first() const { return queries.begin / BLOCK_Q * BLOCK_Q; }
  __device__ bool valid() const { return head < head_end; }
  __device__ void advance() {
    q_start += BLOCK_Q;
    if (q_start >= queries.end) q_start = first(), ++head;
  }
};

__device__ void load_tiles(const Params& p, const Maps& maps, Rings& rings, const Sequence& sequence, const Band& band,
                           int kv_head) {
  int batch = PACKED ? 0 : sequence.batch;
  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    rings.K.load(maps.k, sequence.kv_start + kv_start, kv_head, batch);
    rings.V.load(maps.v, sequence.kv_start + kv_start, kv_head, batch);
    for (QTiles q_tiles(p, sequence, band, kv_head, kv_start); q_tiles.valid(); q_tiles.advance()) {
      rings.Q.load(maps.q, sequence.q_start + q_tiles.q_start, q_tiles.head, batch);
      rings.dO.load(maps.dout, sequence.q_start + q_tiles.q_start, q_tiles.head, batch);
    }
  }
}

// Rows that see no key, or are outside the sequence, get lse2 +inf, so that their probabilities are 0.
__device__ void load_lse_delta(const Params& p, unsigned char* smem, Rings& rings, const Sequence& sequence,
                               const Band& band, int kv_head) {
  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV)
    for (QTiles q_tiles(p, sequence, band, kv_head, kv_start); q_tiles.valid(); q_tiles.advance()) {
      rings.rows.acquire();
      float* to = (float*)(smem + (rings.rows.slot() - rings.K.start));
      // One array after the other, because this warp has few registers.
      auto load = [&](const Operand& x, float* to, float otherwise) {
        const float* numbers = sequence.queries<float>(x, q_tiles.head);
#pragma unroll 1
        for (int n = lane_id(); n < BLOCK_Q; n += WARP) {
          int i = q_tiles.q_start + n;
          to[n] = q_tiles.queries(i) ? numbers[i] : otherwise;
        }
      };
      load(p.lse2, to, infinity());
      load(p.delta, to + BLOCK_Q, 0);
      mbarrier_arrive(rings.rows.full());
      ++rings.rows.index;
    }
}

// Issues dQ = dS K for 64 queries of tile dS^T, and the columns of K at K_smem.
__device__ void issue_dQ(float (&dQ)[1][N_Q][4], unsigned int dS_smem, unsigned int K_smem) {
  unsigned long long dS = smem_descriptor(dS_smem, BLOCK_KV * PANEL_ROW),
                     K = smem_descriptor(K_smem, BLOCK_KV * PANEL_ROW);
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 16; ++k)
    wgmma<element, MN_MAJOR, MN_MAJOR>(dQ, dS + k * NEXT_16_ROWS, K + k * NEXT_16_ROWS, k > 0);
  wgmma_commit_group();
}

// Issues C += A X for 64 keys of tile A, and the columns of a tile X of queries at X_smem.
template <int N>
__device__ void accumulate(float (&C)[1][N][4], unsigned int A_smem, unsigned int X_smem) {
  unsigned long long a = smem_descriptor(A_smem, BLOCK_KV * PANEL_ROW),
                     x = smem_descriptor(X_smem, BLOCK_Q * PANEL_ROW);
#pragma unroll
  for (int k = 0; k < BLOCK_Q / 16; ++k)
    wgmma<element, K_MAJOR, MN_MAJOR>(C, a + k / 4 * (BLOCK_KV * PANEL_ROW >> 4) + k % 4 * NEXT_16_COLUMNS,
                                      x + k * NEXT_16_ROWS, true);
  wgmma_commit_group();
}

// Adds this warp's 16 rows of dQ, from column `column`, to the workspace.
__device__ void add_dQ(const DqSums& sums, const float (&dQ)[1][N_Q][4], int row, int column, unsigned char* dQ_smem) {
  if constexpr (DQ_IN_BULK) {
    // Staged in the layout of the workspace, where the fragments of 16 rows are contiguous.
    int bytes = 4 * 16 * min(8 * N_Q, DqSums::COLUMNS - column);
    if (lane_id() == 0) bulk_wait_group_read<0>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N_Q; ++n)
      *(float4*)(dQ_smem + 512 * n + 16 * lane_id()) = make_float4(dQ[0][n][0], dQ[0][n][1], dQ[0][n][2], dQ[0][n][3]);
    fence_proxy_async();
    __syncwarp();
    if (lane_id() == 0 && bytes > 0) {
      bulk_reduce_add(sums.block_row(row) + 16 * column, smem_address(dQ_smem), bytes);
      bulk_commit_group();
    }
  } else {
#pragma unroll
    for (int n = 0; n < N_Q; ++n)
      if (column + 8 * n < DqSums::COLUMNS) sums.add(row, column + n / 2 * 16, n % 2, dQ[0][n]);
  }
}

__device__ void compute(const Params& p, Rings& rings, unsigned char* smem, const Sequence& sequence, const Band& band,
                        int kv_head) {
  float scale_log2 = log2_scale_of(p);
  int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP - 1, 0);
  int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP % (WARPGROUP / WARP), 0);
  // This consumer's keys, its queries within a tile, and its part of dQ.
  int keys = warpgroup / SHARES * 64, share = warpgroup % SHARES, queries = share * QUERIES;
  int dQ_rows = warpgroup / DQ_SHARES * 64, dQ_share = warpgroup % DQ_SHARES;
  int row = keys + 16 * warp;
  unsigned char* dQ_smem = smem + (rings.dQ - rings.K.start) + (warpgroup * 4 + warp) * 512 * N_Q;
  unsigned int dS_index = 0;

  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    Range unmasked_queries = band.seen_by_all(kv_start + keys, kv_start + keys + 64);
    float dK_rmem[1][N_K][4] = {}, dV_rmem[1][N_V][4] = {};
    unsigned int K_smem = rings.K.tile(), V_smem = rings.V.tile();
    rings.K.wait(), rings.V.wait();
    if constexpr (PACKED || KV_LENGTHS)
      if (kv_start + BLOCK_KV > sequence.kv_len) {
        auto counts = [&](int row) { return kv_start + row < sequence.kv_len; };
        clear_rows<BLOCK_KV, DIM>(K_smem, counts);
        clear_rows<BLOCK_KV, DIM_V>(V_smem, counts);
        sync_cleared_rows();
      }

    for (QTiles q_tiles(p, sequence, band, kv_head, kv_start); q_tiles.valid(); q_tiles.advance()) {
      int i0 = q_tiles.q_start + queries;
      Score score(p, sequence, q_tiles.head);
      Dropout dropout(p, sequence.batch, q_tiles.head);
      unsigned int Q_smem = rings.Q.tile(), dO_smem = rings.dO.tile();
      unsigned int dS_smem = rings.dS + dS_index % 2 * (Rings::dS_BYTES + Rings::P_BYTES);
      unsigned int P_smem = dS_smem + Rings::dS_BYTES;
      ++dS_index;
      rings.rows.wait(), rings.Q.wait(), rings.dO.wait();
      const float* lse2 = (const float*)(smem + (rings.rows.slot() - rings.K.start));

      // A probability of 0 does not cancel a NaN or infinity in Q or dO: zero the rows without probabilities.
      bool cleared = false;
#pragma unroll
      for (int n = 0; n < BLOCK_Q; n += WARP) cleared |= lse2[n + lane_id()] == infinity();
      if (__any_sync(0xFFFFFFFF, cleared)) {
        auto counts = [&](int row) { return lse2[row] != infinity(); };
        clear_rows<BLOCK_Q, DIM>(Q_smem, counts);
        clear_rows<BLOCK_Q, DIM_V>(dO_smem, counts);
        sync_cleared_rows();
      }

      float S_rmem[1][N][4], dP_rmem[1][N][4];
      fence_operand(S_rmem), fence_operand(dP_rmem);
      wgmma_fence();
      scores<BLOCK_KV, BLOCK_Q, HEAD_DIM>(S_rmem, K_smem + keys * PANEL_ROW, Q_smem + queries * PANEL_ROW);
      scores<BLOCK_KV, BLOCK_Q, HEAD_DIM_V>(dP_rmem, V_smem + keys * PANEL_ROW, dO_smem + queries * PANEL_ROW);
      wgmma_wait_group<1>();
      fence_operand(S_rmem);
      auto wait_dP = [&] {
        wgmma_wait_group<0>();
        fence_operand(dP_rmem);
      };
      Rows rows = {lse2 + queries, lse2 + BLOCK_Q + queries};
      bool masked = i0 < unmasked_queries.begin || i0 + QUERIES > unmasked_queries.end;
      differentiate<true, false>(S_rmem, dP_rmem, masked, score, band, dropout, scale_log2, rows, i0, kv_start + row,
                                 wait_dP);
      __syncwarp();  // all lanes have read lse2 and delta, not only the one that arrives
      rings.rows.release();

      // SHARES == 1: P^T and dS^T are register operands of dV and dK. dQ needs dS of all consumers, via shared memory.
      unsigned int P_rmem[1][N / 2][4], dS_rmem[1][N / 2][4];
      round_fragments(P_rmem, S_rmem);
      round_fragments(dS_rmem, dP_rmem);
      store_fragments<BLOCK_KV>(dS_smem, dS_rmem, row, queries / 8);
      if constexpr (SHARES == 1) {
        fence_operand(dV_rmem), fence_operand(P_rmem);
        wgmma_fence();
        accumulate(dV_rmem, P_rmem, dO_smem);
      } else {
        store_fragments<BLOCK_KV>(P_smem, P_rmem, row, queries / 8);
      }
      fence_proxy_async();
      named_barrier_sync(COMMON_BARRIER, CONSUMERS);
      float dQ_rmem[1][N_Q][4];
      fence_operand(dQ_rmem), fence_operand(dK_rmem), fence_operand(dS_rmem);
      if constexpr (SHARES > 1) fence_operand(dV_rmem);
      wgmma_fence();
      if constexpr (SHARES > 1)
        accumulate(dV_rmem, P_smem + keys * PANEL_ROW, dO_smem + share * (N_V / 8) * BLOCK_Q * PANEL_ROW);
      issue_dQ(dQ_rmem, dS_smem + dQ_rows * BLOCK_KV / 64 * PANEL_ROW,
               K_smem + dQ_share * (N_Q / 8) * BLOCK_KV * PANEL_ROW);
      if constexpr (SHARES == 1)
        accumulate(dK_rmem, dS_rmem, Q_smem);
      else
        accumulate(dK_rmem, dS_smem + keys * PANEL_ROW, Q_smem + share * (N_K / 8) * BLOCK_Q * PANEL_ROW);
      wgmma_wait_group<1>();
      fence_operand(dV_rmem), fence_operand(P_rmem), fence_operand(dQ_rmem);
      rings.dO.release();

      int i = q_tiles.q_start + dQ_rows + 16 * warp;
      if (i < sequence.q_len) {
        // The first block of a query tile is the one of the first key that the tile's first query sees.
        unsigned int before = DQ_IN_ORDER ? kv_start / BLOCK_KV - band.kv_begin(q_tiles.q_start) / BLOCK_KV : 0;
        DqTurns turns(p, sequence, q_tiles.head);
        if constexpr (DQ_IN_ORDER) turns.wait(i, dQ_share, before);
        add_dQ(DqSums(p, sequence, q_tiles.head), dQ_rmem, i, 8 * N_Q * dQ_share, dQ_smem);
        if constexpr (DQ_IN_ORDER) turns.pass(i, dQ_share, before);
      }
      wgmma_wait_group<0>();
      fence_operand(dK_rmem), fence_operand(dS_rmem);
      rings.Q.release();
    }

    // Wait until all consumers' wgmmas have read K and V.
    named_barrier_sync(COMMON_BARRIER, CONSUMERS);
    const float scales[1][2] = {{(float)p.scale, (float)p.scale}};
    rescale(dK_rmem, scales);
    unsigned int dK_rounded[1][N_K / 2][4], dV_rounded[1][N_V / 2][4];
    round_fragments(dK_rounded, dK_rmem);
    round_fragments(dV_rounded, dV_rmem);
    element *dK = sequence.keys<element>(p.dk, kv_head), *dV = sequence.keys<element>(p.dv, kv_head);
    store_rows<BLOCK_KV, HEAD_DIM>(dK, p.dk, smem, dK_rounded, row, share * N_K, kv_start + row, sequence.kv_rows);
    store_rows<BLOCK_KV, HEAD_DIM_V>(dV, p.dv, smem + rings.K.BYTES, dV_rounded, row, share * N_V, kv_start + row,
                                     sequence.kv_rows);
    fence_proxy_async();
    __syncwarp();
    rings.K.release(), rings.V.release();
  }
  if constexpr (DQ_IN_BULK)
    if (lane_id() == 0) bulk_wait_group_read<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Rings rings(smem_address(smem));
  if (threadIdx.x == 0) {
    rings.init();
    fence_mbarrier_init();
  }
  __syncthreads();

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<40>();
    if (threadIdx.x < WARP) {
      if (elect_one()) load_tiles(p, maps, rings, sequence, band, kv_head);
    } else if (threadIdx.x < 2 * WARP) {
      load_lse_delta(p, smem, rings, sequence, band, kv_head);
    }
  } else {
    setmaxnreg_inc<232>();
    compute(p, rings, smem, sequence, band, kv_head);
  }
}
