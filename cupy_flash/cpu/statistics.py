"""Statistics of the rows of scores: the largest score, its key, and the entropy; and their gradients.

Beside its m and l, an online softmax sums w = sum e^(s - m) (s - m). All terms of w have one sign, and the entropy
H = log l - w / l is not a difference of large numbers, as lse - sum P s is for scores far from 0.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array, empty
from ..problem.records import Problem

# The values of a row that sees no key.
OF_DEAD_ROWS = {"max": -np.inf, "argmax": -1, "entropy": 0.0}


def empty_statistics(problem: Problem, like: Array) -> tuple[Array, ...]:
    """Return arrays for the statistics of a forward, with the values of rows that see no key."""
    arrays = []
    for name in problem.statistics:
        dtype = np.dtype(np.int32) if name == "argmax" else problem.accumulation
        arrays.append(empty(problem.lse_shape(like), dtype, like))
        arrays[-1].numpy()[...] = OF_DEAD_ROWS[name]
    return tuple(arrays)


class RowStatistics:
    """The statistics of some rows over the keys seen so far, beside an online softmax.

    The largest score and its key are those of keys alone; m and l of the softmax may include a sink.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.max, self.argmax = np.full(shape, -np.inf, dtype), np.full(shape, -1, np.int32)
        self.w, self.entropy = np.zeros(shape, dtype), np.zeros(shape, dtype)

    def see(self, S: np.ndarray, first: int) -> None:
        """Take the scores (..., keys) of the keys from `first` on into max and argmax; hidden scores are -inf."""
        keys = S.argmax(axis=-1)
        top = np.take_along_axis(S, keys[..., None], axis=-1)[..., 0]
        self.take(top, (keys + first).astype(np.int32))

    def see_listed(self, S: np.ndarray, j: np.ndarray) -> None:
        """Take the scores (..., keys) of keys j, which broadcasts to them, in any order; hidden scores are -inf."""
        top = S.max(axis=-1, initial=-np.inf)
        reach = (top[..., None] == S) | np.isnan(S)
        last = np.iinfo(np.int32).max
        keys = np.where(reach, j, last).min(axis=-1, initial=last)
        self.take(top, keys.astype(np.int32))

    def take(self, top: np.ndarray, keys: np.ndarray) -> None:
        """Take the largest scores of other keys, and these keys; of equal scores, or of NaNs, the lowest key stays."""
        undefined, known = np.isnan(top), np.isnan(self.max)
        larger = (top > self.max) | (undefined & ~known)
        equal = ((top == self.max) | (undefined & known)) & (keys < self.argmax)
        for old, new in ((self.max, top), (self.argmax, keys)):
            np.copyto(old, new, where=larger | equal)

    def rescale(self, growth: np.ndarray, factor: np.ndarray, l: np.ndarray) -> None:
        """Refer w to an m that has grown by `growth`; factor = e^-growth, and l is the sum before it is rescaled."""
        self.w -= np.where(l == 0, 0, growth) * l
        self.w *= factor

    def add(self, exponents: np.ndarray, P: np.ndarray) -> None:
        """Add the terms of s - m (..., keys) and P = e^(s - m); those of hidden keys are 0."""
        self.w += np.vecdot(P, np.where(P == 0, 0, exponents))

    def finish(self, l: np.ndarray) -> None:
        """Compute the entropy, which is 0 for a row that has seen no key."""
        one = np.where(l == 0, 1, l)
        self.entropy = np.maximum(np.log(one) - self.w / one, 0)


def merged(parts: list[RowStatistics], weights: np.ndarray) -> RowStatistics:
    """Return the statistics over the keys of all parts; `weights` are exp(lse of a part - lse) and sum to 1.

    The entropy is sum weight (H - log weight): that of the choice of a part, and that within the part.
    """
    total = RowStatistics(parts[0].max.shape, parts[0].max.dtype)
    for part, weight in zip(parts, weights, strict=True):
        total.take(part.max, part.argmax)
        total.entropy += weight * (part.entropy - np.log(np.where(weight == 0, 1, weight)))
    total.entropy = np.maximum(total.entropy, 0)
    return total


class StatisticsGradients:
    """The gradients of the statistics of some rows: max has one at its argmax, the entropy dS = -dH P (s - mu).

    mu is the mean of the scores, so that s - mu = log P + H. Arrays are (heads, rows), or those of the rows of a tile;
    None without a gradient.
    """

    def __init__(
        self,
        empty: np.ndarray,
        dmax: np.ndarray | None,
        argmax: np.ndarray | None,
        dentropy: np.ndarray | None,
        entropy: np.ndarray | None,
    ) -> None:
        self.dmax, self.argmax = dmax, argmax
        self.dH = None if dentropy is None else np.where(empty, 0, dentropy)
        self.H = None if entropy is None else np.where(empty, 0, entropy)

    def of_entropy(self, log_P: np.ndarray, P: np.ndarray, rows: slice = slice(None)) -> np.ndarray:
        """Return dS / P = -dH (log P + H) of a tile, finite where P is 0."""
        assert self.dH is not None and self.H is not None
        deviation = np.where(P == 0, 0, log_P) + self.H[:, rows][..., None]
        gradient: np.ndarray = -self.dH[:, rows][..., None] * deviation
        return gradient

    def add_of_max(self, dS: np.ndarray, rows: slice, kv_start: int) -> None:
        """Add the gradient of max to dS (heads, rows, keys) of a tile."""
        if self.dmax is None or self.argmax is None:
            return
        keys = self.argmax[:, rows] - kv_start
        heads, queries = np.nonzero((keys >= 0) & (keys < dS.shape[-1]) & (self.argmax[:, rows] >= 0))
        dS[heads, queries, keys[heads, queries]] += self.dmax[:, rows][heads, queries]

    def add_of_max_listed(self, dS: np.ndarray, j: np.ndarray) -> None:
        """Add the gradient of max to dS (..., keys) of keys j, which broadcasts to it."""
        if self.dmax is not None and self.argmax is not None:
            np.add(dS, self.dmax[..., None], out=dS, where=j == self.argmax[..., None])

    def of_sinks(self, log_P: np.ndarray) -> np.ndarray:
        """Return the gradients of the sinks by rows, from the log probabilities of the sinks."""
        assert self.dH is not None and self.H is not None
        gradients: np.ndarray = -np.exp(log_P) * np.where(np.isneginf(log_P), 0, log_P + self.H) * self.dH
        return gradients
