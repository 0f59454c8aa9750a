// Steps that attention_weights.cuh, top_weights.cuh and key_importance.cuh share: probabilities from scores and a given
// lse. These kernels read q, k and lse; there is no v. An engine includes them after its ScoreTile (simt/weights.cuh,
// mma/weights.cuh).
#pragma once
#include "score.cuh"
#include "tile_pages.cuh"
#include "walk.cuh"

__device__ inline bool is_visible(const Score& score, const Band& band, int i, int j) {
  bool seen = band.sees(i, j);
  if constexpr (MASK_MOD) seen = seen && band.mod_sees(score.head, i, j);
  if constexpr (DENSE_MASK) seen = seen && DenseMask::sees(score.p, band, score.batch, score.head, i, j);
  return seen;
}

// Turns q.k into scores; keys that a query does not see get -inf. place(r, c) is (query, key).
template <int ROWS, int COLS, typename Place>
__device__ void modify(real (&S)[ROWS][COLS], const Score& score, const Band& band, Place place) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      int2 at = place(r, c);
      real derivative;
      bool seen = at.x >= 0 && is_visible(score, band, at.x, at.y);
      S[r][c] = seen ? score.apply(S[r][c], at.x, at.y, derivative) : -infinity();
    }
}

// The probability of a score. lse is an input: it may be NaN, or -inf for a row that sees no key.
__device__ inline real probability(real s, real lse) {
  return s == -infinity() ? 0 : exp(s - (lse == -infinity() ? infinity() : lse));  // @weights.probability
}

// The lse of query i; -inf outside of the sequence.
__device__ inline real lse_of(const Params& p, const Sequence& sequence, int head, int i) {
  return i >= 0 && i < sequence.q_len ? sequence.queries<real>(p.lse, head)[i * p.lse.row] : -infinity();
}

// Loads the keys of a tile. The caller ensures that no thread still reads K_smem.
__device__ inline void load_keys(OperandAddress K_smem, const Params& p, const Sequence& sequence, int kv_head,
                                 TilePages& pages, int kv_start, Range visible) {
  Range readable = sequence.readable(visible);
  pages.look_up(kv_start, readable);
  pages.store();
  __syncthreads();
  auto rows = sequence.key_rows<element>(p.k, kv_head);
  load_operand<BLOCK_KV>(K_smem, rows.tile(kv_start, pages.stored()), rows.stride, readable);
}
