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
// score_mod computes the distance of two bases once, and per score only adds a constant.
struct Position {
  int base;
  int offset;

  __device__ Position(int base, int offset = 0) : base(base), offset(offset) {}
  __device__ operator int() const { return base + offset; }
};

#if MODS
#include "mod_functions.cuh"
#include "traced.cuh"
#else
struct Mod {
  using Sum = real;
  __device__ Mod(const Params& p, int batch) {}
};
#endif
