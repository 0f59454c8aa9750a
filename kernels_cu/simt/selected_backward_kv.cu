// Backward of attention to selected keys, dK and dV: one block per at most BLOCK_KV keys that an entry names together,
// over the rows of all lists that name them, in ascending order, so that every sum is deterministic. grid (tiles of all
// blocks of keys, key/value heads, sequences)
#include "../inverse_lists.cuh"
#include "selected_backward.cuh"

constexpr int ROWS = BLOCK_KV / ROW_THREADS;  // score tiles are transposed: rows are keys
constexpr int COLS = BLOCK_Q / LANES;
using SharedMemory = ByKey;

// Finds the rows from `start` on of the lists at `places`, of those queries that may see a key of the tile; returns
// whether there is one. It is a barrier, before which no thread may read the rows of an earlier tile.
__device__ bool find_rows(ListTile& tile, const Lists& lists, const InverseLists& inverse, Range places, int start,
                          Range visible, int head) {
  bool any = false;
  for (int n = threadIdx.x; n < BLOCK_Q; n += THREADS) {
    int place = places.begin + (start + n) / lists.rows, row = (start + n) % lists.rows, i = -1;
    // @rows-of-inverse-list
    if (place < places.end) i = inverse.lists[place] * lists.queries + row / HEADS_OF_LIST;
    bool seen = visible(i);
    tile.query[n] = seen ? i : lists.q_rows;
    tile.head[n] = head + row % HEADS_OF_LIST;
    any |= seen;
  }
  return __syncthreads_or(any);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected_backward_kv(const __grid_constant__ Params p) {
  extern __shared__ Chunk shared[];
  __shared__ ListTile tile;
  real *smem = (real*)shared, *P_smem = smem + ByKey::P;
  KeyTile keys(smem + ByKey::KEYS);
  QueryTile queries(smem + ByKey::QUERIES);

  int kv_head = blockIdx.y;
  Sequence sequence(p, blockIdx.z);
  Band band(p, sequence);
  int width = min(KEYS_OF_ENTRY, max(sequence.kv_rows, 1)), parts = (width + BLOCK_KV - 1) / BLOCK_KV;
  int blocks = (sequence.kv_rows + width - 1) / width;
  for (int n = blockIdx.x; n < blocks * parts; n += gridDim.x) {
    // Prologue.
    int block = n / parts, kv_start = block * width + n % parts * BLOCK_KV;
    int kv_stop = min(min(kv_start + BLOCK_KV, (block + 1) * width), sequence.kv_len);  // @cut-block
    Range visible = {band.q_begin(kv_start), kv_start < kv_stop && band.low <= band.high ? band.q_end(kv_stop) : 0};
    __syncthreads();
    for (int row = threadIdx.x; row < BLOCK_KV; row += THREADS)
      tile.key[row] = kv_start + row < kv_stop ? kv_start + row : sequence.kv_len;
    __syncthreads();
    load_keys(keys, tile, p, sequence, kv_head);
    real dK_rmem[ROWS][columns_of(HEAD_DIM)] = {}, dV_rmem[ROWS][columns_of(HEAD_DIM_V)] = {};

    // Mainloop.
    for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; head += HEADS_OF_LIST) {
      Lists lists(p, sequence, head);
      InverseLists inverse(p, sequence, lists, p.selected_heads == 1 ? 0 : head / HEADS_OF_LIST);
      Dropout dropout(p, sequence.batch, head);
      Range places = kv_start < sequence.kv_len ? inverse.of_block(block) : Range{0, 0};
      for (int start = 0; start < (places.end - places.begin) * lists.rows; start += BLOCK_Q) {
        __syncthreads();
        if (!find_rows(tile, lists, inverse, places, start, visible, head)) continue;
        load_queries(queries, tile, p, sequence);
        __syncthreads();
        Gradients<ROWS, COLS, true, true> products(queries, keys);
        differentiate(products, tile, p, sequence, band, dropout, queries);
        products.add_to(dK_rmem, dV_rmem, queries, P_smem);
      }
    }

    // Epilogue.
    int kv_end = min(min(kv_start + BLOCK_KV, (block + 1) * width), sequence.kv_rows);
#if SHARED_KV
    add_dV<ROWS>(dK_rmem, dV_rmem, (real)p.scale);
#endif
    for_each_row<ROWS>(kv_start, kv_end, [&](int r, int j) {
      element* dk = sequence.keys<element>(p.dk, kv_head) + j * p.dk.row;
      store_row<HEAD_DIM>(dk, dK_rmem[r], SHARED_KV ? (real)1 : (real)p.scale);
#if !SHARED_KV
      store_row<HEAD_DIM_V>(sequence.keys<element>(p.dv, kv_head) + j * p.dv.row, dV_rmem[r], (real)1);
#endif
    });
  }
}
