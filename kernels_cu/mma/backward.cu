// Backward, dQ, dK and dV at once: one block per tile of BLOCK_KV keys, as backward_kv.cu with ADD_DQ, but warps that
// share rows compute different queries of the scores, and get the others' P and dS from shared memory. A warp then has
// 16 M keys and half of the columns of dK and dV, so that it uses each fragment of K, V, Q and dO for M products:
// shared memory is read .7 times as much, which binds where tensor cores multiply 1024 pairs a clock. grid (key tiles,
// key/value heads, sequences)
#include "../dq_sums.cuh"
#include "backward.cuh"
#include "tile_stream.cuh"

constexpr int M = BLOCK_KV / ROW_WARPS / 16;   // fragments of a warp's scores, by rows, which are keys
constexpr int N = BLOCK_Q / COLUMN_WARPS / 8;  // and by columns, which are queries

struct SharedMemory {
  static constexpr int KEYS = 0;                                        // KeySlot
  static constexpr int QUERIES = KEYS + KeySlot::BYTES;                 // STAGES x QuerySlot
  static constexpr int P = QUERIES + STAGES * QuerySlot::BYTES;         // P^T [BLOCK_KV][BLOCK_Q]
  static constexpr int dS = P + BLOCK_KV * row_bytes(BLOCK_Q);          // dS^T [BLOCK_KV][BLOCK_Q]
  static constexpr int dK = KEYS + KeySlot::K, dV = KEYS + KeySlot::V;  // staging memory of the epilogue
  static constexpr int BYTES = dS + BLOCK_KV * row_bytes(BLOCK_Q);
};

// Rounds this warp's scores X, from a row and a column on, and stores them to a tile [BLOCK_KV][BLOCK_Q].
__device__ inline void share_scores(unsigned char* smem, const float (&X)[M][N][4], int row, int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned int at = Tile<BLOCK_Q>::at(row + row_of(m, 2 * half), column / 8 + n) + lane_id() % 4 * 4;
        *(unsigned int*)(smem + at) = cvt_rn_x2<element>(X[m][n][2 * half], X[m][n][2 * half + 1]);
      }
}

// C += A X for 16 M rows of tile A, which has a column per query, and the rows of tile X: this warp's columns.
template <int DIM>
__device__ void accumulate_shared(float (&C)[M][fragments_of(DIM)][4], unsigned int A_smem,
                                  const typename Tile<BLOCK_Q>::Lane& a_lane, unsigned int X_smem,
                                  const typename Tile<DIM>::Lane& x_lane) {
  unsigned int a[M][4], b[4];
#pragma unroll
  for (int k = 0; k < BLOCK_Q / 16; ++k) {
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], A_smem + a_lane.at(16 * m, 2 * k));
#pragma unroll
    for (int n = 0; n < fragments_of(DIM); n += 2) {
      ldmatrix_x4_trans(b, X_smem + x_lane.at(16 * k, n * COLUMN_WARPS));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<element>(C[m][n], a[m], b[0], b[1], C[m][n]);
        mma_m16n8k16<element>(C[m][n + 1], a[m], b[2], b[3], C[m][n + 1]);
      }
    }
  }
}

