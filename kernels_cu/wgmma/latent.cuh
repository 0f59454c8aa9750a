// The decode of values that are the first columns of the keys (multi-head latent attention) on wgmma. Rows of O are too
// long for the registers of a warpgroup, so two consumer warpgroups have the same 64 rows, and each half of the columns
// of O. They take turns at the tiles of keys: the one whose turn it is computes S and its softmax, and passes P and the
// row max to the other, because both accumulate the values (PV n: O += Pn Vn):
//
//   warpgroup 0    S0, softmax | PV 0      | S2 + PV 1, softmax | PV 2      | ..
//   warpgroup 1                | S1 + PV 0, softmax | PV 1      | S3 + PV 2, softmax | ..
//
// S of a tile and the values of the tile before, which the other has passed, are in flight together, and those values
// during the softmax. A producer warp loads a tile once for both products, panel by panel, and loads a panel again as
// soon as both warpgroups have finished with it. A row's reference depends only on its own scores, as in
// mma/latent.cuh.
#pragma once
#include "../mma/page_box.cuh"
#include "../mma/part_row.cuh"
#include "tile.cuh"

constexpr int M = 1;             // score fragments of a warp, by rows
constexpr int N = BLOCK_KV / 8;  // and by columns
#include "../mma/packed_rows.cuh"

constexpr int PANELS = panels_of(HEAD_DIM), HALF = HEAD_DIM_V / PANEL / 2;  // panels of a tile, and of its values half
constexpr int N_V = 8 * HALF;                                               // fragments of O of a warpgroup, by columns
constexpr int PANEL_BYTES = BLOCK_KV * PANEL_ROW;
// Registers per thread: O of more than 256 columns needs those of the producer, and has no masks for it to walk.
constexpr bool WIDE = HEAD_DIM_V > 256;
constexpr int PRODUCER_REGISTERS = WIDE ? 24 : 40, CONSUMER_REGISTERS = WIDE ? 240 : 232;
static_assert(BLOCK_Q == 64 && BLOCK_KV == 64 && CONSUMERS == 2 * WARPGROUP, "two warpgroups share the rows");
static_assert(HEAD_DIM_V % (2 * PANEL) == 0, "both warpgroups have whole panels of values");

// Named barriers.
constexpr int WARPGROUP_BARRIER = 2;  // + n: of warpgroup n
constexpr int P_BARRIER = 4;          // + n: P and the row max of warpgroup n are stored

// Offsets in bytes.
struct SharedMemory {
  static constexpr int Q = 0;                                       // [BLOCK_Q][HEAD_DIM]
  static constexpr int KEYS = Q + tile_bytes(BLOCK_Q, HEAD_DIM);    // STAGES x [BLOCK_KV][HEAD_DIM]
  static constexpr int P = KEYS + STAGES * PANELS * PANEL_BYTES;    // [BLOCK_Q][BLOCK_KV]
  static constexpr int MAXIMA = P + tile_bytes(BLOCK_Q, BLOCK_KV);  // floats [BLOCK_Q]: row max
  static constexpr int SUMS = MAXIMA + 4 * BLOCK_Q;                 // floats [2][BLOCK_Q]: row sums
  static constexpr int MBARRIERS = SUMS + 8 * BLOCK_Q;              // of the panels of all slots
  static constexpr int BYTES = MBARRIERS + mbarrier_bytes(STAGES * PANELS);
};

// Ring of STAGES slots of tiles; each panel of a slot has a full and an empty mbarrier.
struct KeyRing {
  unsigned int smem;
  unsigned int index = 0;  // of a tile

  __device__ KeyRing(unsigned int smem) : smem(smem) {}
  __device__ void init() const {
    for (int n = 0; n < STAGES * PANELS; ++n) {
      mbarrier_init(smem + SharedMemory::MBARRIERS + 16 * n, 1);
      mbarrier_init(smem + SharedMemory::MBARRIERS + 16 * n + 8, CONSUMERS / WARP);
    }
  }
  __device__ KeyRing after(int tiles) const {
    KeyRing ring = *this;
    ring.index += tiles;
    return ring;
  }
  __device__ unsigned int parity() const { return index / STAGES % 2; }
  __device__ unsigned int panel(int n) const {
    return smem + SharedMemory::KEYS + (index % STAGES * PANELS + n) * PANEL_BYTES;
  }
  __device__ unsigned int full(int n) const {
    return smem + SharedMemory::MBARRIERS + 16 * (index % STAGES * PANELS + n);
  }
  __device__ unsigned int empty(int n) const { return full(n) + 8; }

