// Locates the keys of a sequence in a KV cache. A block is a page that the block table names, or the row of a
// contiguous cache that holds the sequence. A wrong table may name blocks that do not exist: they are never accessed,
// and their keys read as zeros.
#pragma once
#include "params.cuh"

template <typename T>
struct TileRows;  // sequence.cuh

struct Blocks {
  const int* table;  // block table of this sequence; contiguous: null
  int own;           // contiguous: the block of this sequence
  int count;         // blocks of the cache
  int page_log2;     // log2 of the keys of a page; PAGE_DIVISION: their reciprocal
#if PAGE_DIVISION
  int page_keys;
#endif

  __device__ Blocks(const Params& p, int b) : table(nullptr), own(b), count(p.cache_blocks), page_log2(p.page_log2) {
    bool past_the_end = PACKED && b == p.batch;
    if (PAGED && !past_the_end) table = p.block_table + b * p.table_row;
    if (!PAGED && !past_the_end && p.cache_batch_idx) own = p.cache_batch_idx[b];
#if PAGE_DIVISION
    page_keys = p.cache_rows;
#endif
  }
  __device__ bool has(int block) const { return (unsigned)block < (unsigned)count; }  // @has-page
  // exists(): true if paged, or if the sequence has a valid row of the contiguous cache; row(): that row, 0 if invalid.
  __device__ bool exists() const { return PAGED || has(own); }
  __device__ int row() const { return has(own) ? own : 0; }

  // The block of a key, and the key's row in it.
#if PAGE_DIVISION
  // The quotient of a key, which has 31 bits, and the keys of a page, exact by a reciprocal of 32 bits rounded up:
  // 2^(32 + shift) / page_keys, where 2^(shift + 1) is the power of two above page_keys.
  __device__ int page_of(int key) const {
    return __umulhi(key, page_log2) >> (31 - __clz(page_keys - 1));  // @page-division
  }
  __device__ int block_of(int key) const { return table[page_of(key)]; }
  __device__ int row_in_block(int key) const { return key - page_of(key) * page_keys; }
#else
  __device__ int block_of(int key) const { return PAGED ? table[key >> page_log2] : own; }  // @page-of-key
  __device__ int row_in_block(int key) const { return PAGED ? key & ((1 << page_log2) - 1) : key; }
#endif
};

// Addresses of the rows of a tile of BLOCK_KV keys on one or more pages. Tiles begin at multiples of BLOCK_KV, so pages
// of at least BLOCK_KV keys hold whole tiles.
template <typename T>
struct PagedTileRows {
  static constexpr bool EQUIDISTANT = false;

  Blocks blocks;
  T* data;         // the head's row 0 of page 0
  long long page;  // stride of a page
  long long stride;
  int first;
  int aligned;
  const int* pages;  // page numbers of the tile, in shared memory

#if PAGE_DIVISION
  // A tile may begin anywhere in its first page.
  __device__ int page_of(int row) const { return pages[blocks.page_of(first + row) - blocks.page_of(first)]; }
#else
  __device__ int page_of(int row) const { return pages[row >> blocks.page_log2]; }
#endif
  __device__ bool has(int key) const { return blocks.has(page_of(key - first)); }
  __device__ T* operator()(int row) const {
    return data + page_of(row) * page + blocks.row_in_block(first + row) * stride;  // @row-in-page
  }
};

// The keys of one head of a cache; tile(first, pages) returns those from position `first`, given their pages.
template <typename T>
struct CacheRows {
  Blocks blocks;
  T* data;
  long long page;
  long long stride;
  int aligned;

  __device__ auto tile(int first, const int* pages) const {
    if constexpr (PAGED)
      return PagedTileRows<T>{blocks, data, page, stride, first, aligned, pages};
    else
      return TileRows<T>{data, stride, first, aligned};
  }
};
