// The tiles that a block visits, in order, and whether each of them is masked. The kernels of all engines iterate over
// tiles with these structs, so that only this file depends on the form of the mask:
//
//   for (KvTiles<Order::LAST_TO_FIRST> kv_tiles(band, head, q_start); kv_tiles.valid(); kv_tiles.next())
//
// Prefetches and producer warps iterate over the same tiles with a copy that is a few tiles ahead.
#pragma once
#include "mask.cuh"

enum class Order { FIRST_TO_LAST, LAST_TO_FIRST };

// Iterator over the visited tiles of SIZE positions of one axis. Under a mask_mod, classify(range) says whether the
// mask may be true, and whether it may be false, for a pair of the range. A warp classifies 32 candidates at a time,
// one per lane, and skips those without a visible pair, so all lanes of a warp must call next() together.
template <int SIZE, Order ORDER, typename Classify>
struct Walk {
  static constexpr int STEP = ORDER == Order::LAST_TO_FIRST ? -SIZE : SIZE;

  Range unmasked;  // positions of which the band hides no pair; a mask_mod may hide some
  Range visible;   // positions to load: the band hides all others from the block
  int first;       // start of the first tile
  int start;       // start of the current tile
  Classify classify;
  unsigned int may_see = 0;   // bit n: the tile n steps ahead may have a visible pair
  unsigned int may_hide = 0;  // bit n: the tile n steps ahead may have a hidden pair
  int candidates = 0;         // number of valid bits of the two masks

  __device__ Walk(Range unmasked, Range visible, Classify classify)
      : unmasked(unmasked), visible(visible), first(visible.begin / SIZE * SIZE), start(first), classify(classify) {
    if (ORDER == Order::LAST_TO_FIRST)
      start = visible.begin < visible.end ? (visible.end - 1) / SIZE * SIZE : first - SIZE;
  }
  __device__ bool inside(int start) const {
    return ORDER == Order::LAST_TO_FIRST ? start >= first : start < visible.end;  // @inside-walk
  }
  __device__ bool valid() const { return inside(start); }
  __device__ void next() {
    advance(1);
    skip_hidden();
  }
  __device__ void advance(int n) {
    start += n * STEP;
    if constexpr (MASK_MOD) may_see >>= n, may_hide >>= n, candidates -= n;
  }
  // Moves to the first tile, from the current one on, in which the mask_mod may see a pair. After 32 hidden tiles a
  // lane classifies 32 at once, so that a narrow mask of a long sequence takes few rounds.
  __device__ void skip_hidden() {
    if constexpr (MASK_MOD) {
      int tiles = 1;  // per lane
      while (inside(start)) {
        if (candidates == 0) {
          int mine = start + (int)(threadIdx.x % 32) * tiles * STEP;
          auto seen = classify(range_of(inside(mine) ? mine : start, tiles));
          may_see = __ballot_sync(0xFFFFFFFF, seen.may && inside(mine));
          may_hide = __ballot_sync(0xFFFFFFFF, seen.may_not);
          if (tiles > 1) {
            start += (may_see ? __ffs(may_see) - 1 : 32) * tiles * STEP;  // @pass-hidden-tiles
            if (may_see) tiles = 1;
            continue;
          }
          candidates = 32;
        }
        if (may_see) return advance(__ffs(may_see) - 1);  // @first-visible-tile
        start += candidates * STEP;
        candidates = 0, tiles = 32;  // @next-candidates
      }
    }
  }
  // The visible positions of `tiles` tiles in the order of the walk, the first of them at `start`.
  __device__ Range range_of(int start, int tiles) const {
    int last = start + (tiles - 1) * STEP;  // @last-tile-of-range
    return {max(min(start, last), first), min(max(start, last) + SIZE, visible.end)};
  }
  // Restricts the walk to positions within `limits`, which begin at the start of a tile.
  __device__ void clip(Range limits) {
    static_assert(ORDER == Order::FIRST_TO_LAST, "the last tile is not clipped");
    start = max(start, limits.begin);
    visible.end = min(visible.end, limits.end);  // @clip-walk
    candidates = 0;
    skip_hidden();
  }
  // False if every (query, key) pair with a position of the walk in [start + offset, start + offset + count) is
  // visible.
  __device__ bool masked(int offset = 0, int count = SIZE) const {
    // @tile-is-masked
    return start + offset < unmasked.begin || start + offset + count > unmasked.end || (MASK_MOD && (may_hide & 1));
  }
};