  __device__ void acquire(int n) const { mbarrier_wait(empty(n), parity() ^ 1); }  // @acquire-panel
  __device__ void wait(int n) const { mbarrier_wait(full(n), parity()); }          // @wait-panel
  // Signals that this warp has finished with panels: those of the values that warpgroup `of` accumulates, or all
  // others.
  __device__ void release(int of, bool values) const {
    int n = lane_id();
    if (n < PANELS && (n / HALF == of) == values) mbarrier_arrive(empty(n));  // @release-panels
  }
};

// Tensor map of the keys: a box has the columns of a panel, and those keys of a tile that are on one page.
struct Maps {
  TensorMap k;
};

// Producer warp: loads the tiles of a part.
__device__ inline void load_tiles(const Params& p, const Part& part, const Maps& maps, KeyRing& ring) {
  PageBox box(part);
  PartTiles tiles(p, part);
  int block = box.look_up(tiles.start);
  while (tiles.valid()) {
    int start = tiles.start, current = block;
    tiles.next();
    block = box.look_up(tiles.start);
    int row_in_block = box.row_in_block(start);
#pragma unroll 1
    for (int n = 0; n < PANELS; ++n) {
      ring.acquire(n);
      if (lane_id() == 0) mbarrier_arrive_expect_tx(ring.full(n), PANEL_BYTES);
      __syncwarp();
      if (box.exists())
        tma_load(ring.panel(n) + box.row * PANEL_ROW, maps.k, ring.full(n), n * PANEL, row_in_block, part.kv_head,
                 current);  // @load-panel
    }
    ++ring.index;
  }
}

// Loads Q into panels. Rows past the end, and columns past those of a row, are zeros.
__device__ void load_Q(const Params& p, const Part& part, unsigned int smem) {
  constexpr int CHUNKS = 8 * PANELS, LANES = 8;
  PackedRows Q{part.sequence.queries<element>(p.q, part.kv_head * p.group), p.q, p.group, part.first_row, p.q.aligned};
#pragma unroll
  for (int row = threadIdx.x / LANES; row < BLOCK_Q; row += CONSUMERS / LANES) {
    bool valid = part.first_row + row < part.sequence.q_len * p.group;
    const element* from = valid ? Q(row) : Q.data;
#pragma unroll
    for (int chunk = threadIdx.x % LANES; chunk < CHUNKS; chunk += LANES) {
      int bytes = valid ? min(max(2 * HEAD_DIM - 16 * chunk, 0), 16) : 0;
      cp_async<16>(smem + swizzled_offset<BLOCK_Q>(row, chunk), bytes ? from + 8 * chunk : Q.data, bytes);
    }
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  fence_proxy_async();  // @fence-Q
}

// A consumer warpgroup.
struct Warpgroup {
  int number;
  int row;  // the first of this warp's 16 rows

  __device__ Warpgroup()
      : number(__shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP, 0)),
        row(__shfl_sync(0xFFFFFFFF, threadIdx.x / WARP % 4 * 16, 0)) {}
  __device__ int other() const { return number ^ 1; }
};

// Zeroes the values outside the part: a probability of 0 does not cancel a NaN.
__device__ void clear_values(const KeyRing& ring, const Warpgroup& warpgroup, int start, Range keys) {
  if (start >= keys.begin && start + BLOCK_KV <= keys.end) return;  // @clear-hidden-values
  constexpr int CHUNKS = PANEL_ROW / 16;
  const unsigned int zeros[4] = {};
  for (int panel = 0; panel < 2 * HALF; ++panel) ring.wait(panel);
  for (int n = threadIdx.x % WARPGROUP; n < BLOCK_KV * CHUNKS; n += WARPGROUP)
    for (int panel = 0; panel < 2 * HALF && !keys(start + n / CHUNKS); ++panel)
      st_shared_v4(ring.panel(panel) + 16 * n, zeros);
  fence_proxy_async();  // @fence-zeros
  named_barrier_sync(WARPGROUP_BARRIER + warpgroup.number, WARPGROUP);
}

