// Backward: one block per tile of BLOCK_KV keys of one key/value head, over all queries that see them, head after head
// of the GQA group. dK and dV accumulate in registers; the block's part of dQ is added to the workspace. grid (key
// tiles, key/value heads, sequences)
//
// Warp-specialised: in warpgroup 0 one thread issues the TMA loads of K, V, Q_i and dO_i, and one warp loads lse2 and
// delta; under a mask_mod their warps classify the tiles. The consumer warpgroups have 64 keys each. Score tiles are
// transposed: rows are keys, columns are queries. SHARES consumers have the same keys: each computes its part of the
// queries of S^T, and of the columns of dK and dV.
#include "backward.cuh"

// Mainloop of a consumer: the sums of dK and dV of its keys over all queries that see them, and the parts of dQ. The
// softmax overlaps dP; the addition to dQ overlaps dK. DEFERRED: the softmax also overlaps dK of the tile before, and
// the addition to dQ overlaps S of the next tile.
template <typename Share, int N_K, int N_V>
__device__ void sum_over_queries(float (&dK_rmem)[1][N_K][4], float (&dV_rmem)[1][N_V][4], const Params& p,
                                 Rings& rings, unsigned char* smem, const Sequence& sequence, const Band& band,
                                 int kv_head, int kv_start, unsigned int& dS_index, const Consumer& consumer,
                                 const Share& share) {
  float scale_log2 = log2_scale_of(p);
  constexpr int N_Q = Share::N_Q;
  int dQ_fragments = 4 * (consumer.dQ_rows / 64 * N_Q + share.Q) + consumer.warp * N_Q;  // before this warp's
  unsigned char* dQ_smem = smem + SharedMemory::dQ + 512 * dQ_fragments;
  unsigned int K_smem = rings.K.tile(), V_smem = rings.V.tile();
  Range keys = {kv_start + consumer.keys, kv_start + consumer.keys + 64};
  auto q_tiles = consumer_tiles(rings.rows, p, band, kv_head, kv_start, keys);
  UnfinishedTile before(rings.Q);
  float S_rmem[1][N][4];
  if (q_tiles.valid()) wait_Q(q_tiles, rings, smem);
  if (DEFERRED && q_tiles.valid()) {
    issue_S(S_rmem, K_smem, rings.Q.tile(), consumer);
    wait_S<0>(S_rmem);  // @wait-first-S
  }
#if S_AHEAD
  if (q_tiles.valid()) {
    issue_S(S_rmem, K_smem, rings.Q.tile(), consumer);
    wait_S<0>(S_rmem);  // @ahead.wait-first-S
  }
#endif
  while (q_tiles.valid()) {
    int head = q_tiles.head, q_start = q_tiles.start;
    Score score(p, sequence, head);
    Dropout dropout(p, sequence.batch, head);
    unsigned int Q_smem = rings.Q.tile(), dO_smem = rings.dO.tile();
    unsigned int dS_smem = rings.dS + dS_index % 2 * (SharedMemory::dS_BYTES + SharedMemory::P_BYTES);  // @dS-buffer
    unsigned int P_smem = dS_smem + SharedMemory::dS_BYTES;
    ++dS_index;

    float dP_rmem[1][N][4], dQ_rmem[1][N_Q][4];
#if !S_AHEAD
    if constexpr (!DEFERRED) issue_S(S_rmem, K_smem, Q_smem, consumer);
#endif
    rings.dO.wait();  // @wait-dO
    issue_dP(dP_rmem, V_smem, dO_smem, consumer);
    if constexpr (DEFERRED) before.issue_dK(dK_rmem, share, consumer);
    rings.rows.wait();  // @wait-rows
#if !S_AHEAD
    if constexpr (!DEFERRED) wait_S<1>(S_rmem);  // @backward.wait-S
#endif
    const float* lse2 = rings.row_numbers(smem) + consumer.queries;
    bool masked = q_tiles.masked(consumer.queries, QUERIES);  // @backward.mask-S
    differentiate<true, false>(S_rmem, dP_rmem, masked, score, band, dropout, scale_log2, {lse2, lse2 + BLOCK_Q},
                               q_start + consumer.queries, kv_start + consumer.row, [&] { wait_dP(dP_rmem); });
    __syncwarp();  // @read-rows: all lanes have read lse2 and delta, not only the lane that arrives
    rings.rows.release();
    if constexpr (DEFERRED) wait_dK(dK_rmem), before.release_Q();  // @deferred.release-Q

    LeftOperand P(S_rmem, P_smem, consumer), dS(dP_rmem, dS_smem, consumer);
    dS.store();  // dQ needs dS of all consumers
    fence_gradients(dV_rmem, dQ_rmem, dK_rmem, P, dS);
    unsigned int dO_panel = share.template panel<BLOCK_Q>(dO_smem, share.V);
    P.issue_or_store(dV_rmem, dO_panel);
    fence_proxy_async();                            // @fence-dS
    named_barrier_sync(COMMON_BARRIER, CONSUMERS);  // @barrier-after-dS
    P.issue_stored(dV_rmem, dO_panel);              // @issue-stored-dV
    issue_dQ(dQ_rmem, dS_smem, share.template panel<BLOCK_KV>(K_smem, share.Q), consumer);
    if constexpr (!DEFERRED) dS.issue(dK_rmem, share.template panel<BLOCK_Q>(Q_smem, share.K));  // @K-columns-of-share
    wait_dV<DEFERRED ? 1 : 2>(dV_rmem, P);                                                       // @wait-dV
    rings.dO.release();
#if S_AHEAD
    wait_dK(dK_rmem), dS.fence();  // @ahead.wait-dK
    fence_operand(dQ_rmem);
    auto Q_before = rings.Q;
    ++rings.Q.index;
    q_tiles.next();
    // After the last tile S is computed once more, because ptxas serialises wgmmas that a branch skips.
    if (q_tiles.valid()) wait_Q(q_tiles, rings, smem), Q_smem = rings.Q.tile();
    issue_S(S_rmem, K_smem, Q_smem, consumer);
    add_dQ_in_turn(p, rings, sequence, dQ_rmem, head, q_start, consumer, 8 * share.Q, dQ_smem);
    wait_S<0>(S_rmem);   // @ahead.wait-S
    Q_before.release();  // @ahead.release-Q
#else
    if constexpr (DEFERRED) {
      before.Q_smem = Q_smem, before.dS_smem = dS_smem;
      ++rings.Q.index;
      q_tiles.next();
      // After the last tile S is computed once more, because ptxas serialises wgmmas that a branch skips.
      if (q_tiles.valid()) wait_Q(q_tiles, rings, smem), Q_smem = rings.Q.tile();
      issue_S(S_rmem, K_smem, Q_smem, consumer);
    }
    wait_dQ(dQ_rmem);
    add_dQ_in_turn(p, rings, sequence, dQ_rmem, head, q_start, consumer, 8 * share.Q, dQ_smem);
    if constexpr (DEFERRED) {
      wait_S<0>(S_rmem);  // @deferred.wait-S
    } else {
      wait_dK(dK_rmem), dS.fence();  // @wait-dK-of-tile
      rings.Q.release();             // @release-Q
      q_tiles.next();
      if (q_tiles.valid()) wait_Q(q_tiles, rings, smem);
    }
#endif
  }
  if constexpr (DEFERRED) before.issue_dK(dK_rmem, share, consumer), wait_dK(dK_rmem), before.release_Q();
}

