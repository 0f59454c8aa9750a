// Backward: one block per tile of BLOCK_KV keys of one key/value head, over all queries that see them, head after head
// of the GQA group. dK and dV accumulate in registers; the block's part of dQ is added to the workspace. grid (key
// tiles, key/value heads, sequences)
//
// Warp-specialised: in warpgroup 0 one thread issues the TMA loads of K, V, Q_i and dO_i, and one warp loads lse2 and
// delta; under a mask_mod their warps classify the tiles. The consumer warpgroups have 64 keys each. Score tiles are
// transposed: rows are keys, columns are queries. SHARES consumers have the same keys: each computes its part of the
// queries of S^T, and of the columns of dK and dV.
#include "backward.cuh"

// Consumer: one warpgroup.
template <typename Share>
__device__ void compute(const Params& p, Rings& rings, unsigned char* smem, const Sequence& sequence, const Band& band,
                        const BlockIndex& block) {
  float scale_log2 = log2_scale_of(p);
  constexpr int N_K = Share::N_K, N_V = Share::N_V, N_Q = Share::N_Q;
  const Consumer consumer;
  const Share share(consumer);
  int dQ_fragments = 4 * (consumer.dQ_rows / 64 * N_Q + share.Q) + consumer.warp * N_Q;  // before this warp's
  unsigned char* dQ_smem = smem + SharedMemory::dQ + 512 * dQ_fragments;
  unsigned int dS_index = 0;

  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next()) {
    int kv_start = kv_tiles.kv_start, kv_head = block.kv_head;
    // Prologue: the block's K and V.
    Range keys = {kv_start + consumer.keys, kv_start + consumer.keys + 64};
    float dK_rmem[1][N_K][4] = {}, dV_rmem[1][N_V][4] = {};
    unsigned int K_smem = rings.K.tile(), V_smem = rings.V.tile();
    rings.K.wait(), rings.V.wait();  // @wait-K-V
    clear_keys(sequence, kv_start, K_smem, V_smem);

    // Mainloop: the softmax overlaps dP; the addition to dQ overlaps dK.
    for (auto q_tiles = consumer_tiles(rings.rows, p, band, kv_head, kv_start, keys); q_tiles.valid(); q_tiles.next()) {
      Score score(p, sequence, q_tiles.head);
      Dropout dropout(p, sequence.batch, q_tiles.head);
      unsigned int Q_smem = rings.Q.tile(), dO_smem = rings.dO.tile();
      unsigned int dS_smem = rings.dS + dS_index % 2 * (SharedMemory::dS_BYTES + SharedMemory::P_BYTES);  // @dS-buffer
      unsigned int P_smem = dS_smem + SharedMemory::dS_BYTES;
      ++dS_index;
      const float* lse2 = rings.row_numbers(smem);
      rings.Q.wait();  // @wait-Q
      if (has_unwanted_rows(q_tiles)) {
        rings.rows.wait(), rings.dO.wait();  // @wait-rows-dO-to-clear
        clear_queries([&](int row) { return lse2[row] != infinity(); }, Q_smem, dO_smem);
      }

      float S_rmem[1][N][4], dP_rmem[1][N][4], dQ_rmem[1][N_Q][4];
      issue_S(S_rmem, K_smem, Q_smem, consumer);
      rings.dO.wait();  // @wait-dO
      issue_dP(dP_rmem, V_smem, dO_smem, consumer);
      rings.rows.wait();  // @wait-rows
      wait_S(S_rmem);
      Rows rows = {lse2 + consumer.queries, lse2 + BLOCK_Q + consumer.queries};
      bool masked = q_tiles.masked(consumer.queries, QUERIES);  // @backward.mask-S
      differentiate<true, false>(S_rmem, dP_rmem, masked, score, band, dropout, scale_log2, rows,
                                 q_tiles.start + consumer.queries, kv_start + consumer.row, [&] { wait_dP(dP_rmem); });
      __syncwarp();  // @read-rows: all lanes have read lse2 and delta, not only the lane that arrives
      rings.rows.release();

      LeftOperand P(S_rmem, P_smem, consumer), dS(dP_rmem, dS_smem, consumer);
      dS.store();  // dQ needs dS of all consumers
      fence_gradients(dV_rmem, dQ_rmem, dK_rmem, P, dS);
      unsigned int dO_panel = share.panel<BLOCK_Q>(dO_smem, share.V);
      P.issue_or_store(dV_rmem, dO_panel);
      fence_proxy_async();                            // @fence-dS
      named_barrier_sync(COMMON_BARRIER, CONSUMERS);  // @barrier-after-dS
      P.issue_stored(dV_rmem, dO_panel);              // @issue-stored-dV
      issue_dQ(dQ_rmem, dS_smem, share.panel<BLOCK_KV>(K_smem, share.Q), consumer);
      dS.issue(dK_rmem, share.panel<BLOCK_Q>(Q_smem, share.K));  // @K-columns-of-share
      wait_dV_dQ(dV_rmem, P, dQ_rmem);
      rings.dO.release();
      add_dQ_in_turn(p, rings, sequence, dQ_rmem, q_tiles.head, q_tiles.start, consumer, 8 * share.Q, dQ_smem);
      wait_dK(dK_rmem, dS);  // @wait-dK
      rings.Q.release();     // @release-Q
    }

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

  BlockIndex block(DQ_IN_ORDER ? *(int*)(smem + SharedMemory::TILE_NUMBER) : 0);
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
