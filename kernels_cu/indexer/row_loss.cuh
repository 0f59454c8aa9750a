// The loss of a row and the gradients of its scores, with p the target, normalised over the entries that name a key:
//
//   loss = r sum p (log p - log softmax(I)) ;  dI = r dloss (softmax(I) - p)
#pragma once
#include "listed_scores.cuh"

// Combines the numbers of all threads, in the same order in every run.
template <typename T, typename Combine>
__device__ T combined(T x, Combine combine) {
  __shared__ T numbers[THREADS];
  __syncthreads();
  numbers[threadIdx.x] = x;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) numbers[threadIdx.x] = combine(numbers[threadIdx.x], numbers[threadIdx.x + half]);
  }
  __syncthreads();
  return numbers[0];
}
template <typename T>
__device__ T sum_of(T x) {
  return combined(x, [](T a, T b) { return a + b; });
}

// Writes the loss of query i, and replaces the scores of its list by their gradients. All threads have written the
// scores before a barrier.
__device__ inline void finish_row(const Params& p, const Sequence& sequence, const Lists& lists, int i) {
  real* I = listed_scores(p, sequence, i);
  const target_element* target =
      (const target_element*)p.target.data + sequence.batch * p.target.batch + i * p.target.row;
  auto names_key = [&](int n) { return (unsigned)lists.entry(i, n) < (unsigned)sequence.kv_len; };
  real largest = -infinity(), sum = 0, whole = 0;
  for (int n = threadIdx.x; n < lists.length; n += THREADS) {
    if (!names_key(n)) continue;  // @loss.names-key
    largest = max(largest, I[n]);
    whole += to_real(target[n * p.target.column]);
  }
  largest = combined(largest, [](real a, real b) { return max(a, b); });
  if (largest == -infinity()) largest = 0;
  for (int n = threadIdx.x; n < lists.length; n += THREADS) sum += exp(I[n] - largest);
  sum = sum_of(sum), whole = sum_of(whole);  // @loss.whole
  real log_sum = largest + log(sum == 0 ? 1 : sum), lost = 0;
  const row_element* weights = (const row_element*)p.loss_weights.data;
  real r = weights ? (real)to_real(weights[sequence.batch * p.loss_weights.batch + i * p.loss_weights.row]) : 1;
  real factor = p.dloss ? r * *(const real*)p.dloss : r;
  for (int n = threadIdx.x; n < lists.length; n += THREADS) {
    real of_target = names_key(n) && whole != 0 ? to_real(target[n * p.target.column]) / whole : 0;
    if (of_target != 0) lost += of_target * (log(of_target) - (I[n] - log_sum));
    real probability = whole == 0 ? 0 : exp(I[n] - log_sum);
    I[n] = factor * (probability - of_target);  // @loss.gradient
  }
  lost = sum_of(lost);
  if (threadIdx.x == 0) p.row_losses[(long long)sequence.batch * p.q_len + i] = r * lost;  // @loss.row-weight
}