// Issues S = Q K^T, panel by panel as they arrive.
__device__ void issue_QK(float (&S)[M][N][4], unsigned int Q_smem, const KeyRing& ring) {
  unsigned long long Q = k_major_descriptor(Q_smem), K = k_major_descriptor(ring.panel(0));
  fence_operand(S);
#pragma unroll
  for (int k = 0; k < round_up(HEAD_DIM, 16) / 16; ++k) {
    int at = k / 4 * (PANEL_BYTES >> 4) + k % 4 * NEXT_16_COLUMNS;
    if (k % 4 == 0) {
      ring.wait(k / 4);
      wgmma_fence();  // ptxas would insert it after the branches of a wait
    }
    wgmma<element>(S, Q + at, K + at, k > 0);
  }
  wgmma_commit_group();
}

// Issues O += P V, the columns of a warpgroup.
__device__ void issue_PV(float (&O)[M][N_V][4], unsigned int (&P)[M][N / 2][4], const KeyRing& ring,
                         const Warpgroup& warpgroup) {
  fence_operand(O), fence_operand(P);
  wgmma_fence();
  accumulate<0, N / 2>(O, P, ring.panel(warpgroup.number * HALF));  // @columns-of-warpgroup
}

// Updates the references of rows whose row max has grown: each row decides for itself, so that the other rows change
// none of its bits. Returns whether factors must rescale O.
__device__ bool update_rows(float (&factors)[M][2], Softmax2 (&softmax)[M][2], const float (&largest)[2],
                            float scale_log2) {
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factors[0][half] = 1;
    if (softmax[0][half].exceeds_reference(largest[half], scale_log2)) {  // @if-row-of-warp-grows
      factors[0][half] = softmax[0][half].update(largest[half], scale_log2);
      grows = true;
    }
  }
  return __any_sync(0xFFFFFFFF, grows);
}

// This warpgroup's part of the mainloop.
struct Mainloop {
  const Params& p;
  const Part& own;  // the rows of this warp
  const Warpgroup& warpgroup;
  KeyRing& ring;
  unsigned char* smem;
  float scale;
  float scale_log2;
  Softmax2 softmax[M][2];
  float O[M][N_V][4] = {};
  float S[M][N][4];
  unsigned int P[M][N / 2][4];

  __device__ unsigned int P_smem() const { return smem_address(smem + SharedMemory::P); }
  __device__ float* row_maxima() const { return (float*)(smem + SharedMemory::MAXIMA) + warpgroup.row + row_of(0, 0); }

