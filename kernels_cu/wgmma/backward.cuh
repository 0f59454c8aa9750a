// Parts of backward.cu:
//
//   Consumer          the rows and columns of the block's tiles that a consumer warpgroup computes
//   SharedMemory      the layout of shared memory; Rings: its slots
//   load_lse_delta    producer of lse2 and delta, and of the records of tiles of queries
//   PublishedQTiles   the tiles of queries as consumers read them under a mask_mod
//   clear_keys        zeroes rows of K and V that belong to another sequence; clear_queries: rows of Q and dO
//   LeftOperand       operand A of dV and dK: FromRegisters or FromShared
//   UnfinishedTile    DEFERRED: the tile whose dK the next step computes
//   issue_S ..        the asynchronous steps of the mainloop
//   add_dQ            the block's part of dQ -> workspace
//   store_dK_dV       epilogue: dK and dV -> the shared memory of K and V -> global memory
#pragma once
#include "../dq_sums.cuh"
#include "../gradients.cuh"
#include "../walk.cuh"
#include "tile.cuh"

// The number of panels of a tile to split between `shares` consumers, at least one for each. If consumers share no keys
// (SHARES == 1), it is rounded up so that their shares of dQ are equal: unequal shares need two versions of the
// mainloop, which would exceed the registers.
__device__ constexpr int panels_of_shares(int dim, int shares) {
  return SHARES == 1 ? round_up(panels_of(dim), shares) : maximum(panels_of(dim), shares);
}
// Number of fragments along the columns of a share. Shares have whole panels; if the number of panels is odd, the
// larger share has one panel more.
__device__ constexpr int fragments_of_share(int dim, int shares, bool larger) {
  return shares == 1 ? fragments_of(dim) : (panels_of_shares(dim, shares) + larger) / 2 * (PANEL / 8);
}

constexpr int QUERIES = BLOCK_Q / SHARES;  // columns of S^T per consumer
constexpr int N = QUERIES / 8;             // score fragments, by columns
// A consumer computes dQ of 64 queries; consumers with the same queries split its columns.
constexpr int DQ_SHARES = CONSUMERS / WARPGROUP / (BLOCK_Q / 64);
// Columns of tiles.
constexpr int DIM = PANEL * panels_of_shares(HEAD_DIM, SHARES > DQ_SHARES ? SHARES : DQ_SHARES);
constexpr int DIM_V = PANEL * panels_of_shares(HEAD_DIM_V, SHARES);

// Registers per thread: the producer keeps more to classify tiles by a mask_mod.
constexpr int PRODUCER_REGISTERS = MASK_MOD ? 56 : 40, CONSUMER_REGISTERS = MASK_MOD ? 224 : 232;

// The part of a block's tiles that a consumer warpgroup computes: S^T and dP^T of `QUERIES` queries and 64 keys, its
// share of the columns of dK and dV of these keys, and its share of the columns of dQ of 64 queries.
struct Consumer {
  int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP - 1, 0);
  int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP % (WARPGROUP / WARP), 0);
  int keys = warpgroup / SHARES * 64;  // this consumer's first row in the tile of keys
  int share = warpgroup % SHARES;
  int queries = share * QUERIES;  // this consumer's first row in the tile of queries, for S^T and dP^T
  int dQ_rows = warpgroup / DQ_SHARES * 64;
  int dQ_share = warpgroup % DQ_SHARES;
  int row = keys + 16 * warp;  // first key of this warp
};

// A consumer's columns of dK, dV and dQ, in fragments. If two consumers split an odd number of panels, the first
// consumer has one panel more of dK, and the second (SECOND) one more of dV and dQ.
template <bool SECOND>
struct Share {
  static constexpr int N_K = fragments_of_share(HEAD_DIM, SHARES, !SECOND);
  static constexpr int N_V = fragments_of_share(HEAD_DIM_V, SHARES, SECOND);
  static constexpr int N_Q = fragments_of_share(HEAD_DIM, DQ_SHARES, SECOND);
  int K, V, Q;  // first fragment of this consumer's columns

