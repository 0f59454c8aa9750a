// Forward of fp8 (e4m3): one block per tile of BLOCK_Q queries of one head. grid (query tiles, heads, sequences)
//
// Warp-specialised: one thread of warpgroup 0, the producer, issues the TMA loads of Q, K and V^T; its warp classifies
// the tiles by a mask_mod, and stages the values that mods compute per key. Each consumer warpgroup computes 64
// queries and overlaps the PV wgmma of one tile with the softmax of the next.
#include "forward.cuh"
#include "fp8.cuh"

// Tensor maps; the box of each is one panel of a tile.
struct Maps {
  TensorMap q;
  TensorMap k;
  TensorMap vt;
#if TMA_STORE_O
  TensorMap out;
#endif
};

using Q_Ring = TileRing<1, BLOCK_Q, HEAD_DIM, 1, QK_PANEL>;
using K_Ring = TileRing<STAGES, BLOCK_KV, HEAD_DIM, 1, QK_PANEL>;
using VT_Ring = TileRing<STAGES, 8 * N_V, BLOCK_KV, 1, VT_PANEL, VT_PANEL>;

// Offsets in bytes. O, in bf16, is staged in the memory of Q.
struct SharedMemory {
  static constexpr int Q = 0, Q_END = tile_bytes(BLOCK_Q, HEAD_DIM, QK_PANEL);      // [BLOCK_Q][HEAD_DIM]
  static constexpr int O = 0, O_END = tile_bytes(BLOCK_Q, HEAD_DIM_V);              // [BLOCK_Q][HEAD_DIM_V]
  static constexpr int K = maximum(Q_END, O_END);                                   // STAGES x [BLOCK_KV][HEAD_DIM]
  static constexpr int VT = K + STAGES * tile_bytes(BLOCK_KV, HEAD_DIM, QK_PANEL);  // STAGES x [8 N_V][BLOCK_KV]
  static constexpr int Q_MBARRIERS = VT + STAGES * tile_bytes(8 * N_V, BLOCK_KV, VT_PANEL, VT_PANEL);
  static constexpr int K_MBARRIERS = Q_MBARRIERS + mbarrier_bytes(1);
  static constexpr int VT_MBARRIERS = K_MBARRIERS + mbarrier_bytes(STAGES);
  static constexpr int KV_RECORDS = VT_MBARRIERS + mbarrier_bytes(STAGES);
  static constexpr int KEY_VALUES = KV_RECORDS + RECORDS_BYTES;  // KeyValues [KEY_SLOTS][BLOCK_KV]
  static constexpr int BYTES = KEY_VALUES + KEY_VALUES_BYTES;
};

struct Rings {
  Q_Ring Q;
  K_Ring K;
  VT_Ring VT;
  unsigned int kv_records;
  Mod::KeyValues* staged_keys;

  __device__ Rings(unsigned char* generic, unsigned int smem)
      : Q(smem + SharedMemory::Q, smem + SharedMemory::Q_MBARRIERS),
        K(smem + SharedMemory::K, smem + SharedMemory::K_MBARRIERS),
        VT(smem + SharedMemory::VT, smem + SharedMemory::VT_MBARRIERS),
        kv_records(smem + SharedMemory::KV_RECORDS),
        staged_keys((Mod::KeyValues*)(generic + SharedMemory::KEY_VALUES)) {}
};

__device__ void load_tiles(const Maps& maps, Rings& rings, const Sequence& sequence, const Band& band, int head,
                           int kv_head, int tiles) {
  int batch = PACKED ? 0 : sequence.batch, vt_column = vt_start(sequence);
  for (int tile = tiles - 1 - blockIdx.x; tile >= 0; tile -= gridDim.x) {
    int q_start = tile * BLOCK_Q;
    if (issues_loads()) rings.Q.load(maps.q, sequence.q_start + q_start, head, batch, EVICT_FIRST);
    for (BlockKvTiles kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next()) {
      stage_keys(rings.K, rings.staged_keys, band, kv_tiles.start);
      if (!issues_loads()) continue;
      Box keys = sequence.key_box(kv_tiles.start);
      write_record(rings.K, rings.kv_records, kv_tiles);
      rings.K.load(maps.k, keys.row, kv_head, keys.batch, EVICT_LAST);
      rings.VT.load(maps.vt, 0, kv_head, batch, EVICT_LAST, vt_column + kv_tiles.start);
    }
    if (issues_loads()) publish_end(rings.K, rings.kv_records);
  }
}

// Issues S = Q K^T of a tile; wait_QK waits until at most PENDING groups are in flight and releases K.
__device__ void issue_QK(float (&S)[1][N][4], unsigned int Q_smem, const K_Ring& K) {
  K.wait();  // @wait-K
  fence_operand(S);
  wgmma_fence();  // @fence-S
  scores_fp8<BLOCK_Q, HEAD_DIM>(S, k_major_descriptor(Q_smem), opaque(k_major_descriptor(K.tile())));
}
template <int PENDING>
__device__ void wait_QK(float (&S)[1][N][4], K_Ring& K) {
  wgmma_wait_group<PENDING>();  // @wait-S-group
  fence_operand(S);
  K.release();
}

// O += P V, in parts of its columns: issue_PV issues the first part, finish_PV adds the last part.
__device__ void issue_PV(PartialSums<N_V>& PV, unsigned int (&P)[1][N / 4][4], const VT_Ring& VT) {
  VT.wait();  // @wait-VT
  PV.issue(P, VT.tile());
}
__device__ void finish_PV(float (&O)[1][N_V][4], PartialSums<N_V>& PV, unsigned int (&P)[1][N / 4][4], VT_Ring& VT) {
  PV.add(O, P);
  VT.release();
}
__device__ void compute_PV(float (&O)[1][N_V][4], PartialSums<N_V>& PV, unsigned int (&P)[1][N / 4][4], VT_Ring& VT) {
  issue_PV(PV, P, VT);
  PV.issue_others(O, P, VT.tile());
  finish_PV(O, PV, P, VT);
}