  // Issues S of a tile of this warpgroup.
  __device__ void issue_scores(const KeyRing& tile) { issue_QK(S, smem_address(smem + SharedMemory::Q), tile); }
  // Waits until the values of a tile have been added to O, if there is one.
  __device__ void wait_values(const KeyRing& tile, bool exists = true) {
    wgmma_wait_group<0>();  // @wait-values
    fence_operand(O), fence_operand(P);
    if (exists) tile.release(warpgroup.number, true);
  }
  // Takes P and the row max of a tile of the other warpgroup.
  __device__ void take_P() {
    named_barrier_sync(P_BARRIER + warpgroup.other(), CONSUMERS);  // @wait-P
    float factors[M][2], largest[2] = {row_maxima()[0], row_maxima()[8]};
    if (update_rows(factors, softmax, largest, scale_log2)) rescale(O, factors);  // @rescale-passed
    int lane = lane_id();
#pragma unroll
    for (int k = 0; k < N / 2; ++k)
      ldmatrix_x4(P[0][k], P_smem() + swizzled_offset<BLOCK_Q>(warpgroup.row + lane % 16, 2 * k + lane / 16));
  }
  // Issues the values of a tile of the other warpgroup.
  __device__ void issue_passed_values(const KeyRing& tile) {
#pragma unroll
    for (int n = 0; n < HALF; ++n) tile.wait(warpgroup.number * HALF + n);
    issue_PV(O, P, tile, warpgroup);
    tile.release(warpgroup.number, false);  // @release-unread
  }
  // Computes P of a tile of this warpgroup, whose S is complete, passes it to the other, and adds its values to O.
  // Those of the tile before are added during the softmax; FIRST: there is none.
  template <bool FIRST>
  __device__ void issue_own_values(const KeyRing& tile, const PartTiles& tiles, const KeyRing& passed) {
    fence_operand(S);
    tile.release(warpgroup.number, false);
    if (tiles.masked())
      modify_rows<true>(S, p, own, scale, tiles.start);
    else if constexpr (MODIFIED || DENSE_MASK)
      modify_rows<false>(S, p, own, scale, tiles.start);
    float factors[M][2], largest[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < N; ++n) largest[half] = max(largest[half], max(S[0][n][2 * half], S[0][n][2 * half + 1]));
      largest[half] = row_max(largest[half]);
    }
    bool rescales = update_rows(factors, softmax, largest, scale_log2);
    exponentiate(S, softmax, scale_log2);
    pmevent_if_negative(softmax[0][0].l + softmax[0][1].l);  // ptxas then moves no exponential behind the wait
    if constexpr (!FIRST) wait_values(passed);
    round_fragments(P, S);
    // This warp has read P of the tile before, whose memory it reuses.
    store_fragments<BLOCK_Q>(P_smem(), P, warpgroup.row, 0);
    if (lane_id() % 4 == 0) row_maxima()[0] = softmax[0][0].m, row_maxima()[8] = softmax[0][1].m;  // @pass-maxima
    named_barrier_arrive(P_BARRIER + warpgroup.number, CONSUMERS);                                 // @pass-P
    if (rescales) rescale(O, factors);                                                             // @rescale-own
    issue_PV(O, P, tile, warpgroup);
  }

  __device__ void run(PartTiles& tiles) {
    softmax[0][0].init(), softmax[0][1].init();
    bool adds = false;  // the values of the tile before are being added to O
    if (warpgroup.number == 0 && tiles.valid()) {
      clear_values(ring, warpgroup, tiles.start, own.keys);
      issue_scores(ring);
      wgmma_wait_group<0>();
      issue_own_values<true>(ring, tiles, ring);
      tiles.next();
      ++ring.index, adds = true;
    }
    // From here on a tile of the other warpgroup comes first.
    bool passed = tiles.valid();
    if (passed) tiles.next();
    while (tiles.valid()) {
      KeyRing mine = ring.after(1);
      wait_values(ring.after(-1), adds);  // the other may need their panels for its next tile before it can pass P
      clear_values(mine, warpgroup, tiles.start, own.keys);
      take_P();
      issue_scores(mine);
      issue_passed_values(ring);
      wgmma_wait_group<1>();  // @wait-S
      issue_own_values<false>(mine, tiles, ring);
      ring.index += 2, adds = true;
      tiles.next();
      passed = tiles.valid();
      if (passed) tiles.next();
    }
    if (passed) {
      wait_values(ring.after(-1), adds);
      take_P();
      issue_passed_values(ring);
      ++ring.index, adds = true;
    }
    wait_values(ring.after(-1), adds);
  }

  // Stores the result of a part: this warpgroup's columns. The sum of a row is that of both warpgroups, in their order.
  __device__ void store(const Part& part) {
    float* sums = (float*)(smem + SharedMemory::SUMS) + warpgroup.row + row_of(0, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = row_sum(softmax[0][half].l);
      if (lane_id() % 4 == 0) sums[warpgroup.number * BLOCK_Q + 8 * half] = l;
    }
    named_barrier_sync(COMMON_BARRIER, CONSUMERS);  // @wait-sums-of-warpgroups
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax[0][half].l = sums[8 * half] + sums[BLOCK_Q + 8 * half];
      int i = own.query(p, row_of(0, 2 * half)), head = own.head(p, row_of(0, 2 * half));
      if (i >= part.sequence.q_rows) continue;
      PartRow result(p, part, warpgroup.row + row_of(0, 2 * half), i, head,
                     softmax[0][half].end(scale_log2, SCALE_IN_EXPONENT ? scale : 1.0f),
                     warpgroup.number == 0 && lane_id() % 4 == 0);
      if (!result.exists()) continue;
#pragma unroll
      for (int n = 0; n < N_V; ++n)
        result.store(64 * HALF * warpgroup.number + column_of(n, 0), O[0][n][2 * half],
                     O[0][n][2 * half + 1]);  // @columns-of-result
    }
  }
};

// Consumers: computes a part.
__device__ void attend(const Params& p, const Part& part, unsigned char* smem, KeyRing& ring) {
  Warpgroup warpgroup;
  Part own = part;
  own.first_row += warpgroup.row;
  float scale = part.descales(p).scale(p, SCALE_IN_EXPONENT);
  // No product of the part before reads Q: store() waits for both warpgroups.
  load_Q(p, part, smem_address(smem + SharedMemory::Q));
  named_barrier_sync(COMMON_BARRIER, CONSUMERS);  // @wait-Q
  PartTiles tiles(p, part);
  Mainloop mainloop{p, own, warpgroup, ring, smem, scale, log2_scale_of(scale)};
  mainloop.run(tiles);
  mainloop.store(part);
}
