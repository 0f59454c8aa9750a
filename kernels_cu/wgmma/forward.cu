// Forward: a block has tiles of BLOCK_Q queries of one head, which and how many says work.cuh. grid (query tiles,
// heads, sequences), or (multiprocessors)
//
// The first warpgroup brings tiles of Q, K and V, a thread of it for all. Each of the others computes 64 queries: while
// its tensor core multiplies the probabilities of one tile with V, it works out those of the next.
#include "forward.cuh"
#include "work.cuh"

// The tensors, with the box of each that is one panel of a tile.
struct Maps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
#if O_BOXES
  TensorMap out;
#endif
};

// Whether scores take a pass of their own before the softmax, masked or not. It needs the registers of P, so the sums
// of the tile before are waited for.
constexpr bool PASS = MODIFIED || DENSE_MASK;

// Whether scores, probabilities and sums leave few registers. A sequence that is like all others is then read from the
// parameters again and again, for which a step takes some instructions more.
constexpr bool FEW_LEFT =
    6 * N + 4 * N_V > (THREADS == 384 ? 180 : 100) && !(PACKED || Q_LENGTHS || KV_LENGTHS || SHARD);

using Q_Ring = Ring<1, BLOCK_Q, HEAD_DIM>;
using K_Ring = Ring<STAGES, BLOCK_KV, HEAD_DIM, 1 + PAIRED>;
using V_Ring = Ring<STAGES, BLOCK_KV, HEAD_DIM_V, 1 + PAIRED>;

// In shared memory: Q, in whose place O leaves, tiles of K, tiles of V, mbarriers, and what Q is of.
struct Rings {
  static constexpr int Q_BYTES = panels_of(HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V) * Q_Ring::PANEL_BYTES;
  static constexpr int MBARRIERS = Q_BYTES + K_Ring::BYTES + V_Ring::BYTES;
  static constexpr int WORK = MBARRIERS + Q_Ring::MBARRIER_BYTES + K_Ring::MBARRIER_BYTES + V_Ring::MBARRIER_BYTES;

  Q_Ring Q;
  K_Ring K;
  V_Ring V;

  __device__ Rings(unsigned int smem)
      : Q(smem, smem + MBARRIERS),
        K(smem + Q_BYTES, smem + MBARRIERS + Q_Ring::MBARRIER_BYTES),
        V(smem + Q_BYTES + K_Ring::BYTES, smem + MBARRIERS + Q_Ring::MBARRIER_BYTES + K_Ring::MBARRIER_BYTES) {}
};

// Queries are read once, keys by every tile of queries. The first keys of a tile are asked for before its queries,
// whose place is taken until the last result has left it. What is to be done stands beside the queries: who waits for
// them finds it.
__device__ void produce(const Params& p, const Maps& maps, Rings& rings, Work& announced) {
  Work work(p);
  for (; work.tile >= 0; work.next(p)) {
    const Sequence& sequence = work.sequence;
    int q_start = work.tile * BLOCK_Q, batch = PACKED ? 0 : sequence.batch, kv_head = work.head / p.group;
    Visits visits(Band(p, sequence), q_start);
    auto bring_keys = [&](int kv_start) {
      rings.K.fill(maps.k, sequence.kv_start + kv_start, kv_head, batch, EVICT_LAST);
      rings.V.fill(maps.v, sequence.kv_start + kv_start, kv_head, batch, EVICT_LAST);
    };
    if (visits.last >= visits.first) bring_keys(visits.last);
    rings.Q.claim();
    announced = work;
    rings.Q.fill(maps.q, sequence.q_start + q_start, work.head, batch, EVICT_FIRST);
    for (int kv_start = visits.last - BLOCK_KV; kv_start >= visits.first; kv_start -= BLOCK_KV) bring_keys(kv_start);
  }
  rings.Q.claim();
  announced.tile = -1;
  arrive(rings.Q.full());
}