// Bounds of the mask_mod over the heads and queries of a block and a range of keys; ClassifyQueries: over the keys of a
// block and a range of queries.
struct ClassifyKeys {
  const Band& band;
  Range heads;
  Range queries;

#if MODS
  __device__ Truth operator()(Range keys) const {
#if PREFIX_PASS
    return unknown();  // the queries are of several sequences
#else
    return band.mod.tile({heads.begin, heads.end - 1}, {queries.begin, queries.end - 1}, {keys.begin, keys.end - 1});
#endif
  }
#endif
};
struct ClassifyQueries {
  const Band& band;
  int head;
  Range keys;

#if MODS
  __device__ Truth operator()(Range queries) const {
    return band.mod.tile(point(head), {queries.begin, queries.end - 1}, {keys.begin, keys.end - 1});
  }
#endif
};

// The key tiles of a query tile. Kernels with an online softmax visit the last tile first, which is the one that a
// causal mask cuts. masked() answers for `queries`, which may be a part of the block's queries.
template <Order ORDER>
struct KvTiles : Walk<BLOCK_KV, ORDER, ClassifyKeys> {
  __device__ KvTiles(const Band& band, int head, int q_start, Range queries)
      : Walk<BLOCK_KV, ORDER, ClassifyKeys>(band.sees_all(queries.begin, queries.end), visible_keys(band, q_start),
                                            {band, {head, head + 1}, {q_start, min(q_start + BLOCK_Q, band.q_len)}}) {
    this->skip_hidden();
  }
  __device__ KvTiles(const Band& band, int head, int q_start)
      : KvTiles(band, head, q_start, {q_start, q_start + BLOCK_Q}) {}

  __device__ static Range visible_keys(const Band& band, int q_start) {
    int q_stop = min(q_start + BLOCK_Q, band.q_len);
    return {band.kv_begin(q_start), q_start < q_stop ? band.kv_end(q_stop) : 0};
  }
};

// The query tiles of a key tile, head after head of the GQA group. masked() answers for `keys`, which may be a part of
// the block's keys.
struct QTiles : Walk<BLOCK_Q, Order::FIRST_TO_LAST, ClassifyQueries> {
  int head;
  int head_end;

  __device__ QTiles(const Params& p, const Band& band, int kv_head, int kv_start, Range keys)
      : Walk(band.seen_by_all(keys.begin, keys.end), visible_queries(band, kv_start),
             {band, kv_head * p.group, {kv_start, min(kv_start + BLOCK_KV, band.kv_len)}}) {
    head = kv_head * p.group;
    head_end = visible.begin < visible.end ? head + p.group : head;  // @heads-of-walk
    if (MASK_MOD && head < head_end) skip_hidden(), skip_heads();
  }
  __device__ QTiles(const Params& p, const Band& band, int kv_head, int kv_start)
      : QTiles(p, band, kv_head, kv_start, {kv_start, kv_start + BLOCK_KV}) {}

  __device__ static Range visible_queries(const Band& band, int kv_start) {
    int kv_stop = min(kv_start + BLOCK_KV, band.kv_len);
    // In a striped shard a narrow window may lie between two positions (band.high < band.low): then no pair is visible.
    return {band.q_begin(kv_start), kv_start < kv_stop && band.low <= band.high ? band.q_end(kv_stop) : 0};
  }
  __device__ bool valid() const { return head < head_end; }
  __device__ void next() {
    Walk::next();
    skip_heads();
  }
  // Past the last tile of a head, moves to the first tile of the next head that has a visible tile.
  __device__ void skip_heads() {
    while (start >= visible.end) {
      start = first;
      ++head;  // @next-head
      if (!MASK_MOD || head == head_end) return;
      classify.head = head;
      candidates = 0;
      skip_hidden();
    }
  }
};
