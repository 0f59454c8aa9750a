// Parts of backward.cu:
//
//   SharedMemory         the layout of shared memory; TensorMemory: that of tensor memory
//   Rings                the rings, mbarriers and signals of a block, as one role sees them
//   load_rows            lse2 and delta of tiles of queries; zeroes rows that belong to another sequence
//   kept_queries         dropout of a key and 32 queries
//   exponentiate         q.k of a key -> probabilities; differentiate: dO V^T -> gradients of the scores
//   store_dS             rounded gradients of the scores -> tensor memory and shared memory
//   add_dQ               the block's part of dQ -> workspace
//   store_gradient       epilogue: dK or dV -> global memory
#pragma once
#include "../dq_sums.cuh"
#include "../rows.cuh"
#include "../walk.cuh"
#include "../wgmma/tile.cuh"
#include "ring.cuh"

constexpr int ROWS = TENSOR_MEMORY_ROWS;  // of a tile of keys, and of one of queries
static_assert(BLOCK_Q == ROWS && BLOCK_KV == ROWS, "a tile has a row for each lane of tensor memory");
constexpr int DIM = round_up(HEAD_DIM, 16), DIM_V = round_up(HEAD_DIM_V, 16);

// Threads of the roles, in this order: addition to dQ, computation of the two halves of the queries of each score tile,
// and the warps that issue mma, load tiles, load rows, and wait for the turns of a deterministic dQ.
constexpr int COMPUTE_WARP = 4, MMA_WARP = 12, LOAD_WARP = 13, ROWS_WARP = 14, TURN_WARP = 15;
constexpr int DQ_WARPS = 4, COMPUTE_WARPS = 8, HALF_WARPS = COMPUTE_WARPS / 2;

constexpr int QUERIES = BLOCK_Q / 2;  // columns of S^T in a thread, which has the row of a key
// The probabilities of all columns do not fit the registers beside derivatives, dropout, or what masks and biases read:
// then P^T and dS^T are computed part by part, in steps of HALF_PART columns.
constexpr bool PART_BY_PART = SOFTCAP || SCORE_MOD || BIAS || DENSE_MASK || MASK_MOD || DROPOUT;
constexpr int HALF_PART = PART / 2;

// First columns. P^T of each half of the queries, two numbers a column, lies over the first columns of its half of S^T,
// and dS^T over dP^T: threads store what they have loaded themselves. dQ has two buffers, or lies over dP^T and dS^T.
// S of the next queries is issued behind the product that reads P^T, dQ and dP behind that which reads dS^T: STRICT
// (forward.cuh) waits for these.
struct TensorMemory {
  static constexpr int S = 0, dP = BLOCK_Q, dV = 2 * BLOCK_Q, dK = dV + DIM_V;
  static constexpr int dQ_BUFFERS = dK + 3 * DIM <= TENSOR_MEMORY_COLUMNS ? 2 : 1;
  static constexpr bool dQ_OVER_dP = dQ_BUFFERS == 1;
  __device__ static constexpr int dQ(int n) { return dQ_OVER_dP ? dP : dK + (1 + n) * DIM; }  // @columns-of-dQ
};
// A warp of the first role holds its whole part of dQ, so that dP need not wait longer than for its loads.
constexpr int DQ_REGISTERS = 168, COMPUTE_REGISTERS = 144, ISSUING_REGISTERS = 56;
static_assert(TensorMemory::dK + DIM <= TENSOR_MEMORY_COLUMNS, "scores and gradients fit tensor memory");

// lse2 and delta of a tile of queries, negated.
constexpr int ROW_SLOT_BYTES = 2 * 4 * BLOCK_Q;
constexpr int dO_STAGES = STAGES - 1;  // dK reads a tile of Q later than dV one of dO

// Each warp adds parts of dQ, of 16 rows, through buffers of its own.
constexpr int dQ_COLUMNS = DqSums::COLUMNS % 64 == 0 ? 64 : DqSums::COLUMNS % 32 == 0 ? 32 : 16;
constexpr int dQ_PART_BYTES = 4 * 16 * dQ_COLUMNS, dQ_PARTS = 2;

