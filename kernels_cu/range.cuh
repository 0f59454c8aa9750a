// Interval arithmetic, with which the generated Mod::tile bounds a mask over all queries and keys of a tile. Functions
// have the names and results of those in cupy_flash/mods/tiles.py. T is int if the generator has proved that all bounds
// fit 32 bits.
#pragma once

constexpr int CHUNK = 64;              // elements of a captured array per entry of its table of extremes
constexpr int MOST_CHUNKS = 64;        // maximum number of table entries read for a box
constexpr int MOST_ELEMENTS = 16;      // maximum number of elements read one by one
constexpr long long NEAR = 1ll << 40;  // sums of longs with magnitudes below this do not wrap
constexpr int INT_LEAST = -2147483647 - 1;
constexpr long long LONG_LEAST = -9223372036854775807ll - 1;

// lo <= x <= hi
template <typename T>
struct Interval {
  T lo;
  T hi;

  template <typename U>
  __device__ operator Interval<U>() const {
    return {(U)lo, (U)hi};
  }
};

// Whether a bool may be true, and whether it may be false.
struct Truth {
  bool may;
  bool may_not;
};

// The known bits of an integer, with 0 elsewhere, and a mask of the unknown ones.
template <typename T>
struct KnownBits {
  T known;
  T unknown;

  template <typename U>
  __device__ operator KnownBits<U>() const {
    return {(U)known, (U)unknown};
  }
};

__device__ inline Truth always() {
  return {true, false};
}
__device__ inline Truth never() {
  return {false, true};
}
__device__ inline Truth unknown() {
  return {true, true};
}
__device__ inline Interval<int> any_int() {
  return {INT_LEAST, 2147483647};
}
__device__ inline Interval<long long> any_long() {
  return {LONG_LEAST, 9223372036854775807ll};
}
template <typename T>
__device__ Interval<T> point(T x) {
  return {x, x};
}

template <typename T>
__device__ Interval<T> add(Interval<T> x, Interval<T> y) {
  return {x.lo + y.lo, x.hi + y.hi};
}
template <typename T>
__device__ Interval<T> scale(Interval<T> x, T factor) {
  return factor < 0 ? Interval<T>{x.hi * factor, x.lo * factor} : Interval<T>{x.lo * factor, x.hi * factor};
}
// The sum if its terms are too small for it to wrap, else the interval of all longs.
template <typename T>
__device__ Interval<T> guarded(Interval<T> sum) {
  return sum;
}
template <typename T, typename... Terms>
__device__ Interval<T> guarded(Interval<T> sum, Interval<T> term, Terms... terms) {
  return guarded<T>(term.lo > -NEAR && term.hi < NEAR ? sum : (Interval<T>)any_long(), terms...);
}
// The interval of an int, given the interval of its value before it wraps.
template <typename T>
__device__ Interval<T> wrapped(Interval<T> x) {
  return x.lo >= INT_LEAST && x.hi <= 2147483647 ? x : (Interval<T>)any_int();
}
template <typename T>
__device__ Interval<T> smallest(Interval<T> x, Interval<T> y) {
  return {min(x.lo, y.lo), min(x.hi, y.hi)};
}
template <typename T>
__device__ Interval<T> largest(Interval<T> x, Interval<T> y) {
  return {max(x.lo, y.lo), max(x.hi, y.hi)};
}
template <typename T>
__device__ Interval<T> multiply(Interval<T> x, Interval<T> y) {
  bool small = sizeof(T) == 4 || (min(x.lo, y.lo) >= INT_LEAST && max(x.hi, y.hi) <= 2147483647);
  if (!small) return any_long();
  T a = x.lo * y.lo, b = x.lo * y.hi, c = x.hi * y.lo, d = x.hi * y.hi;
  return {min(min(a, b), min(c, d)), max(max(a, b), max(c, d))};
}
template <typename T>
__device__ Interval<T> magnitude(Interval<T> x) {
  if (sizeof(T) == 8 && x.lo == LONG_LEAST) return any_long();
  T a = abs(x.lo), b = abs(x.hi);
  return {x.lo <= 0 && x.hi >= 0 ? 0 : min(a, b), max(a, b)};
}
// a / b rounded down, for b > 0.
template <typename T>
__device__ T floor_quotient(T a, T b) {
  T q = a / b;
  return q * b > a ? q - 1 : q;
}
template <typename T>
__device__ Interval<T> floor_divide(Interval<T> x, Interval<T> y) {
  if (y.lo <= 0) return any_long();
  return {min(floor_quotient(x.lo, y.lo), floor_quotient(x.lo, y.hi)),
          max(floor_quotient(x.hi, y.lo), floor_quotient(x.hi, y.hi))};
}
template <typename T>
__device__ Interval<T> modulo(Interval<T> x, Interval<T> y) {
  if (y.lo <= 0) return any_long();
  T quotient = floor_quotient(x.lo, y.hi);
  bool exact = y.lo == y.hi && quotient == floor_quotient(x.hi, y.hi);
  // @bounds-of-remainder
  return exact ? Interval<T>{x.lo - quotient * y.hi, x.hi - quotient * y.hi} : Interval<T>{0, y.hi - 1};
}
template <typename T>
__device__ Interval<T> shift_right(Interval<T> x, T count) {
  return {x.lo >> count, x.hi >> count};
}

