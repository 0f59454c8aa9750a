// Split-KV attention on a KV cache: a block computes a run of KV tiles, which may belong to several output tiles (see
// split_kv.cuh). Rows are (query, head of the GQA group) pairs, so that each key is read once for all heads that share
// it. Every warp computes 16 keys of each tile, for all rows and columns, and the results of the warps are merged at
// the end of a part. The arithmetic of a row does not depend on the number of rows of its tile. parts.cuh divides the
// work. grid (blocks), or (CLUSTER x output tiles, sequences)
#include "kv_stages.cuh"
#if CLUSTER_MERGE
#include "../merge_row.cuh"
#endif
#include "packed_rows.cuh"

#if LATENT
#include "latent.cuh"
#else
// Lazy rescaling per row, not per warp: a row's reference depends only on its own scores, so that the other rows of the
// tile do not change the bits of its result.
__device__ void update_rows(float (&O)[M][Gemm::FRAGMENTS][4], Softmax2 (&softmax)[M][2], const float (&S)[M][N][4],
                            float scale_log2
#if STATISTICS
                            ,
                            RowStatistics (&statistics)[M][2], int kv_start
#endif
#if SCALED_KV
                            ,
                            float (&zeros)[M][1][4]
#endif
) {
  float factors[M][2];
  bool any = false;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -infinity();
#pragma unroll
      for (int n = 0; n < N; ++n) largest = max(largest, max(S[m][n][2 * half], S[m][n][2 * half + 1]));
      largest = row_max(largest);
      factors[m][half] = 1;
#if STATISTICS
      RowStatistics& row = statistics[m][half];
      Softmax2 previous = softmax[m][half];
      if constexpr (FIND_MAX) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) row.take(S[m][n][e], kv_start + column_of(n, e));
      }
#endif
      if (softmax[m][half].exceeds_reference(largest, scale_log2)) {  // @if-maximum-grows
        factors[m][half] = softmax[m][half].update(largest, scale_log2);
        any = true;
#if STATISTICS
        // @rescale-w-of-row
        if constexpr (ENTROPY)
          row.rescale(previous.reference, softmax[m][half].reference, factors[m][half], previous.l);
#endif
      }
    }
#if SCALED_KV
  if constexpr (CODES_OF_4_BITS) rescale(zeros, factors);
#endif
  if (__any_sync(0xFFFFFFFF, any)) rescale(O, factors);
}

#if CLUSTER_MERGE
constexpr int LSE_COLUMN = O_ROW - 1;  // @LSE_COLUMN: the padding of a row of O_smem holds the lse of the part
#if STATISTICS
constexpr int STATISTICS_COLUMN = LSE_COLUMN - 3;  // and its PartStatistics before it
#endif

// A row of the result of a part, in the shared memory of any block of the cluster.
struct ClusterRow {
  unsigned int address;

  __device__ float operator[](int column) const { return ld_shared_cluster(address + 4 * column); }
};

// Merges the parts of an output tile in the order of their keys. The rows are divided among all warps of the cluster,
// which read the parts in the shared memory of each block. No block leaves the second barrier, and overwrites its part,
// before all blocks have read it.
__device__ void merge_parts(const Params& p, const Part& part, int parts, const float* O_smem) {
  cluster_sync();  // @wait-parts-stored
  // @rows-of-rank
  for (int row = threadIdx.x / WARP * CLUSTER + cluster_ctarank(); row < BLOCK_Q; row += WARPS * CLUSTER) {
    if (part.query(p, row) >= part.sequence.q_len) break;
    unsigned int row_smem = smem_address(O_smem + row * O_ROW);
    merge_row(
        p, part.sequence, part.kv_head, part.first_row + row, parts,
        [&](int c) { return ClusterRow{mapa(row_smem, c)}[LSE_COLUMN]; },
        [&](int c) { return ClusterRow{mapa(row_smem, c)}; }
#if STATISTICS
        ,
        [&](int c) {
          ClusterRow result{mapa(row_smem, c)};
          return PartStatistics{{result[STATISTICS_COLUMN], __float_as_int(result[STATISTICS_COLUMN + 1])},
                                result[STATISTICS_COLUMN + 2]};
        }
#endif
    );  // @part-of-rank
  }
  cluster_sync();  // @wait-parts-read
}
#endif