  __device__ Share(const Consumer& consumer)
      : K(consumer.share * (DIM / 8 - N_K)),
        V(consumer.share * (DIM_V / 8 - N_V)),
        Q(consumer.dQ_share * (DIM / 8 - N_Q)) {}  // @first-columns-of-share
  // Address of the panel whose first fragment is `fragment`, in a tile of ROWS rows.
  template <int ROWS>
  __device__ static unsigned int panel(unsigned int tile, int fragment) {
    return tile + fragment / 8 * ROWS * PANEL_ROW;
  }
};
constexpr bool UNEQUAL_SHARES = Share<false>::N_K != Share<true>::N_K || Share<false>::N_V != Share<true>::N_V ||
                                Share<false>::N_Q != Share<true>::N_Q;

#include "../key_blocks.cuh"

// Operand A of dV += P^T dO and of dK += dS^T Q: this consumer's 64 keys x BLOCK_Q queries. Each consumer rounds the
// columns of its own queries; store() writes them to a tile that all consumers read.
struct RoundedTile {
  unsigned int rmem[1][N / 2][4];
  unsigned int smem;
  Consumer consumer;

  __device__ RoundedTile(const float (&S)[1][N][4], unsigned int smem, const Consumer& consumer)
      : smem(smem), consumer(consumer) {
    round_fragments(rmem, S);
  }
  __device__ void store() const { store_fragments<BLOCK_KV>(smem, rmem, consumer.row, consumer.queries / 8); }
};

// If consumers share no keys, each computes all queries, and A is read from registers.
struct FromRegisters : RoundedTile {
  static constexpr bool IN_SMEM = false;
  using RoundedTile::RoundedTile;

  __device__ void fence() { fence_operand(rmem); }
  // Issues C += A X. X_smem is the address, in a tile of queries, of the first panel of this consumer's columns.
  template <int COLUMNS>
  __device__ void issue(float (&C)[1][COLUMNS][4], unsigned int X_smem) const {
    accumulate<0, N / 2>(C, rmem, X_smem);
  }
  // FromShared needs a barrier between its store and its issue: issue_or_store runs before that barrier,
  // issue_stored after it. This operand is in registers, so issue_or_store issues the wgmmas and issue_stored does
  // nothing.
  template <int COLUMNS>
  __device__ void issue_or_store(float (&C)[1][COLUMNS][4], unsigned int X_smem) const {
    issue(C, X_smem);
  }
  template <int COLUMNS>
  __device__ void issue_stored(float (&)[1][COLUMNS][4], unsigned int) const {}
};

// Issues C += A X for this consumer's keys of a tile that store() has written.
template <int COLUMNS>
__device__ void accumulate_stored(float (&C)[1][COLUMNS][4], unsigned int A_smem, unsigned int X_smem,
                                  const Consumer& consumer) {
  unsigned long long a = k_major_descriptor(A_smem + consumer.keys * PANEL_ROW),
                     x = mn_major_descriptor(X_smem, BLOCK_Q * PANEL_ROW);
#pragma unroll
  for (int k = 0; k < BLOCK_Q / 16; ++k)
    wgmma<element, K_MAJOR, MN_MAJOR>(C, a + k / 4 * (BLOCK_KV * PANEL_ROW >> 4) + k % 4 * NEXT_16_COLUMNS,
                                      x + k * NEXT_16_ROWS, true);
}

// If consumers share keys, A is read from shared memory.
struct FromShared : RoundedTile {
  static constexpr bool IN_SMEM = true;
  using RoundedTile::RoundedTile;

  __device__ void fence() {}
  template <int COLUMNS>
  __device__ void issue(float (&C)[1][COLUMNS][4], unsigned int X_smem) const {
    accumulate_stored(C, smem, X_smem, consumer);
    wgmma_commit_group();
  }
  template <int COLUMNS>
  __device__ void issue_or_store(float (&)[1][COLUMNS][4], unsigned int) const {
    store();  // @store-A
  }
  template <int COLUMNS>
  __device__ void issue_stored(float (&C)[1][COLUMNS][4], unsigned int X_smem) const {
    issue(C, X_smem);
  }
};

