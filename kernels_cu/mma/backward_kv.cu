// Backward, dK and dV: one block per tile of BLOCK_KV keys of one key/value head, over all queries that see them, head
// after head of the GQA group, so that every sum is deterministic. ADD_DQ: the block also adds its part of dQ to the
// workspace; otherwise backward_q.cu computes dQ. grid (key tiles, key/value heads, sequences)
#include "../dq_sums.cuh"
#include "steps.cuh"

constexpr int M = BLOCK_KV / ROW_WARPS / 16;  // fragments of a warp, by rows; score tiles are transposed: rows are keys
constexpr int N = BLOCK_Q / 8;                // and by columns
constexpr int K_BYTES = BLOCK_KV * Tile<HEAD_DIM>::ROW;
constexpr int V_BYTES = BLOCK_KV * Tile<HEAD_DIM_V>::ROW;
constexpr int Q_BYTES = BLOCK_Q * Tile<HEAD_DIM>::ROW;
constexpr int dO_BYTES = BLOCK_Q * Tile<HEAD_DIM_V>::ROW;
constexpr int STAGE_BYTES = Q_BYTES + dO_BYTES + 2 * 4 * BLOCK_Q;

// Writes this warp's dS^T to shared memory [BLOCK_KV][BLOCK_Q], for the other warps.
__device__ void share(unsigned char* dS_smem, const unsigned int (&dS)[M][N / 2][4], int row) {
  if (column_warp() > 0) return;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *(unsigned int*)(dS_smem + Tile<BLOCK_Q>::at(row + row_of(m, 2 * half), n) + lane_id() % 4 * 4) =
            dS[m][n / 2][n % 2 * 2 + half];
}