// Offsets in bytes. dK and dV are staged in the memory of K and V.
struct SharedMemory {
  static constexpr int K = 0;                                                  // [BLOCK_KV][HEAD_DIM]
  static constexpr int V = K + tile_bytes(BLOCK_KV, HEAD_DIM);                 // [BLOCK_KV][HEAD_DIM_V]
  static constexpr int Q = V + tile_bytes(BLOCK_KV, HEAD_DIM_V);               // STAGES x [BLOCK_Q][HEAD_DIM]
  static constexpr int dO = Q + STAGES * tile_bytes(BLOCK_Q, HEAD_DIM);        // dO_STAGES x [BLOCK_Q][HEAD_DIM_V]
  static constexpr int dS = dO + dO_STAGES * tile_bytes(BLOCK_Q, HEAD_DIM_V);  // dS^T: [BLOCK_KV][BLOCK_Q]
  static constexpr int dQ = dS + tile_bytes(BLOCK_KV, BLOCK_Q);  // DQ_IN_BULK: DQ_WARPS x dQ_PARTS parts of 16 rows
  static constexpr int ROW_SLOTS = dQ + (DQ_IN_BULK ? DQ_WARPS * dQ_PARTS * dQ_PART_BYTES : 0);  // RowRing
  static constexpr int K_MBARRIERS = ROW_SLOTS + 2 * ROW_SLOT_BYTES;
  static constexpr int V_MBARRIERS = K_MBARRIERS + mbarrier_bytes(1);
  static constexpr int Q_MBARRIERS = V_MBARRIERS + mbarrier_bytes(1);
  static constexpr int dO_MBARRIERS = Q_MBARRIERS + mbarrier_bytes(STAGES);
  static constexpr int ROW_MBARRIERS = dO_MBARRIERS + mbarrier_bytes(dO_STAGES);
  static constexpr int dQ_MBARRIERS = ROW_MBARRIERS + mbarrier_bytes(2);
  static constexpr int TURN_MBARRIERS = dQ_MBARRIERS + mbarrier_bytes(2);  // DQ_IN_ORDER
  static constexpr int SIGNALS = TURN_MBARRIERS + mbarrier_bytes(1);
  static constexpr int TENSOR_MEMORY_ADDRESS = SIGNALS + 8 * 6;
  static constexpr int TILE_NUMBER = TENSOR_MEMORY_ADDRESS + 4;  // DQ_IN_ORDER: the number of this block
  static constexpr int BYTES = TILE_NUMBER + 4;
};

// Tensor maps; the box of each is one panel of a tile.
struct Maps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
};

using Q_Ring = Ring<STAGES, BLOCK_Q, HEAD_DIM>;
using dO_Ring = Ring<dO_STAGES, BLOCK_Q, HEAD_DIM_V>;
using RowRing = SlotRing<2, ROW_SLOT_BYTES, WARP>;

struct Rings {
  TileRing<1, BLOCK_KV, HEAD_DIM> K;  // empty once dK has left it
  TileRing<1, BLOCK_KV, HEAD_DIM_V> V;
  Q_Ring Q;
  dO_Ring dO;
  RowRing rows;                                 // full: also rows of other sequences are zeros, in Q, dO, K and V
  SlotRing<TensorMemory::dQ_BUFFERS, 0, 1> dQ;  // full: dS K is in tensor memory
  SlotRing<1, 0, 1> turn;                       // DQ_IN_ORDER: full while it is this block's turn at a tile of dQ
  unsigned int smem;

  __device__ Rings(unsigned int smem)
      : K(smem + SharedMemory::K, smem + SharedMemory::K_MBARRIERS),
        V(smem + SharedMemory::V, smem + SharedMemory::V_MBARRIERS),
        Q(smem + SharedMemory::Q, smem + SharedMemory::Q_MBARRIERS),
        dO(smem + SharedMemory::dO, smem + SharedMemory::dO_MBARRIERS),
        rows(smem + SharedMemory::ROW_SLOTS, smem + SharedMemory::ROW_MBARRIERS),
        dQ(0, smem + SharedMemory::dQ_MBARRIERS),
        turn(0, smem + SharedMemory::TURN_MBARRIERS),
        smem(smem) {}