// dQ += dS K over all keys of the block: each warp has 32 queries and every SIDE_BY_SIDE-th block of 16 columns.
__device__ inline void add_dQ(const DqSums& sums, unsigned int dS_smem, unsigned int K_smem, int q_start, int q_len) {
  constexpr int ROWS = 2, WARPS = THREADS / WARP, SIDE_BY_SIDE = WARPS / (BLOCK_Q / 16 / ROWS);
  constexpr int COLUMNS = DqSums::COLUMNS / 16, EACH = (COLUMNS + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
  static_assert(SIDE_BY_SIDE * (BLOCK_Q / 16 / ROWS) == WARPS, "warps are distributed over all queries");
  int warp = threadIdx.x / WARP, row = warp / SIDE_BY_SIDE * ROWS, column = warp % SIDE_BY_SIDE;
  // ldmatrix transposes dS^T. The addresses of a lane include its warp's row and column.
  typename Tile<BLOCK_Q>::Lane dS_lane(lane_id() % 8 + lane_id() / 16 * 8, 2 * row + lane_id() / 8 % 2);
  typename Tile<HEAD_DIM>::Lane K_lane(lane_id() % 16, 2 * column + lane_id() / 16);
  auto exists = [&](int n) { return COLUMNS % SIDE_BY_SIDE == 0 || column + n * SIDE_BY_SIDE < COLUMNS; };
  float dQ[ROWS][EACH][2][4] = {};
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 16; ++k) {
    unsigned int a[ROWS][4], b[4];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) ldmatrix_x4_trans(a[m], dS_smem + dS_lane.at(16 * k, 2 * m));
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      if (!exists(n)) continue;
      ldmatrix_x4_trans(b, K_smem + K_lane.at(16 * k, 2 * n * SIDE_BY_SIDE));
#pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        mma_m16n8k16<element>(dQ[m][n][0], a[m], b[0], b[1], dQ[m][n][0]);
        mma_m16n8k16<element>(dQ[m][n][1], a[m], b[2], b[3], dQ[m][n][1]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    int q = q_start + 16 * (row + m);
    if (q >= q_len) break;
#pragma unroll
    for (int n = 0; n < EACH; ++n)
      if (exists(n))
#pragma unroll
        for (int half = 0; half < 2; ++half) sums.add(q, 16 * (column + n * SIDE_BY_SIDE), half, dQ[m][n][half]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  unsigned char* smem = (unsigned char*)shared;
  KeyTile keys(smem_address(smem) + SharedMemory::KEYS);
  unsigned char *P_smem = smem + SharedMemory::P, *dS_smem = smem + SharedMemory::dS;

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  int row = row_warp() * M * 16, column = column_warp() * N * 8;
  ProductLanes lanes(row);
  auto shared_lane = Tile<BLOCK_Q>::lane_of_A(row).first_kept();
  auto QT_lane = Tile<HEAD_DIM>::lane_of_X();
  auto dOT_lane = Tile<HEAD_DIM_V>::lane_of_X();

  for (int kv_start = blockIdx.x * BLOCK_KV; kv_start < sequence.kv_rows; kv_start += gridDim.x * BLOCK_KV) {
    // Prologue.
    QTiles q_tiles(p, band, kv_head, kv_start);
    TileStream<QueryTile, QTiles, QueryLoads> stream(q_tiles, QueryLoads(p, sequence).kept(),
                                                     smem_address(smem) + SharedMemory::QUERIES);
    __syncthreads();
    KeyLoads(p, sequence, kv_head, kv_start).load(keys, Range{0, sequence.kv_len});
    stream.fill();
    float dK_rmem[M][fragments_of(HEAD_DIM)][4] = {}, dV_rmem[M][fragments_of(HEAD_DIM_V)][4] = {};
    Scale scale(p);

    // Mainloop.
    for (; q_tiles.valid(); q_tiles.next()) {
      QueryTile queries(stream.wait());
      Score score(p, sequence, q_tiles.head);
      Dropout dropout(p, sequence.batch, q_tiles.head);
      stream.load_ahead();  // before the products, whose fragments leave no registers for addresses

      float P[M][N][4], dS[M][N][4];
      scores<M, N, HEAD_DIM>(P, keys.K, lanes.A, queries.Q + column * row_bytes(HEAD_DIM), lanes.B);
      scores<M, N, HEAD_DIM_V>(dS, keys.V, lanes.A_v, queries.dO + column * row_bytes(HEAD_DIM_V), lanes.B_v);
      differentiate<true, false>(P, dS, q_tiles.masked(), score, band, dropout, scale.of_scores,
                                 queries.numbers_of(smem, column), q_tiles.start + column,
                                 kv_start + row);  // @shared-scores.mask
      share_scores(P_smem, P, row, column);
      share_scores(dS_smem, dS, row, column);
      __syncthreads();  // @barrier-after-shared-scores

      accumulate_shared<HEAD_DIM_V>(dV_rmem, smem_address(P_smem), shared_lane, queries.dO, dOT_lane);
      accumulate_shared<HEAD_DIM>(dK_rmem, smem_address(dS_smem), shared_lane, queries.Q, QT_lane);
      add_dQ(DqSums(p, sequence, q_tiles.head), smem_address(dS_smem), keys.K, q_tiles.start, sequence.q_len);
    }

    // Epilogue.
    cp_async_wait_group<0>();  // the keys may be in flight if no query was visited
    __syncthreads();
    store_fragments<M, HEAD_DIM>(smem + SharedMemory::dK, dK_rmem, row, [&](int, int) { return (float)p.scale; });
    store_fragments<M, HEAD_DIM_V>(smem + SharedMemory::dV, dV_rmem, row, [](int, int) { return 1.0f; });
    __syncthreads();
    store_tile<BLOCK_KV, HEAD_DIM>(sequence.keys<element>(p.dk, kv_head), p.dk, smem + SharedMemory::dK, kv_start,
                                   sequence.kv_rows);
    store_tile<BLOCK_KV, HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head), p.dv, smem + SharedMemory::dV, kv_start,
                                     sequence.kv_rows);
  }
}
