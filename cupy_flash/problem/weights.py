"""Poses the calls that return attention probabilities: attention_weights, top_weights and key_importance.

They read q, k and lse; there is no v. `Asked` has what a call wants of the probabilities, beside its Problem.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from ..arrays import AnyArray, Array
from .build import pose, pose_with_cache
from .checks import Requirements, Sizes, broadcasts, is_float
from .records import (
    DTYPES,
    LONGEST,
    WHOLE,
    AnyGradient,
    CacheOptions,
    Operands,
    Options,
    Packed,
    Problem,
    SavedWeights,
    Shard,
    applied,
)

# The functions, which are also the values of Problem.weights
WEIGHTS, TOP, IMPORTANCE = "attention_weights", "top_weights", "key_importance"
GRADIENT = {WEIGHTS: "dweights", TOP: "dvalues", IMPORTANCE: "dimportance"}  # the names of their gradients
EACH, MEAN = "each", "mean"
LIMIT = 2**31  # bytes of the result of attention_weights above which it is an error, unless the caller raises it

Rows: TypeAlias = "Sequence[int] | npt.NDArray[np.integer] | slice | None"
Heads: TypeAlias = "str | Sequence[int] | npt.NDArray[np.integer]"


class Wish(NamedTuple):
    """The arguments of a call on probabilities beside its arrays and options, not checked yet."""

    kind: str
    rows: Rows = None
    heads: Heads = EACH
    limit: float | None = LIMIT
    n: int | None = None
    row_weights: AnyArray | None = None


class Asked(NamedTuple):
    """The checked arguments of a call on probabilities: rows, heads, n, and the arrays beside q, k and lse."""

    kind: str
    shape: tuple[int, ...]  # of the result
    rows: npt.NDArray[np.int64]  # of a packed batch, numbers of its packed rows
    heads: tuple[int, ...] | None  # None: the mean over all heads
    n: int
    row_weights: Array | None = None
    gradient: Array | None = None  # of the result; None in a forward
    keys: Array | None = None  # in a backward of top_weights, its second result


class WeightsGradients(NamedTuple):
    """The gradients of a call that returns probabilities, each with its input's shape and dtype.

    lse counts as an input of its own. None for an input that was not given; `dcaptured` has one for each array that
    score_mod and mask_mod capture, None for one that is not floating.
    """

    dq: AnyGradient
    dk: AnyGradient
    dlse: AnyGradient
    dbias: AnyGradient | None = None
    dcaptured: tuple[AnyGradient | None, ...] | None = None
    drow_weights: AnyGradient | None = None

    def results(self) -> WeightsGradients:
        """Return the record with the caller's arrays in place of the package's."""
        return WeightsGradients(*applied(Array.result, self))


class Beside:
    """The arrays of a call beside q, k and its options, and the checks of what it wants, for `build.pose`."""

    asked: Asked

    def __init__(self, wish: Wish, lse: object, gradient: object = None, keys: object = None) -> None:
        self.wish, self.gradient = wish, GRADIENT[wish.kind]
        given = {"row_weights": wish.row_weights, self.gradient: gradient, "keys": keys}
        self.arrays = {"lse": lse, **{name: x for name, x in given.items() if x is not None}}

    def check(self, requirements: Requirements, call: dict[str, Array], sizes: Sizes, width: int | None) -> None:
        """Check what the call wants against its sizes.

        `width` is the largest number of keys of a sequence, or with `selected` of a list.
        """
        kind, require_type, wish = self.wish.kind, requirements.require_type, self.wish
        n = _count(requirements, wish.n) if kind == TOP else 0
        if not sizes.known or width is None:
            if kind == WEIGHTS:  # check what does not depend on the sizes
                _rows(requirements, wish.rows, None)
                _heads(requirements, wish.heads, None)
                _check_limit(requirements, wish.limit, 0)
            return
        q = call["q"]
        lse = (sizes.heads, q.shape[0]) if len(q.shape) == 3 else (sizes.batch, sizes.heads, sizes.q_len)
        accumulation = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
        rows, heads, shape = np.arange(lse[-1]), None, (*lse, n)
        if kind == IMPORTANCE:
            shape = (sizes.batch, sizes.heads, width)
        elif kind == WEIGHTS:
            rows, heads = _rows(requirements, wish.rows, lse[-1]), _heads(requirements, wish.heads, sizes.heads)
            of_heads = call["selected"].shape[-3] if "selected" in call else 1
            shared = heads is not None or of_heads == 1
            requirements.require(
                shared, f'heads="mean" needs lists that all heads share, not those of {of_heads} heads'
            )
            shape = (*lse[:-2], *(() if heads is None else (len(heads),)), len(rows), width)
            _check_limit(requirements, wish.limit, math.prod(shape) * q.dtype.itemsize)
        if "lse" in call and not sizes.lse:  # a call on a KV cache, whose lse build.py does not check
            _check_array(requirements, call, "lse", lse, accumulation)
        weights = call.get("row_weights")
        if weights is not None:
            require_type(is_float(weights.dtype), f"row_weights must be {', '.join(DTYPES)}, not {weights.dtype.name}")
            fits = broadcasts(weights.shape, lse)
            requirements.require(fits, f"row_weights must broadcast to {lse}, not be {weights.shape}")
        if self.gradient in call:
            _check_array(requirements, call, self.gradient, shape, accumulation if kind == IMPORTANCE else q.dtype)
        if "keys" in call:
            _check_array(requirements, call, "keys", shape, np.dtype(np.int32))
        self.asked = Asked(kind, shape, rows, heads, n, weights, call.get(self.gradient), call.get("keys"))


def _check_array(
    requirements: Requirements, call: dict[str, Array], name: str, shape: tuple[int, ...], dtype: np.dtype
) -> None:
    array = call[name]
    requirements.require(array.shape == shape, f"{name} must be {shape}, not {array.shape}")
    requirements.require_type(array.dtype == dtype, f"{name} must be {dtype.name}, not {array.dtype.name}")


def pose_weights(
    function: str,
    arrays: tuple[AnyArray, AnyArray, AnyArray],
    options: Options,
    wish: Wish,
    packed: Packed | None = None,
    saved: SavedWeights | None = None,
    shard: Shard = WHOLE,
) -> tuple[Problem, Operands, Asked]:
    """Return the Problem, Operands and Asked of one call, or raise one error with every unmet requirement.

    `arrays` are q, k and lse; with `saved` the call is a backward. Dropout plays no part: the probabilities are those
    before it.
    """
    q, k, lse = arrays
    beside = Beside(wish, lse) if saved is None else Beside(wish, lse, saved.gradient, saved.keys)
    problem, operands = pose(function, (q, k, None), options, packed, saved, shard, beside=beside)
    return problem._replace(weights=wish.kind, dropout=0.0), operands, beside.asked


def pose_weights_with_cache(
    function: str,
    arrays: tuple[AnyArray, AnyArray, AnyArray],
    options: CacheOptions,
    wish: Wish,
    reasons: tuple[str, ...] = (),
) -> tuple[Problem, Operands, Asked]:
    """Return `pose_weights` of a call on a KV cache; `arrays` are q, k_cache and lse."""
    q, k_cache, lse = arrays
    beside = Beside(wish, lse)
    problem, operands = pose_with_cache(q, k_cache, None, options, reasons, function, beside)
    return problem._replace(weights=wish.kind), operands, beside.asked


def _whole(values: object) -> npt.NDArray[np.int64] | None:
    """Return whole numbers in host memory as a vector, or None if they are something else."""
    try:
        array = np.asarray(values)
    except Exception:  # a foreign object, or an array on a GPU, may raise anything
        return None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        return None
    return array.astype(np.int64)


NONE = np.zeros(0, np.int64)


def _rows(requirements: Requirements, given: object, count: int | None) -> npt.NDArray[np.int64]:
    """Return the numbers of the rows; `count`, the number of all, is None if it is not known."""
    if given is None:
        return np.arange(count or 0)
    if isinstance(given, slice):
        try:
            return np.arange(*given.indices(count or 0))
        except Exception:  # a slice may hold anything
            requirements.require_type(False, f"rows must be a slice of whole numbers, not {given!r}")
            return NONE
    return _numbers(requirements, "rows", "None, a slice", given, count)


def _heads(requirements: Requirements, given: object, count: int | None) -> tuple[int, ...] | None:
    if isinstance(given, str):
        requirements.require(given in (EACH, MEAN), f'heads must be "each", "mean" or a list of heads, not {given!r}')
        return None if given == MEAN else tuple(range(count or 0))
    heads: list[int] = _numbers(requirements, "heads", '"each", "mean"', given, count).tolist()
    return tuple(heads)


def _numbers(
    requirements: Requirements, name: str, others: str, given: object, count: int | None
) -> npt.NDArray[np.int64]:
    numbers = _whole(given)
    if numbers is None:
        text = f"{name} must be {others} or a vector of whole numbers in host memory, not {given!r}"
        requirements.require_type(False, text)
        return NONE
    if count is None or not numbers.size:
        return numbers
    first, last = numbers.min(), numbers.max()
    inside = requirements.require(first >= 0 and last < count, f"{name} must be in [0, {count}), not {first} to {last}")
    return numbers if inside else NONE


def _count(requirements: Requirements, given: object) -> int:
    n = None
    if isinstance(given, SupportsIndex):
        try:
            n = operator.index(given)
        except Exception:  # a foreign object may raise anything
            n = None
    if n is None:
        requirements.require_type(False, f"n must be a whole number, not {given!r}")
        return 0
    legal = not isinstance(given, bool) and 1 <= n <= LONGEST
    return n if requirements.require(legal, f"n must be in [1, {LONGEST}], not {given!r}") else 0


def _check_limit(requirements: Requirements, limit: object, size: int) -> None:
    if limit is None:
        return
    if not isinstance(limit, (int, float, np.integer, np.floating)) or isinstance(limit, bool) or limit != limit:
        requirements.require_type(False, f"limit must be a number of bytes or None, not {limit!r}")
        return
    requirements.require(
        bool(size <= limit),
        f"the weights would take {size:,} bytes, more than limit = {limit:,}: ask for fewer rows or heads, for "
        'heads="mean", or raise limit (None: no limit)',
    )
