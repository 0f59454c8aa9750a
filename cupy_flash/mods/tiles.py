"""Classifies the tiles of a mask by interval arithmetic, without evaluating it for every score.

A tile is EMPTY if none of its queries sees any of its keys, FULL if each sees all, and CUT if neither can be proved; a
CUT tile is masked, which is always correct. All tiles of a call are classified at once: an interval is two arrays with
one element per tile. The functions that intervals.py calls are defined here and, with the same results, in
kernels_cu/range.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .intervals import Abstraction
from .ir import INT, REAL, Node, order

if TYPE_CHECKING:
    import numpy.typing as npt  # its import takes milliseconds

EMPTY, CUT, FULL = 0, 1, 2

Integers: TypeAlias = np.ndarray | np.int64  # int64, one element per tile or one for all tiles
Bools: TypeAlias = np.ndarray | np.bool_

INT_MIN, INT_MAX = np.int64(-(2**31)), np.int64(2**31 - 1)
LONG_MIN, LONG_MAX = np.int64(-(2**63)), np.int64(2**63 - 1)
NEAR = np.int64(2**40)  # longs with a smaller magnitude are exact in sums

CHUNK = 64  # elements of a captured array per entry of its table of extremes
MOST_CHUNKS = 64  # maximum number of chunks that a query of the table reads
MOST_ELEMENTS = 16  # maximum number of elements that are read one by one


class Interval(NamedTuple):
    """The integers lo <= x <= hi; both bounds are int64 and broadcast to the shape of the tiles."""

    lo: Integers
    hi: Integers


class Truth(NamedTuple):
    """Whether a bool may be true and whether it may be false; at least one of both holds."""

    may: Bools
    may_not: Bools


class KnownBits(NamedTuple):
    """The bits of a sign-extended 64-bit integer: the known ones, with 0 elsewhere, and a mask of the unknown ones."""

    known: Integers
    unknown: Integers


BoundsT = TypeVar("BoundsT", Truth, Interval)

# ------------------------------------------------------------------------------ functions that range.cuh has as well


def always() -> Truth:
    """Return the Truth of True."""
    return Truth(np.True_, np.False_)


def never() -> Truth:
    """Return the Truth of False."""
    return Truth(np.False_, np.True_)


def unknown() -> Truth:
    """Return the Truth of an unknown bool."""
    return Truth(np.True_, np.True_)


def any_int() -> Interval:
    """Return the interval of all ints."""
    return Interval(INT_MIN, INT_MAX)


def any_long() -> Interval:
    """Return the interval of all longs."""
    return Interval(LONG_MIN, LONG_MAX)


def add(x: Interval, y: Interval) -> Interval:
    """Return x + y without wrapping."""
    return Interval(x.lo + y.lo, x.hi + y.hi)


def scale(x: Interval, factor: int) -> Interval:
    """Return x * factor without wrapping."""
    ends = x.lo * np.int64(factor), x.hi * np.int64(factor)
    return Interval(*ends) if factor >= 0 else Interval(*ends[::-1])


def guarded(total: Interval, *terms: Interval) -> Interval:
    """Return `total` if its terms are too small for it to wrap, else the interval of all longs."""
    exact = reduce(np.logical_and, [(term.lo > -NEAR) & (term.hi < NEAR) for term in terms])
    return _where(exact, total, any_long())


def wrapped(x: Interval) -> Interval:
    """Return the interval of an int, given the interval of its unwrapped value."""
    return _where((x.lo >= INT_MIN) & (x.hi <= INT_MAX), x, any_int())


def multiply(x: Interval, y: Interval) -> Interval:
    """Return x * y of ints without wrapping; the interval of all longs if an operand exceeds 32 bits."""
    ends = x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi
    small = np.minimum(x.lo, y.lo) >= INT_MIN
    small = small & (np.maximum(x.hi, y.hi) <= INT_MAX)  # no product overflows 64 bits
    return _where(small, Interval(reduce(np.minimum, ends), reduce(np.maximum, ends)), any_long())


def smallest(x: Interval, y: Interval) -> Interval:
    """Return min(x, y)."""
    return Interval(np.minimum(x.lo, y.lo), np.minimum(x.hi, y.hi))


def largest(x: Interval, y: Interval) -> Interval:
    """Return max(x, y)."""
    return Interval(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi))


def magnitude(x: Interval) -> Interval:
    """Return |x|; the interval of all longs if x may be the least long, whose magnitude wraps."""
    inside = (x.lo <= 0) & (x.hi >= 0)
    ends = np.abs(x.lo), np.abs(x.hi)
    lo = np.where(inside, 0, np.minimum(*ends))
    return _where(x.lo == LONG_MIN, any_long(), Interval(lo, np.maximum(*ends)))


def floor_divide(x: Interval, y: Interval) -> Interval:
    """Return x // y rounded down; the interval of all longs unless y > 0."""
    least, most = np.maximum(y.lo, 1), np.maximum(y.hi, 1)
    quotient = Interval(np.minimum(x.lo // least, x.lo // most), np.maximum(x.hi // least, x.hi // most))
    return _where(y.lo > 0, quotient, any_long())


def modulo(x: Interval, y: Interval) -> Interval:
    """Return x % y, which is not negative; the interval of all longs unless y > 0."""
    most = np.maximum(y.hi, 1)
    quotient = x.lo // most
    exact = (y.lo == y.hi) & (x.hi // most == quotient)  # all x have one quotient: the rest is x minus a constant
    rest = _where(exact, Interval(x.lo - quotient * most, x.hi - quotient * most), Interval(np.int64(0), most - 1))
    return _where(y.lo > 0, rest, any_long())


def shift_right(x: Interval, count: int) -> Interval:
    """Return x >> count."""
    return Interval(x.lo >> count, x.hi >> count)


def less(x: Interval, y: Interval) -> Truth:
    """Return x < y."""
    return Truth(x.lo < y.hi, x.hi >= y.lo)


def less_equal(x: Interval, y: Interval) -> Truth:
    """Return x <= y."""
    return Truth(x.lo <= y.hi, x.hi > y.lo)


def equal(x: Interval, y: Interval) -> Truth:
    """Return x == y."""
    return Truth((x.lo <= y.hi) & (y.lo <= x.hi), (x.lo != x.hi) | (y.lo != y.hi) | (x.lo != y.lo))


def nonzero(x: Interval) -> Truth:
    """Return x != 0."""
    return Truth((x.lo != 0) | (x.hi != 0), (x.lo <= 0) & (x.hi >= 0))


def negate(x: Truth) -> Truth:
    """Return not x."""
    return Truth(x.may_not, x.may)


def both(x: Truth, y: Truth) -> Truth:
    """Return x and y."""
    return Truth(x.may & y.may, x.may_not | y.may_not)


def either(x: Truth, y: Truth) -> Truth:
    """Return x or y."""
    return Truth(x.may | y.may, x.may_not & y.may_not)


def same(x: Truth, y: Truth) -> Truth:
    """Return x == y of Truths."""
    return Truth((x.may & y.may) | (x.may_not & y.may_not), (x.may & y.may_not) | (x.may_not & y.may))


def choose(condition: Truth, x: BoundsT, y: BoundsT) -> BoundsT:
    """Return where(condition, x, y) for two Truths or two intervals."""
    if isinstance(x, Truth):
        may = (condition.may & x.may) | (condition.may_not & y.may)
        return Truth(may, (condition.may & x.may_not) | (condition.may_not & y.may_not))
    hull = Interval(np.minimum(x.lo, y.lo), np.maximum(x.hi, y.hi))
    return _where(condition.may, _where(condition.may_not, hull, x), y)


def bits_of_interval(x: Interval) -> KnownBits:
    """Return the known bits of an interval: those above the highest bit in which its bounds differ."""
    differ = x.lo ^ x.hi
    for shift in (1, 2, 4, 8, 16, 32):
        differ = differ | (differ >> shift)
    return KnownBits(x.lo & ~differ, differ)


def interval_of_bits(x: KnownBits) -> Interval:
    """Return the interval of known bits: an unknown sign bit lowers lo, the other unknown bits raise hi."""
    return Interval(x.known | (x.unknown & LONG_MIN), x.known | (x.unknown & LONG_MAX))


def bits_and(x: KnownBits, y: KnownBits) -> KnownBits:
    """Return x & y."""
    known = x.known & y.known
    return KnownBits(known, (x.known | x.unknown) & (y.known | y.unknown) & ~known)


def bits_or(x: KnownBits, y: KnownBits) -> KnownBits:
    """Return x | y."""
    known = x.known | y.known
    return KnownBits(known, (x.unknown | y.unknown) & ~known)


def bits_xor(x: KnownBits, y: KnownBits) -> KnownBits:
    """Return x ^ y."""
    unknown = x.unknown | y.unknown
    return KnownBits((x.known ^ y.known) & ~unknown, unknown)


def bits_not(x: KnownBits) -> KnownBits:
    """Return ~x."""
    return KnownBits(~x.known & ~x.unknown, x.unknown)


def bits_shift_left(x: KnownBits, count: int) -> KnownBits:
    """Return x << count, which must not shift out any bit."""
    return KnownBits(x.known << count, x.unknown << count)


def bits_shift_right(x: KnownBits, count: int) -> KnownBits:
    """Return x >> count."""
    return KnownBits(x.known >> count, x.unknown >> count)


def agree(equal: Truth, x: KnownBits, y: KnownBits) -> Truth:
    """Return x == y of integers, given `equal` of their intervals and their known bits."""
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


def _where(condition: Bools, x: Interval, y: Interval) -> Interval:
    return Interval(np.where(condition, x.lo, y.lo), np.where(condition, x.hi, y.hi))


# ---------------------------------------------------------------------------------------------------- captured arrays


class Extremes:
    """Least and greatest elements of a captured bool or integer array over boxes of indices."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        limits = np.iinfo(array.dtype) if array.dtype != np.bool_ else None
        # Bounds for every box. An array without elements is never read, so that its bounds do not matter.
        self.limits = Interval(*map(np.int64, (limits.min, limits.max) if limits else (0, 1)))
        self._chunks: Interval | None = None

    @property
    def chunks(self) -> Interval:
        """Bounds of each CHUNK consecutive elements of the last axis, (rows, chunks)."""
        if self._chunks is None:
            rows = self.array.reshape(-1, self.array.shape[-1]).astype(np.int64)
            starts = np.arange(0, rows.shape[1], CHUNK)
            self._chunks = Interval(*(f.reduceat(rows, starts, axis=1) for f in (np.minimum, np.maximum)))
        return self._chunks

    def over(self, indices: Sequence[Interval]) -> Interval:
        """Return bounds of the elements with every index in its interval, clamped to the array as in evaluation."""
        if not self.array.size:
            return self.limits
        boxes = [
            Interval(np.clip(index.lo, 0, size - 1), np.clip(index.hi, 0, size - 1))
            for index, size in zip(indices, self.array.shape, strict=True)
        ]
        elements: Integers = np.int64(1)
        for box in boxes:
            elements = np.minimum(elements * (box.hi - box.lo + 1), MOST_ELEMENTS + 1)
        few = elements <= MOST_ELEMENTS
        found = self.limits
        if not np.all(few):
            found = self._over_chunks(boxes)
        return _where(few, self._over_elements(boxes, int(elements.max())), found) if np.any(few) else found

    def _over_elements(self, boxes: Sequence[Interval], most: int) -> Interval:
        """Return bounds of the first `most` elements of each box, read one by one; smaller boxes are read again."""
        lo, hi = LONG_MAX, LONG_MIN
        for n in range(min(most, MOST_ELEMENTS)):
            rest: Integers = np.int64(n)
            place = []
            for box in boxes[::-1]:
                extent = box.hi - box.lo + 1
                place.append(box.lo + rest % extent)
                rest = rest // extent
            element = self.array[tuple(place[::-1])].astype(np.int64)
            lo, hi = np.minimum(lo, element), np.maximum(hi, element)
        return Interval(lo, hi)

    def _over_chunks(self, boxes: Sequence[Interval]) -> Interval:
        """Return bounds of the chunks that a box overlaps if it lies in one row and few chunks, else of the array."""
        *leading, last = boxes
        row, one_row = np.int64(0), np.True_
        for box, size in zip(leading, self.array.shape, strict=False):
            row, one_row = row * size + box.lo, one_row & (box.lo == box.hi)
        first, stop = last.lo // CHUNK, last.hi // CHUNK
        count = np.where(one_row & (stop - first < MOST_CHUNKS), stop - first + 1, 0)
        lo, hi = LONG_MAX, LONG_MIN
        for n in range(int(count.max())):
            chunk = np.minimum(first + n, stop)
            least, most = (np.asarray(bound)[row, chunk] for bound in self.chunks)
            lo, hi = np.minimum(lo, least), np.maximum(hi, most)
        return _where(count > 0, Interval(lo, hi), self.limits)


# ------------------------------------------------------------------------------------------------------------ classes


class TileClasses:
    """Classifies the tiles of one call under its mask_mod."""

    def __init__(self, mask: Node, arrays: Sequence[np.ndarray], numbers: Sequence[int | float] = ()) -> None:
        """Prepare the mask of a Program; `arrays` and `numbers` are the captured ones, by slot and index."""
        self.mask, self.numbers = mask, numbers
        read = {node.value for node in order((mask,)) if node.op == "load" and node.kind != REAL}
        self.extremes = {slot: Extremes(arrays[slot]) for slot in read}

    def of(
        self,
        batch: int,
        head: int,
        queries: tuple[npt.ArrayLike, npt.ArrayLike],
        keys: tuple[npt.ArrayLike, npt.ArrayLike],
    ) -> np.ndarray:
        """Return EMPTY, CUT or FULL for tiles of queries and keys, each given by its first and last position.

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
    """The domain of intervals.py with one array element per tile."""

    def __init__(
        self, inputs: dict[str, Interval], numbers: Sequence[int | float], extremes: dict[int, Extremes]
    ) -> None:
        self.inputs, self.numbers, self.extremes = inputs, numbers, extremes

    def constant(self, value: int) -> Interval:
        """Return the interval of one number."""
        return Interval(np.int64(value), np.int64(value))

    def input(self, name: str) -> Interval:
        """Return the interval of b, h, q or kv."""
        return self.inputs[name]

    def argument(self, node: Node) -> Interval:
        """Return the interval of a run-time number."""
        return self.constant(int(self.numbers[node.value]))

    def load(self, node: Node, indices: Sequence[Interval]) -> Interval:
        """Return bounds of the elements at indices in these intervals."""
        return self.extremes[node.value].over(indices)

    def call(self, function: str, *operands: Any) -> Any:
        """Return the result of a function of this module."""
        return FUNCTIONS[function](*operands)

    def fits(self, interval: Interval, kind: str) -> bool:
        """Return whether all bounds fit the kind: int32 for an int, below NEAR for a long, so that sums are exact."""
        lo, hi = (INT_MIN, INT_MAX) if kind == INT else (1 - NEAR, NEAR - 1)
        return bool(np.all(interval.lo >= lo) and np.all(interval.hi <= hi))


class TileCounts(NamedTuple):
    """The numbers of tiles that are skipped, computed without a mask, and masked."""

    empty: int
    full: int
    cut: int