  __device__ unsigned int signal(int n) const { return smem + SharedMemory::SIGNALS + 8 * n; }
  __device__ Signal S_ready() const { return signal(0); }   // q.k are in S^T; dV has read P^T before
  __device__ Signal P_ready() const { return signal(1); }   // P^T is stored
  __device__ Signal dP_ready() const { return signal(2); }  // V dO^T are in dP^T; dK and dQ have read dS before
  __device__ Signal dS_ready() const { return signal(3); }  // dS is stored, in both memories
  __device__ Signal gradients_ready() const {
    return signal(4);
  }  // dK and dV are complete; P is stored after they are read

  __device__ Signal products_complete() const { return signal(5); }  // STRICT: dV has read P^T, or dK dS^T

  __device__ void acquire_dQ() const {
    dQ.acquire();
    tcgen05_fence_after();
  }
  __device__ float* row_numbers(unsigned char* smem) const {
    return (float*)(smem + SharedMemory::ROW_SLOTS + (rows.slot() - rows.start));
  }
  __device__ void init() const {
    init(Q, 1, 2), init(dO, 1, 2);                           // @arrivals-of-readers
    init(K, 1, HALF_WARPS + 1), init(V, 1, HALF_WARPS + 1);  // the load of rows, and the epilogue
    init(rows, WARP, COMPUTE_WARPS);
    init(dQ, 1, DQ_WARPS);
    if constexpr (DQ_IN_ORDER) init(turn, 1, DQ_WARPS);
    mbarrier_init(S_ready().mbarrier, 1);
    mbarrier_init(P_ready().mbarrier, COMPUTE_WARPS);  // @arrivals-of-P-halves
    mbarrier_init(dP_ready().mbarrier, 1);
    mbarrier_init(dS_ready().mbarrier, COMPUTE_WARPS);  // @arrivals-of-dS
    mbarrier_init(gradients_ready().mbarrier, 1);
    if constexpr (STRICT) mbarrier_init(products_complete().mbarrier, 1);
  }
  // Initialises a ring with so many arrivals per full and per empty phase.
  template <int SLOTS, int SLOT_BYTES, int PRODUCERS>
  __device__ static void init(const SlotRing<SLOTS, SLOT_BYTES, PRODUCERS>& ring, int full, int empty) {
#pragma unroll
    for (int n = 0; n < SLOTS; ++n) {
      mbarrier_init(ring.mbarriers + 8 * n, full);
      mbarrier_init(ring.mbarriers + 8 * (SLOTS + n), empty);
    }
  }
};

#include "../dq_turns.cuh"
#include "../load_tiles.cuh"

// Zeroes the rows of a tile of ROWS rows for which wanted(row) is false; called by one warp.
template <int COLUMNS, typename Wanted>
__device__ void clear_rows_of_warp(unsigned int tile, Wanted wanted) {
  constexpr int CHUNKS = PANEL_ROW / 16;
  const unsigned int zeros[4] = {};
  for (int n = lane_id(); n < ROWS * CHUNKS; n += WARP)
    if (!wanted(n / CHUNKS))
      for (int panel = 0; panel < panels_of(COLUMNS); ++panel)
        st_shared_v4(tile + panel * ROWS * PANEL_ROW + 16 * n, zeros);  // @clear-rows-of-warp
}

// Signals that the load of rows needs a slot no longer.
template <typename TilesOfRing>
__device__ void leave(TilesOfRing& ring) {
  if (lane_id() == 0) mbarrier_arrive(ring.empty());
  ++ring.index;
}

