// Scores of a query and the keys of its list, in tiles whose rows are heads of the indexer, for an engine whose
// operations on tiles are included before.
#pragma once
#include "../selection.cuh"

// Where the heads of query i are, from `head` on.
__device__ inline TileRows<element> heads_of(const Params& p, const Sequence& sequence, int i, int head) {
  return {sequence.queries<element>(p.q, 0) + i * p.q.row, p.q.head, head, p.q.aligned};
}

__device__ inline real weight_of(const Params& p, const Sequence& sequence, int i, int head) {
  return head < p.heads ? (real)to_real(sequence.queries<head_element>(p.head_weights, head)[i * p.head_weights.row])
                        : 0;
}

// The scores of the list of query i, or their gradients.
__device__ inline real* listed_scores(const Params& p, const Sequence& sequence, int i) {
  return (real*)p.listed_scores + ((long long)sequence.batch * p.q_len + i) * p.selected_entries;
}

__device__ inline real relu(real a) {
  return a <= 0 ? 0 : a;  // a NaN stays
}
