// Bias and dense mask of the softmax. A thread has a row of scores, so that a warp which reads them where they are
// reads 32 rows at once. Instead each warp copies those of its rows to shared memory, coalesced and a part of PART keys
// ahead:
//
//   PartCopy     copies a part of one array, and returns a thread's row of it
//   DenseParts   both arrays
//   DenseRow     the numbers of a row, for modify() in rows.cuh
#pragma once
#include "ptx.cuh"
#include "mask.cuh"

// Columns of scores that are loaded, modified or stored at once.
constexpr int PART = 32;

// Number n of those in words. Of two bfloat16 each has its own instruction, where a cast would first take them apart.
template <typename T>
__device__ real number_of(const unsigned int* words, int n) {
  return to_real(((const T*)words)[n]);
}
template <>
__device__ inline real number_of<bfloat16>(const unsigned int* words, int n) {
  return __uint_as_float(n % 2 ? words[n / 2] & 0xFFFF0000 : words[n / 2] << 16);  // @half-of-word
}

struct DenseRow {
  static constexpr int BIAS_NUMBER_BYTES = sizeof(bias_element) < 4 ? 2 : 4;  // PartCopy rounds fp64 to fp32

  unsigned int bias[PART * BIAS_NUMBER_BYTES / 4];
  unsigned int mask[PART / 4];

  __device__ real bias_of(int n) const {
    if constexpr (sizeof(bias_element) > BIAS_NUMBER_BYTES)
      return __uint_as_float(bias[n]);
    else
      return number_of<bias_element>(bias, n);
  }
  __device__ bool sees(int n) const { return mask[n / 4] & 0xFFu << n % 4 * 8; }
};

// A part of a warp in shared memory: 32 rows in chunks of 16 bytes, swizzled so that neither the copy nor the threads
// that read a row each have bank conflicts.
template <typename T>
struct PartCopy {
  static constexpr int BYTES = sizeof(T) < 4 ? sizeof(T) : 4;  // of a number, once it is copied
  static constexpr int ROW = PART * BYTES, CHUNKS = ROW / 16, IN_CHUNK = 16 / BYTES, ROWS = WARP / CHUNKS;
  static_assert(CHUNKS <= 8 && PART == WARP, "a row has a line of shared memory at most, and a lane for each column");

  // Rows that are contiguous and 16-byte aligned are copied in vectors: each lane takes 16 bytes of every ROWS-th row.
  // Rows that are not aligned, or of fp64, are copied one number at a time, a column per lane.
  bool aligned;
  const T* from;  // the lane's first number, for key 0
  long long next;
  long long column;
  int lane_row;
  int lane_column;
  int rows;  // existing rows of the warp
  unsigned int smem;

  __device__ PartCopy(const Dense& x, unsigned int smem, const Sequence& sequence, int head, int q_start)
      : column(x.column), rows(sequence.q_len - q_start), smem(smem) {
    long long strides = x.batch | x.head | x.row;
    bool in_chunks = (((long long)x.data | strides * BYTES) & 15) == 0;
    aligned = column == 1 && in_chunks && sizeof(T) == BYTES;  // @aligned-rows
    lane_row = aligned ? lane_id() / CHUNKS : 0;
    lane_column = aligned ? lane_id() % CHUNKS * IN_CHUNK : lane_id();
    next = (aligned ? ROWS : 1) * x.row;
    from = (const T*)x.data + sequence.batch * x.batch + head * x.head + (q_start + lane_row) * x.row +
           lane_column * column;
  }

  __device__ unsigned int address(int row, int chunk) const {
    return smem + row * ROW + ((chunk ^ row / (8 / CHUNKS) % CHUNKS) << 4);
  }

  // Begins the copy of the keys from kv_start on; positions that do not exist become zeros.
  __device__ void start(int kv_start, int kv_len) const {
    const T* number = from + kv_start * column;
    int existing = kv_len - kv_start - lane_column;
    if (aligned) {
      int bytes = min(max(existing, 0) * BYTES, 16);  // @keys-of-chunk
#pragma unroll
      for (int r = 0; r < WARP; r += ROWS, number += next)
        // @rows-of-part
        cp_async<16>(address(lane_row + r, lane_id() % CHUNKS), number, lane_row + r < rows ? bytes : 0);
    } else {
#pragma unroll 8
      for (int r = 0; r < WARP; ++r, number += next)
        // @copied-one-by-one
        store(address(r, lane_id() / IN_CHUNK) + lane_id() % IN_CHUNK * BYTES,
              r < rows && existing > 0 ? *number : T());
    }
  }
  __device__ static void store(unsigned int to, const T& x) {
    if constexpr (BYTES == 4)
      st_shared(to, __float_as_int((float)x));
    else if constexpr (BYTES == 2)
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(*(const unsigned short*)&x) : "memory");
    else
      asm volatile("st.shared.b8 [%0], %1;" ::"r"(to), "r"((unsigned int)x) : "memory");
  }

  // This thread's row of the part.
  __device__ void read(unsigned int (&words)[ROW / 4]) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) *(uint4*)(words + 4 * chunk) = ld_shared_v4(address(lane_id(), chunk));
  }
};

// The parts of the rows [q_start, q_start + 32) of one head.
struct DenseParts {
  static constexpr int BIAS_BYTES = BIAS ? WARP * PART * DenseRow::BIAS_NUMBER_BYTES : 0;
  static constexpr int BYTES = BIAS_BYTES + (DENSE_MASK ? WARP * PART : 0);  // of a warp

  PartCopy<bias_element> bias;
  PartCopy<unsigned char> mask;
  int kv_len;

  __device__ DenseParts(const Params& p, unsigned int smem, const Sequence& sequence, int head, int q_start)
      : bias(p.bias, smem, sequence, head, q_start),
        mask(p.mask, smem + BIAS_BYTES, sequence, head, q_start),
        kv_len(sequence.kv_len) {}
  __device__ void start(int kv_start) const {
    if constexpr (BIAS) bias.start(kv_start, kv_len);
    if constexpr (DENSE_MASK) mask.start(kv_start, kv_len);
    cp_async_commit_group();
  }
  // This thread's row of the part whose copy was begun last. Afterwards every lane may begin the next.
  __device__ void read(DenseRow& numbers) const {
    cp_async_wait_group<0>();  // @wait-part
    __syncwarp();              // @copied-part
    if constexpr (BIAS) bias.read(numbers.bias);
    if constexpr (DENSE_MASK) mask.read(numbers.mask);
    __syncwarp();
  }
};