// The role that loads lse2 and delta. Rows that see no key, or are outside the sequence, get lse2 +inf, so that their
// probabilities are 0, which does not cancel a NaN or an infinity: their rows of Q and dO are zeroed. So are the rows
// of K and V past the end of the sequence, which may hold another sequence's data. The role waits for every tile, and
// no slot is filled again before it has: it would take the next tile for this one.
__device__ void load_rows(const Params& p, unsigned char* smem, Rings rings, const Sequence& sequence, const Band& band,
                          const BlockIndex& block) {
  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next()) {
    int kv_start = kv_tiles.kv_start;
    QTiles q_tiles(p, band, block.kv_head, kv_start);
    rings.K.wait(), rings.V.wait();  // @wait-K-V-to-clear
    if constexpr (PACKED || KV_LENGTHS)
      if (q_tiles.valid() && kv_start + BLOCK_KV > sequence.kv_len) {  // @past-the-keys
        auto exists = [&](int row) { return kv_start + row < sequence.kv_len; };
        clear_rows_of_warp<HEAD_DIM>(rings.K.tile(), exists);
        clear_rows_of_warp<HEAD_DIM_V>(rings.V.tile(), exists);
        fence_proxy_async();  // @fence-cleared-keys
      }
    __syncwarp();
    leave(rings.K), leave(rings.V);
    for (; q_tiles.valid(); q_tiles.next()) {
      rings.rows.acquire();  // @acquire-row-slot
      const float* lse2 = sequence.queries<float>(p.lse2, q_tiles.head);
      const float* delta = sequence.queries<float>(p.delta, q_tiles.head);  // @rows-of-head
      float* to = rings.row_numbers(smem);
      bool unwanted = false;
      for (int n = lane_id(); n < BLOCK_Q; n += WARP) {
        int i = q_tiles.start + n;
        bool visible = q_tiles.visible(i);
        float of_row = visible ? -lse2[i] : -infinity();
        to[n] = of_row, to[BLOCK_Q + n] = visible ? -delta[i] : 0;
        unwanted |= of_row == -infinity();
      }
      if (__any_sync(0xFFFFFFFF, unwanted)) {  // @clear-queries
        __syncwarp();                          // @written-row-numbers
        auto sees = [&](int row) { return to[row] != -infinity(); };
        rings.Q.wait(), rings.dO.wait();  // @wait-Q-dO-to-clear
        clear_rows_of_warp<HEAD_DIM>(rings.Q.tile(), sees);
        clear_rows_of_warp<HEAD_DIM_V>(rings.dO.tile(), sees);
        fence_proxy_async();  // @fence-cleared-queries
      }
      mbarrier_arrive(rings.rows.full());
      ++rings.rows.index;
      rings.Q.wait(), rings.dO.wait();  // @wait-every-tile
      __syncwarp();
      leave(rings.Q), leave(rings.dO);
    }
  }
}

// Dropout of key j and queries i to i + 31: bit n of the result says whether query i + n is kept. A Philox call serves
// the keys j, j ^ 1, j ^ 8, j ^ 9, which are those of four lanes: each makes a quarter of the calls, and the lanes
// exchange the words.
__device__ inline unsigned int kept_queries(const Dropout& dropout, int i, int j) {
  int number = j & 1 | j >> 2 & 2;  // of this lane among the four
  unsigned int kept = 0;
#pragma unroll
  for (int first = 0; first < PART; first += first % 16 ? 12 : 4) {  // queries first .. first + 3 and 8 further down
    Philox mine = dropout.bits(i + first + number, j);               // @call-of-key
    unsigned int bits[4];                                            // for each of the four lanes, those of two queries
#pragma unroll
    for (int lane = 0; lane < 4; ++lane)
      bits[lane] = __byte_perm(mine.word[lane / 2], mine.word[2 + lane / 2], lane % 2 ? 0x7632 : 0x5410);
    // Transposes the 4 x 4 words of the four lanes: then bits[n] is that of query first + n, in the low half.
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n & step) continue;
        bool is_upper = number & step;
        unsigned int given = is_upper ? bits[n] : bits[n + step];
        unsigned int received = __shfl_xor_sync(0xFFFFFFFF, given, step == 1 ? 1 : 8);  // @words-of-other-key
        (is_upper ? bits[n] : bits[n + step]) = received;
      }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      kept |= (unsigned int)((bits[n] & 0xFFFF) >= dropout.drop_below) << (first + n);
      kept |= (unsigned int)(bits[n] >> 16 >= dropout.drop_below) << (first + n + 8);
    }
  }
  return kept;
}

