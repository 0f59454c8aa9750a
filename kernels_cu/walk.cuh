// The tiles that a block visits, in order, and whether each of them is masked. The kernels of all engines iterate over
// tiles with these structs alone, so that a mask which is not a band is a change of this file:
//
//   for (KvTiles<Order::LAST_TO_FIRST> kv_tiles(band, q_start); kv_tiles.valid(); kv_tiles.next())
//
// A copy that is a few tiles ahead iterates over the same tiles: that of the next loads, or of a producer warp.
#pragma once
#include "mask.cuh"

enum class Order { FIRST_TO_LAST, LAST_TO_FIRST };

// Iterator over the visited tiles of SIZE positions of one axis.
template <int SIZE, Order ORDER>
struct Walk {
  Range visible;   // positions to load: no pair of the block with another position is visible
  Range unmasked;  // positions that need no mask
  int first;       // of the first tile
  int start;       // of the current tile

  __device__ Walk(Range visible, Range unmasked)
      : visible(visible), unmasked(unmasked), first(visible.begin / SIZE * SIZE), start(first) {
    if (ORDER == Order::LAST_TO_FIRST)
      start = visible.begin < visible.end ? (visible.end - 1) / SIZE * SIZE : first - SIZE;
  }
  __device__ bool valid() const { return ORDER == Order::LAST_TO_FIRST ? start >= first : start < visible.end; }
  __device__ void next() { start += ORDER == Order::LAST_TO_FIRST ? -SIZE : SIZE; }
  // Restricts the walk to positions within `limits`, the first of which starts a tile.
  __device__ void clip(Range limits) {
    static_assert(ORDER == Order::FIRST_TO_LAST, "the last tile is not clipped");
    start = max(start, limits.begin);
    visible.end = min(visible.end, limits.end);
  }
  // False if every pair of positions [start + offset, start + offset + count) is visible.
  __device__ bool masked(int offset = 0, int count = SIZE) const {
    return start + offset < unmasked.begin || start + offset + count > unmasked.end;
  }
};

// The key tiles of a query tile. Kernels with an online softmax visit the last tile first, which is the one that a
// causal mask cuts. `queries` are those that masked() refers to.
template <Order ORDER>
struct KvTiles : Walk<BLOCK_KV, ORDER> {
  __device__ KvTiles(const Band& band, int q_start, Range queries)
      : Walk<BLOCK_KV, ORDER>(visible_keys(band, q_start), band.sees_all(queries.begin, queries.end)) {}
  __device__ KvTiles(const Band& band, int q_start) : KvTiles(band, q_start, {q_start, q_start + BLOCK_Q}) {}

  __device__ static Range visible_keys(const Band& band, int q_start) {
    int q_stop = min(q_start + BLOCK_Q, band.q_len);
    return {band.kv_begin(q_start), q_start < q_stop ? band.kv_end(q_stop) : 0};
  }
};

// The query tiles of a key tile, head after head of the GQA group. `keys` are those that masked() refers to.
struct QTiles : Walk<BLOCK_Q, Order::FIRST_TO_LAST> {
  int head;
  int head_end;

  __device__ QTiles(const Params& p, const Band& band, int kv_head, int kv_start, Range keys)
      : Walk(visible_queries(band, kv_start), band.seen_by_all(keys.begin, keys.end)) {
    head = kv_head * p.group;
    head_end = visible.begin < visible.end ? head + p.group : head;
  }
  __device__ QTiles(const Params& p, const Band& band, int kv_head, int kv_start)
      : QTiles(p, band, kv_head, kv_start, {kv_start, kv_start + BLOCK_KV}) {}

  __device__ static Range visible_queries(const Band& band, int kv_start) {
    int kv_stop = min(kv_start + BLOCK_KV, band.kv_len);
    return {band.q_begin(kv_start), kv_start < kv_stop ? band.q_end(kv_stop) : 0};
  }
  __device__ bool valid() const { return head < head_end; }
  __device__ void next() {
    start += BLOCK_Q;
    if (start >= visible.end) start = first, ++head;
  }
};
