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

#if MODS
#include "mod_functions.cuh"
#include "traced.cuh"
#else
struct Mod {
  using Sum = real;
  __device__ Mod(const Params& p, int batch) {}
};
#endif