using LeftOperand = Choice<SHARES == 1, FromRegisters, FromShared>::type;

// Tensor maps; the box of each is one panel of a tile.
struct Maps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
};

// lse2 and delta of a tile of queries (DSTATISTICS: and dentropy, dmax and argmax); under a mask_mod also the tile's
// record: its start, plus CUT if the mask_mod cuts the tile, and its head.
#if DSTATISTICS
constexpr int RECORD = 5 * 4 * BLOCK_Q, ROW_SLOT_BYTES = RECORD + (MASK_MOD ? 16 : 0);
#else
constexpr int RECORD = 2 * 4 * BLOCK_Q, ROW_SLOT_BYTES = RECORD + (MASK_MOD ? 16 : 0);
#endif
using RowRing = SlotRing<2, ROW_SLOT_BYTES, WARP>;

// A step leaves its tile unfinished: the next one computes its dK, from dS in shared memory, under the softmax. S of
// the next tile is computed under the addition to dQ, whose registers are then beside those of S. That needs registers,
// which consumers that share keys do not have, because their head dimensions are large, and shared memory for 128
// queries takes longer than is gained.
constexpr bool DEFERRED = SHARES == 1 && BLOCK_Q == 64;
constexpr int Q_SLOTS = STAGES + DEFERRED;  // an unfinished tile keeps its slot of Q for longer

// Offsets in bytes. dK and dV are staged in the memory of K and V.
struct SharedMemory {
  static constexpr int K = 0;                                        // [BLOCK_KV][DIM]
  static constexpr int V = K + tile_bytes(BLOCK_KV, DIM);            // [BLOCK_KV][DIM_V]
  static constexpr int Q = V + tile_bytes(BLOCK_KV, DIM_V);          // Q_SLOTS x [BLOCK_Q][DIM]
  static constexpr int dO = Q + Q_SLOTS * tile_bytes(BLOCK_Q, DIM);  // STAGES x [BLOCK_Q][DIM_V]
  // Two buffers of dS^T [BLOCK_KV][BLOCK_Q] and, if consumers share keys, of P^T.
  static constexpr int dS = dO + STAGES * tile_bytes(BLOCK_Q, DIM_V);
  static constexpr int dS_BYTES = tile_bytes(BLOCK_KV, BLOCK_Q), P_BYTES = SHARES > 1 ? dS_BYTES : 0;
  static constexpr int dQ = dS + 2 * (dS_BYTES + P_BYTES);  // DQ_IN_BULK: [BLOCK_Q][dQ_COLUMNS], fp32
  static constexpr int dQ_COLUMNS = DQ_SHARES == 1 ? 8 * fragments_of(HEAD_DIM) : DIM;
  static constexpr int ROWS = dQ + (DQ_IN_BULK ? 4 * BLOCK_Q * dQ_COLUMNS : 0);  // RowRing
  static constexpr int K_MBARRIERS = ROWS + 2 * ROW_SLOT_BYTES;
  static constexpr int V_MBARRIERS = K_MBARRIERS + mbarrier_bytes(1);
  static constexpr int Q_MBARRIERS = V_MBARRIERS + mbarrier_bytes(1);
  static constexpr int dO_MBARRIERS = Q_MBARRIERS + mbarrier_bytes(Q_SLOTS);
  static constexpr int ROW_MBARRIERS = dO_MBARRIERS + mbarrier_bytes(STAGES);
  static constexpr int TURN_MBARRIERS = ROW_MBARRIERS + mbarrier_bytes(2);  // DQ_IN_ORDER
  static constexpr int TILE_NUMBER = TURN_MBARRIERS + mbarrier_bytes(1);    // DQ_IN_ORDER: the number of this block
  static constexpr int BYTES = DQ_IN_ORDER ? TILE_NUMBER + 16 : TURN_MBARRIERS;
};
static_assert(LeftOperand::IN_SMEM == (SharedMemory::P_BYTES > 0), "P goes through shared memory");

