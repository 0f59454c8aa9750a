// Lists of selected keys. A tile of scores belongs to one list: its rows are (query, head) pairs that share the list,
// heads of a query side by side (packed GQA), and its columns are keys that the list names. Where they are is in shared
// memory, because neither rows nor keys of a tile are equidistant.
#pragma once
#include "dropout.cuh"
#include "score.cuh"

// The lists of one sequence for the heads from `head` on, HEADS_OF_LIST of which share them. Wrong entries are never
// followed: they name no key.
struct Lists {
  const int* entries;  // of the first list
  long long row;       // strides
  long long column;
  int length;   // entries of a list
  int queries;  // that share a list
  int rows;     // of a list: queries x heads
  int q_rows;

  __device__ Lists(const Params& p, const Sequence& sequence, int head)
      : row(p.selected.row),
        column(p.selected.column),
        length(p.selected_entries),
        queries(max(min(p.selected_rows, sequence.q_rows), 1)),
        rows(queries * HEADS_OF_LIST),
        q_rows(sequence.q_rows) {
    long long first = PACKED ? sequence.q_start / p.selected_rows + sequence.batch : 0;  // @first-list
    entries = (const int*)p.selected.data + (PACKED ? 0 : sequence.batch * p.selected.batch) +
              head / HEADS_OF_LIST * p.selected.head + first * row;
  }
  // Lists of the first `q_len` queries.
  __device__ int count(int q_len) const { return (q_len + queries - 1) / queries; }
  __device__ int entry(int list, int place) const { return entries[list * row + place * column]; }
  // Keys that a list names at most.
  __device__ long long keys() const { return (long long)length * KEYS_OF_ENTRY; }
};

// Where the rows of a tile are. A row that does not exist has the number of queries: it reads as zeros, and sees
// nothing.
struct ListRows {
  int query[BLOCK_Q];
  int head[BLOCK_Q];

  // Finds the rows of a list from `first` on. After a barrier they may be read.
  __device__ void find_rows(const Lists& lists, int list, int first, int head_first) {
    for (int n = threadIdx.x; n < BLOCK_Q; n += THREADS) {
      int row = first + n, i = list * lists.queries + row / HEADS_OF_LIST;  // @listed-query
      query[n] = row < lists.rows ? min(i, lists.q_rows) : lists.q_rows;
      head[n] = head_first + row % HEADS_OF_LIST;  // @listed-head
    }
  }
  // The keys that some of these rows may see.
  __device__ static Range visible(const Lists& lists, const Sequence& sequence, const Band& band, int list, int first) {
    int begin = list * lists.queries + first / HEADS_OF_LIST;
    int last = list * lists.queries + (min(first + BLOCK_Q, lists.rows) - 1) / HEADS_OF_LIST;
    int end = min(last + 1, band.q_len);
    return sequence.readable(begin < end ? Range{band.kv_begin(begin), band.kv_end(end)} : Range{0, 0});
  }
};

// Where the keys of a tile are. One that does not exist, or that no row of the tile sees, has the number of keys: it
// reads as zeros, and nothing sees it.
struct ListKeys {
  int key[BLOCK_KV];
#if KV_CACHE
  int block[BLOCK_KV];  // of the cache
#endif

  // Takes neighbouring keys. After a barrier they may be read.
  __device__ void take(Range keys, int kv_len) {
    for (int n = threadIdx.x; n < BLOCK_KV; n += THREADS) key[n] = keys.begin + n < keys.end ? keys.begin + n : kv_len;
  }

  // Finds the keys of a list from place `start` on, and returns whether any of them is visible. It is a barrier, before
  // which no thread may read the keys of an earlier tile.
  __device__ bool find_keys(const Lists& lists, const Sequence& sequence, int list, long long start, Range visible) {
    bool any = false;
    for (int n = threadIdx.x; n < BLOCK_KV; n += THREADS) {
      long long place = start + n, named = -1;
      if (place < lists.keys()) {
        int entry = lists.entry(list, place / KEYS_OF_ENTRY);
        if (entry >= 0) named = (long long)entry * KEYS_OF_ENTRY + place % KEYS_OF_ENTRY;  // @key-of-entry
      }
      bool seen = named >= visible.begin && named < visible.end;  // @listed-key-exists
      key[n] = seen ? named : sequence.kv_len;
#if KV_CACHE
      block[n] = seen ? sequence.blocks.block_of(named) : -1;
#endif
      any |= seen;
    }
    return __syncthreads_or(any);
  }
};

struct ListTile : ListRows, ListKeys {};

// The tiles of BLOCK_Q rows of one list that a block owns, one after another.
struct ListTiles {
  const Sequence& sequence;
  const Band& band;
  Lists lists;
  int head;     // of the first row
  int of_list;  // tiles of a list
  int tile;
  int list;       // of the tile
  Range visible;  // keys that a row of the tile may see

