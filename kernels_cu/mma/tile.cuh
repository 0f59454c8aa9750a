// Tiles of the mma engine: 16-bit numbers in shared memory, fragments in registers, and the two matrix products.
//
//   load_tile      rows of a tensor -> shared memory, asynchronously, zeros for rows outside the range
//   scores         C = A B^T     rows of two tiles with DIM columns each
//   accumulate     C += P X      P in fragments, X the rows of a tile; this warp's columns
//
// A tile is ROWS x DIM; a row is DIM / 8 chunks of 16 bytes. ldmatrix reads eight rows of one chunk at a time, which
// must lie in different banks: chunk c of row r is stored at c ^ swizzle(r).
#pragma once
#include "../fragments.cuh"
#include "../walk.cuh"

constexpr int ROW_WARPS = THREADS / WARP / COLUMN_WARPS;  // warps with different rows

// Columns of a tile: a whole number of fragments per warp.
__device__ constexpr int padded(int dim) {
  return round_up(dim, 16 * COLUMN_WARPS);
}

// Index of this warp among those with different rows, and among those with different columns.
__device__ inline int row_warp() {
  return threadIdx.x / WARP / COLUMN_WARPS;
}
__device__ inline int column_warp() {
  return COLUMN_WARPS == 1 ? 0 : threadIdx.x / WARP % COLUMN_WARPS;
}

// Returns x through a shuffle, which the compiler cannot see through: it keeps the result in a register instead of
// recomputing x in every iteration. Must be executed by whole warps.
template <typename T>
__device__ T keep(T x) {
  return __shfl_sync(0xFFFFFFFF, x, threadIdx.x % WARP);
}

// Swizzled layout of a row of DIM numbers.
template <int DIM>
struct Tile {
  static constexpr int CHUNKS = padded(DIM) / 8;
  static constexpr int ROW = 16 * CHUNKS;  // bytes
  // Chunks are permuted within groups of 8, or of the largest power of two that divides the row. Rows of a smaller
  // group are not a multiple of all banks long, and need less swizzling.
  static constexpr int GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;

  __device__ static int swizzle(int row) { return row / (8 / GROUP) % GROUP; }
  __device__ static unsigned int at(int row, int chunk) { return row * ROW + ((chunk ^ swizzle(row)) << 4); }

  // Address arithmetic of one lane: byte offsets into a tile for ldmatrix of 16 x 16 numbers.
  struct Lane {
    unsigned int offset[GROUP / 2];  // swizzled offsets of chunks 0, 2 .. of the first group

    __device__ Lane(int row, int chunk) {
#pragma unroll
      for (int n = 0; n < GROUP / 2; ++n)
        offset[n] = row * ROW + (((chunk % GROUP ^ 2 * n ^ swizzle(row)) + chunk / GROUP * GROUP) << 4);
    }
    __device__ Lane kept() const {
      Lane lane = *this;
#pragma unroll
      for (int n = 0; n < GROUP / 2; ++n) lane.offset[n] = keep(offset[n]);
      return lane;
    }
    // `row` is a multiple of 8, and `chunk` has no bit in common with the lane's chunk.
    __device__ unsigned int at(int row, int chunk) const {
      return offset[chunk % GROUP / 2] + row * ROW + (chunk / GROUP * GROUP << 4);
    }
  };

  // The lane's addresses of 16 rows of A, of 16 rows of B, and of 16 rows of X in this warp's columns.
  __device__ static Lane lane_of_A(int row) { return Lane(row + lane_id() % 16, lane_id() / 16); }
  __device__ static Lane lane_of_B() { return Lane(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2); }
  __device__ static Lane lane_of_X() { return Lane(lane_id() % 16, 2 * column_warp() + lane_id() / 16); }
};

// Fragments of DIM columns that one warp accumulates: 16-column blocks are dealt round-robin to the column warps.
__device__ constexpr int fragments_of(int dim) {
  return padded(dim) / 8 / COLUMN_WARPS;
}
// Column of the tensor where fragment n of this warp begins.
__device__ inline int first_column(int n) {
  return 16 * (n / 2 * COLUMN_WARPS + column_warp()) + n % 2 * 8;
}

// Loads a chunk of an unaligned row number by number, synchronously.
template <int DIM>
__device__ void load_numbers_of_chunk(unsigned int to, const element* row, int chunk, bool valid) {
  unsigned int words[4] = {};
#pragma unroll
  for (int n = 0; n < 8; ++n)
    if (valid && 8 * chunk + n < DIM) words[n / 2] |= (unsigned int)row[8 * chunk + n].bits << 16 * (n % 2);
  st_shared_v4(to, words);
}

