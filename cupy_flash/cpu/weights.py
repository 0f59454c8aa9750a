"""Attention probabilities on the CPU: weights of chosen rows, the largest of each row, sums over the rows of each key.

They are recomputed from q, k and lse, P = exp(S - lse), in the tiles of the forward: no array has an element for each
pair of a query and a key, except a result that is asked for. lse is an input of its own, so the gradients are

    dS = P dP ;  dlse = -rowsum(P dP)

with dP the gradient of the result by P: dW (of a mean dW / Hq), w_i dc_j of an importance, and for the largest weights
that of the element at their keys, else 0. Chosen rows are computed in runs of consecutive ones.

The engine of KV caches has another walk over the keys (decode/weights.py), and adds its tiles to the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from ..arrays import Array, empty
from ..plan.plan import Plan
from ..problem.records import Operands, Problem
from ..problem.weights import IMPORTANCE, TOP, Asked, WeightsGradients
from . import attention
from .attention import Call, hide_gradient, load_rows, rounded
from .blas import product
from .score import ScoreTile
from .thread_pool import run_tasks


class Run(NamedTuple):
    """Consecutive rows of one sequence among those that are asked for."""

    batch: int  # sequence index
    row: int  # batch index into the arrays: that of the sequence, or 0 for a packed batch
    rows: slice  # of the sequence
    at: slice  # of the arrays with an element for each query, such as lse
    place: slice  # of the rows asked for
    keys: int  # of the sequence

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.rows.stop - self.rows.start


def runs_of(rows: np.ndarray, batch: int, row: int, queries: slice, keys: int, block: int) -> list[Run]:
    """Return the runs of the rows in a sequence, whose rows are `queries`; a run ends at multiples of `block`."""
    places = np.flatnonzero((rows >= queries.start) & (rows < queries.stop))
    inside = rows[places] - queries.start
    follows = (np.diff(inside) == 1) & (np.diff(places) == 1) & (inside[1:] % block != 0)
    starts = np.flatnonzero(np.append(True, ~follows)[: len(inside)]).tolist()
    stops = [*starts, len(inside)][1:]
    found = []
    for start, stop in zip(starts, stops, strict=True):
        first, place, count = int(inside[start]), int(places[start]), stop - start
        at = slice(queries.start + first, queries.start + first + count)
        found.append(Run(batch, row, slice(first, first + count), at, slice(place, place + count), keys))
    return found


def probabilities(S: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Return exp(S - lse) for scores (..., rows, keys), hidden ones -inf, and lse (..., rows), inf for an empty row."""
    P = S - lse[..., None]
    if np.isnan(lse).any():
        np.copyto(P, -np.inf, where=np.isneginf(S))  # -inf - NaN is NaN, and no weight is at a hidden key
    return np.exp(P, out=P)


def filled(lse: np.ndarray) -> np.ndarray:
    """Return lse with inf for a row that sees no key, so that its probabilities are 0."""
    return np.where(lse == -np.inf, np.inf, lse)


def zeros(shape: tuple[int, ...], dtype: np.dtype, like: Array, value: int = 0) -> Array:
    """Allocate an output in the framework of `like`, filled with a value."""
    array = empty(shape, dtype, like)
    array.numpy()[...] = value
    return array


class _Best:
    """The n largest scores of each row so far, (heads, rows, n) in the order of their keys, and these keys."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.S, self.keys = np.full(shape, -np.inf, dtype), np.full(shape, -1, np.int32)
        self.lse = np.zeros(shape[:2], dtype)


def largest(best: np.ndarray, keys: np.ndarray, S: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest scores of each row (..., n) and their keys, in the order of keys, after more scores.

    The scores S (..., keys) are those of the keys from `first` on, which are above `keys`. Of equal scores the lower
    keys remain: columns are in the order of keys.
    """
    if not (best.min(axis=-1, keepdims=True) < S).any():
        return best, keys
    n, numbers = best.shape[-1], np.broadcast_to(np.arange(first, first + S.shape[-1], dtype=np.int32), S.shape)
    S, numbers = (np.concatenate(pair, axis=-1) for pair in ((best, S), (keys, numbers)))
    last = S.shape[-1] - n
    lowest = np.partition(S, last, axis=-1)[..., last, None]
    above, equal = lowest < S, lowest == S
    room = n - above.sum(axis=-1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=-1) <= room))
    return S[chosen].reshape(best.shape), numbers[chosen].reshape(best.shape)


State: TypeAlias = np.ndarray | _Best | None  # of a run: what its tiles add up to


