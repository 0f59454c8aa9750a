// The score_mod and the mask_mod of a call. traced.cuh is written by cupy_flash/mods/cuda_code.py.
#pragma once
#include "number.cuh"
#include "params.cuh"

// A gradient with rows of queries and columns of keys; stride 0 where it sums over a dimension.
struct DenseGradient {
  Dense array;
  int rows;
  int columns;
};

// Position of a query or key: a base, and what an unrolled loop over the rows or columns of a tile adds to it. A
// score_mod computes the distance of two bases once, and per score only adds a constant. `column` is a key's place in
// its tile, by which staged values are read.
struct Position {
  int base;
  int offset;
  int column;

  __device__ Position(int base, int offset = 0, int column = 0) : base(base), offset(offset), column(column) {}
  __device__ operator int() const { return base + offset; }
};

#if MODS
#include "mod_functions.cuh"
#include "traced.cuh"
#else
struct Mod {
  using Sum = real;
  struct KeyValues {};
  const KeyValues* staged_keys;
  __device__ Mod(const Params& p, int batch) {}
  __device__ KeyValues key_values(Position at) const { return {}; }
};
#endif
