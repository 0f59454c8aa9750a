// Forward and its derivative in one direction (JVP), as in simt/jvp.cu: one block per tile of BLOCK_Q queries of one
// head. grid (query tiles, heads, sequences)
#include "../mean.cuh"
#include "direction.cuh"
#include "tile_stream.cuh"

constexpr int M = BLOCK_Q / ROW_WARPS / 16;  // fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;              // score fragments of a warp, by columns
constexpr int SUMS = fragments_of(HEAD_DIM_V);

// Offsets in bytes. The epilogue stages O, and then tO, in the same memory.
struct SharedMemory {
  static constexpr int Q = 0;                                           // [BLOCK_Q][HEAD_DIM]
  static constexpr int tQ = Q + BLOCK_Q * row_bytes(HEAD_DIM);          // TQ: [BLOCK_Q][HEAD_DIM]
  static constexpr int KEYS = tQ + TQ * BLOCK_Q * row_bytes(HEAD_DIM);  // STAGES x KeySlot
  static constexpr int O = 0, O_END = BLOCK_Q * row_bytes(HEAD_DIM_V);  // [BLOCK_Q][HEAD_DIM_V]
  static constexpr int BYTES = maximum(KEYS + STAGES * KeySlot::BYTES, O_END);
};

// Turns q.k and its tangent into scores and their tangents; keys that a query does not see get -inf.
template <bool MASKED>
__device__ void modify(float (&S)[M][N][4], float (&tS)[M][N][4], const Score& score, const Band& band, int q_start,
                       int kv_start) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int i = q_start + row_of(m, e), j = kv_start + column_of(n, e);
        Score::Moved x = moved<MASKED, false>(score, band, S[m][n][e], tS[m][n][e], i, j);
        S[m][n][e] = x.score, tS[m][n][e] = x.tangent;
      }
}

// The mean of tS over the keys so far, updated as lazily as the row max of a forward: T sums P (tS - mu) V, where mu is
// an earlier mean. mu becomes the current mean, and T is corrected, before the two differ by more than the mean
// absolute deviation of tS. So P (tS - mu) is rounded with at most twice the error that it has at the mean itself.
struct LazyMean {
  float center;  // mu
  float sum;     // this lane's sum of P (tS - mu)
  float spread;  // a lower bound of this lane's sum of P |tS - mu|

  __device__ void rescale(float factor) { sum *= factor, spread *= factor; }
  // Adds one row of the fragment: row lane / 4 for half 0, row lane / 4 + 8 for half 1.
  __device__ void add(const float (&P)[N][4], const float (&tS)[N][4], int half) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        float weight = P[n][e] * (tS[n][e] - center);  // @sum-tangent
        sum += weight, spread += fabsf(weight);
      }
  }
  // If this is false in all four lanes of a row, |mean - mu| <= sum(P |tS - mu|) / 2 l <= sum(P |tS - mean|) / l.
  __device__ bool departed() const { return fabsf(sum) > 0.5f * spread; }
  // `row_l` is the row sum of all four lanes.
  __device__ float mean(float row_l) const {
    float row = row_sum(sum);
    return row_l == 0 ? 0 : center + row / row_l;
  }
  // Replaces the center, and returns the change; `l` is the partial row sum of the keys that were added.
  __device__ float move(float new_center, float l) {
    float change = new_center - center;
    center = new_center, sum -= change * l;  // @move-center
    spread = max(spread - fabsf(change) * l, 0.0f);
    return change;
  }
};

// Adds a tile with probabilities P to the means. If a mean has departed from its mu, mu becomes the mean and T is
// corrected; then the tile is added again, because differences from a distant mu are less precise. `l_before` has the
// partial row sums without the tile.
__device__ void follow(LazyMean (&mean)[M][2], float (&T)[M][SUMS][4], const float (&O)[M][SUMS][4],
                       const FactorScale& scale, const Softmax2 (&softmax)[M][2], const float (&l_before)[M][2],
                       const float (&P)[M][N][4], const float (&tS)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      LazyMean with_tile = mean[m][half];
      with_tile.add(P[m], tS[m], half);
      if (!__any_sync(0xFFFFFFFF, with_tile.departed())) {  // @center-stays
        mean[m][half] = with_tile;
        continue;
      }
      float change = mean[m][half].move(with_tile.mean(row_sum(softmax[m][half].l)), l_before[m][half]);
      mean[m][half].add(P[m], tS[m], half);  // @add-tile-again
      change *= scale.power();               // @scale-change-of-center
#pragma unroll
      for (int n = 0; n < SUMS; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) T[m][n][e] -= change * O[m][n][e];
    }
}