#if STATISTICS
// The statistics of a row of the part from those of the warps; `softmax` is that of all warps together.
__device__ PartStatistics statistics_of(int row, const Softmax2& softmax, const float (*softmax_smem)[BLOCK_Q][2],
                                        const RowStatistics (*statistics_smem)[BLOCK_Q], float scale_log2,
                                        float scale) {
  RowStatistics total;
  total.init();
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    RowStatistics of_warp = statistics_smem[warp][row];
    Softmax2 own;
    own.init();
    own.update(softmax_smem[warp][row][0], scale_log2);
    of_warp.rescale(own.reference, softmax.reference, ex2_approx(own.reference - softmax.reference),
                    softmax_smem[warp][row][1]);  // @rescale-w-of-warp
    total.take(of_warp.top, of_warp.key);
    total.w += of_warp.w;
  }
  return {{total.top * scale, total.key}, softmax.entropy(total.w)};
}
#endif

// Merges the results of the warps, in the order of the warps, and stores the result of the part.
__device__ void store_part(const Params& p, const Part& part, float* O_smem, const float (*softmax_smem)[BLOCK_Q][2]
#if STATISTICS
                           ,
                           const RowStatistics (*statistics_smem)[BLOCK_Q]
#endif
) {
  Descales descales = part.descales(p);
  float scale = descales.scale(p, SCALE_IN_EXPONENT), scale_log2 = log2_scale_of(scale);
  constexpr int CHUNKS = PART_COLUMNS / 4;
  for (int n = threadIdx.x; n < BLOCK_Q * CHUNKS; n += THREADS) {
    int row = n / CHUNKS, column = 4 * (n % CHUNKS), i = part.query(p, row), head = part.head(p, row);
    if (i >= part.sequence.q_rows) return;
    float m = -infinity();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) m = max(m, softmax_smem[warp][row][0]);
    Softmax2 softmax;
    softmax.init();
    softmax.update(m, scale_log2);
    float O[4] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      Softmax2 other;
      other.init();
      other.update(softmax_smem[warp][row][0], scale_log2);
      float weight = other.m == -infinity() ? 0 : ex2_approx(other.reference - softmax.reference);
      softmax.l += weight * softmax_smem[warp][row][1];
      float4 o = *(const float4*)(O_smem + (warp * BLOCK_Q + row) * O_ROW + column);
      O[0] += weight * o.x, O[1] += weight * o.y, O[2] += weight * o.z, O[3] += weight * o.w;  // @sum-O-of-warps
    }
    Softmax2::Ending ending = softmax.end(scale_log2, SCALE_IN_EXPONENT ? scale : 1.0f);  // @scale-of-lse
#pragma unroll
    for (int e = 0; e < 4; ++e) O[e] *= ending.factor * descales.v;                       // @decode.descale-O
#if STATISTICS
    PartStatistics statistics;
    if (column == 0)
      statistics =
          statistics_of(row, softmax, softmax_smem, statistics_smem, scale_log2, SCALE_IN_EXPONENT ? scale : 1.0f);
#endif
    if (!part.whole) {
#if CLUSTER_MERGE
      // The result overwrites O of warp 0: no other thread reads these columns of it.
      float* result = O_smem + row * O_ROW;
      *(float4*)(result + column) = {O[0], O[1], O[2], O[3]};
      if (column == 0) result[LSE_COLUMN] = ending.lse;
#if STATISTICS
      if (column == 0) {
        result[STATISTICS_COLUMN] = statistics.top, result[STATISTICS_COLUMN + 1] = __int_as_float(statistics.key);
        result[STATISTICS_COLUMN + 2] = statistics.entropy;
      }
#endif
#else
      long long at = (long long)part.partial_result * BLOCK_Q + row;
      // If the lengths exceed those of the plan, the workspace has no room for the last parts: they are dropped.
#if PREFIX_PASS
      if (SPLIT_SIZE && part.partial_result >= p.prefix_results) continue;
      *(float4*)(p.prefix_out + at * PART_COLUMNS + column) = {O[0], O[1], O[2], O[3]};
      if (column == 0) p.prefix_lse[at] = ending.lse;
#if STATISTICS
      if (column == 0) ((PartStatistics*)p.prefix_statistics)[at] = statistics;
#endif
#else
      if (SPLIT_SIZE && part.partial_result >= p.partial_results) continue;
      *(float4*)(p.part_out + at * PART_COLUMNS + column) = {O[0], O[1], O[2], O[3]};
      if (column == 0) p.part_lse[at] = ending.lse;  // @store-lse-of-part
#if STATISTICS
      if (column == 0) ((PartStatistics*)p.part_statistics)[at] = statistics;
#endif
#endif
#endif
      continue;
    }
