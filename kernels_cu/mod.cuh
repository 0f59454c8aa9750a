// struct Mod: the score_mod and the mask_mod of a call, in traced.cuh, which cupy_flash/mods/cuda_code.py generates.
#pragma once
#include "number.cuh"
#include "params.cuh"
#include "sequence.cuh"

// A gradient with a row per query and a column per key; a dimension over which it sums has stride 0.
struct DenseGradient {
  Dense array;
  int rows;
  int columns;
};

// Position of a query or key: a base, plus the constant offset of a row or column in an unrolled loop over a tile. A
// score_mod computes the distance of two bases once, and adds a constant per score. `column` is a key's index in its
// tile, by which staged values are read.
struct Position {
  int base;
  int offset;
  int column;

  __device__ Position(int base, int offset = 0, int column = 0) : base(base), offset(offset), column(column) {}
  __device__ operator int() const { return base + offset; }  // @query-key-distance
};

#if MODS
#include "mod_functions.cuh"

// The q_idx of the queries of a sequence on a KV cache: its last positions, or those given. They are clamped to the
// capacity, so that wrong contents of `positions` cannot make a mod read a captured array out of bounds. Unused without
// a cache.
struct QueryPositions {
#if KV_CACHE
  const int* given;  // null: consecutive positions
  int first;
  int last;  // last position of the capacity

  __device__ QueryPositions(const Params& p, const Sequence& sequence)
      : given(p.positions), first(sequence.offset), last(p.cache_capacity - 1) {
#if PREFIXES
    first += sequence.keys_before, last += p.prefix_capacity;  // @query-position-after-prefix
#endif
    if (given) given += PACKED ? sequence.q_start : sequence.batch * p.positions_row;  // @given-positions
  }
  __device__ int operator()(int i) const { return min(max(given ? given[i] : first + i, 0), last); }  // @query-position
  // The least and the greatest q_idx of queries.lo to queries.hi.
  __device__ Interval<int> operator()(Interval<int> queries) const {
    Interval<int> bounds = {(*this)(queries.lo), (*this)(queries.hi)};
#pragma unroll 1
    for (int i = queries.lo; given && i <= queries.hi; ++i)  // @bounds-of-positions
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
  struct KeyValues {};
  const KeyValues* staged_keys;
  __device__ Mod(const Params& p, const Sequence& sequence) {}
  __device__ KeyValues key_values(Position at) const { return {}; }
};
#endif
