// Loads from global to shared memory:
//
//   Loader, load_tile   rows of a tensor -> a tile, asynchronously, zeros for rows outside the range
//   load_numbers        numbers of a per-row array
//   Pipeline            ring of slots that are loaded ahead
//   KvLoads             tiles of K and V -> the slots of a pipeline
#pragma once
#include "../tile_pages.cuh"
#include "../walk.cuh"
#include "tile.cuh"

// Loads a chunk of an unaligned row element by element, synchronously.
template <int DIM, typename T>
__device__ void load_numbers_of_chunk(unsigned int to, const T* row, int chunk, bool valid) {
  constexpr int COUNT = 16 / sizeof(T), EACH = COUNT / 4;  // numbers of a chunk and of a word
  unsigned int words[4] = {};
#pragma unroll
  for (int n = 0; n < COUNT; ++n)
    if (valid && COUNT * chunk + n < DIM)
      words[n / EACH] |= (unsigned int)row[COUNT * chunk + n].bits << 32 / EACH * (n % EACH);
  st_shared_v4(to, words);
}

__device__ constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Loads tiles of ROWS rows of a tensor into shared memory. If every thread has the same share of every tile (REGULAR),
// its addresses are computed once; then LANES threads share a row, some of which are idle if a row has fewer chunks.
template <int ROWS, int DIM, typename Number = element>
struct Loader {
  using T = TileOf<DIM, Number>;
  static constexpr int COUNT = 16 / sizeof(Number);  // numbers of a chunk
  static constexpr int LANES = power_of_two_from(T::CHUNKS);
  static constexpr int STEP = THREADS / LANES;  // rows that all threads together load at once
  static constexpr bool REGULAR = STEP > 0 && STEP % 8 == 0 && ROWS % STEP == 0;

  // REGULAR: offsets in the tensor and in shared memory of this thread's chunk in the tile's first rows.
  long long from;
  unsigned int to;

  __device__ Loader(long long stride) {
    int row = threadIdx.x / LANES;
    from = row * stride + (bytes(chunk()) ? COUNT * chunk() : 0);
    to = T::at(row, chunk());
  }
  __device__ Loader kept() const {
    Loader loader = *this;
    loader.from = keep(from), loader.to = keep(to);
    return loader;
  }
  __device__ static int chunk() { return threadIdx.x % LANES; }
  __device__ static bool idle() { return LANES > T::CHUNKS && chunk() >= T::CHUNKS; }
  // Valid bytes of a chunk: 16 except at the end of a row.
  __device__ static int bytes(int chunk) {
    constexpr int ROW = DIM * sizeof(Number);                       // @bytes-of-row
    return ROW == T::ROW ? 16 : min(max(ROW - 16 * chunk, 0), 16);  // @bytes-of-chunk
  }

