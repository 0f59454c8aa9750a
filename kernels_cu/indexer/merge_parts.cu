// Merges the lists of the parts of select_keys: the n best entries of each row. A warp has a row, and adds the entries
// of the other parts, in order, to the list of the first. grid (query tiles, 1, sequences)
#include "candidates.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) merge_parts(const __grid_constant__ Params p) {
  __shared__ Chosen rows_smem[THREADS / 32];
  Chosen& state = rows_smem[threadIdx.x / 32];
  auto block_of = [&](int part) { return ((long long)blockIdx.z * p.parts + part) * gridDim.x + blockIdx.x; };
  for (int row = threadIdx.x / 32; row < BLOCK_Q; row += THREADS / 32) {
    int i = blockIdx.x * BLOCK_Q + row;
    if (i >= p.q_len) break;
    if (lane() == 0) state = {0, 0, p.candidate_counts[block_of(0) * BLOCK_Q + row]};
    __syncwarp();
    Candidates best = candidates_at(state, p, block_of(0), row);
    for (int part = 1; part < p.parts; ++part) {  // @indexer.merge
      Candidates other = candidates_at(state, p, block_of(part), row);
      int count = p.candidate_counts[block_of(part) * BLOCK_Q + row];
      for (int first = 0; first < count; first += 32) {
        int place = first + lane();
        bool exists = place < count;
        best.add(exists ? other.scores[place] : 0, exists ? other.entries[place] : 0);
      }
    }
    best.store(list_of(p, blockIdx.z, i));
    __syncwarp();
  }
}