class Weights:
    """The result of attention_weights, each head's own or the mean of all."""

    def __init__(self, problem: Problem, operands: Operands, asked: Asked) -> None:
        self.problem, self.asked = problem, asked
        array = zeros(asked.shape, problem.dtype, operands.q)
        self.results: tuple[Array, ...] = (array,)
        self.W = array.numpy()[None] if problem.layout == "thd" else array.numpy()
        self.together = asked.heads is None  # one task computes all heads of a run
        self.wanted = range(problem.heads) if asked.heads is None else sorted(set(asked.heads))
        self.rows = asked.rows

    def begin(self, run: Run, heads: Sequence[int]) -> State:
        """Return what the tiles of a run add up to, over which a mean is rounded once; None without a mean."""
        return np.zeros((run.length, run.keys), self.problem.accumulation) if self.together else None

    def add(self, total: State, run: Run, heads: Sequence[int], keys: slice, S: np.ndarray, lse: np.ndarray) -> None:
        """Add the scores (heads, rows, keys) of a tile."""
        P = probabilities(S, lse)
        if self.asked.heads is None:
            assert isinstance(total, np.ndarray)
            total[:, keys] += P.sum(axis=0)
            return
        chosen = {head: P[n] for n, head in enumerate(heads)}
        for place, head in enumerate(self.asked.heads):
            if head in chosen:
                self.W[run.row, place, run.place, keys] = chosen[head]

    def end(self, total: State, run: Run, heads: Sequence[int]) -> None:
        """Write the mean."""
        if isinstance(total, np.ndarray):
            self.W[run.row, run.place, : run.keys] = total / self.problem.heads


class Importance:
    """The result of key_importance, sums over the rows of row weight times probability."""

    together = False

    def __init__(self, problem: Problem, operands: Operands, asked: Asked) -> None:
        self.wanted = range(problem.heads)
        array = zeros(asked.shape, problem.accumulation, operands.q)
        self.results: tuple[Array, ...] = (array,)
        self.sums, self.row_weights = array.numpy(), rows_of_weights(problem, operands, asked)
        weighted = np.flatnonzero((self.row_weights != 0).any(axis=(0, 1)))
        self.rows = np.arange(*(weighted[[0, -1]] + (0, 1))) if weighted.size else weighted

    def begin(self, run: Run, heads: Sequence[int]) -> State:
        """Return None: the tiles add to the result."""

    def add(self, total: State, run: Run, heads: Sequence[int], keys: slice, S: np.ndarray, lse: np.ndarray) -> None:
        """Add the scores (heads, rows, keys) of a tile. A row of weight 0 adds nothing, whatever its scores are."""
        for head, S_head, lse_head in zip(heads, S, lse, strict=True):
            w = self.row_weights[run.row, head, run.at].astype(S.dtype)
            rows = np.flatnonzero(w)
            if rows.size:
                P = probabilities(S_head[rows], lse_head[rows])
                self.sums[run.batch, head, keys] += product(P.T, w[rows, None])[:, 0]

    def end(self, total: State, run: Run, heads: Sequence[int]) -> None:
        """Do nothing."""


class Top:
    """The result of top_weights: the largest probabilities of each row and their keys."""

    together = False

    def __init__(self, problem: Problem, operands: Operands, asked: Asked) -> None:
        self.problem, self.wanted, self.rows = problem, range(problem.heads), asked.rows
        self.results: tuple[Array, ...] = (
            zeros(asked.shape, problem.dtype, operands.q),
            zeros(asked.shape, np.dtype(np.int32), operands.q, -1),
        )
        self.values, self.keys = (x.numpy()[None] if problem.layout == "thd" else x.numpy() for x in self.results)
        self.n = min(asked.n, problem.kv_len)

    def begin(self, run: Run, heads: Sequence[int]) -> State:
        """Return no keys."""
        return _Best((len(heads), run.length, self.n), self.problem.accumulation)

    def add(self, best: State, run: Run, heads: Sequence[int], keys: slice, S: np.ndarray, lse: np.ndarray) -> None:
        """Merge the scores (heads, rows, keys) of a tile, whose keys are above those of earlier tiles.

        A score that is NaN counts as inf. Of equal scores the lower keys remain: columns are in the order of keys.
        """
        assert isinstance(best, _Best)
        best.lse = lse
        S = np.where(np.isnan(S), np.inf, S)
        best.S, best.keys = largest(best.S, best.keys, S, keys.start)

    def end(self, best: State, run: Run, heads: Sequence[int]) -> None:
        """Write the probabilities in descending order of their scores, ties in the order of keys."""
        assert isinstance(best, _Best)
        order = np.argsort(-best.S, axis=-1, kind="stable")
        S, keys = (np.take_along_axis(x, order, axis=-1) for x in (best.S, best.keys))
        here = (run.row, slice(heads[0], heads[-1] + 1), run.at, slice(self.n))
        self.values[here] = probabilities(S, best.lse)
        self.keys[here] = np.where(np.isneginf(S), -1, keys)


