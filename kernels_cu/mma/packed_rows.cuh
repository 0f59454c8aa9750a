// Rows of a tile that are (query, head) pairs of a GQA group: their addresses, and their masks and scores, of which a
// warp has M x N fragments.
#pragma once
#include "parts.cuh"

// Addresses of the rows of a tile of Q under GQA packing.
struct PackedRows {
  static constexpr bool EQUIDISTANT = false;

  const element* data;  // query 0 of the group's first head
  const Operand& x;
  int group;
  int first;
  int aligned;

  __device__ const element* operator()(int row) const {
    return data + (first + row) / group * x.row + (first + row) % group * x.head;
  }
};

#if PREFIX_PASS
// Addresses of the rows of a tile of the queries of a group.
struct RowsOfGroup {
  static constexpr bool EQUIDISTANT = false;

  const element* data;  // any valid address
  const Params& p;
  const Part& part;
  int first;
  int aligned;

  __device__ const element* operator()(int row) const {
    Part own = part_of_row(p, part, row);
    return own.sequence.queries<element>(p.q, own.head(p, row)) + own.query(p, row) * p.q.row;
  }
};
#endif

// Masks keys that a query does not see with -inf; MODIFIED: also turns q.k into scores.
template <bool MASKED>
__device__ void modify_rows(float (&S)[M][N][4], const Params& p, const Part& part, float scale, int kv_start) {
#if PREFIX_PASS
  const Part& of_group = part;
#endif
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#if PREFIX_PASS
      Part part = part_of_row(p, of_group, row_of(m, 2 * half));  // @sequence-of-row
#endif
      int i = part.query(p, row_of(m, 2 * half)), head = part.head(p, row_of(m, 2 * half));
      Score score(p, part.sequence, head, part.band.mod);
      score.scale = scale;
      Range keys = part.band.keys(i);
      int query = part.band.query(i);  // @clamp-query
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          int j = kv_start + column_of(n, e);
          bool seen = !MASKED || keys(j);
          if constexpr (DENSE_MASK) seen = seen && DenseMask::sees(p, part.band, part.sequence.batch, head, query, j);
          int key = MASKED && (MODS || BIAS) ? part.band.key(j) : j;                       // @clamp-key
          if constexpr (MASKED && MASK_MOD) seen &= part.band.mod_sees(head, query, key);  // @mod-sees
          float derivative;
          float s = MODIFIED ? score.apply(S[m][n][e], query, key, derivative) : S[m][n][e];
          S[m][n][e] = seen ? s : -infinity();
        }
    }
}
