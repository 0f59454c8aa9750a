// The gradient of probabilities in a backward of attention_weights, top_weights or key_importance: dS = P dP, and dP is
// read from the gradient of the result.
#pragma once
#include "row_weights.cuh"
#include "score.cuh"

// The places of a row or a head in the result, of which there may be several.
struct Places {
  const int* firsts;  // null: the numbers are `count` ones, `step` apart
  const int* nexts;
  int first;
  int step;
  int count;

  // The first place of a number; -1 if it has none.
  __device__ int of(int number) const {
    if (firsts) return firsts[number];
    int distance = number - first, place = step ? distance / step : 0;
    return place >= 0 && place < count && place * step == distance ? place : -1;  // @weights.place
  }
  __device__ int after(int place) const { return nexts ? nexts[place] : -1; }
};

__device__ inline Places places_of_rows(const Params& p) {
  return {p.row_places, p.row_next, p.row_first, p.row_step, p.result_rows};
}

// Whether the result has any of the rows [begin, end) of q, which are counted over all sequences of a packed batch.
__device__ inline bool has_rows(const Params& p, int begin, int end) {
  if (GRADIENT_OF != 0) return true;
  Places rows = places_of_rows(p);
  for (int row = begin; row < end; ++row)
    if (rows.of(row) >= 0) return true;
  return false;
}

struct ResultGradient {
  const Params& p;
  int batch;
  int head;
  int q_start;

  __device__ ResultGradient(const Score& score)
      : p(score.p), batch(score.batch), head(score.head), q_start(PACKED ? score.p.cu_seqlens_q[score.batch] : 0) {}

  __device__ real weight(int i) const { return row_weight(p, batch, head, q_start + i); }

  // The gradient of P at query i and key j; of key_importance without the weight of the row.
  __device__ real operator()(int i, int j) const {
    int row = q_start + i;
    long long begin = PACKED && GRADIENT_OF != 2 ? 0 : batch * p.result.batch;
    if (GRADIENT_OF == 2) return ((const real*)p.result.data)[begin + head * p.result.head + j];
    const element* result = (const element*)p.result.data + begin;
    real sum = 0;
    if (GRADIENT_OF == 1) {
      long long list = head * p.result.head + row * p.result.row;
      for (int place = 0; place < p.result_columns; ++place)
        if (p.result_keys[begin + list + place] == j) sum = to_real(result[list + place]);  // @weights.key-of-place
      return sum;
    }
    Places rows = places_of_rows(p);
    Places heads{p.head_places, p.head_next, p.head_first, p.head_step, p.result_heads};
    for (int place = rows.of(row); place >= 0; place = rows.after(place)) {
      const element* of_row = result + place * p.result.row + j;
      if (MEAN) sum += to_real(*of_row) / (real)p.heads;  // @weights.mean-gradient
      for (int h = MEAN ? -1 : heads.of(head); h >= 0; h = heads.after(h)) sum += to_real(of_row[h * p.result.head]);
    }
    return sum;
  }
};