struct Rings {
  TileRing<1, BLOCK_KV, DIM> K;
  TileRing<1, BLOCK_KV, DIM_V> V;
  TileRing<Q_SLOTS, BLOCK_Q, DIM> Q;
  TileRing<STAGES, BLOCK_Q, DIM_V> dO;
  RowRing rows;
  SlotRing<1, 0, 1> turn;  // DQ_IN_ORDER: full while it is this block's turn to add to a tile of dQ
  unsigned int dS;

  __device__ Rings(unsigned int smem)
      : K(smem + SharedMemory::K, smem + SharedMemory::K_MBARRIERS),
        V(smem + SharedMemory::V, smem + SharedMemory::V_MBARRIERS),
        Q(smem + SharedMemory::Q, smem + SharedMemory::Q_MBARRIERS),
        dO(smem + SharedMemory::dO, smem + SharedMemory::dO_MBARRIERS),
        rows(smem + SharedMemory::ROWS, smem + SharedMemory::ROW_MBARRIERS),
        turn(0, smem + SharedMemory::TURN_MBARRIERS),
        dS(smem + SharedMemory::dS) {}

  // lse2 of the current tile of queries, then delta.
  __device__ float* row_numbers(unsigned char* smem) const {
    return (float*)(smem + SharedMemory::ROWS + (rows.slot() - rows.start));
  }
  __device__ void init() const {
    K.init(), V.init(), Q.init(), dO.init(), rows.init();
    if constexpr (DQ_IN_ORDER) turn.init();
  }
};

// DEFERRED: the tile of queries of which dK is not computed yet, if there is one.
struct UnfinishedTile {
  decltype(Rings::Q) ring;  // up to the slot of this tile
  unsigned int Q_smem = 0;
  unsigned int dS_smem = 0;

  __device__ UnfinishedTile(const decltype(Rings::Q)& ring) : ring(ring) {}
  __device__ bool exists() const { return dS_smem > 0; }  // @no-tile-before
  // Issues dK += dS^T Q. Without a tile the group is empty, so that waits count the same groups in all steps. Both
  // branches have all statements of a group, because otherwise ptxas adds the missing ones behind the branch.
  template <typename Share, int N_K>
  __device__ void issue_dK(float (&dK)[1][N_K][4], const Share& share, const Consumer& consumer) const {
    if (exists()) {
      fence_operand(dK);
      wgmma_fence();
      accumulate_stored(dK, dS_smem, share.template panel<BLOCK_Q>(Q_smem, share.K), consumer);
      wgmma_commit_group();
    } else {
      wgmma_fence();
      wgmma_commit_group();
    }
  }
  __device__ void release_Q() {
    if (exists()) ring.release();
  }
};

#include "../load_tiles.cuh"

