"""Score modifications between Q K^T and the softmax on one tile, with the same math as kernels_cu/score.cuh.

Each is a class with `apply` and `gradient`. `apply` modifies the tile S in place and, with `save`, returns the values
that the gradient needs, or None; `gradient` turns dS of the modified scores into dS of the unmodified ones, in place.
For a JVP, `tangent` is `apply` together with the tangent tS of the scores; for a double backward, `second_gradient`
turns the gradients (dS, dtS) of the modified (S, tS) into those of the unmodified ones. The order is:

    s = scale * q.k ;  c * tanh(s / c) ;  - slope * |i + o - j| ;  + bias ;  score_mod(s, b, h, i, j)

The engine of KV caches applies them to tiles of several heads, with decode/sequences.py's coordinates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from ..mods.numpy_code import Direction, Function, direction_of, mask_function, score_function, slope_of

if TYPE_CHECKING:
    from ..mods.numpy_code import Read, SecondRead
    from ..mods.tiles import TileClasses
    from ..problem.records import Operands, Problem

Gradient: TypeAlias = np.ndarray | tuple[np.ndarray | None, ...]  # of an option; a tuple for captured arrays


class Positions(NamedTuple):
    """Positions of a shard's rows in the whole sequence: query i at q_first + i step, key j at kv_first + j step.

    offset = q_first + o - kv_first with the diagonal offset o, so that the position of query i is (i - j) step + offset
    after that of key j. A whole sequence has q_first = kv_first = 0, step = 1 and offset = o.
    """

    q_first: int
    kv_first: int
    offset: int
    step: int


QUERIES, KEYS = 0, 1  # the axes of a tile


class Cut(NamedTuple):
    """A half-open range of queries or keys."""

    axis: int
    start: int
    stop: int


class Coordinates(Protocol):
    """The indices and positions of a tile of scores, whose last two axes are queries and keys."""

    @property
    def batch(self) -> int:
        """The sequence index."""

    @property
    def head(self) -> int | np.ndarray:
        """The query head of all scores, or an array of heads that broadcasts to the scores."""

    @property
    def distances(self) -> np.ndarray:
        """The distances in positions between queries and keys."""

    @property
    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """The q_idx (queries, 1) and kv_idx (1, keys) of mods, int32."""

    def cut(self, dense: np.ndarray) -> np.ndarray:
        """Return the tile's part of an array that has an element for each score of the call."""


class DifferentiableCoordinates(Coordinates, Protocol):
    """The coordinates of a tile whose scores have gradients."""

    def add(self, total: np.ndarray, dS: np.ndarray) -> None:
        """Add gradients of the scores to an array that has an element for each score of the call."""


class ScoreTile(NamedTuple):
    """Coordinates of a tile of scores: sequence index, query head, half-open ranges of queries and keys."""

    batch: int
    head: int
    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    positions: Positions
    masked: Cut | None = None  # the part in which mask_mod may hide scores; None: nowhere

    @property
    def queries(self) -> tuple[int, int]:
        """The half-open range of queries."""
        return self.q_start, self.q_stop

    @property
    def keys(self) -> tuple[int, int]:
        """The half-open range of keys."""
        return self.kv_start, self.kv_stop

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.q_stop - self.q_start, self.kv_stop - self.kv_start

    @property
    def distances(self) -> np.ndarray:
        """The distances in positions between queries and keys, int64 (queries, keys)."""
        i = np.arange(self.q_start, self.q_stop)[:, None]
        j = np.arange(self.kv_start, self.kv_stop)[None, :]
        return np.abs((i - j) * self.positions.step + self.positions.offset)

    @property
    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions of queries (queries, 1) and keys (1, keys) in the whole sequence, int32."""
        q_first, kv_first, _, step = self.positions
        q, kv = (
            np.arange(first + step * start, first + step * stop, step, dtype=np.int32)
            for first, (start, stop) in ((q_first, self.queries), (kv_first, self.keys))
        )
        return q[:, None], kv[None, :]

    def cut(self, dense: np.ndarray) -> np.ndarray:
        """Return this tile of an array (B or 1, Hq or 1, Sq or 1, Sk or 1); dimensions of size 1 stay 1."""
        batch, head, rows, columns = dense.shape
        plane = dense[self.batch if batch > 1 else 0, self.head if head > 1 else 0]
        return plane[
            self.q_start if rows > 1 else 0 : self.q_stop if rows > 1 else 1,
            self.kv_start if columns > 1 else 0 : self.kv_stop if columns > 1 else 1,
        ]

    def add(self, total: np.ndarray, dS: np.ndarray) -> None:
        """Add dS to this tile of an array as that of `cut`, summed over its dimensions of size 1."""
        target = self.cut(total)
        broadcast = tuple(axis for axis in (0, 1) if target.shape[axis] == 1 and dS.shape[axis] > 1)
        target += dS.sum(axis=broadcast, keepdims=True) if broadcast else dS


class ScoreStep(Protocol):
    """One score modification and its gradient on a tile: S, dS (queries, keys), with other axes before these if any."""

    bounded: bool  # |score| never exceeds |product|
    by_sequence: bool  # different sequences add to different elements of its gradients
    by_head: bool  # different query heads add to different elements of its gradients

    def apply(self, S: np.ndarray, tile: Coordinates, save: bool) -> Any:
        """Modify S in place; with `save`, return the values that the gradient needs."""

    def gradient(self, dS: np.ndarray, tile: DifferentiableCoordinates, saved: Any) -> None:
        """Turn dS of the modified scores into dS of the unmodified ones, in place."""

    def tangent(self, S: np.ndarray, tS: np.ndarray, tile: Coordinates, save: bool) -> Any:
        """Modify S and its tangent tS in place; with `save`, return the values that the second gradient needs."""

    def second_gradient(self, dS: np.ndarray, dtS: np.ndarray, tile: DifferentiableCoordinates, saved: Any) -> None:
        """Turn dS and dtS of the modified scores and tangents into those of the unmodified ones, in place."""

    def gradients(self) -> dict[str, Gradient]:
        """Return the gradients of the step's own arrays, by option name."""