// Consumer: one warpgroup.
template <typename Share>
__device__ void compute(const Params& p, Rings& rings, unsigned char* smem, const Sequence& sequence, const Band& band,
                        const BlockIndex& block) {
  const Consumer consumer;
  const Share share(consumer);
  unsigned int dS_index = 0;

  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next()) {
    int kv_start = kv_tiles.kv_start, kv_head = block.kv_head;
    // Prologue: the block's K and V.
    float dK_rmem[1][Share::N_K][4] = {}, dV_rmem[1][Share::N_V][4] = {};
    rings.K.wait(), rings.V.wait();  // @wait-K-V
    clear_keys(sequence, kv_start, rings.K.tile(), rings.V.tile());

    sum_over_queries(dK_rmem, dV_rmem, p, rings, smem, sequence, band, kv_head, kv_start, dS_index, consumer, share);

    // Epilogue: dK and dV go through the shared memory of K and V, once all consumers' wgmmas have read them.
    named_barrier_sync(COMMON_BARRIER, CONSUMERS);  // @barrier-before-dK
    store_dK_dV(dK_rmem, dV_rmem, p, sequence, smem + SharedMemory::K, smem + SharedMemory::V, kv_head, kv_start,
                consumer, share);
    rings.K.release(), rings.V.release();
  }
  if constexpr (DQ_IN_BULK)
    if (lane_id() == 0) bulk_wait_group_read<0>();  // @wait-last-dQ
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Rings rings(smem_address(smem));
  if (threadIdx.x == 0) {
    rings.init();
    fence_mbarrier_init();  // @fence-mbarriers
    if constexpr (DQ_IN_ORDER) *(int*)(smem + SharedMemory::TILE_NUMBER) = atomicAdd(p.tile_counter, 1);
  }
  __syncthreads();  // @barrier-after-mbarriers

#if LONGEST_FIRST
  BlockIndex block(p);
  if (block.tile >= gridDim.x) return;
#else
  BlockIndex block(DQ_IN_ORDER ? *(int*)(smem + SharedMemory::TILE_NUMBER) : 0);
#endif
  Sequence sequence(p, block.batch);
  Band band(p, sequence);
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP) {
      if (MASK_MOD || elect_one()) load_tiles(p, maps, rings, sequence, band, block);
    } else if (threadIdx.x < 2 * WARP) {
      load_lse_delta(p, smem, rings, sequence, band, block);
    } else if (DQ_IN_ORDER && threadIdx.x < 3 * WARP) {
      take_turns(p, rings, sequence, band, block);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if (UNEQUAL_SHARES && Consumer().warpgroup > 0)
      compute<Share<true>>(p, rings, smem, sequence, band, block);  // @second-share
    else
      compute<Share<false>>(p, rings, smem, sequence, band, block);
  }
}