// Producer of lse2 and delta. Rows that see no key, or are outside the sequence, get lse2 +inf, so that their
// probabilities are 0.
__device__ void load_lse_delta(const Params& p, unsigned char* smem, Rings& rings, const Sequence& sequence,
                               const Band& band, const BlockIndex& block) {
  auto write_record = [&](int head, int start) {
    unsigned int record = rings.rows.slot() + RECORD;
    if (lane_id() == 0) st_shared(record, start), st_shared(record + 4, head);  // @head-of-record
  };
  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next()) {
    for (QTiles q_tiles(p, band, block.kv_head, kv_tiles.kv_start); q_tiles.valid(); q_tiles.next()) {
      rings.rows.acquire();  // @acquire-rows
      // @record-of-queries
      if constexpr (MASK_MOD) write_record(q_tiles.head, q_tiles.start + (q_tiles.may_hide & 1 ? CUT : 0));
      float* to = rings.row_numbers(smem);
      // Loads lse2 for all rows, and then delta, because this warp has few registers.
      auto load = [&](const Operand& x, float* to, float otherwise) {
        const float* numbers = sequence.queries<float>(x, q_tiles.head);  // @load-rows
#pragma unroll 1
        for (int n = lane_id(); n < BLOCK_Q; n += WARP) {
          int i = q_tiles.start + n;
          to[n] = q_tiles.visible(i) ? numbers[i] : otherwise;
        }
      };
      load(p.lse2, to, infinity());
      load(p.delta, to + BLOCK_Q, 0);
#if DSTATISTICS
      if constexpr (DENTROPY) load(p.dentropy, to + 2 * BLOCK_Q, 0);
      if constexpr (DMAX) {
        load(p.dmax, to + 3 * BLOCK_Q, 0);
        load(p.argmax, to + 4 * BLOCK_Q, 0);  // numbers of keys, in 32 bits; dmax is 0 in the rows without one
      }
#endif
      mbarrier_arrive(rings.rows.full());
      ++rings.rows.index;
    }
    if constexpr (MASK_MOD) {
      rings.rows.acquire();
      write_record(0, END);  // @publish-end-of-queries
      mbarrier_arrive(rings.rows.full());
      ++rings.rows.index;
    }
  }
}

// Consumer: iterator over the published tiles. `unmasked` are the queries that only the mask_mod may mask.
struct PublishedQTiles {
  RowRing& ring;
  Range unmasked;
  int head;
  int start;
  bool cut;

  __device__ PublishedQTiles(RowRing& ring, Range unmasked) : ring(ring), unmasked(unmasked) { next(); }
  __device__ bool valid() const { return start >= 0; }
  __device__ void next() {
    ring.wait();  // @wait-record-of-queries
    int record = ld_shared(ring.slot() + RECORD);
    head = ld_shared(ring.slot() + RECORD + 4), start = record & ~CUT, cut = record & CUT;
    if (record == END) {
      __syncwarp();  // all lanes have read the record, not only the lane that arrives
      ring.release();
    }
  }
  __device__ bool masked(int offset, int count) const {
    return cut || start + offset < unmasked.begin || start + offset + count > unmasked.end;
  }
};

// The tiles of queries that a consumer visits, with masked() for its own `keys`.
__device__ auto consumer_tiles(RowRing& ring, const Params& p, const Band& band, int kv_head, int kv_start,
                               Range keys) {
  if constexpr (MASK_MOD)
    return PublishedQTiles(ring, band.seen_by_all(keys.begin, keys.end));
  else
    return QTiles(p, band, kv_head, kv_start, keys);
}

// Zeroes rows of K and V past the end of the sequence, which may hold another sequence's data.
__device__ void clear_keys(const Sequence& sequence, int kv_start, unsigned int K_smem, unsigned int V_smem) {
  if constexpr (PACKED || KV_LENGTHS)
    if (kv_start + BLOCK_KV > sequence.kv_len) {  // @clear-keys-past-the-last
      auto counts = [&](int row) { return kv_start + row < sequence.kv_len; };
      clear_rows<BLOCK_KV, DIM>(K_smem, counts);
      clear_rows<BLOCK_KV, DIM_V>(V_smem, counts);
      sync_cleared_rows();
    }
}

// Whether rows of Q and dO of the current tile may belong to another sequence or see no key. Rows that no key of the
// block sees by position lie outside of the walk's visible queries; other options may hide all keys of any row.
template <typename Tiles>
__device__ bool has_unwanted_rows(const Tiles& tiles) {
  if constexpr (DENSE_MASK || BIAS || MODS)
    return true;
  else
    return tiles.start < tiles.visible.begin || tiles.start + BLOCK_Q > tiles.visible.end;
}

