// The score_mod and the mask_mod of a call. traced.cuh is written by cupy_flash/mods/cuda_code.py.
#pragma once
#include "number.cuh"
#include "params.cuh"
#include "sequence.cuh"

// A gradient with rows of queries and columns of keys; stride 0 where it sums over a dimension.
struct DenseGradient {
  Dense array;
  int rows;
  int columns;
};

// Position of a query or key: a base, and what an unrolled loop over the rows or columns of a tile adds to it. A
// score_mod computes the distance of two bases once, and per score only adds a constant.
struct Position {
  int base;
  int offset;

  __device__ Position(int base, int offset = 0) : base(base), offset(offset) {}
  __device__ operator int() const { return base + offset; }
};

#if MODS
#include "mod_functions.cuh"

// The q_idx of the queries of a sequence on a KV cache: where they lie, or the given positions. They are clamped to the
// capacity, so that no contents of an array make a mod read a captured array out of bounds. Without a cache unused.
struct QueryPositions {
#if KV_CACHE
  const int* given;  // null: consecutive positions
  int first;
  int last;  // of the capacity

  __device__ QueryPositions(const Params& p, const Sequence& sequence)
      : given(p.positions), first(sequence.offset), last(p.cache_capacity - 1) {
    if (given) given += PACKED ? sequence.q_start : sequence.batch * p.positions_row;
  }
  __device__ int operator()(int i) const { return min(max(given ? given[i] : first + i, 0), last); }
  // The least and the greatest among those of queries.lo to queries.hi.
  __device__ Interval<int> operator()(Interval<int> queries) const {
    Interval<int> bounds = {(*this)(queries.lo), (*this)(queries.hi)};
#pragma unroll 1
    for (int i = queries.lo; given && i <= queries.hi; ++i)
      bounds = {min(bounds.lo, (*this)(i)), max(bounds.hi, (*this)(i))};
    return bounds;
  }
#else
  __device__ QueryPositions(const Params& p, const Sequence& sequence) {}
  template <typename Queries>
  __device__ Queries operator()(Queries queries) const {
    return queries;
  }
#endif
};

#include "traced.cuh"
#else
struct Mod {
  using Sum = real;
  __device__ Mod(const Params& p, const Sequence& sequence) {}
};
#endif