#if STATISTICS
    if (column == 0)
      statistics.store(p, part.sequence, head, i, entropy_with_sink(p, head, ending, statistics.entropy));
#endif
    // Rows past the last sequence of a packed batch have no sink.
    ending = i < part.sequence.q_len ? with_sink(p, head, ending.lse) : Softmax2::Ending{-infinity(), 0};
    element* out = part.sequence.queries<element>(p.out, head) + i * p.out.row + column;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + e < HEAD_DIM_V) store(out + e, O[e] * ending.factor);  // @normalise-O
    if (column == 0) part.sequence.queries<float>(p.lse, head)[i * p.lse.row] = ending.lse;
  }
}

// Stores O, row max and row sum of this warp where store_part reads them.
__device__ void store_warp(float* O_smem, float (*softmax_smem)[BLOCK_Q][2], Softmax2 (&softmax)[M][2],
                           const float (&O)[M][Gemm::FRAGMENTS][4]
#if STATISTICS
                           ,
                           RowStatistics (*statistics_smem)[BLOCK_Q], RowStatistics (&statistics)[M][2]
#endif
) {
  int warp = threadIdx.x / WARP;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = row_of(m, 2 * half);
      float l = row_sum(softmax[m][half].l);
      if (lane_id() % 4 == 0) softmax_smem[warp][row][0] = softmax[m][half].m, softmax_smem[warp][row][1] = l;
      Gemm::store_row(smem_address(O_smem + (warp * BLOCK_Q + row) * O_ROW), O[m], half);
#if STATISTICS
      statistics[m][half].reduce(4);
      statistics[m][half].w = row_sum(statistics[m][half].w);
      if (lane_id() % 4 == 0) statistics_smem[warp][row] = statistics[m][half];
#endif
    }
}