  // REGULAR: loads a tile of which all rows are read; `next` is the address of this thread's chunk of its first rows.
  __device__ void load_whole(unsigned int tile, const Number* next, long long stride) const {
    if (idle()) return;  // @idle-threads
#pragma unroll
    for (int n = 0; n < ROWS / STEP; ++n, next += STEP * stride)
      cp_async<16>(tile + to + n * STEP * T::ROW, next, bytes(chunk()));
  }

#if LATENT
  // Loads a tile with the first four warps. A few lanes load a row, neighbouring chunks at a time, and compute its
  // address once.
  template <typename Rows, typename Read>
  __device__ void load(unsigned int tile, const Rows& rows, bool, Read read) const {
    constexpr int GROUP = T::GROUP, AT_ONCE = 4 * WARP / GROUP;  // lanes of a row, and rows that are loaded at once
    if (threadIdx.x >= 4 * WARP) return;
#pragma unroll
    for (int first = 0; first < ROWS; first += AT_ONCE) {
      int row = first + threadIdx.x / GROUP, in_group = threadIdx.x % GROUP;
      if (ROWS % AT_ONCE && row >= ROWS) return;
      bool valid = read(rows.first + row);
      const Number* from = valid ? rows(row) : rows.data;
      unsigned int to = tile + T::at(row, in_group);
      if (rows.aligned < COUNT) {  // @unaligned-rows
#pragma unroll 1
        for (int n = 0; n < T::CHUNKS; n += GROUP) load_numbers_of_chunk<DIM>(to + 16 * n, from, n + in_group, valid);
      } else {
#pragma unroll
        for (int n = 0; n < T::CHUNKS; n += GROUP)
          cp_async<16>(to + 16 * n, from + COUNT * (n + in_group), valid ? bytes(n + in_group) : 0);
      }
    }
  }
#else
  // Loads a tile. Rows for which read(position) is false become zeros, and their memory is not accessed; `whole`: it is
  // true for all rows.
  template <typename Rows, typename Read>
  __device__ void load(unsigned int tile, const Rows& rows, bool whole, Read read) const {
    if (rows.aligned < COUNT) {  // @unaligned-rows
#pragma unroll 1
      for (int n = threadIdx.x; n < ROWS * T::CHUNKS; n += THREADS) {
        int row = n / T::CHUNKS, chunk = n % T::CHUNKS;
        load_numbers_of_chunk<DIM>(tile + T::at(row, chunk), rows(row), chunk, read(rows.first + row));
      }
    } else if constexpr (REGULAR && Rows::EQUIDISTANT) {
      const Number* next = rows(0) + from;
      if (whole) {
        load_whole(tile, next, rows.stride);
      } else if (!idle()) {
#pragma unroll 1
        for (int n = 0; n < ROWS / STEP; ++n, next += STEP * rows.stride) {
          bool valid = read(rows.first + threadIdx.x / LANES + n * STEP);
          cp_async<16>(tile + to + n * STEP * T::ROW, valid ? next : rows.data, valid ? bytes(chunk()) : 0);
        }
      }
    } else {
#pragma unroll 2
      for (int n = threadIdx.x; n < ROWS * T::CHUNKS; n += THREADS) {
        int row = n / T::CHUNKS, chunk = n % T::CHUNKS;
        int size = read(rows.first + row) ? bytes(chunk) : 0;
        cp_async<16>(tile + T::at(row, chunk), size ? rows(row) + COUNT * chunk : rows.data, size);
      }
    }
  }
#endif
  template <typename Rows>
  __device__ void load(unsigned int tile, const Rows& rows, Range range) const {
    load(tile, rows, rows.first >= range.begin && rows.first + ROWS <= range.end,
         [&](int position) { return range(position) && rows.has(position); });  // @readable-rows
  }
};

// Rows of tiles that are loaded one after the other. The address of a tile is computed by adding a constant to the
// address of the previous tile, while TileRows needs a 64-bit multiplication per tile.
struct AdvancingRows : TileRows<element> {  // `data` is the row of the tile's first position
  __device__ const element* operator()(int row) const { return data + (long long)row * stride; }
  __device__ void seek(const HeadRows<element>& rows, int start) {
    data = rows.data + (long long)start * rows.stride;
    stride = rows.stride, aligned = rows.aligned, first = start;
  }
  __device__ void advance(int rows) { data += rows * stride, first += rows; }
};

template <int ROWS, int DIM, typename Rows>
__device__ void load_tile(unsigned int tile, const Rows& rows, Range range) {
  Loader<ROWS, DIM>(rows.stride).load(tile, rows, range);
}

// Multistage cp.async pipeline: a ring of STAGES slots, of which STAGES - 1 are in flight while one is used. With one
// slot, every load is waited for.
template <int STAGES, int BYTES>
struct Pipeline {
  unsigned int start;
  unsigned int loading;  // byte offset of the slot to load next
  unsigned int used;     // byte offset of the slot to use next

  __device__ Pipeline(unsigned int start) : start(start), loading(0), used(0) {}
  __device__ static unsigned int after(unsigned int slot) {
    return STAGES == 1 ? 0 : STAGES == 2 ? slot ^ BYTES : slot == (STAGES - 1) * BYTES ? 0 : slot + BYTES;
  }
  __device__ unsigned int next() const { return start + loading; }
  // Commits the loads of one slot; called without loads after the last tile, to keep the group count.
  __device__ void commit() {
    cp_async_commit_group();
    loading = after(loading);
  }
  // Waits for the next slot. Its barrier also means that all warps have finished with the previous slot.
  __device__ unsigned int wait() {
    cp_async_wait_group<(STAGES > 1 ? STAGES - 2 : 0)>();  // @wait-loads
    __syncthreads();                                       // @barrier-after-loads
    unsigned int slot = start + used;
    used = after(used);
    return slot;
  }
};

