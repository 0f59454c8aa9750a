"""The classes of tiles under a mask, proved by interval arithmetic without a look at their scores.

A tile is EMPTY if no query of it sees a key of it, FULL if each sees all; CUT is what neither is proved of, and only
costs time. All tiles of a call are classified at once: an interval is two arrays with one element per tile. The
functions by which intervals.py evaluates an expression are defined here and, alike, in kernels_cu/range.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from .intervals import Abstraction
from .ir import INT, REAL, Node, order

EMPTY, CUT, FULL = 0, 1, 2

Numbers = Any  # an array or NumPy scalar: int64, or bool of truths

INT_MIN, INT_MAX = np.int64(-(2**31)), np.int64(2**31 - 1)
LONG_MIN, LONG_MAX = np.int64(-(2**63)), np.int64(2**63 - 1)
NEAR = np.int64(2**40)  # 64-bit integers below it in magnitude are exact in sums

CHUNK = 64  # elements of a captured array whose least and greatest are known
MOST_CHUNKS = 64  # more of them are not looked through
MOST_ELEMENTS = 16  # at most as many are read one by one


class Interval(NamedTuple):
    """Integers lo <= x <= hi; both bounds int64, of a shape that broadcasts to that of the tiles."""

    lo: Numbers
    hi: Numbers


class Truth(NamedTuple):
    """A bool that may be true, and may be false: one of both holds, or both."""

    may: Numbers
    may_not: Numbers


class KnownBits(NamedTuple):
    """The bits of an integer, extended by its sign to 64: the known ones, 0 elsewhere, and which are unknown."""

    known: Numbers
    unknown: Numbers


# ------------------------------------------------------------------------------------------------ twins of range.cuh


def always() -> Truth:
    """The truth that holds."""
    return Truth(np.True_, np.False_)


def never() -> Truth:
    """The truth that does not hold."""
    return Truth(np.False_, np.True_)


def unknown() -> Truth:
    """The truth value of which nothing is known."""
    return Truth(np.True_, np.True_)


def any_int() -> Interval:
    """Every int."""
    return Interval(INT_MIN, INT_MAX)


def any_long() -> Interval:
    """Every long."""
    return Interval(LONG_MIN, LONG_MAX)


def add(x: Interval, y: Interval) -> Interval:
    """x + y, not wrapped."""
    return Interval(x.lo + y.lo, x.hi + y.hi)


def scale(x: Interval, factor: int) -> Interval:
    """x * factor, not wrapped."""
    ends = x.lo * np.int64(factor), x.hi * np.int64(factor)
    return Interval(*ends) if factor >= 0 else Interval(*ends[::-1])


def guarded(total: Interval, *terms: Interval) -> Interval:
    """A sum, if its terms are too small for it to wrap; else anything."""
    exact = reduce(np.logical_and, [(term.lo > -NEAR) & (term.hi < NEAR) for term in terms])
    return _where(exact, total, any_long())


def wrapped(x: Interval) -> Interval:
    """An int from its unwrapped value."""
    return _where((x.lo >= INT_MIN) & (x.hi <= INT_MAX), x, any_int())


def multiply(x: Interval, y: Interval) -> Interval:
    """x * y of ints, not wrapped; of longs beyond 32 bits anything."""
    ends = x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi
    small = np.minimum(x.lo, y.lo) >= INT_MIN
    small = small & (np.maximum(x.hi, y.hi) <= INT_MAX)  # no product leaves 64 bits
    return _where(small, Interval(reduce(np.minimum, ends), reduce(np.maximum, ends)), any_long())


def smallest(x: Interval, y: Interval) -> Interval:
    """min(x, y)."""
    return Interval(np.minimum(x.lo, y.lo), np.minimum(x.hi, y.hi))


def largest(x: Interval, y: Interval) -> Interval:
    """max(x, y)."""
    return Interval(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi))


def magnitude(x: Interval) -> Interval:
    """|x|; that of the least long is itself, so what may be it may be anything."""
    inside = (x.lo <= 0) & (x.hi >= 0)
    ends = np.abs(x.lo), np.abs(x.hi)
    lo = np.where(inside, 0, np.minimum(*ends))
    return _where(x.lo == LONG_MIN, any_long(), Interval(lo, np.maximum(*ends)))


def floor_divide(x: Interval, y: Interval) -> Interval:
    """x // y rounded down; anything unless y > 0."""
    least, most = np.maximum(y.lo, 1), np.maximum(y.hi, 1)
    quotient = Interval(np.minimum(x.lo // least, x.lo // most), np.maximum(x.hi // least, x.hi // most))
    return _where(y.lo > 0, quotient, any_long())


def modulo(x: Interval, y: Interval) -> Interval:
    """x % y, not negative; anything unless y > 0."""
    most = np.maximum(y.hi, 1)
    quotient = x.lo // most
    exact = (y.lo == y.hi) & (x.hi // most == quotient)  # then the rest is x less a constant
    rest = _where(exact, Interval(x.lo - quotient * most, x.hi - quotient * most), Interval(np.int64(0), most - 1))
    return _where(y.lo > 0, rest, any_long())


def shift_right(x: Interval, count: int) -> Interval:
    """x >> count."""
    return Interval(x.lo >> count, x.hi >> count)


def less(x: Interval, y: Interval) -> Truth:
    """x < y."""
    return Truth(x.lo < y.hi, x.hi >= y.lo)


def less_equal(x: Interval, y: Interval) -> Truth:
    """x <= y."""
    return Truth(x.lo <= y.hi, x.hi > y.lo)


def equal(x: Interval, y: Interval) -> Truth:
    """x == y."""
    return Truth((x.lo <= y.hi) & (y.lo <= x.hi), (x.lo != x.hi) | (y.lo != y.hi) | (x.lo != y.lo))


def nonzero(x: Interval) -> Truth:
    """x != 0."""
    return Truth((x.lo != 0) | (x.hi != 0), (x.lo <= 0) & (x.hi >= 0))


def negate(x: Truth) -> Truth:
    """not x."""
    return Truth(x.may_not, x.may)


def both(x: Truth, y: Truth) -> Truth:
    """x and y."""
    return Truth(x.may & y.may, x.may_not | y.may_not)


def either(x: Truth, y: Truth) -> Truth:
    """x or y."""
    return Truth(x.may | y.may, x.may_not & y.may_not)


def same(x: Truth, y: Truth) -> Truth:
    """x == y of truths."""
    return Truth((x.may & y.may) | (x.may_not & y.may_not), (x.may & y.may_not) | (x.may_not & y.may))


def choose(condition: Truth, x: Any, y: Any) -> Any:
    """where(condition, x, y) of two truths or two intervals."""
    if isinstance(x, Truth):
        may = (condition.may & x.may) | (condition.may_not & y.may)
        return Truth(may, (condition.may & x.may_not) | (condition.may_not & y.may_not))
    hull = Interval(np.minimum(x.lo, y.lo), np.maximum(x.hi, y.hi))
    return _where(condition.may, _where(condition.may_not, hull, x), y)


def bits_of_interval(x: Interval) -> KnownBits:
    """Known are the bits above the highest in which the bounds differ."""
    differ = x.lo ^ x.hi
    for shift in (1, 2, 4, 8, 16, 32):
        differ = differ | (differ >> shift)
    return KnownBits(x.lo & ~differ, differ)


def interval_of_bits(x: KnownBits) -> Interval:
    """The sign counts down, the other bits up."""
    return Interval(x.known | (x.unknown & LONG_MIN), x.known | (x.unknown & LONG_MAX))


def bits_and(x: KnownBits, y: KnownBits) -> KnownBits:
    """x & y."""
    known = x.known & y.known
    return KnownBits(known, (x.known | x.unknown) & (y.known | y.unknown) & ~known)


def bits_or(x: KnownBits, y: KnownBits) -> KnownBits:
    """x | y."""
    known = x.known | y.known
    return KnownBits(known, (x.unknown | y.unknown) & ~known)


def bits_xor(x: KnownBits, y: KnownBits) -> KnownBits:
    """x ^ y."""
    unknown = x.unknown | y.unknown
    return KnownBits((x.known ^ y.known) & ~unknown, unknown)


def bits_not(x: KnownBits) -> KnownBits:
    """~x."""
    return KnownBits(~x.known & ~x.unknown, x.unknown)


def bits_shift_left(x: KnownBits, count: int) -> KnownBits:
    """x << count, of which no bit leaves the number."""
    return KnownBits(x.known << count, x.unknown << count)


def bits_shift_right(x: KnownBits, count: int) -> KnownBits:
    """x >> count."""
    return KnownBits(x.known >> count, x.unknown >> count)


def agree(equal: Truth, x: KnownBits, y: KnownBits) -> Truth:
    """Whether integers are equal, of which also bits are known."""
    return Truth(equal.may & ((x.known ^ y.known) & ~(x.unknown | y.unknown) == 0), equal.may_not)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        always, never, unknown, any_int, any_long, add, scale, guarded, wrapped, multiply, smallest, largest,
        magnitude, floor_divide, modulo, shift_right, less, less_equal, equal, nonzero, negate, both, either, same,
        choose, bits_of_interval, interval_of_bits, bits_and, bits_or, bits_xor, bits_not, bits_shift_left,
        bits_shift_right, agree,
    )
}  # fmt: skip


def _where(condition: Numbers, x: Interval, y: Interval) -> Interval:
    return Interval(np.where(condition, x.lo, y.lo), np.where(condition, x.hi, y.hi))


# ---------------------------------------------------------------------------------------------------- captured arrays


class Extremes:
    """Least and greatest elements of a captured bool or integer array over boxes of indices."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        limits = np.iinfo(array.dtype) if array.dtype != np.bool_ else None
        # The bounds that hold for any box. An array without elements is read by no score.
        self.limits = Interval(*map(np.int64, (limits.min, limits.max) if limits else (0, 1)))
        self._chunks: Interval | None = None

    @property
    def chunks(self) -> Interval:
        """Bounds of CHUNK elements in a row of the last axis, (rows, chunks)."""
        if self._chunks is None:
            rows = self.array.reshape(-1, self.array.shape[-1]).astype(np.int64)
            starts = np.arange(0, rows.shape[1], CHUNK)
            self._chunks = Interval(*(f.reduceat(rows, starts, axis=1) for f in (np.minimum, np.maximum)))
        return self._chunks

    def over(self, indices: Sequence[Interval]) -> Interval:
        """Bounds of the elements whose every index lies in its interval, clamped to the array as in evaluation."""
        if not self.array.size:
            return self.limits
        boxes = [
            Interval(np.clip(index.lo, 0, size - 1), np.clip(index.hi, 0, size - 1))
            for index, size in zip(indices, self.array.shape, strict=True)
        ]
        elements = np.int64(1)
        for box in boxes:
            elements = np.minimum(elements * (box.hi - box.lo + 1), MOST_ELEMENTS + 1)
        few = elements <= MOST_ELEMENTS
        found = self.limits
        if not np.all(few):
            found = self._over_chunks(boxes)
        return _where(few, self._over_elements(boxes, int(elements.max())), found) if np.any(few) else found

    def _over_elements(self, boxes: Sequence[Interval], most: int) -> Interval:
        """Bounds of the first `most` elements, one after the other; a smaller box repeats its last."""
        lo, hi = LONG_MAX, LONG_MIN
        for n in range(min(most, MOST_ELEMENTS)):
            rest, place = np.int64(n), []
            for box in boxes[::-1]:
                extent = box.hi - box.lo + 1
                place.append(box.lo + rest % extent)
                rest = rest // extent
            element = self.array[tuple(place[::-1])].astype(np.int64)
            lo, hi = np.minimum(lo, element), np.maximum(hi, element)
        return Interval(lo, hi)

    def _over_chunks(self, boxes: Sequence[Interval]) -> Interval:
        """Bounds of the chunks that a stretch of one row meets; of any element where there are more rows or chunks."""
        *leading, last = boxes
        row, one_row = np.int64(0), np.True_
        for box, size in zip(leading, self.array.shape, strict=False):
            row, one_row = row * size + box.lo, one_row & (box.lo == box.hi)
        first, stop = last.lo // CHUNK, last.hi // CHUNK
        count = np.where(one_row & (stop - first < MOST_CHUNKS), stop - first + 1, 0)
        lo, hi = LONG_MAX, LONG_MIN
        for n in range(int(count.max())):
            chunk = np.minimum(first + n, stop)
            lo, hi = np.minimum(lo, self.chunks.lo[row, chunk]), np.maximum(hi, self.chunks.hi[row, chunk])
        return _where(count > 0, Interval(lo, hi), self.limits)


# ------------------------------------------------------------------------------------------------------------ classes


class TileClasses:
    """Classifies the tiles of one call under its mask_mod."""

    def __init__(self, mask: Node, arrays: Sequence[np.ndarray], numbers: Sequence[int | float] = ()) -> None:
        """`arrays` and `numbers` are those of the Program, by slot and index."""
        self.mask, self.numbers = mask, numbers
        read = {node.value for node in order((mask,)) if node.op == "load" and node.kind != REAL}
        self.extremes = {slot: Extremes(arrays[slot]) for slot in read}

    def of(self, batch: int, head: int, queries: tuple[Any, Any], keys: tuple[Any, Any]) -> np.ndarray:
        """EMPTY, CUT or FULL for tiles of queries and keys, each from first to last, both included.

        The result is uint8, of the shape to which these four bounds broadcast.
        """
        inputs = {"b": (batch, batch), "h": (head, head), "q": queries, "kv": keys}
        intervals = {
            name: Interval(*(np.asarray(bound, np.int64) for bound in bounds)) for name, bounds in inputs.items()
        }
        with np.errstate(all="ignore"):  # integers wrap
            truth = Abstraction(TileDomain(intervals, self.numbers, self.extremes)).mask(self.mask)
        classes = np.where(truth.may, np.where(truth.may_not, CUT, FULL), EMPTY).astype(np.uint8)
        return np.broadcast_to(classes, np.broadcast_shapes(*(np.shape(bound) for bound in (*queries, *keys))))


class TileDomain:
    """The domain of intervals.py with an array element per tile."""

    def __init__(
        self, inputs: dict[str, Interval], numbers: Sequence[int | float], extremes: dict[int, Extremes]
    ) -> None:
        self.inputs, self.numbers, self.extremes = inputs, numbers, extremes

    def constant(self, value: int) -> Interval:
        """The interval of one number."""
        return Interval(np.int64(value), np.int64(value))

    def input(self, name: str) -> Interval:
        """The interval of b, h, q or kv."""
        return self.inputs[name]

    def argument(self, node: Node) -> Interval:
        """The interval of a run-time number."""
        return self.constant(int(self.numbers[node.value]))

    def load(self, node: Node, indices: Sequence[Interval]) -> Interval:
        """The bounds of the elements that indices of these intervals read."""
        return self.extremes[node.value].over(indices)

    def call(self, function: str, *operands: Any) -> Any:
        """The result of a function of this module."""
        return FUNCTIONS[function](*operands)

    def fits(self, interval: Interval, kind: str) -> bool:
        """Whether all bounds are exact in sums of the kind."""
        lo, hi = (INT_MIN, INT_MAX) if kind == INT else (1 - NEAR, NEAR - 1)
        return bool(np.all(interval.lo >= lo) and np.all(interval.hi <= hi))