__device__ void consume(const Params& p, const Maps& maps, Rings& rings, unsigned char* smem, const Work& announced) {
  float unit = unit_of(p);
  int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP - 1, 0);
  int row = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP - WARPGROUP / WARP, 0) * 16;  // of this warp in the tile
  if (warpgroup == CONSUMERS / WARPGROUP - 1) pass_turn(warpgroup);

  do {
    rings.Q.wait();
    if (announced.tile < 0) break;
    const Sequence sequence = FEW_LEFT ? Sequence(p, announced.sequence.batch) : announced.sequence;
    int head = announced.head, q_start = announced.tile * BLOCK_Q, q_group = q_start + 64 * warpgroup;
    Band band(p, sequence);
    Score score(p, sequence, head);
    Dropout dropout(p, sequence.batch, head);
    Visits visits(band, q_start);
    Range unmasked = band.sees_all(q_group, q_group + 64);
    unsigned int Q_smem = rings.Q.tile() + 64 * warpgroup * PANEL_ROW;
    Softmax2 softmax[1][2];
    softmax[0][0].init(), softmax[0][1].init();
    float O_rmem[1][N_V][4] = {}, S_rmem[1][N][4], moved[1][2];
    unsigned int P_rmem[1][N / 2][4];

    // S becomes probabilities; whether O must be rescaled by `moved`.
    auto probabilities = [&](int kv_start) {
      if (PASS || kv_start < unmasked.begin || kv_start + BLOCK_KV > unmasked.end)
        modify<true>(S_rmem, score, band, q_start + row, kv_start);
      bool moves = follow(moved, softmax, S_rmem, unit);
      exponentiate(S_rmem, softmax, unit);
      if constexpr (DROPOUT) drop(S_rmem, dropout, q_start + row, kv_start);
      return moves;
    };
    // Both products begin and are waited for elsewhere; in between they use their registers and tiles.
    auto begin_scores = [&] {
      rings.K.wait();
      pin(S_rmem);
      begin_products();
      scores<BLOCK_Q, BLOCK_KV, HEAD_DIM>(S_rmem, Q_smem, rings.K.tile());
    };
    auto begin_sums = [&] {
      rings.V.wait();
      begin_products();
      accumulate(O_rmem, P_rmem, rings.V.tile());
    };
    auto end_scores = [&] {
      pin(S_rmem);
      rings.K.release();
    };
    auto end_sums = [&] {
      wait_for_products<0>();
      pin(O_rmem), pin(P_rmem);
      rings.V.release();
    };

    if (visits.last >= visits.first) {
      begin_scores();
      wait_for_products<0>();
      end_scores();
      probabilities(visits.last);
      round_fragments(P_rmem, S_rmem);
      if constexpr (PACKED || KV_LENGTHS)
        if (visits.last + BLOCK_KV > sequence.kv_len) {
          rings.V.wait();
          clear_rows<BLOCK_KV, HEAD_DIM_V>(rings.V.tile(),
                                           [&](int row) { return visits.last + row < sequence.kv_len; });
          end_of_clearing();
        }
      for (int kv_start = visits.last - BLOCK_KV; kv_start >= visits.first; kv_start -= BLOCK_KV) {
        pin(O_rmem), pin(P_rmem);
        wait_for_turn(warpgroup);
        begin_scores();
        begin_sums();
        pass_turn(warpgroup);
        if constexpr (PASS) end_sums();
        wait_for_products<1>();
        end_scores();
        bool moves = probabilities(kv_start);
        if constexpr (!PASS) end_sums();
        if (moves) rescale(O_rmem, moved);
        round_fragments(P_rmem, S_rmem);
      }
      pin(O_rmem), pin(P_rmem);
      begin_sums();
      end_sums();
    }

    float factors[1][2];
    finish(factors, softmax, p, sequence, dropout, head, q_start + row, true);
    store_O(O_rmem, factors, p, maps, smem, sequence, head, row, q_start + row);
    rings.Q.release();
  } while (PERSISTENT);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if PAIRED
    __cluster_dims__(2, 1, 1)
#endif
        forward(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Rings rings(shared_address(smem));
  if (threadIdx.x == 0) {
    rings.Q.init(), rings.K.init(), rings.V.init();
    fence_mbarriers();
  }
#if PAIRED
  wait_for_cluster();
#else
  __syncthreads();
#endif

  Work& announced = *(Work*)(smem + Rings::WORK);
  if (threadIdx.x < WARPGROUP) {
    fewer_registers<FEW_REGISTERS>();
    if (threadIdx.x < WARP && elected()) produce(p, maps, rings, announced);
  } else {
    more_registers<MANY_REGISTERS>();
    consume(p, maps, rings, smem, announced);
  }
#if PAIRED
  // Until the other block will neither bring keys here nor say that it has read its own.
  wait_for_cluster();
#endif
}