__device__ void attend(const Params& p, const Part& part, unsigned char* smem, KvStages::Shared& shared) {
  unsigned int Q_smem = smem_address(smem + SharedMemory::Q);
  int warp = threadIdx.x / WARP;
  float scale = part.descales(p).scale(p, SCALE_IN_EXPONENT), scale_log2 = log2_scale_of(scale);
  auto Q_lane = Tile<HEAD_DIM>::lane_of_A(0);
  auto K_lane = Gemm::K::lane_of_B();
  auto V_lane = Gemm::V::lane_of_X();
  PartTiles tiles(p, part);
  KvStages stages(p, part, tiles, smem_address(smem), shared);

  // Prologue.
  stages.reuse_memory();
#if PREFIX_PASS
  RowsOfGroup Q{(const element*)p.q.data, p, part, part.first_row, p.q.aligned};
#else
  PackedRows Q{part.sequence.queries<element>(p.q, part.kv_head * p.group), p.q, p.group, part.first_row, p.q.aligned};
#endif
  Loader<BLOCK_Q, HEAD_DIM>(0).load(Q_smem, Q, false, [&](int row) { return row < part.sequence.q_len * p.group; });
  cp_async_commit_group();
  stages.begin();
  stages.wait_for_Q();
  sync_consumers();
#if SCALED_KV
  float Q_sums[M][2], zeros_rmem[M][1][4] = {};
  if constexpr (CODES_OF_4_BITS) {
    sum_Q(Q_sums, Q_smem);
    sync_consumers();
  }
#endif
  Gemm::arrange_Q(Q_smem);  // @arrange-Q
  unsigned int Q_rmem[padded(HEAD_DIM) / 16][M][4];
  if constexpr (Q_IN_REGISTERS) load_fragments<M, HEAD_DIM>(Q_rmem, Q_smem, 0);

  Softmax2 softmax[M][2];
#pragma unroll
  for (int n = 0; n < 2 * M; ++n) softmax[n / 2][n % 2].init();
  float O_rmem[M][Gemm::FRAGMENTS][4] = {};
#if STATISTICS
  RowStatistics statistics[M][2];
  init(statistics);
#endif
#if SCALED_KV
  ScaledP scaled_P;
#endif

  // Mainloop.
  for (; tiles.valid(); tiles.next()) {
    unsigned int slot = stages.next(tiles.start);
    unsigned int K_smem = slot + KeySlot::K + 16 * warp * Gemm::K::ROW;
    unsigned int V_smem = slot + KeySlot::V + 16 * warp * Gemm::V::ROW;
    float S_rmem[M][N][4];
    if constexpr (Q_IN_REGISTERS)
      Gemm::scores(S_rmem, Q_rmem, K_smem, K_lane);
    else
      Gemm::scores(S_rmem, Q_smem, Q_lane, K_smem, K_lane);
#if SCALED_KV
    scale_products(S_rmem, slot, 16 * warp, Q_sums);
#endif
    if (tiles.masked())
      modify_rows<true>(S_rmem, p, part, scale, tiles.start + 16 * warp);
    else if constexpr (MODIFIED || DENSE_MASK)
      modify_rows<false>(S_rmem, p, part, scale, tiles.start + 16 * warp);
#if STATISTICS
    update_rows(O_rmem, softmax, S_rmem, scale_log2, statistics, tiles.start + 16 * warp
#if SCALED_KV
                ,
                zeros_rmem
#endif
    );
    if constexpr (ENTROPY)
      exponentiate<true>(S_rmem, softmax, statistics, scale_log2);
    else
      exponentiate(S_rmem, softmax, scale_log2);
#else
#if SCALED_KV
    update_rows(O_rmem, softmax, S_rmem, scale_log2, zeros_rmem);
#else
    update_rows(O_rmem, softmax, S_rmem, scale_log2);
#endif
    exponentiate(S_rmem, softmax, scale_log2);
#endif
    unsigned int P_rmem[M][N / 2][4];
#if SCALED_KV
    scaled_P.round(P_rmem, S_rmem, O_rmem, zeros_rmem, slot, 16 * warp);
#else
    round_fragments(P_rmem, S_rmem);
#endif
    Gemm::accumulate(O_rmem, P_rmem, V_smem, V_lane);
    stages.release();
  }

  // Epilogue.
#if SCALED_KV
  scaled_P.end(O_rmem, zeros_rmem);
#endif
  stages.end();
  float* O_smem = (float*)(smem + SharedMemory::O);
  auto softmax_smem = (float (*)[BLOCK_Q][2])(smem + SharedMemory::ROWS);
#if STATISTICS
  auto statistics_smem = (RowStatistics(*)[BLOCK_Q])(smem + SharedMemory::STATISTICS_ROWS);
  store_warp(O_smem, softmax_smem, softmax, O_rmem, statistics_smem, statistics);
  sync_consumers();
  store_part(p, part, O_smem, softmax_smem, statistics_smem);
#else
  store_warp(O_smem, softmax_smem, softmax, O_rmem);
  sync_consumers();
  store_part(p, part, O_smem, softmax_smem);
#endif
}
#endif

#if TMA_KV
extern "C" __global__ void __launch_bounds__(THREADS + WARP, 1)
    decode(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  KvRing ring(smem_address(smem + SharedMemory::SLOTS), smem_address(smem + SharedMemory::MBARRIERS));
  if (threadIdx.x == 0) {
    ring.init();
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < CONSUMERS)
    for_each_part(p, [&](const Part& part) { attend(p, part, smem, ring); });
  else
    for_each_part(p, [&](const Part& part) { load_tiles(p, part, maps, ring); });
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER_MERGE
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        decode(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  __shared__ int pages_smem[2][BLOCK_KV];
  unsigned char* smem = (unsigned char*)shared;
  auto attend_part = [&](const Part& part) { attend(p, part, smem, pages_smem); };
#if CLUSTER_MERGE
  for_each_part(p, attend_part, [&](const Part& part, int parts) {
    merge_parts(p, part, parts, (const float*)(smem + SharedMemory::O));
  });
#else
  for_each_part(p, attend_part);
#endif
}
#endif