template <typename T>
__device__ Truth less(Interval<T> x, Interval<T> y) {
  return {x.lo < y.hi, x.hi >= y.lo};
}
template <typename T>
__device__ Truth less_equal(Interval<T> x, Interval<T> y) {
  return {x.lo <= y.hi, x.hi > y.lo};  // @interval-less-equal
}
template <typename T>
__device__ Truth equal(Interval<T> x, Interval<T> y) {
  return {x.lo <= y.hi && y.lo <= x.hi, x.lo != x.hi || y.lo != y.hi || x.lo != y.lo};
}
template <typename T>
__device__ Truth nonzero(Interval<T> x) {
  return {x.lo != 0 || x.hi != 0, x.lo <= 0 && x.hi >= 0};
}

__device__ inline Truth negate(Truth x) {
  return {x.may_not, x.may};
}
__device__ inline Truth both(Truth x, Truth y) {
  return {x.may && y.may, x.may_not || y.may_not};  // @interval-and
}
__device__ inline Truth either(Truth x, Truth y) {
  return {x.may || y.may, x.may_not && y.may_not};
}
__device__ inline Truth same(Truth x, Truth y) {
  return {(x.may && y.may) || (x.may_not && y.may_not), (x.may && y.may_not) || (x.may_not && y.may)};
}
// where(condition, x, y)
__device__ inline Truth choose(Truth condition, Truth x, Truth y) {
  return {(condition.may && x.may) || (condition.may_not && y.may),
          (condition.may && x.may_not) || (condition.may_not && y.may_not)};
}
template <typename T>
__device__ Interval<T> choose(Truth condition, Interval<T> x, Interval<T> y) {
  if (!condition.may) return y;
  if (!condition.may_not) return x;
  return {min(x.lo, y.lo), max(x.hi, y.hi)};
}

// The known bits are those above the highest bit in which the bounds differ.
template <typename T>
__device__ KnownBits<T> bits_of_interval(Interval<T> x) {
  T differ = x.lo ^ x.hi;
#pragma unroll
  for (int shift = 1; shift < 8 * sizeof(T); shift *= 2) differ |= differ >> shift;
  return {x.lo & ~differ, differ};
}
// An unknown sign bit lowers lo; the other unknown bits raise hi.
template <typename T>
__device__ Interval<T> interval_of_bits(KnownBits<T> x) {
  constexpr T sign = (T)1 << (8 * sizeof(T) - 1);
  return {x.known | (x.unknown & sign), x.known | (x.unknown & ~sign)};
}
template <typename T>
__device__ KnownBits<T> bits_and(KnownBits<T> x, KnownBits<T> y) {
  T known = x.known & y.known;
  return {known, (x.known | x.unknown) & (y.known | y.unknown) & ~known};
}
template <typename T>
__device__ KnownBits<T> bits_or(KnownBits<T> x, KnownBits<T> y) {
  T known = x.known | y.known;
  return {known, (x.unknown | y.unknown) & ~known};
}
template <typename T>
__device__ KnownBits<T> bits_xor(KnownBits<T> x, KnownBits<T> y) {
  T unknown = x.unknown | y.unknown;
  return {(x.known ^ y.known) & ~unknown, unknown};
}
template <typename T>
__device__ KnownBits<T> bits_not(KnownBits<T> x) {
  return {~x.known & ~x.unknown, x.unknown};
}
template <typename T>
__device__ KnownBits<T> bits_shift_left(KnownBits<T> x, T count) {
  return {x.known << count, x.unknown << count};
}
template <typename T>
__device__ KnownBits<T> bits_shift_right(KnownBits<T> x, T count) {
  return {x.known >> count, x.unknown >> count};
}
template <typename T>
__device__ Truth agree(Truth equal, KnownBits<T> x, KnownBits<T> y) {
  return {equal.may && ((x.known ^ y.known) & ~(x.unknown | y.unknown)) == 0, equal.may_not};
}