def result_of(problem: Problem, operands: Operands, asked: Asked) -> Weights | Importance | Top:
    """Return the result of a call, to which a walk over its tiles adds them."""
    if asked.kind == TOP:
        return Top(problem, operands, asked)
    return (Importance if asked.kind == IMPORTANCE else Weights)(problem, operands, asked)


def rows_of_weights(problem: Problem, operands: Operands, asked: Asked) -> np.ndarray:
    """Return the row weights of key_importance, 1 if there are none, as a view (B, Hq, Sq)."""
    given = np.ones(()) if asked.row_weights is None else asked.row_weights.numpy()
    rows = np.broadcast_to(given, problem.lse_shape(operands.q))
    return rows[None] if problem.layout == "thd" else rows


def forward(plan: Plan, operands: Operands, asked: Asked) -> tuple[Array, ...]:
    """Compute the weights or the importance, or the values and keys of the largest weights."""
    call = Call(plan, operands)
    result = result_of(plan.problem, operands, asked)

    def compute(runs: list[Run], sequence: attention.Sequence, heads: Sequence[int]) -> None:
        rows = [_Rows(call, sequence, head) for head in heads]
        for run in runs:
            state = result.begin(run, heads)
            for of_head in rows:
                for tile in of_head.tiles(run):
                    S, _ = of_head.scores(tile, save=False)
                    lse = of_head.lse[run.rows]
                    result.add(state, run, [of_head.head], slice(*tile.keys), S[None], lse[None])
            result.end(state, run, heads)

    tasks: list[Callable[[], None]] = []
    for sequence, runs in _runs(plan, call, result.rows):
        if result.together:
            tasks += [partial(compute, [run], sequence, result.wanted) for run in runs]
        else:
            tasks += [partial(compute, runs, sequence, [head]) for head in result.wanted]
    run_tasks(plan.threads, tasks, call.stop)
    return result.results


def backward(plan: Plan, operands: Operands, asked: Asked) -> WeightsGradients:
    """Compute the gradients of the inputs from that of the result, each in the shape and dtype of its input."""
    problem, q = plan.problem, operands.q
    assert operands.lse is not None
    call = Call(plan, operands)
    gradient = _Gradient(problem, operands, asked)
    dq, dk, dlse = (zeros(x.shape, x.dtype, q) for x in (operands.q, operands.k, operands.lse))
    dq_rows, dk_rows, dlse_rows = call.heads_first(dq), call.heads_first(dk), call.rows_of(dlse)
    runs_of_sequence = {sequence.batch: runs for sequence, runs in _runs(plan, call, asked.rows)}

    def differentiate(sequence: attention.Sequence, kv_heads: slice) -> None:
        kv_head = kv_heads.start
        dK = np.zeros((sequence.kv_len, problem.head_dim), problem.accumulation)
        for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
            rows = _Rows(call, sequence, head)
            dQ = np.zeros((sequence.q_len, problem.head_dim), problem.accumulation)
            for run in runs_of_sequence[sequence.batch]:
                for tile in rows.tiles(run):
                    here, keys = slice(*tile.queries), slice(*tile.keys)
                    S, saved = rows.scores(tile, save=True)
                    P = probabilities(S, rows.lse[here])
                    dS = gradient.of_scores(P, run, head, keys)
                    dlse_rows[run.row, head, run.at] -= dS.sum(axis=-1)
                    for step, value in zip(call.score_steps[::-1], saved[::-1], strict=True):
                        step.gradient(dS, tile, value)
                    hide_gradient(dS, P)  # softcap's derivative is NaN at a masked NaN
                    dQ[here] += product(dS, rows.K[keys])
                    dK[keys] += product(dS.T, rows.Q(here))
            dQ *= problem.accumulation.type(problem.scale)
            dq_rows[sequence.row, head, sequence.queries] = dQ
        call.scale(dK)
        dk_rows[sequence.row, kv_head, sequence.keys] = dK

    run_tasks(plan.threads, call.gradient_tasks(differentiate), call.stop)
    sums = {name: total for step in call.score_steps for name, total in step.gradients().items()}
    gradients = WeightsGradients(dq, dk, dlse)
    for name, total in sums.items():
        gradients = gradients._replace(**{f"d{name}": rounded(total, getattr(operands, name), q)})
    if asked.row_weights is not None:
        gradients = gradients._replace(drow_weights=gradient.of_row_weights(q))
    return gradients