// Loads COUNT numbers or records of an array that has one per row, such as lse2; `numbers` points to the one of row
// `first`. Rows for which read(row) is false become zeros.
template <int COUNT, typename Number, typename Read>
__device__ void load_numbers(unsigned int to, const Number* numbers, int first, Read read) {
  static_assert(COUNT <= THREADS, "a thread loads at most one number");
  int n = threadIdx.x;
  if (n >= COUNT) return;
  bool valid = read(first + n);
  constexpr int SIZE = sizeof(Number);
  cp_async<SIZE>(to + SIZE * n, numbers + (valid ? n : 0), valid ? SIZE : 0);
}

#if LATENT
// Values are the first columns of the keys.
struct KeySlot {
  static constexpr int K = 0;  // [BLOCK_KV][HEAD_DIM]
  static constexpr int BYTES = BLOCK_KV * row_bytes(HEAD_DIM);
};
#else
// Byte offsets of the operands of a tile of keys and of their tangents.
struct KeySlot {
#if CODES_OF_4_BITS
  static constexpr int K_BYTES = BLOCK_KV * row_bytes(HEAD_DIM / 2, 1);
  static constexpr int V_BYTES = BLOCK_KV * row_bytes(HEAD_DIM_V / 2, 1);
#else
  static constexpr int K_BYTES = BLOCK_KV * row_bytes(HEAD_DIM, sizeof(kv_element));
  static constexpr int V_BYTES = BLOCK_KV * row_bytes(HEAD_DIM_V, sizeof(kv_element));
#endif
  static constexpr int K = 0;                  // [BLOCK_KV][HEAD_DIM]
  static constexpr int tK = K + K_BYTES;       // TK: [BLOCK_KV][HEAD_DIM]
  static constexpr int V = tK + TK * K_BYTES;  // [BLOCK_KV][HEAD_DIM_V]
  static constexpr int tV = V + V_BYTES;       // TV: [BLOCK_KV][HEAD_DIM_V]
#if SCALED_KV
  static constexpr int SCALES = tV + TV * V_BYTES;  // floats [4][BLOCK_KV]: scales of K and V, and their zeros
  static constexpr int BYTES = SCALES + 16 * BLOCK_KV;
#else
  static constexpr int BYTES = tV + TV * V_BYTES;
#endif
};
#endif

// Loads tiles of K and V of one head into the slots of a pipeline.
struct KvLoads {
  const Sequence& sequence;
  KeyRows<kv_element> K;
#if !LATENT
  KeyRows<kv_element> V;
#endif
#if CODES_OF_4_BITS
  Loader<BLOCK_KV, HEAD_DIM / 2, kv_element> K_loader;
  Loader<BLOCK_KV, HEAD_DIM_V / 2, kv_element> V_loader;
#else
  Loader<BLOCK_KV, HEAD_DIM, kv_element> K_loader;
#if !LATENT
  Loader<BLOCK_KV, HEAD_DIM_V, kv_element> V_loader;
#endif
#endif
  TilePages pages;

  __device__ KvLoads(const Params& p, const Sequence& sequence, int kv_head, int (&pages_smem)[2][BLOCK_KV])
      : sequence(sequence),
        K(sequence.key_rows<kv_element>(p.k, kv_head)),
#if !LATENT
        V(sequence.key_rows<kv_element>(p.v, kv_head)),
#endif
        K_loader(K.stride),
#if !LATENT
        V_loader(V.stride),
#endif
        pages{sequence, pages_smem} {
  }
  __device__ KvLoads kept() const {
    KvLoads loads = *this;
#if LATENT
    loads.K_loader = K_loader.kept();
#else
    loads.K_loader = K_loader.kept(), loads.V_loader = V_loader.kept();
#endif
    return loads;
  }

  // Loads the `keys` of the tile at `start`. The last pages.store() must have stored the page numbers of this tile.
  __device__ void load(unsigned int slot, int start, Range keys) const {
    Range readable = sequence.readable(keys);
    K_loader.load(slot + KeySlot::K, K.tile(start, pages.stored()), readable);
#if !LATENT
    V_loader.load(slot + KeySlot::V, V.tile(start, pages.stored()), readable);
#endif
  }
};