  __device__ ListTiles(const Params& p, const Sequence& sequence, const Band& band, int head)
      : sequence(sequence),
        band(band),
        lists(p, sequence, head),
        head(head),
        of_list((lists.rows + BLOCK_Q - 1) / BLOCK_Q),
        tile(blockIdx.x) {}
  __device__ bool valid() const { return tile < lists.count(sequence.q_rows) * of_list; }
  __device__ void next() { tile += gridDim.x; }

  // Finds the rows of the tile, between two barriers.
  __device__ void find_rows(ListRows& rows) {
    int first = tile % of_list * BLOCK_Q;
    list = tile / of_list;
    visible = ListRows::visible(lists, sequence, band, list, first);
    __syncthreads();
    rows.find_rows(lists, list, first, head);
    __syncthreads();
  }
  // Calls visit() for the tiles of the list's keys of which a row may see one.
  template <typename Visit>
  __device__ void visit_keys(ListKeys& keys, Visit visit) const {
    for (long long start = 0; visible.begin < visible.end && start < lists.keys(); start += BLOCK_KV) {
      __syncthreads();
      if (keys.find_keys(lists, sequence, list, start, visible)) visit();
    }
  }
};

// A tile of at most BLOCK_KV keys that an entry names together, counted over the blocks of a sequence.
struct BlockTile {
  int width;  // keys of a block, at most all of them
  int parts;  // tiles of a block
  int tiles;

  __device__ BlockTile(const Sequence& sequence)
      : width(min(KEYS_OF_ENTRY, max(sequence.kv_rows, 1))),
        parts((width + BLOCK_KV - 1) / BLOCK_KV),
        tiles((sequence.kv_rows + width - 1) / width * parts) {}
  __device__ int block(int tile) const { return tile / parts; }
  // The keys of a tile that are below `end`.
  __device__ Range keys(int tile, int end) const {
    int begin = block(tile) * width + tile % parts * BLOCK_KV;
    return {begin, min(min(begin + BLOCK_KV, (block(tile) + 1) * width), end)};  // @cut-block
  }
};

// Addresses of the rows of a tile in a tensor whose rows are queries.
template <typename T>
struct ListedQueries {
  static constexpr bool EQUIDISTANT = false;

  const ListRows& tile;
  T* data;  // query 0 of head 0 of the sequence
  long long head;
  long long stride;
  int q_len;
  int aligned;
  static constexpr int first = 0;

  __device__ ListedQueries(const ListRows& tile, const Sequence& sequence, const Operand& x)
      : tile(tile),
        data(sequence.queries<T>(x, 0)),
        head(x.head),
        stride(x.row),
        q_len(sequence.q_len),
        aligned(x.aligned) {}
  __device__ T* operator()(int row) const { return data + tile.head[row] * head + tile.query[row] * stride; }
  __device__ bool has(int row) const { return tile.query[row] < q_len; }
};

// Addresses of the keys of a tile.
template <typename T>
struct ListedKeys {
  static constexpr bool EQUIDISTANT = false;

  const ListKeys& tile;
  T* data;
  long long stride;
  int kv_len;
  int aligned;
  static constexpr int first = 0;
#if KV_CACHE
  Blocks blocks;
  long long page;  // stride

  __device__ ListedKeys(const ListKeys& tile, const Sequence& sequence, const Operand& x, int kv_head)
      : tile(tile),
        data((T*)x.data + kv_head * x.head + (PAGED ? 0 : sequence.blocks.row() * x.batch)),
        stride(x.row),
        kv_len(sequence.kv_len),
        aligned(x.aligned),
        blocks(sequence.blocks),
        page(PAGED ? x.batch : 0) {}
  __device__ T* operator()(int row) const {
    return data + tile.block[row] * page + blocks.row_in_block(tile.key[row]) * stride;
  }
  __device__ bool has(int row) const { return tile.key[row] < kv_len && (!PAGED || blocks.has(tile.block[row])); }
#else
  __device__ ListedKeys(const ListKeys& tile, const Sequence& sequence, const Operand& x, int kv_head)
      : tile(tile), data(sequence.keys<T>(x, kv_head)), stride(x.row), kv_len(sequence.kv_len), aligned(x.aligned) {}
  __device__ T* operator()(int row) const { return data + tile.key[row] * stride; }
  __device__ bool has(int row) const { return tile.key[row] < kv_len; }  // @listed-keys-alone
#endif
};

// The sums of dK, without the scale, and of dV of one head, to which blocks add in the accumulation dtype.
struct KeySums {
  real* dK;
  real* dV;
  long long dK_row;
  long long dV_row;

  __device__ KeySums(const Params& p, const Sequence& sequence, int kv_head)
      : dK(sequence.keys<real>(p.dk_sums, kv_head)),
        dV(sequence.keys<real>(p.dv_sums, kv_head)),
        dK_row(p.dk_sums.row),
        dV_row(p.dv_sums.row) {}
  __device__ real* of_K(int j) const { return dK + j * dK_row; }
  __device__ real* of_V(int j) const { return dV + j * dV_row; }
};

// The dropout of another head of a sequence.
__device__ inline Dropout of_head(Dropout dropout, const Params& p, int b, int head) {
  dropout.head_index = b * p.whole_heads + p.first_head + head;
  return dropout;
}