// Bounds of the elements of a captured array in a box of clamped indices. A box of few elements is read element by
// element. For a box inside one row, the table `chunks`, [rows][chunks of the last axis], is read. For any other box
// the bounds are `limits`, which are the bounds of the dtype.
template <typename T, typename Element, int RANK>
__device__ Interval<T> elements(const Element* data, const Interval<T>* chunks, const int (&size)[RANK],
                                const long long (&stride)[RANK], const Interval<int> (&indices)[RANK],
                                Interval<T> limits) {
  Interval<int> box[RANK];
  int count = 1;
  bool one_row = true;
  long long row = 0;
#pragma unroll
  for (int d = 0; d < RANK; ++d) {
    if (size[d] == 0) return limits;
    box[d] = {min(max(indices[d].lo, 0), size[d] - 1), min(max(indices[d].hi, 0), size[d] - 1)};
    count = min(count, MOST_ELEMENTS + 1) * min(box[d].hi - box[d].lo + 1, MOST_ELEMENTS + 1);
    if (d < RANK - 1) one_row = one_row && box[d].lo == box[d].hi, row = row * size[d] + box[d].lo;
  }
  if (count <= MOST_ELEMENTS) {
    Interval<T> found = {limits.hi, limits.lo};
#pragma unroll 1
    for (int n = 0; n < count; ++n) {  // @each-element
      long long place = 0;
      int rest = n;
#pragma unroll
      for (int d = RANK - 1; d >= 0; --d) {
        int extent = box[d].hi - box[d].lo + 1, inside = d == 0 ? rest : rest % extent;  // n < count
        place += (long long)(box[d].lo + inside) * stride[d];
        rest /= extent;
      }
      T x = (T)data[place];
      found = {min(found.lo, x), max(found.hi, x)};
    }
    return found;
  }
  int first = box[RANK - 1].lo / CHUNK, last = box[RANK - 1].hi / CHUNK;
  if (!one_row || last - first >= MOST_CHUNKS) return limits;
  chunks += row * ((size[RANK - 1] + CHUNK - 1) / CHUNK);
  Interval<T> found = chunks[first];  // @first-chunk
  // @next-chunk
#pragma unroll 1
  for (int n = first + 1; n <= last; ++n) found = {min(found.lo, chunks[n].lo), max(found.hi, chunks[n].hi)};
  return found;
}

// Fills the table `chunks` that elements() reads: warp w computes the chunks w, w + warps, ..., and each lane reads two
// elements of a chunk.
template <typename T, typename Element, int RANK>
__device__ void fill_chunks(Interval<T>* chunks, const Element* data, const int (&size)[RANK],
                            const long long (&stride)[RANK], int warp, int warps) {
  long long rows = 1;
#pragma unroll
  for (int d = 0; d < RANK - 1; ++d) rows *= size[d];
  int per_row = (size[RANK - 1] + CHUNK - 1) / CHUNK;
  for (long long n = warp; n < rows * per_row; n += warps) {
    long long rest = n / per_row;
    const Element* row = data;
#pragma unroll
    for (int d = RANK - 2; d >= 0; --d) {
      row += rest % size[d] * stride[d];
      rest /= size[d];
    }
    // Elements after the end of the axis are replaced by the last one.
    int first = (int)(n % per_row) * CHUNK, lane = threadIdx.x % 32, last = size[RANK - 1] - 1;
    T x = (T)row[min(first + lane, last) * stride[RANK - 1]],
      y = (T)row[min(first + lane + 32, last) * stride[RANK - 1]];
    Interval<T> bounds = {min(x, y), max(x, y)};
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      bounds = {min(bounds.lo, __shfl_xor_sync(0xFFFFFFFF, bounds.lo, distance)),
                max(bounds.hi, __shfl_xor_sync(0xFFFFFFFF, bounds.hi, distance))};
    if (lane == 0) chunks[n] = bounds;
  }
}
