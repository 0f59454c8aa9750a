// Forward of values that are the first columns of the keys: one block per tile of BLOCK_Q rows, the (query, head) pairs
// of a GQA group. A tile of keys is loaded once for both products and for all heads of the group. grid (tiles of rows,
// key/value heads, sequences)
#include "kv_stages.cuh"
#include "packed_rows.cuh"

#include "latent.cuh"

// The rows of a tile, with all keys that any of them sees.
__device__ Part part_of_rows(const Params& p, const Sequence& sequence, const Band& band, int kv_head, int tile) {
  Part part{sequence, band, kv_head, tile * BLOCK_Q, Range{0, 0}, true};
  Range queries = part.queries(p);
  if (queries.begin < queries.end)
    part.keys = {band.kv_begin(queries.begin), band.kv_end(queries.end)};  // @keys-of-rows
  if (part.keys.begin >= part.keys.end) part.keys = {0, 0};
  return part;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) latent_forward(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  __shared__ int pages_smem[2][BLOCK_KV];
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  // Under a causal mask the last tiles see the most keys, so they start first.
  int tiles = (sequence.q_rows * p.group + BLOCK_Q - 1) / BLOCK_Q;
  for (int tile = tiles - 1 - blockIdx.x; tile >= 0; tile -= gridDim.x)
    attend(p, part_of_rows(p, sequence, band, blockIdx.y, tile), (unsigned char*)shared, pages_smem);
}