def steps(problem: Problem, operands: Operands) -> list[ScoreStep]:
    """Return the score modifications of a call, in the order of the formula."""
    applied: list[ScoreStep] = []
    if problem.softcap is not None:
        applied.append(Softcap(problem.softcap))
    if operands.alibi_slopes is not None:
        applied.append(Alibi(np.atleast_2d(operands.alibi_slopes.numpy())))
    if operands.bias is not None:
        bias = four_dimensional(operands.bias.numpy())
        tbias = None if operands.tbias is None else four_dimensional(operands.tbias.numpy())
        applied.append(Bias(bias, np.zeros(bias.shape, problem.accumulation) if problem.bias_gradient else None, tbias))
    if problem.score_mod:
        applied.append(Modified(problem, operands))
    return applied


def four_dimensional(array: np.ndarray) -> np.ndarray:
    """Prepend dimensions of size 1 up to four: (B or 1, Hq or 1, Sq or 1, Sk or 1)."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


class Softcap:
    """s <- c tanh(s / c), which keeps scores inside (-c, c) (Gemma 2)."""

    bounded = by_sequence = by_head = True

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def apply(self, S: np.ndarray, tile: Coordinates, save: bool) -> np.ndarray | None:
        """Set S to c tanh(S / c); the gradient needs 1 - tanh(S / c)^2."""
        S /= self.cap
        np.tanh(S, out=S)
        slope = 1 - S * S if save else None
        S *= self.cap
        return slope

    def gradient(self, dS: np.ndarray, tile: DifferentiableCoordinates, saved: np.ndarray) -> None:
        """Multiply dS by the derivative of the cap."""
        dS *= saved

    def tangent(
        self, S: np.ndarray, tS: np.ndarray, tile: Coordinates, save: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Cap S, and multiply tS by the derivative 1 - tanh(S / c)^2, whose tangent the second gradient needs too."""
        slope = self.apply(S, tile, save=True)
        assert slope is not None
        change = -2 / self.cap**2 * S * slope * tS if save else None  # S is capped: c tanh
        tS *= slope
        return slope, change

    def second_gradient(
        self, dS: np.ndarray, dtS: np.ndarray, tile: DifferentiableCoordinates, saved: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Set dS to dS f' + dtS f'' tS, and dtS to dtS f', for the cap f."""
        slope, change = saved
        dS *= slope
        dS += _times(dtS, change)
        dtS *= slope

    def gradients(self) -> dict[str, Gradient]:
        """{}: the cap is a number."""
        return {}


class Alibi:
    """s <- s - slope |i + o - j|, one slope per head (Press et al., Train Short, Test Long). Slopes get no gradient."""

    bounded = False
    by_sequence = by_head = True

    def __init__(self, slopes: np.ndarray) -> None:
        self.slopes = slopes  # (B or 1, Hq)

    def apply(self, S: np.ndarray, tile: Coordinates, save: bool) -> None:
        """Subtract slope * distance from S; the gradient needs no saved values."""
        slope = self.slopes[tile.batch if len(self.slopes) > 1 else 0, tile.head].astype(S.dtype)
        S -= slope * tile.distances

    def gradient(self, dS: np.ndarray, tile: DifferentiableCoordinates, saved: None) -> None:
        """Leave dS as it is, because apply adds a constant to each score."""
        pass

    def tangent(self, S: np.ndarray, tS: np.ndarray, tile: Coordinates, save: bool) -> None:
        """Modify S; tS does not change, because apply adds a constant to each score."""
        self.apply(S, tile, save)

    def second_gradient(self, dS: np.ndarray, dtS: np.ndarray, tile: DifferentiableCoordinates, saved: None) -> None:
        """Leave dS and dtS as they are."""
        pass

    def gradients(self) -> dict[str, Gradient]:
        """{}: slopes get no gradient."""
        return {}


class Bias:
    """s <- s + bias; -inf masks a key. dbias sums dS over the dimensions of size 1."""

    bounded = False

    def __init__(self, bias: np.ndarray, dbias: np.ndarray | None = None, tbias: np.ndarray | None = None) -> None:
        self.bias = bias  # broadcasts to (B, Hq, Sq, Sk)
        self.tbias = tbias  # tangent, with bias.shape; None is 0
        self.dbias = dbias  # bias.shape, in the accumulation dtype; None if not requested
        self.by_sequence = dbias is None or dbias.shape[0] > 1
        self.by_head = dbias is None or dbias.shape[1] > 1

    def apply(self, S: np.ndarray, tile: Coordinates, save: bool) -> None:
        """Add bias to S; the gradient needs no saved values."""
        bias = tile.cut(self.bias).astype(S.dtype, copy=False)
        S += bias
        if np.isnan(np.vdot(S, S)):  # NaN + -inf is NaN, which would not hide the key
            np.copyto(S, -np.inf, where=bias == -np.inf)

    def gradient(self, dS: np.ndarray, tile: DifferentiableCoordinates, saved: None) -> None:
        """Add dS to dbias, summed over the dimensions that bias broadcasts; dS itself is unchanged."""
        if self.dbias is not None:
            tile.add(self.dbias, dS)

    def tangent(self, S: np.ndarray, tS: np.ndarray, tile: Coordinates, save: bool) -> None:
        """Add bias to S and tbias to tS."""
        self.apply(S, tile, save)
        if self.tbias is not None:
            tS += tile.cut(self.tbias)

    def second_gradient(self, dS: np.ndarray, dtS: np.ndarray, tile: DifferentiableCoordinates, saved: None) -> None:
        """Add dS to dbias; dS and dtS are unchanged."""
        self.gradient(dS, tile, saved)

    def gradients(self) -> dict[str, Gradient]:
        """dbias, the sum over all tiles so far."""
        return {} if self.dbias is None else {"bias": self.dbias}


class ModInputs:
    """The inputs, except the score, of the functions generated from mods, for the tiles of one call."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        # For a JVP, `Modified` appends the tangents of the arrays, None for an array without a tangent.
        self.arrays: tuple[Any, ...] = tuple(array.numpy() for array in operands.captured)
        self.numbers, self.real = operands.numbers, problem.accumulation.type
        self.first_head, self.first_batch = problem.first_head, problem.first_batch

    def of(self, tile: Coordinates) -> tuple[object, ...]:
        """Return (b, h, q, kv, arrays, numbers, real) with global indices of sequence and head."""
        batch, head = np.int32(self.first_batch + tile.batch), np.int32(self.first_head + tile.head)
        return batch, head, *tile.indices, self.arrays, self.numbers, self.real


class Modified:
    """s <- score_mod(s, b, h, q_idx, kv_idx), with the gradients of the floating arrays that it captures."""

    bounded = False

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.inputs = ModInputs(problem, operands)
        self.function: Function = score_function(problem.mods)
        self.slope = slope_of(problem.mods, problem.captured_gradient) if problem.backward else None
        # Sums are in float64, because all scores may add to one element.
        self.dcaptured = [
            np.zeros(array.shape) if wanted else None
            for array, wanted in zip(self.inputs.arrays, problem.captured_gradient, strict=True)
        ]
        self.direction: Direction | None = None
        if problem.derivative:
            tangents = tuple(None if array is None else array.numpy() for array in operands.tcaptured or ())
            moved = tuple(array is not None for array in tangents)
            self.inputs.arrays += tangents
            self.direction = direction_of(problem.mods, moved, problem.captured_gradient)
        self.by_sequence = self.slope is None or self.slope.indexed_by("b")
        self.by_head = self.slope is None or self.slope.indexed_by("h")

    def apply(self, S: np.ndarray, tile: Coordinates, save: bool) -> tuple[np.ndarray, list[Read]] | None:
        """Replace S by the modified scores; with `save`, return the derivative and the reads of captured arrays."""
        inputs = self.inputs.of(tile)
        if self.slope is None or not save:
            (S[...],) = self.function(S, *inputs)
            return None
        modified, slope, reads = self.slope.evaluate(S.copy(), *inputs)  # a derivative may return its input S
        S[...] = modified
        return slope, reads

    def gradient(self, dS: np.ndarray, tile: DifferentiableCoordinates, saved: tuple[np.ndarray, list[Read]]) -> None:
        """Multiply dS by the derivative, and add the gradients of the elements read to those of the captured arrays."""
        slope, reads = saved
        for slot, factor, indices in reads:
            total = self.dcaptured[slot]
            assert total is not None  # only reads of arrays with a gradient are saved
            _add_at(total, indices, _times(dS, factor))
        dS[...] = _times(dS, slope)

    def tangent(self, S: np.ndarray, tS: np.ndarray, tile: Coordinates, save: bool) -> list[Any] | None:
        """Modify S and tS; with `save`, return the derivatives of both and the reads of captured arrays."""
        assert self.direction is not None
        inputs = (S.copy(), *self.inputs.of(tile), tS.copy())  # a derivative may return its input S
        if not save:
            S[...], tS[...] = self.direction.tangent(*inputs)
            return None
        S[...], tS[...], *saved = self.direction.second(*inputs)
        return saved

    def second_gradient(
        self,
        dS: np.ndarray,
        dtS: np.ndarray,
        tile: DifferentiableCoordinates,
        saved: tuple[np.ndarray, np.ndarray, list[SecondRead]],
    ) -> None:
        """Set dS to dS f' + dtS times the tangent of f', dtS to dtS f', and add the gradients of the elements read."""
        slope, change, reads = saved
        for read in reads:
            total = self.dcaptured[read.slot]
            assert total is not None  # only reads of arrays with a gradient are saved
            _add_at(total, read.indices, _times(dS, read.of_score) + _times(dtS, read.of_tangent))
        dS[...] = _times(dS, slope) + _times(dtS, change)
        dtS[...] = _times(dtS, slope)

    def gradients(self) -> dict[str, Gradient]:
        """Return the sums over all tiles so far, for each captured array; None if not requested."""
        return {"captured": tuple(self.dcaptured)}


class MaskMod:
    """Applies mask_mod(b, h, q_idx, kv_idx) to the tiles of one call."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.inputs = ModInputs(problem, operands)
        self.function = mask_function(problem.mods)
        self.text = problem.mods

    def classes(self) -> TileClasses:
        """Return the classes of tiles, which are empty, full or cut."""
        from ..mods.ir import parse  # imported by the first call that has a mod
        from ..mods.tiles import TileClasses

        mask = parse(self.text).mask
        assert mask is not None
        return TileClasses(mask, self.inputs.arrays, self.inputs.numbers)

    def visible(self, tile: Coordinates) -> np.ndarray:
        """Return the mask, True = attend, which broadcasts to the scores of the tile."""
        (visible,) = self.function(None, *self.inputs.of(tile))
        return np.asarray(visible)

    def hide(self, S: np.ndarray, tile: ScoreTile, value: float) -> None:
        """Set the scores (..., queries, keys) that the mask hides, which are all inside tile.masked, to `value`."""
        if tile.masked is None:
            return
        axis, start, stop = tile.masked
        if axis == KEYS:
            S = S[..., start - tile.kv_start : stop - tile.kv_start]
            tile = tile._replace(kv_start=start, kv_stop=stop)
        else:
            S = S[..., start - tile.q_start : stop - tile.q_start, :]
            tile = tile._replace(q_start=start, q_stop=stop)
        np.copyto(S, value, where=~self.visible(tile))


def _times(dS: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return dS * factor, with 0 where dS is 0, because the factor of a hidden score may be infinite or NaN."""
    product: np.ndarray = dS * factor
    if not np.isfinite(np.vdot(product, product)):
        product[dS == 0] = 0
    return product


def _add_at(total: np.ndarray, indices: tuple[np.ndarray, ...], values: np.ndarray) -> None:
    """Add values (..., rows, columns) to total at clamped indices, first summed over axes on which no index depends."""
    clamped = [np.clip(index, 0, size - 1) for index, size in zip(indices, total.shape, strict=True)]
    shape = np.broadcast_shapes((1,) * values.ndim, *(index.shape for index in clamped))
    repeated = tuple(axis for axis, size in enumerate(shape) if size == 1)
    sums = values.sum(axis=repeated, keepdims=True, dtype=total.dtype)
    if not indices:
        total += sums.reshape(())
        return
    np.add.at(total, tuple(np.broadcast_to(index, sums.shape) for index in clamped), sums)