// Turns q.k of key j and queries from i on into probabilities; `derivatives` are those that Score::gradient needs.
template <bool MASKED, int N>
__device__ void exponentiate_part(float (&S)[N], float (&derivatives)[N], const Score& score, const Band& band, int i,
                                  int j, float scale_log2, const float* minus_lse2) {
  int key_read = MASKED ? band.key(j) : j;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    int query_read = MASKED ? band.query(i + n) : i + n;
    bool seen = true;
    if constexpr (DENSE_MASK) seen = DenseMask::sees(score.p, band, score.batch, score.head, query_read, key_read);
    if constexpr (MASKED && MASK_MOD) seen &= band.mod_sees(score.head, query_read, key_read);
    if constexpr (SCORE_MOD) {
      Position query(i, n), key(j);
      if constexpr (MASKED) query = query_read, key = key_read;
      S[n] = score.apply(S[n], query, key, derivatives[n]);
    } else if constexpr (MODIFIED)
      S[n] = score.apply(S[n], query_read, key_read, derivatives[n]);
    S[n] = seen ? S[n] : -infinity();
  }
  if constexpr (MASKED) {
    Range queries = band.queries(j);
    if (queries.end < i + N) hide<true>(S, queries.end - i);   // @visible-queries-end
    if (queries.begin > i) hide<false>(S, queries.begin - i);  // @visible-queries-begin
  }
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    float4 rows = *(const float4*)(minus_lse2 + n);
    if constexpr (SOFTCAP || SCORE_MOD) {  // the derivative of a hidden score may be NaN
#pragma unroll
      for (int e = n; e < n + 4; ++e) derivatives[e] = S[e] == -infinity() ? 0 : derivatives[e];
    }
    fma_rn({S[n], S[n + 1]}, {scale_log2, scale_log2}, {rows.x, rows.y}).get(S[n], S[n + 1]);
    fma_rn({S[n + 2], S[n + 3]}, {scale_log2, scale_log2}, {rows.z, rows.w}).get(S[n + 2], S[n + 3]);
#pragma unroll
    for (int e = n; e < n + 4; ++e) S[e] = ex2_approx(S[e]);
  }
}

template <int N>
__device__ void exponentiate(float (&S)[N], float (&derivatives)[N], bool masked, const Score& score, const Band& band,
                             int i, int j, float scale_log2, const float* minus_lse2) {
  if (masked)
    exponentiate_part<true>(S, derivatives, score, band, i, j, scale_log2, minus_lse2);
  else
    exponentiate_part<false>(S, derivatives, score, band, i, j, scale_log2, minus_lse2);
}

// Zeroes what dropout does not keep, and scales the rest.
template <int N>
__device__ void drop(float (&x)[N], const Dropout& dropout, unsigned int kept) {
  float keep_scale = dropout.keep_scale;
#pragma unroll
  for (int n = 0; n < N; ++n) x[n] = kept >> n & 1 ? x[n] * keep_scale : 0;  // @drop-by-key
}

// Turns V dO^T into the gradients of scale * q.k: dP -> P (dP - delta), times the derivatives of the scores.
template <int N>
__device__ void differentiate(float (&dP)[N], const float (&P)[N], const float (&derivatives)[N], const Score& score,
                              const float* minus_delta) {
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    float4 rows = *(const float4*)(minus_delta + n);
    Pair low = {dP[n], dP[n + 1]}, high = {dP[n + 2], dP[n + 3]};
    low += Pair(rows.x, rows.y);
    high += Pair(rows.z, rows.w);
    mul_rn(low, {P[n], P[n + 1]}).get(dP[n], dP[n + 1]);
    mul_rn(high, {P[n + 2], P[n + 3]}).get(dP[n + 2], dP[n + 3]);
    if constexpr (SOFTCAP || SCORE_MOD) {
#pragma unroll
      for (int e = n; e < n + 4; ++e) dP[e] = score.gradient(dP[e], derivatives[e]);
    }
  }
}