// dQ += dS K over all keys of the block, in blocks of 16 queries x 16 columns distributed over the warps. All counts
// are powers of two, except for COLUMNS.
__device__ void add_dQ(const DqSums& sums, unsigned int dS_smem, unsigned int K_smem, int q_start, int q_len) {
  constexpr int ROWS = BLOCK_Q / 16, COLUMNS = DqSums::COLUMNS / 16, WARPS = THREADS / WARP;
  constexpr int SIDE_BY_SIDE = WARPS > ROWS ? WARPS / ROWS : 1, EACH = (COLUMNS + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
  int warp = threadIdx.x / WARP, row = warp / SIDE_BY_SIDE, column = warp % SIDE_BY_SIDE;
  // dS^T is transposed by ldmatrix. The lanes' chunks include the warp's row and column.
  typename Tile<BLOCK_Q>::Lane dS_lane(lane_id() % 8 + lane_id() / 16 * 8, 2 * row + lane_id() / 8 % 2);
  typename Tile<HEAD_DIM>::Lane K_lane(lane_id() % 16, 2 * column + lane_id() / 16);
  auto exists = [&](int n) { return COLUMNS % SIDE_BY_SIDE == 0 || column + n * SIDE_BY_SIDE < COLUMNS; };
#pragma unroll
  for (int next = 0; next < ROWS; next += WARPS / SIDE_BY_SIDE) {
    int q = q_start + 16 * (row + next);
    if (q >= q_len) break;
    float dQ[EACH][2][4] = {};
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; ++k) {
      unsigned int a[4], b[4];
      ldmatrix_x4_trans(a, dS_smem + dS_lane.at(16 * k, 2 * next));
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        if (!exists(n)) continue;
        ldmatrix_x4_trans(b, K_smem + K_lane.at(16 * k, 2 * n * SIDE_BY_SIDE));
        mma_m16n8k16<element>(dQ[n][0], a, b[0], b[1], dQ[n][0]);
        mma_m16n8k16<element>(dQ[n][1], a, b[2], b[3], dQ[n][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < EACH; ++n)
      if (exists(n))
#pragma unroll
        for (int half = 0; half < 2; ++half) sums.add(q, 16 * (column + n * SIDE_BY_SIDE), half, dQ[n][half]);
  }
}

// Loads the tiles of queries: Q, dO, lse2 and delta.
struct QueryLoads : QdOLoads {
  const float* lse2;
  const float* delta;

  __device__ QueryLoads(const Params& p, const Sequence& sequence) : QdOLoads(p, sequence) {
    Q_loader = Q_loader.kept(), dO_loader = dO_loader.kept();
  }

  __device__ void load(unsigned int Q_smem, const QTiles& tile) {
    unsigned int dO_smem = Q_smem + Q_BYTES, lse2_smem = dO_smem + dO_BYTES;
    auto seek = [&] {
      lse2 = sequence.queries<float>(p.lse2, head) + tile.start;
      delta = sequence.queries<float>(p.delta, head) + tile.start;
    };
    move_to(tile.head, tile.start, seek, [&](int rows) { lse2 += rows, delta += rows; });
    QdOLoads::load(Q_smem, dO_smem, tile.visible);
    load_numbers<BLOCK_Q>(lse2_smem, lse2, tile.start, tile.visible);
    load_numbers<BLOCK_Q>(lse2_smem + 4 * BLOCK_Q, delta, tile.start, tile.visible);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kv(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  unsigned char* smem = (unsigned char*)shared;
  // Shared memory: K [BLOCK_KV][HEAD_DIM], V [BLOCK_KV][HEAD_DIM_V], then STAGES x (Q [BLOCK_Q][HEAD_DIM], dO
  // [BLOCK_Q][HEAD_DIM_V], lse2 [BLOCK_Q], delta [BLOCK_Q]); ADD_DQ: and dS^T [BLOCK_KV][BLOCK_Q]. The epilogue stages
  // dK and dV in the space of K and V.
  unsigned int K_smem = smem_address(smem), V_smem = K_smem + K_BYTES;
  unsigned int stages_smem = V_smem + V_BYTES;
  unsigned char* dS_smem = smem + K_BYTES + V_BYTES + STAGES * STAGE_BYTES;

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  float scale_log2 = log2_scale_of(p);
  int row = row_warp() * M * 16;
  auto K_lane = Tile<HEAD_DIM>::lane_of_A(row), Q_lane = Tile<HEAD_DIM>::lane_of_B(),
       QT_lane = Tile<HEAD_DIM>::lane_of_X();
  auto V_lane = Tile<HEAD_DIM_V>::lane_of_A(row), dO_lane = Tile<HEAD_DIM_V>::lane_of_B(),
       dOT_lane = Tile<HEAD_DIM_V>::lane_of_X();

  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    QTiles q_tiles(p, band, kv_head, kv_start), loaded = q_tiles;  // `loaded`: the tile to load next
    Range existing = {0, sequence.kv_len};
    QueryLoads loads(p, sequence);
    Pipeline<STAGES, STAGE_BYTES> stages(stages_smem);

    auto load = [&] {
      if (loaded.valid()) {
        loads.load(stages.next(), loaded);
        loaded.next();  // @dKV.next-load
      }
      stages.commit();
    };

    __syncthreads();
    load_tile<BLOCK_KV, HEAD_DIM>(K_smem, sequence.key_rows<element>(p.k, kv_head).tile(kv_start), existing);
    load_tile<BLOCK_KV, HEAD_DIM_V>(V_smem, sequence.key_rows<element>(p.v, kv_head).tile(kv_start), existing);
    for (int stage = 0; stage < STAGES - 1; ++stage) load();
    float dK_rmem[M][fragments_of(HEAD_DIM)][4] = {}, dV_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};

    for (; q_tiles.valid(); q_tiles.next()) {
      if constexpr (STAGES == 1) {
        __syncthreads();  // @dKV.barrier-before-load
        load();
      }
      unsigned int Q_smem = stages.wait(), dO_smem = Q_smem + Q_BYTES;

      int q_start = q_tiles.start;
      Score score(p, sequence, q_tiles.head);
      Dropout dropout(p, sequence.batch, q_tiles.head);
      const float* lse2 = (const float*)(smem + (dO_smem + dO_BYTES - smem_address(smem)));
      Rows rows = {lse2, lse2 + BLOCK_Q};
      float S_rmem[M][N][4], dP_rmem[M][N][4];
      scores<M, N, HEAD_DIM>(S_rmem, K_smem, K_lane, Q_smem, Q_lane);
      if constexpr (STAGES > 1) load();  // its addresses are computed while the tensor cores run
      scores<M, N, HEAD_DIM_V>(dP_rmem, V_smem, V_lane, dO_smem, dO_lane);
      differentiate<true, false>(S_rmem, dP_rmem, q_tiles.masked(), score, band, dropout, scale_log2, rows, q_start,
                                 kv_start + row);  // @dKV.mask
      unsigned int P_rmem[M][N / 2][4], dS_rmem[M][N / 2][4];
      round_fragments(P_rmem, S_rmem);
      accumulate<M, N / 2, HEAD_DIM_V>(dV_rmem, P_rmem, dO_smem, dOT_lane);
      round_fragments(dS_rmem, dP_rmem);
      if constexpr (ADD_DQ) share(dS_smem, dS_rmem, row);
      accumulate<M, N / 2, HEAD_DIM>(dK_rmem, dS_rmem, Q_smem, QT_lane);
      if constexpr (ADD_DQ) {
        __syncthreads();  // @barrier-before-added-dQ
        add_dQ(DqSums(p, sequence, q_tiles.head), smem_address(dS_smem), K_smem, q_start, sequence.q_len);
      }
    }

    cp_async_wait_group<0>();  // K and V may be in flight if no query was visited
    __syncthreads();
    store_fragments<M, HEAD_DIM>(smem, dK_rmem, row, [&](int, int) { return (float)p.scale; });  // @scale-dK
    store_fragments<M, HEAD_DIM_V>(smem + K_BYTES, dV_rmem, row, [](int, int) { return 1.0f; });
    __syncthreads();
    store_tile<BLOCK_KV, HEAD_DIM>(sequence.keys<element>(p.dk, kv_head), p.dk, smem, kv_start, sequence.kv_rows);
    store_tile<BLOCK_KV, HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head), p.dv, smem + K_BYTES, kv_start,
                                     sequence.kv_rows);
  }
}