// Loads tiles of ROWS rows of a tensor into shared memory; rows that are not requested become zeros and are not read.
// If every thread has the same share of every tile (REGULAR), its addresses are computed once.
template <int ROWS, int DIM>
struct Loader {
  using T = Tile<DIM>;
  static constexpr int STEP = THREADS / T::CHUNKS;  // rows that all threads load at once
  static constexpr bool REGULAR = THREADS % T::CHUNKS == 0 && STEP % 8 == 0 && ROWS % STEP == 0;

  // REGULAR: offsets of this thread's chunk in the tile's first rows: in the tensor, and in shared memory.
  long long from;
  unsigned int to;

  __device__ Loader(const Operand& x) {
    int row = threadIdx.x / T::CHUNKS;
    from = row * x.row + (bytes(chunk()) ? 8 * chunk() : 0);
    to = T::at(row, chunk());
  }
  __device__ Loader kept() const {
    Loader loader = *this;
    loader.from = keep(from), loader.to = keep(to);
    return loader;
  }
  __device__ static int chunk() { return threadIdx.x % T::CHUNKS; }
  // Valid bytes of a chunk: 16 except at the end of a row.
  __device__ static int bytes(int chunk) { return DIM == padded(DIM) ? 16 : min(max(2 * DIM - 16 * chunk, 0), 16); }

  // Loads rows of the tile whose position is with `read(position)`; `whole`: all of them.
  template <typename Rows, typename Read>
  __device__ void load(unsigned int tile, const Rows& rows, bool whole, Read read) const {
    if (rows.aligned < 8) {
#pragma unroll 1
      for (int n = threadIdx.x; n < ROWS * T::CHUNKS; n += THREADS) {
        int row = n / T::CHUNKS, chunk = n % T::CHUNKS;
        load_numbers_of_chunk<DIM>(tile + T::at(row, chunk), rows(row), chunk, read(rows.first + row));
      }
    } else if constexpr (REGULAR) {
      const element* next = rows(0) + from;
      if (whole) {
#pragma unroll
        for (int n = 0; n < ROWS / STEP; ++n, next += STEP * rows.stride)
          cp_async<16>(tile + to + n * STEP * T::ROW, next, bytes(chunk()));
      } else {
#pragma unroll 1
        for (int n = 0; n < ROWS / STEP; ++n, next += STEP * rows.stride) {
          bool valid = read(rows.first + threadIdx.x / T::CHUNKS + n * STEP);
          cp_async<16>(tile + to + n * STEP * T::ROW, valid ? next : rows.data, valid ? bytes(chunk()) : 0);
        }
      }
    } else {
      for (int n = threadIdx.x; n < ROWS * T::CHUNKS; n += THREADS) {
        int row = n / T::CHUNKS, chunk = n % T::CHUNKS;
        int size = read(rows.first + row) ? bytes(chunk) : 0;
        cp_async<16>(tile + T::at(row, chunk), size ? rows(row) + 8 * chunk : rows.data, size);
      }
    }
  }
  template <typename Rows>
  __device__ void load(unsigned int tile, const Rows& rows, Range range) const {
    load(tile, rows, rows.first >= range.begin && rows.first + ROWS <= range.end, range);
  }
};

template <int ROWS, int DIM, typename Rows>
__device__ void load_tile(unsigned int tile, const Rows& rows, const Operand& x, Range range) {
  Loader<ROWS, DIM>(x).load(tile, rows, range);
}

// Multistage cp.async pipeline: a ring of STAGES slots, of which STAGES - 1 are in flight while one is used. With one
// slot, every load is waited for.
template <int STAGES, int BYTES>
struct Pipeline {
  unsigned int start;
  unsigned int loading;  // byte offset of the slot to load next
  unsigned int used;     // and of the slot to use next

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
    cp_async_wait_group<(STAGES > 1 ? STAGES - 2 : 0)>();
    __syncthreads();
    unsigned int slot = start + used;
    used = after(used);
    return slot;
  }
};

// Loads numbers [first, first + COUNT) of a per-row array such as lse; zeros for those without `read(row)`.
template <int COUNT, typename Read>
__device__ void load_numbers(unsigned int to, const float* numbers, const Operand& x, int first, Read read) {
  static_assert(COUNT <= THREADS, "one each");
  int n = threadIdx.x;
  if (n >= COUNT) return;
  bool valid = read(first + n);
  cp_async<4>(to + 4 * n, numbers + (valid ? (first + n) * x.row : 0), valid ? 4 : 0);
}