// First row of this warp in the tile. It is computed anew where it is used, because ptxas would spill a register that
// is live across the mainloop.
__device__ int warp_row() {
  return __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP - WARPGROUP / WARP, 0) * 16;
}

__device__ void compute(const Params& p, const Maps& maps, Rings& rings, unsigned char* smem, const Sequence& sequence,
                        Band band, int head, int tiles) {
  Score score(p, sequence, head);
  Dropout dropout(p, sequence.batch, head);
  Descales descales(p, sequence.batch, head / p.group);  // @descales-of-head
  score.scale = descales.scale(p, SCALE_IN_EXPONENT);
  float scale_log2 = log2_scale_of(score.scale);
  int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP - 1, 0);

  for (int tile = tiles - 1 - blockIdx.x; tile >= 0; tile -= gridDim.x) {
    int q_start = tile * BLOCK_Q, q_group = q_start + 64 * warpgroup;
    unsigned int Q_smem = rings.Q.tile() + 64 * warpgroup * PANEL_ROW;
    Softmax2 softmax[1][2];
    softmax[0][0].init(), softmax[0][1].init();
    float O_rmem[1][N_V][4] = {}, S_rmem[1][N][4], O_scale[1][2];
    unsigned int P_rmem[1][N / 4][4];
    PartialSums<N_V> PV;

    rings.Q.wait();  // @wait-Q
    auto kv_tiles = consumer_tiles(rings.K, rings.kv_records, band, head, q_start, {q_group, q_group + 64});
    // Modifies S and updates the row maxima; returns whether O must be rescaled by O_scale.
    auto update = [&] {
      read_staged_keys(rings.K, rings.staged_keys, band, score);
      if (ALWAYS_MASKED || kv_tiles.masked())
        modify<true>(S_rmem, score, band, q_start + warp_row(), kv_tiles.start);  // @mask-S
      else if constexpr (SCORE_MODIFIED)
        modify<false>(S_rmem, score, band, q_start + warp_row(), kv_tiles.start);
      return update_max(O_scale, softmax, S_rmem, scale_log2);
    };
    // Turns S into P.
    auto attend = [&] {
      exponentiate(S_rmem, softmax, scale_log2);
      if constexpr (DROPOUT) drop(S_rmem, dropout, q_start + warp_row(), kv_tiles.start);
    };

    if constexpr (SCORE_MODIFIED) {
      // The pass that modifies scores needs the registers of PV, so PV does not overlap with it.
      for (; kv_tiles.valid(); kv_tiles.next()) {
        issue_QK(S_rmem, Q_smem, rings.K);
        wait_QK<0>(S_rmem, rings.K);
        if (update()) rescale(O_rmem, O_scale);
        attend();
        round_to_fp8(P_rmem, S_rmem);
        compute_PV(O_rmem, PV, P_rmem, rings.VT);
      }
    } else if (kv_tiles.valid()) {
      // Prologue: P of the last tile of keys.
      issue_QK(S_rmem, Q_smem, rings.K);
      wait_QK<0>(S_rmem, rings.K);
      update();
      attend();
      round_to_fp8(P_rmem, S_rmem);

      // Mainloop: S of this tile and the first part of PV of the previous one are in flight together. The other parts
      // run under the exponentials.
      for (kv_tiles.next(); kv_tiles.valid(); kv_tiles.next()) {
        issue_QK(S_rmem, Q_smem, rings.K);
        issue_PV(PV, P_rmem, rings.VT);
        wait_QK<1>(S_rmem, rings.K);  // @wait-S
        bool rescales = update();
        PV.issue_others(O_rmem, P_rmem, rings.VT.tile());
        attend();
        finish_PV(O_rmem, PV, P_rmem, rings.VT);
        if (rescales) rescale(O_rmem, O_scale);
        round_to_fp8(P_rmem, S_rmem);
      }
      compute_PV(O_rmem, PV, P_rmem, rings.VT);
    }

    // Epilogue. The descales are read again, for the same reason; the shuffle hides from ptxas that they are the same.
    Descales read_again(p, sequence.batch, __shfl_sync(0xFFFFFFFF, head, 0) / p.group);  // @descales-of-epilogue
    int row = warp_row();
    float factors[1][2];
    finish(factors, softmax, p, sequence, dropout, head, q_start + row, true, read_again.scale(p, SCALE_IN_EXPONENT));
    factors[0][0] *= read_again.v, factors[0][1] *= read_again.v;                                   // @descale-O
    store_O(O_rmem, factors, p, maps, smem + SharedMemory::O, sequence, head, row, q_start + row);  // @store-O
    rings.Q.release();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward_fp8(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Rings rings(smem, smem_address(smem));
  if (threadIdx.x == 0) {
    rings.Q.init(), rings.K.init(), rings.VT.init();
    fence_mbarrier_init();  // @fence-mbarriers
  }
  __syncthreads();  // @barrier-after-mbarriers

  int head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  // Under a causal mask the last tiles see the most keys, so they start first.
  int tiles = (sequence.q_rows + BLOCK_Q - 1) / BLOCK_Q;
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && (PRODUCER_WARP || elect_one()))
      load_tiles(maps, rings, sequence, band, head, head / p.group, tiles);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    compute(p, maps, rings, smem, sequence, band, head, tiles);
  }
}