// Turns S and tS into the weights of V in O and in T, and rescales O and T to the new row max. `scale` is the scale of
// tS and T.
__device__ void attend(float (&S)[M][N][4], float (&tS)[M][N][4], float (&O)[M][SUMS][4], float (&T)[M][SUMS][4],
                       const FactorScale& scale, Softmax2 (&softmax)[M][2], LazyMean (&mean)[M][2], bool masked,
                       const Score& score, const Band& band, const Dropout& dropout, int q_start, int kv_start) {
  if (masked)
    modify<true>(S, tS, score, band, q_start, kv_start);
  else
    modify<false>(S, tS, score, band, q_start, kv_start);
  float rescaling[M][2];
  if (update_max(rescaling, softmax, S, LOG2_E)) {
    rescale(O, rescaling);
    rescale(T, rescaling);  // @rescale-T
#pragma unroll
    for (int n = 0; n < 2 * M; ++n) mean[n / 2][n % 2].rescale(rescaling[n / 2][n % 2]);  // @rescale-mean
  }
  float l_before[M][2];
#pragma unroll
  for (int n = 0; n < 2 * M; ++n) l_before[n / 2][n % 2] = softmax[n / 2][n % 2].l;
  exponentiate(S, softmax, LOG2_E);
  if constexpr (SCORES_MOVE) follow(mean, T, O, scale, softmax, l_before, S, tS);
  if constexpr (DROPOUT) drop(S, dropout, q_start, kv_start);  // @drop-tangent
  // @weigh-tangent
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) tS[m][n][e] = S[m][n][e] * (tS[m][n][e] - mean[m][e / 2].center) * scale.power();
}

// Computes the normalisation factors of the rows from q_start on, and stores lse and tlse. A sink is the last key, so
// it changes mu and T.
__device__ void finish(float (&factors)[M][2], float (&T)[M][SUMS][4], const float (&O)[M][SUMS][4],
                       Softmax2 (&softmax)[M][2], const LazyMean (&mean)[M][2], const Params& p,
                       const Sequence& sequence, const Dropout& dropout, int head, int q_start) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int i = q_start + row_of(m, 2 * half);
      bool exists = i < sequence.q_len;
      softmax[m][half].l = row_sum(softmax[m][half].l);
      Softmax2::Ending ending = softmax[m][half].end(LOG2_E, 1.0f);
      float tlse = mean[m][half].mean(softmax[m][half].l);
      if constexpr (SINK) {
        float sink = to_real(((const sink_element*)p.sink)[head]), of_keys = ending.factor;
        float tsink = TSINK ? to_real(((const sink_element*)p.tsink)[head]) : 0;
        ending.add_sink(sink);
        if (ending.lse > -infinity()) {
          float share = of_keys == 0 ? 0 : ending.factor / of_keys;
          tlse = share * tlse + expf(sink - ending.lse) * tsink;  // @tlse-with-sink
        }
      }
      float change = tlse - mean[m][half].center;  // @move-T-to-tlse
      if constexpr (SCORES_MOVE)
