"""What happens to a tile of scores between Q K^T and the softmax: the Python twin of score.cuh.

A feature is one small class with `apply` and `gradient` side by side. `apply` changes the tile of scores S in place and
returns what its gradient will need (None when that is nothing, or when no gradient follows); `gradient` turns the tile
dS, the gradient of the changed scores, into that of the scores before, in place. Their order is the formula's:

    s = scale * q.k ;  c * tanh(s / c) ;  - slope * |i + o - j| ;  + bias
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np


class Place(NamedTuple):
    """Which positions the rows of a sequence are: query i is position q_first + i step of it, key j kv_first + j step.

    Of a whole sequence the rows are the positions, and `offset` is the diagonal offset o; of a shard it is
    q_first + o - kv_first, so that query i lies i step + offset - j step positions past key j.
    """

    q_first: int
    kv_first: int
    offset: int
    step: int


class Tile(NamedTuple):
    """Where a tile of scores lies: batch entry, query head, and half-open ranges of queries and keys."""

    batch: int
    head: int
    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    place: Place

    @property
    def queries(self) -> tuple[int, int]:
        return self.q_start, self.q_stop

    @property
    def keys(self) -> tuple[int, int]:
        return self.kv_start, self.kv_stop

    def cut(self, dense: np.ndarray) -> np.ndarray:
        """This tile of an array that broadcasts to (B, Hq, Sq, Sk); dimensions of size 1 stay 1."""
        batch, head, rows, columns = dense.shape
        plane = dense[self.batch if batch > 1 else 0, self.head if head > 1 else 0]
        return plane[
            self.q_start if rows > 1 else 0 : self.q_stop if rows > 1 else 1,
            self.kv_start if columns > 1 else 0 : self.kv_stop if columns > 1 else 1,
        ]


class ScoreStep(Protocol):
    """One change of the scores with its gradient."""

    bounded: bool  # no score grows beyond its product's magnitude

    def apply(self, S: np.ndarray, tile: Tile, keep: bool) -> np.ndarray | None: ...

    def gradient(self, dS: np.ndarray, tile: Tile, kept: Any) -> None: ...

    def gradients(self) -> dict[str, np.ndarray]:
        """The sums of the gradients of its own arrays, by the name of the option."""


def steps(problem: Any, operands: Any) -> list[ScoreStep]:
    """The changes of a call's scores, in the order of the formula."""
    found: list[ScoreStep] = []
    if problem.softcap is not None:
        found.append(Softcap(problem.softcap))
    if operands.alibi_slopes is not None:
        found.append(Alibi(np.atleast_2d(operands.alibi_slopes.numpy())))
    if operands.bias is not None:
        bias = four_dimensional(operands.bias.numpy())
        found.append(Bias(bias, np.zeros(bias.shape, problem.accumulation) if problem.bias_gradient else None))
    return found


def four_dimensional(array: np.ndarray) -> np.ndarray:
    """A broadcastable array with its missing leading dimensions."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


class Softcap:
    """s <- c tanh(s / c): scores stay inside (-c, c)."""

    bounded = True

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def apply(self, S: np.ndarray, tile: Tile, keep: bool) -> np.ndarray | None:
        S /= self.cap
        np.tanh(S, out=S)
        slope = 1 - S * S if keep else None
        S *= self.cap
        return slope

    def gradient(self, dS: np.ndarray, tile: Tile, kept: np.ndarray) -> None:
        dS *= kept

    def gradients(self) -> dict[str, np.ndarray]:
        return {}


class Alibi:
    """s <- s - slope |i + o - j|, a slope per head (Press et al., Train Short, Test Long). Slopes have no gradient."""

    bounded = False

    def __init__(self, slopes: np.ndarray) -> None:
        self.slopes = slopes  # (B or 1, Hq)

    def apply(self, S: np.ndarray, tile: Tile, keep: bool) -> None:
        slope = self.slopes[tile.batch if len(self.slopes) > 1 else 0, tile.head].astype(S.dtype)
        i = np.arange(tile.q_start, tile.q_stop)[:, None]
        j = np.arange(tile.kv_start, tile.kv_stop)[None, :]
        S -= slope * np.abs((i - j) * tile.place.step + tile.place.offset)

    def gradient(self, dS: np.ndarray, tile: Tile, kept: None) -> None:
        pass

    def gradients(self) -> dict[str, np.ndarray]:
        return {}


class Bias:
    """s <- s + bias; -inf hides a key. The gradient is summed over the dimensions that the bias broadcasts over."""

    bounded = False

    def __init__(self, bias: np.ndarray, dbias: np.ndarray | None = None) -> None:
        self.bias = bias  # broadcasts to (B, Hq, Sq, Sk)
        self.dbias = dbias  # the bias's shape, in the accumulation dtype

    def apply(self, S: np.ndarray, tile: Tile, keep: bool) -> None:
        S += tile.cut(self.bias).astype(S.dtype, copy=False)

    def gradient(self, dS: np.ndarray, tile: Tile, kept: None) -> None:
        if self.dbias is not None:
            target = tile.cut(self.dbias)
            broadcast = tuple(axis for axis in (0, 1) if target.shape[axis] == 1 and dS.shape[axis] > 1)
            target += dS.sum(axis=broadcast, keepdims=True) if broadcast else dS

    def gradients(self) -> dict[str, np.ndarray]:
        return {} if self.dbias is None else {"bias": self.dbias}
