// Tiles of queries and of keys in shared memory: the operands of a backward and (DIRECTION) of a double backward, which
// also has the tangents of the inputs.
#pragma once
#if DSTATISTICS
#include "../statistics.cuh"
#endif
#include "steps.cuh"

// Offsets, in elements of type real, of the arrays of a tile of queries and of a tile of keys.
struct QuerySlot {
  static constexpr int Q = 0;
  static constexpr int tQ = Q + BLOCK_Q * row_stride(HEAD_DIM);
  static constexpr int dO = tQ + TQ * BLOCK_Q * row_stride(HEAD_DIM);
  static constexpr int LSE = dO + BLOCK_Q * row_stride(HEAD_DIM_V);
  static constexpr int DELTA = LSE + BLOCK_Q, LSE_TANGENT = DELTA + BLOCK_Q, DELTA_TANGENT = LSE_TANGENT + BLOCK_Q;
#if DSTATISTICS
  static constexpr int DENTROPY_ROWS = LSE_TANGENT, DMAX_ROWS = DENTROPY_ROWS + BLOCK_Q;
  static constexpr int ARGMAX = DMAX_ROWS + BLOCK_Q, END = ARGMAX + BLOCK_Q;
#else
  static constexpr int END = DIRECTION ? DELTA_TANGENT + BLOCK_Q : LSE_TANGENT;
#endif
};
struct KeySlot {
  static constexpr int K = 0;
  static constexpr int tK = K + BLOCK_KV * row_stride(HEAD_DIM);
  static constexpr int V = tK + TK * BLOCK_KV * row_stride(HEAD_DIM);
  static constexpr int tV = V + BLOCK_KV * row_stride(HEAD_DIM_V);
  static constexpr int END = tV + TV * BLOCK_KV * row_stride(HEAD_DIM_V);
};

// Q, tQ and dO of a tile of queries, and lse, delta and their tangents of its rows.
struct QueryTile {
  real* Q;              // [BLOCK_Q][HEAD_DIM]
  real* tQ;             // [BLOCK_Q][HEAD_DIM]
  real* dO;             // [BLOCK_Q][HEAD_DIM_V]
  real* lse;            // [BLOCK_Q]; +inf for a row that sees no key, so that its P is 0
  real* delta;          // [BLOCK_Q]; 0 for a row that sees no key, as are its two tangents
  real* lse_tangent;    // mu
  real* delta_tangent;  // eps
#if DSTATISTICS
  real* dentropy;  // [BLOCK_Q]; 0 for a row that sees no key
  real* dmax;      // [BLOCK_Q]
  int* argmax;     // [BLOCK_Q]; -1 for a row that sees no key

  __device__ StatisticsGradients statistics() const { return {dentropy, dmax, argmax}; }
#endif

  __device__ QueryTile(real* smem)
      : Q(smem + QuerySlot::Q),
        tQ(smem + QuerySlot::tQ),
        dO(smem + QuerySlot::dO),
        lse(smem + QuerySlot::LSE),
        delta(smem + QuerySlot::DELTA),
        lse_tangent(smem + QuerySlot::LSE_TANGENT),
        delta_tangent(smem + QuerySlot::DELTA_TANGENT)
#if DSTATISTICS
        ,
        dentropy(smem + QuerySlot::DENTROPY_ROWS),
        dmax(smem + QuerySlot::DMAX_ROWS),
        argmax((int*)(smem + QuerySlot::ARGMAX))
#endif
  {
  }

  __device__ void load(const Params& p, const Sequence& sequence, int head, int q_start, Range queries) {
    auto rows = [&](const Operand& x) { return sequence.query_rows<element>(x, head).tile(q_start); };
    load_tile<BLOCK_Q, HEAD_DIM>(Q, rows(p.q), queries);
#if DIRECTION
    if constexpr (TQ) load_tile<BLOCK_Q, HEAD_DIM>(tQ, rows(p.tq), queries);
#endif
#if !WEIGHTS
    // A row that sees no key must not contribute, whatever its dO is.
    const real* lse_rows = sequence.queries<real>(p.lse, head);
    auto sees = [&](int i) { return queries(i) && lse_rows[i * p.lse.row] != -infinity(); };
    load_tile<BLOCK_Q, HEAD_DIM_V>(dO, rows(p.dout), sees);
#endif
    load_numbers(p, sequence, head, q_start);
  }
  __device__ void load_numbers(const Params& p, const Sequence& sequence, int head, int q_start) {
    auto number = [&](const Operand& x, int i) { return sequence.queries<real>(x, head)[i * x.row]; };
    for (int row = threadIdx.x; row < BLOCK_Q; row += THREADS) {
      int i = q_start + row;
      real x = i < sequence.q_len ? number(p.lse, i) : -infinity();
      lse[row] = x == -infinity() ? infinity() : x;  // @lse-of-no-key
#if !WEIGHTS
      delta[row] = x == -infinity() ? 0 : number(p.delta, i);
#endif
#if DSTATISTICS
      bool has_key = x != -infinity();
      if constexpr (DENTROPY) dentropy[row] = has_key ? number(p.dentropy, i) : 0;
      if constexpr (DMAX) {
        dmax[row] = has_key ? number(p.dmax, i) : 0;
        argmax[row] = has_key ? sequence.queries<int>(p.argmax, head)[i * p.argmax.row] : -1;
      }
#endif
    }
#if DIRECTION
    // A separate loop, because a single loop over all numbers would take more registers.
    for (int row = threadIdx.x; row < BLOCK_Q; row += THREADS) {
      int i = q_start + row;
      bool sees = i < sequence.q_len && number(p.lse, i) != -infinity();
      lse_tangent[row] = sees ? number(p.tlse, i) : 0;
      delta_tangent[row] = sees ? number(p.delta_tangent, i) : 0;
    }
#endif
  }
};

// K, V and their tangents of a tile of keys.
struct KeyTile {
  real* K;   // [BLOCK_KV][HEAD_DIM]
  real* tK;  // [BLOCK_KV][HEAD_DIM]
  real* V;   // [BLOCK_KV][HEAD_DIM_V]
  real* tV;  // [BLOCK_KV][HEAD_DIM_V]

  __device__ KeyTile(real* smem)
      : K(smem + KeySlot::K), tK(smem + KeySlot::tK), V(smem + KeySlot::V), tV(smem + KeySlot::tV) {}

  __device__ void load(const Params& p, const Sequence& sequence, int kv_head, int kv_start, Range keys) {
    auto rows = [&](const Operand& x) { return sequence.key_rows<element>(x, kv_head).tile(kv_start); };
    load_tile<BLOCK_KV, HEAD_DIM>(K, rows(p.k), keys);
#if DIRECTION
    if constexpr (TK) load_tile<BLOCK_KV, HEAD_DIM>(tK, rows(p.tk), keys);
#endif
#if !WEIGHTS
    load_tile<BLOCK_KV, HEAD_DIM_V>(V, rows(p.v), keys);
#endif
#if DIRECTION
    if constexpr (TV) load_tile<BLOCK_KV, HEAD_DIM_V>(tV, rows(p.tv), keys);
#endif
  }
};

// O += P X. P goes from the registers of all threads through P_smem; the caller ensures that no thread still reads
// P_smem.
template <int DIM, int ROWS, int COLS>
__device__ void add_product(real (&O)[ROWS][columns_of(DIM)], const real (&P)[ROWS][COLS], real* P_smem,
                            const real* X_smem) {
  store_p(P_smem, P);
  __syncthreads();
  accumulate<ROWS, COLS * LANES, DIM>(O, P_smem, X_smem);
}