#pragma unroll
        for (int n = 0; n < SUMS; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) T[m][n][e] -= change * O[m][n][e];
      factors[m][half] = exists ? ending.factor * (DROPOUT ? (float)dropout.keep_scale : 1.0f) : 0;
      if (column_warp() != 0 || lane_id() % 4 != 0 || i >= sequence.q_rows) continue;
      sequence.queries<float>(p.lse, head)[i * p.lse.row] = exists ? ending.lse : -infinity();
      sequence.queries<float>(p.tlse, head)[i * p.tlse.row] = exists ? tlse : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) jvp(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  unsigned char* O_smem = (unsigned char*)shared + SharedMemory::O;
  unsigned int smem = smem_address(shared), Q_smem = smem + SharedMemory::Q, tQ_smem = smem + SharedMemory::tQ;

  int head = blockIdx.y, kv_head = head / p.group;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  int row = row_warp() * M * 16;
  auto Q_lane = Tile<HEAD_DIM>::lane_of_A(row).first_kept(), K_lane = Tile<HEAD_DIM>::lane_of_B().first_kept();
  auto V_lane = Tile<HEAD_DIM_V>::lane_of_X().first_kept();

  int tiles = (sequence.q_rows + BLOCK_Q - 1) / BLOCK_Q;
  for (int tile = tiles - 1 - blockIdx.x; tile >= 0; tile -= gridDim.x) {
    // Prologue.
    int q_start = tile * BLOCK_Q;
    KvTiles<Order::LAST_TO_FIRST> kv_tiles(band, head, q_start);
    auto key_loads = KeyLoads(p, sequence, kv_head, kv_tiles.start).kept();
    TileStream<KeyTile, KvTiles<Order::LAST_TO_FIRST>, KeyLoads> stream(kv_tiles, key_loads, smem + SharedMemory::KEYS);
    __syncthreads();
    auto rows = [&](const Operand& x) { return sequence.query_rows<element>(x, head).tile(q_start); };
    load_tile<BLOCK_Q, HEAD_DIM>(Q_smem, rows(p.q), Range{0, sequence.q_len});
    if constexpr (TQ) load_tile<BLOCK_Q, HEAD_DIM>(tQ_smem, rows(p.tq), Range{0, sequence.q_len});
    stream.fill();
    Softmax2 softmax[M][2];
    LazyMean mean[M][2] = {};
#pragma unroll
    for (int n = 0; n < 2 * M; ++n) softmax[n / 2][n % 2].init();
    float O_rmem[M][SUMS][4] = {}, T_rmem[M][SUMS][4] = {};
    FactorScale scale;

    // Mainloop.
    for (; kv_tiles.valid(); kv_tiles.next()) {
      KeyTile keys(stream.wait());
      float S_rmem[M][N][4] = {}, tS_rmem[M][N][4] = {};
      scores_moved<M, N, HEAD_DIM, TQ, TK>(S_rmem, tS_rmem, Q_smem, tQ_smem, Q_lane, keys.K, keys.tK, K_lane);
      stream.load_ahead();
      attend(S_rmem, tS_rmem, O_rmem, T_rmem, scale, softmax, mean, kv_tiles.masked(), score, band, dropout,
             q_start + row, kv_tiles.start);
      unsigned int P_rmem[M][N / 2][4];
      round_fragments(P_rmem, S_rmem);
      auto tP = factor<SCORES_MOVE>(tS_rmem);
      scale.round([&](float by) { multiply(T_rmem, by); }, tP);
      accumulate_moved<M, N / 2, HEAD_DIM_V, SCORES_MOVE, TV>(O_rmem, T_rmem, P_rmem, tP.rounded, scale, keys.V,
                                                              keys.tV, V_lane);
    }

    // Epilogue.
    multiply(T_rmem, scale.inverse());  // @scale-T-back
    float factors[M][2];
    finish(factors, T_rmem, O_rmem, softmax, mean, p, sequence, dropout, head, q_start + row);
    cp_async_wait_group<0>();  // Q may be in flight if no key was visited
    auto store = [&](const float (&C)[M][SUMS][4], const Operand& x) {
      __syncthreads();
      store_fragments<M, HEAD_DIM_V>(O_smem, C, row, [&](int m, int half) { return factors[m][half]; });
      __syncthreads();
      store_tile<BLOCK_Q, HEAD_DIM_V>(sequence.queries<element>(x, head), x, O_smem, q_start, sequence.q_rows);
    };
    store(O_rmem, p.out);
    store(T_rmem, p.tout);
  }
}