// C += A B^T for columns [16 k, 16 k + 16) of A and B; k = 0 starts the sum.
template <int M, int N, int DIM>
__device__ void add_product(float (&C)[M][N][4], const unsigned int (&A)[M][4], unsigned int B_smem,
                            const typename Tile<DIM>::Lane& b_lane, int k) {
  unsigned int b[4];
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    ldmatrix_x4(b, B_smem + b_lane.at(8 * n, 2 * k));
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        // Constant zeros cost neither a register nor an instruction.
        const float zeros[4] = {};
        if (k == 0)
          mma_m16n8k16<element>(C[m][n + right], A[m], b[2 * right], b[2 * right + 1], zeros);
        else
          mma_m16n8k16<element>(C[m][n + right], A[m], b[2 * right], b[2 * right + 1], C[m][n + right]);
      }
  }
}

// C = A B^T for 16 M rows of tile A and 8 N rows of tile B, at this lane's addresses.
template <int M, int N, int DIM>
__device__ void scores(float (&C)[M][N][4], unsigned int A_smem, const typename Tile<DIM>::Lane& a_lane,
                       unsigned int B_smem, const typename Tile<DIM>::Lane& b_lane) {
  unsigned int a[M][4];
#pragma unroll
  for (int k = 0; k < padded(DIM) / 16; ++k) {
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], A_smem + a_lane.at(16 * m, 2 * k));
    add_product<M, N, DIM>(C, a, B_smem, b_lane, k);
  }
}

// Loads A fragments for the whole mainloop: DIM columns of 16 M rows from `row` of a tile.
template <int M, int DIM>
__device__ void load_fragments(unsigned int (&A)[padded(DIM) / 16][M][4], unsigned int A_smem, int row) {
  auto a_lane = Tile<DIM>::lane_of_A(row);
#pragma unroll
  for (int k = 0; k < padded(DIM) / 16; ++k)
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(A[k][m], A_smem + a_lane.at(16 * m, 2 * k));
}
template <int M, int N, int DIM>
__device__ void scores(float (&C)[M][N][4], const unsigned int (&A)[padded(DIM) / 16][M][4], unsigned int B_smem,
                       const typename Tile<DIM>::Lane& b_lane) {
#pragma unroll
  for (int k = 0; k < padded(DIM) / 16; ++k) add_product<M, N, DIM>(C, A[k], B_smem, b_lane, k);
}

// C += P X for P (16 M rows, 16 K columns) and the 16 K rows of tile X: this warp's columns.
template <int M, int K, int DIM>
__device__ void accumulate(float (&C)[M][fragments_of(DIM)][4], const unsigned int (&P)[M][K][4], unsigned int X_smem,
                           const typename Tile<DIM>::Lane& x_lane) {
  unsigned int b[4];
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int n = 0; n < fragments_of(DIM); n += 2) {
      ldmatrix_x4_trans(b, X_smem + x_lane.at(16 * k, n * COLUMN_WARPS));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<element>(C[m][n], P[m][k], b[0], b[1], C[m][n]);
        mma_m16n8k16<element>(C[m][n + 1], P[m][k], b[2], b[3], C[m][n + 1]);
      }
    }
}

// Rounds C times `factor(m, half)` and stores it to rows of a tile that only this warp uses.
template <int M, int DIM, typename Factor>
__device__ void store_fragments(unsigned char* smem, const float (&C)[M][fragments_of(DIM)][4], int row,
                                Factor factor) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < fragments_of(DIM); ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float by = factor(m, half);
        unsigned int at = Tile<DIM>::at(row + row_of(m, 2 * half), first_column(n) / 8) + lane_id() % 4 * 4;
        *(unsigned int*)(smem + at) = cvt_rn_x2<element>(C[m][n][2 * half] * by, C[m][n][2 * half + 1] * by);
      }
}

// Copies a tile to rows [first, end) of a tensor, 16 bytes at a time if rows are aligned.
template <int ROWS, int DIM>
__device__ void store_tile(element* rows, const Operand& x, const unsigned char* smem, int first, int end) {
  using T = Tile<DIM>;
  constexpr int CHUNKS = round_up(DIM, 8) / 8;
  for (int n = threadIdx.x; n < ROWS * CHUNKS; n += THREADS) {
    int row = n / CHUNKS, chunk = n % CHUNKS;
    if (first + row >= end) continue;
    uint4 numbers = *(const uint4*)(smem + T::at(row, chunk));
    store_chunk<DIM>(rows + (long long)(first + row) * x.row, x, chunk, numbers);
  }
}