// Stores PART columns of dS^T from `query` on: to tensor memory for dK, and to shared memory for dQ.
__device__ inline void store_dS(unsigned int tmem, unsigned int smem, const unsigned int (&dS)[PART / 2], int row,
                                int query) {
  tmem_st(tmem, dS);
#pragma unroll
  for (int n = 0; n < PART; n += 8)
    st_shared_v4(smem + swizzled_offset<BLOCK_KV>(row, (query + n) / 8),
                 *(unsigned int (*)[4])(dS + n / 2));  // @chunk-of-dS
}

// Adds 16 rows of dQ, from `row` on, to the workspace.
template <int N>
__device__ void add_dQ(const DqSums& sums, const float (&dQ)[N], int row, int column, unsigned char* buffer) {
  if constexpr (DQ_IN_BULK) {
    // The fragments are staged in the layout of the workspace, in which those of 16 rows are contiguous.
    if (lane_id() == 0) bulk_wait_group_read<dQ_PARTS - 1>();  // @wait-dQ-part
    __syncwarp();                                              // @waited-dQ-part
#pragma unroll
    for (int n = 0; n < N / 4; ++n)
      *(float4*)(buffer + 512 * n + 16 * lane_id()) =
          make_float4(dQ[4 * n], dQ[4 * n + 1], dQ[4 * n + 2], dQ[4 * n + 3]);
    fence_proxy_async();  // @fence-dQ-part
    __syncwarp();         // @written-dQ-part
    if (lane_id() == 0) {
      bulk_reduce_add(sums.block_row(row) + 16 * column, smem_address(buffer), dQ_PART_BYTES);
      bulk_commit_group();
    }
  } else {
#pragma unroll
    for (int n = 0; n < N / 4; ++n) sums.add(row, column + n / 2 * 16, n % 2, *(const float (*)[4])(dQ + 4 * n));
  }
}

// Epilogue: this warp's 32 rows of dK or dV, times `scale`, rounded; zeros if the block has visited no queries. They go
// through `tile` to the rows of a tensor with COLUMNS columns, from row `first` of the tile on.
template <int COLUMNS>
__device__ void store_gradient(element* rows, const Operand& x, unsigned char* tile, unsigned int tmem, float scale,
                               bool visited, int first, int end) {
  // Eight lanes read the eight chunks of one row of a panel, without bank conflicts.
  constexpr int TMEM_PART = COLUMNS % 32 ? 16 : 32, CHUNKS = panels_of(COLUMNS) * (PANEL_ROW / 16);
  int row = recomputed(threadIdx.x) % ROWS, lane = row % WARP, warp_row = row - lane;
  unsigned int smem = smem_address(tile);
#pragma unroll 1
  for (int n = 0; n < COLUMNS; n += TMEM_PART) {
    float part[TMEM_PART] = {};
    unsigned int rounded[TMEM_PART / 2];
    if (visited) load(part, tmem + (warp_row << 16) + n);
#pragma unroll
    for (int e = 0; e < TMEM_PART; ++e) part[e] *= scale;  // @scale-gradient
    round_row(rounded, part);
#pragma unroll
    for (int e = 0; e < TMEM_PART; e += 8)
      st_shared_v4(smem + swizzled_offset<BLOCK_KV>(row, (n + e) / 8), *(unsigned int (*)[4])(rounded + e / 2));
  }
  __syncwarp();  // @written-gradient
#pragma unroll 1
  for (int n = lane; n < WARP * CHUNKS; n += WARP) {
    int key = warp_row + n / CHUNKS, chunk = n % CHUNKS;
    if (first + key >= end || 8 * chunk >= COLUMNS) continue;  // @rows-of-keys
    uint4 numbers = *(const uint4*)(tile + swizzled_offset<BLOCK_KV>(key, chunk));
    store_chunk<COLUMNS>(rows + (long long)(first + key) * x.row, x, chunk, numbers);
  }
  fence_proxy_async();
  __syncwarp();
}