def _runs(plan: Plan, call: Call, rows: np.ndarray) -> list[tuple[attention.Sequence, list[Run]]]:
    """Return the runs of each sequence, which lie inside query tiles."""
    return [(x, runs_of(rows, x.batch, x.row, x.queries, x.kv_len, plan.block_q)) for x in call.sequences]


class _Rows:
    """K of one head of a sequence, and the rows of a query head that sees it."""

    def __init__(self, call: Call, sequence: attention.Sequence, head: int) -> None:
        self.call, self.sequence, self.head = call, sequence, head
        assert call.lse is not None
        place = (sequence.row, head, sequence.queries)
        self.q, self.lse = call.q[place], filled(call.lse[place])
        self.K = load_rows(call.k[sequence.row, head // call.problem.group, sequence.keys], call.problem.accumulation)

    def Q(self, rows: slice) -> np.ndarray:
        """Return some rows, multiplied by the part of the scale that is folded into them."""
        Q: np.ndarray = load_rows(self.q[rows], self.call.problem.accumulation) * self.call.q_scale
        return Q

    def tiles(self, run: Run) -> list[ScoreTile]:
        """Return the tiles that a run visits, in the order of keys."""
        sequence, (start, stop) = self.sequence, (run.rows.start, run.rows.stop)
        visits = self.call.kv_tiles(sequence, self.head, start, stop)
        return [
            ScoreTile(sequence.batch, self.head, start, stop, first, last, sequence.positions, cut)
            for first, last, cut in visits[::-1]
        ]

    def scores(self, tile: ScoreTile, save: bool) -> tuple[np.ndarray, list[object]]:
        """Return the scores of a tile, hidden ones -inf, and with `save` the values that gradients need."""
        self.call.stop.poll()
        S = self.Q(slice(*tile.queries)) @ self.K[slice(*tile.keys)].T
        self.call.scale(S)
        saved: list[object] = [step.apply(S, tile, save) for step in self.call.score_steps]
        self.call.hide(S, self.sequence.band, tile, -np.inf)
        return S, saved


class _Gradient:
    """The gradient of a result as one of the probabilities, tile by tile."""

    def __init__(self, problem: Problem, operands: Operands, asked: Asked) -> None:
        assert asked.gradient is not None
        self.problem, self.asked = problem, asked
        packed = problem.layout == "thd" and asked.kind != IMPORTANCE
        self.gradient = asked.gradient.numpy()[None] if packed else asked.gradient.numpy()
        if asked.kind == TOP:
            assert asked.keys is not None
            self.keys = asked.keys.numpy()[None] if packed else asked.keys.numpy()
        if asked.kind == IMPORTANCE:
            self.row_weights = rows_of_weights(problem, operands, asked)
            self.drow_weights = np.zeros(self.row_weights.shape, problem.accumulation)

    def of_scores(self, P: np.ndarray, run: Run, head: int, keys: slice) -> np.ndarray:
        """Return dS = P dP of a tile, 0 where P is 0."""
        asked, dtype = self.asked, P.dtype
        if asked.kind == IMPORTANCE:
            here = (run.row, head, run.at)
            dS = P * self.gradient[run.batch, head, keys]
            hide_gradient(dS, P)
            self.drow_weights[here] += dS.sum(axis=-1)
            dS *= self.row_weights[here].astype(dtype)[:, None]
        elif asked.kind == TOP:
            found = self.keys[run.row, head, run.at]
            rows, places = np.nonzero((found >= keys.start) & (found < keys.stop))
            dP = np.zeros_like(P)
            dP[rows, found[rows, places] - keys.start] = self.gradient[run.row, head, run.at][rows, places]
            dS = P * dP
        elif asked.heads is None:
            dS = P * (self.gradient[run.row, run.place, keys].astype(dtype) / self.problem.heads)
        else:
            dS = np.zeros_like(P)
            for place, chosen in enumerate(asked.heads):
                if chosen == head:
                    dS += self.gradient[run.row, place, run.place, keys].astype(dtype)
            dS *= P
        hide_gradient(dS, P)
        return dS

    def of_row_weights(self, like: Array) -> Array:
        """Return the gradient of the row weights, summed over the axes that they broadcast."""
        weights = self.asked.row_weights
        assert weights is not None
        total = self.drow_weights
        shape = (1,) * (total.ndim - len(weights.shape)) + weights.shape
        repeated = tuple(n for n, (own, full) in enumerate(zip(shape, total.shape, strict=True)) if own != full)
        gradient: Array = rounded(total.sum(axis=repeated), weights, like)
        return gradient