// Zeroes the rows of Q and dO for which wanted(row) is false. Their probabilities are 0, which does not cancel a NaN or
// an infinity.
template <typename Wanted>
__device__ void clear_queries(Wanted wanted, unsigned int Q_smem, unsigned int dO_smem) {
  bool unwanted = false;
#pragma unroll
  for (int n = 0; n < BLOCK_Q; n += WARP) unwanted |= !wanted(n + lane_id());
  if (__any_sync(0xFFFFFFFF, unwanted)) {  // @clear-rows
    clear_rows<BLOCK_Q, DIM>(Q_smem, wanted);
    clear_rows<BLOCK_Q, DIM_V>(dO_smem, wanted);
    sync_cleared_rows();
  }
}

// Waits for Q of the current tile, and clears its rows if need be.
template <typename Tiles>
__device__ void wait_Q(const Tiles& tiles, const Rings& rings, unsigned char* smem) {
  rings.Q.wait();  // @backward.wait-Q
  if (has_unwanted_rows(tiles)) {
    rings.rows.wait(), rings.dO.wait();  // @wait-rows-dO-to-clear
    const float* lse2 = rings.row_numbers(smem);
    clear_queries([&](int row) { return lse2[row] != infinity(); }, rings.Q.tile(), rings.dO.tile());
  }
}

// The asynchronous steps of the mainloop: each issues wgmma groups, or waits for the oldest ones in flight.
__device__ void issue_S(float (&S)[1][N][4], unsigned int K_smem, unsigned int Q_smem, const Consumer& consumer) {
  fence_operand(S);
  wgmma_fence();  // @fence-S
  scores<BLOCK_KV, BLOCK_Q, HEAD_DIM>(
      S, opaque(k_major_descriptor(K_smem + consumer.keys * PANEL_ROW)),
      opaque(k_major_descriptor(Q_smem + consumer.queries * PANEL_ROW)));  // @K-rows-of-consumer
}
__device__ void issue_dP(float (&dP)[1][N][4], unsigned int V_smem, unsigned int dO_smem, const Consumer& consumer) {
  fence_operand(dP);
  wgmma_fence();
  scores<BLOCK_KV, BLOCK_Q, HEAD_DIM_V>(dP, opaque(k_major_descriptor(V_smem + consumer.keys * PANEL_ROW)),
                                        opaque(k_major_descriptor(dO_smem + consumer.queries * PANEL_ROW)));
}
template <int PENDING>
__device__ void wait_S(float (&S)[1][N][4]) {
  wgmma_wait_group<PENDING>();
  fence_operand(S);
}
__device__ void wait_dP(float (&dP)[1][N][4]) {
  wgmma_wait_group<DEFERRED ? 1 : 0>();  // @wait-dP: DEFERRED: dK of the tile before may be in flight
  fence_operand(dP);
}
// Orders earlier accesses to the registers of dV, dQ and dK before their wgmmas. Nothing else accesses these registers
// until the wgmmas have been waited for, so one fence serves all three.
template <int N_V, int N_Q, int N_K>
__device__ void fence_gradients(float (&dV)[1][N_V][4], float (&dQ)[1][N_Q][4], float (&dK)[1][N_K][4], LeftOperand& P,
                                LeftOperand& dS) {
  fence_operand(dV), fence_operand(dQ), fence_operand(dK), P.fence(), dS.fence();
  wgmma_fence();  // @fence-gradients
}
// Issues dQ = dS K for 64 queries of tile dS^T and the columns of K from K_smem on.
template <int N_Q>
__device__ void issue_dQ(float (&dQ)[1][N_Q][4], unsigned int dS_smem, unsigned int K_smem, const Consumer& consumer) {
  constexpr int PANEL_BYTES = BLOCK_KV * PANEL_ROW;
  unsigned long long dS = mn_major_descriptor(dS_smem + consumer.dQ_rows / 64 * PANEL_BYTES, PANEL_BYTES),
                     K = mn_major_descriptor(K_smem, PANEL_BYTES);
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 16; ++k)
    wgmma<element, MN_MAJOR, MN_MAJOR>(dQ, dS + k * NEXT_16_ROWS, K + k * NEXT_16_ROWS, k > 0);
  wgmma_commit_group();
}
template <int PENDING, int N_V>
__device__ void wait_dV(float (&dV)[1][N_V][4], LeftOperand& P) {
  wgmma_wait_group<PENDING>();
  fence_operand(dV), P.fence();
}
template <int N_Q>
__device__ void wait_dQ(float (&dQ)[1][N_Q][4]) {
  wgmma_wait_group<1>();  // @wait-dQ
  fence_operand(dQ);
}
template <int N_K>
__device__ void wait_dK(float (&dK)[1][N_K][4]) {
  wgmma_wait_group<0>();  // @wait-dK
  fence_operand(dK);
}

// Adds this warp's 16 rows of dQ, from column `column`, to the workspace.
template <int N_Q>
__device__ void add_dQ(const DqSums& sums, const float (&dQ)[1][N_Q][4], int row, int column, unsigned char* dQ_smem) {
  if constexpr (DQ_IN_BULK) {
    // The fragments are staged in the layout of the workspace, in which those of 16 rows are contiguous.
    int bytes = 4 * 16 * min(8 * N_Q, DqSums::COLUMNS - column);
    if (lane_id() == 0) bulk_wait_group_read<0>();  // @wait-dQ-buffer
    __syncwarp();                                   // @waited-dQ-buffer
#pragma unroll
    for (int n = 0; n < N_Q; ++n)
      *(float4*)(dQ_smem + 512 * n + 16 * lane_id()) = make_float4(dQ[0][n][0], dQ[0][n][1], dQ[0][n][2], dQ[0][n][3]);
    fence_proxy_async();  // @fence-dQ
    __syncwarp();         // @written-dQ
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

// Adds this warp's 16 rows of dQ to the workspace; DQ_IN_ORDER: waits for this block's turn first.
template <int N_Q>
__device__ void add_dQ_in_turn(const Params& p, Rings& rings, const Sequence& sequence, const float (&dQ)[1][N_Q][4],
                               int head, int q_start, const Consumer& consumer, int column, unsigned char* dQ_smem) {
  int row = q_start + consumer.dQ_rows + 16 * consumer.warp;
  if constexpr (DQ_IN_ORDER) rings.turn.wait();  // @wait-turn
  if (row < sequence.q_len) add_dQ(DqSums(p, sequence, head), dQ, row, column, dQ_smem);
  if constexpr (DQ_IN_ORDER) {
    __syncwarp();  // @added-dQ: all lanes have added, not only the lane that arrives
    rings.turn.release();
  }
}

#include "../dq_turns.cuh"

// Epilogue: scales dK, rounds dK and dV, and stores this warp's 16 rows through K_smem and V_smem.
template <typename Share, int N_K, int N_V>
__device__ void store_dK_dV(float (&dK)[1][N_K][4], const float (&dV)[1][N_V][4], const Params& p,
                            const Sequence& sequence, unsigned char* K_smem, unsigned char* V_smem, int kv_head,
                            int kv_start, const Consumer& consumer, const Share& share) {
  const float scales[1][2] = {{(float)p.scale, (float)p.scale}};
  rescale(dK, scales);
  unsigned int dK_rounded[1][N_K / 2][4], dV_rounded[1][N_V / 2][4];
  round_fragments(dK_rounded, dK);
  round_fragments(dV_rounded, dV);
  element *dk = sequence.keys<element>(p.dk, kv_head), *dv = sequence.keys<element>(p.dv, kv_head);
  int row = consumer.row, first = kv_start + row;
  store_rows<BLOCK_KV, HEAD_DIM>(dk, p.dk, K_smem, dK_rounded, row, share.K, first, sequence.kv_rows);
  store_rows<BLOCK_KV, HEAD_DIM_V>(dv, p.dv, V_smem, dV_rounded, row, share.V, first, sequence.kv_rows);
  fence_proxy_async();
  __syncwarp();
}
