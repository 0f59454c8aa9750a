"""JVP and double backward on the CPU, in the tiles of the forward and of the backward.

Each thread holds a few tiles of scores, so memory is linear in the sequence length.

The letters are those of attention.py; a leading t is a tangent (tQ, tS, tO), mu is the tangent of lse
(`lse_tangent`), eps that of delta for a fixed dO (`delta_tangent`), and m are the dropout factors, 0 or keep_scale. S
are the scores that the softmax sees:

    JVP               mu = rowsum(P tS) + P_sink tsink ;  tO = (m P (tS - mu)) V + (m P) tV
    double backward   g = m (dO V^T) ;  h = m (dO tV^T) ;  c = tS - mu
                      delta = rowsum(dO O) - dlse ;  eps = rowsum(dO tO)
                      dS = P (c g + h - eps - delta c) ;  dtS = P (g - delta) ;  dV = (m P c)^T dO

The final mu is known only after the last tile. The sum T = (m P (tS - mu)) V + (m P) tV uses the mu of the keys so far,
and is corrected when mu changes: if mu grows by x, T decreases by x O. The alternative (m P tS) V - mu O cancels where
one key has nearly all of P, and the double backward would amplify its rounding errors.

The double backward is the gradient of <dO, tO> + <dlse, mu>, which equals <tQ, dQ> + <tK, dK> + <tV, dV> + ...
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, empty
from ..plan.plan import Plan
from ..problem.records import Gradients, Operands
from .attention import Call, Sequence, empty_gradients, hide_gradient, load_rows, rounded, run_query_tiles
from .blas import product
from .score import DifferentiableCoordinates, ScoreTile
from .softmax import Softmax
from .thread_pool import run_tasks


def jvp(plan: Plan, operands: Operands) -> tuple[Array, Array, Array, Array]:
    """Compute out and lse and their tangents tout and tlse, of the same shapes and dtypes, in one online pass."""
    problem, q = plan.problem, operands.q
    out, tout = (empty((*q.shape[:-1], problem.head_dim_v), problem.dtype, q) for _ in range(2))
    lse, tlse = (empty(problem.lse_shape(q), problem.accumulation, q) for _ in range(2))
    call = Call(plan, operands)
    direction = Direction(call, operands)
    if problem.has_lengths:  # no task writes the rows outside the sequences
        for array, value in ((out, 0), (tout, 0), (lse, -np.inf), (tlse, 0)):
            array.numpy()[...] = value
    out_rows, tout_rows = call.heads_first(out), call.heads_first(tout)
    lse_rows, tlse_rows = call.rows_of(lse), call.rows_of(tlse)
    dim = problem.head_dim_v

    def attend(sequence: Sequence, heads: slice, q_tiles: range) -> None:
        head = heads.start
        rows = direction.rows(sequence, head)
        keys = direction.keys(sequence, head // problem.group)
        here = (sequence.row, head, sequence.queries)
        sink = None if call.sink is None else call.sink[head]
        O_rows, tO_rows, L_rows, tL_rows = (x[here] for x in (out_rows, tout_rows, lse_rows, tlse_rows))
        for q_start in q_tiles:
            queries = slice(q_start, min(q_start + plan.block_q, sequence.q_len))
            # The columns are O, T and l, in one array because a new row max rescales all three. lse_tangent is
            # the mean of tS over the keys so far, weighted by P; the sink is the first key.
            sums = np.zeros((queries.stop - queries.start, 2 * dim + 1), problem.accumulation)
            O, T, before = sums[:, :dim], sums[:, dim:-1], sums[:, -1]
            softmax = Softmax(before.shape, problem.accumulation, sink, bounded=False)
            lse_tangent = np.full(len(sums), 0.0 if direction.tsink is None else direction.tsink[head])
            for kv_start, kv_stop, cut in call.kv_tiles(sequence, head, queries.start, queries.stop):
                call.stop.poll()
                tile = ScoreTile(
                    sequence.batch, head, queries.start, queries.stop, kv_start, kv_stop, sequence.positions, cut
                )
                P, tS, _ = direction.scores(rows, keys, tile, save=False)
                before[...] = softmax.l
                softmax.update(P, sums, partial(call.hide, P, sequence.band, tile))
                if tS is not None:
                    hide_gradient(tS, P)
                    lse_tangent = _follow_mean(lse_tangent, P, tS, before, softmax.l, O, T)
                    tS *= P
                if problem.dropout:
                    keep = call.keep(tile)
                    P *= keep
                    if tS is not None:
                        tS *= keep
                O += product(P, keys.V[kv_start:kv_stop])
                if tS is not None:
                    T += product(tS, keys.V[kv_start:kv_stop])
                if keys.tV is not None:
                    T += product(P, keys.tV[kv_start:kv_stop])
            softmax.finish(sums, sums, L_rows[queries])
            O_rows[queries], tO_rows[queries], tL_rows[queries] = O, T, lse_tangent

    run_query_tiles(plan, call, attend)
    return out, lse, tout, tlse


def double_backward(plan: Plan, operands: Operands) -> Gradients:
    """Compute the gradients of <tQ, dQ> + <tK, dK> + <tV, dV> + ... with respect to the inputs of attention.

    Each has the shape and dtype of its input. `operands` has the results of the forward and of the JVP.
    """
    problem, q = plan.problem, operands.q
    gradients = empty_gradients(problem, operands)
    call = Call(plan, operands)
    direction = Direction(call, operands)
    dq_rows, dk_rows, dv_rows = (None if x is None else call.heads_first(x) for x in gradients)
    assert dq_rows is not None and dk_rows is not None
    dsink = np.zeros((problem.batch, problem.heads), problem.accumulation)

    def differentiate(sequence: Sequence, kv_heads: slice) -> None:
        kv_head = kv_heads.start
        keys = direction.keys(sequence, kv_head)
        dK, dV = np.zeros(keys.K.shape, problem.accumulation), np.zeros(keys.V.shape, problem.accumulation)
        for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
            rows = direction.rows(sequence, head)
            statistics = _Statistics.of(call, direction, sequence, head)
            dQ = np.zeros((sequence.q_len, problem.head_dim), problem.accumulation)
            for kv_start in range(0, sequence.kv_len, plan.block_kv):
                kv = slice(kv_start, min(kv_start + plan.block_kv, sequence.kv_len))
                for q_start, q_stop, cut in call.q_tiles(sequence, head, kv.start, kv.stop):
                    call.stop.poll()
                    tile = ScoreTile(sequence.batch, head, q_start, q_stop, kv.start, kv.stop, sequence.positions, cut)
                    here = slice(q_start, q_stop)
                    dS, dtS, W = direction.gradients(rows, keys, statistics, sequence, tile)
                    dV[kv] += product(W.T, statistics.dO[here])
                    dK[kv] += product(dS.T, rows.Q[here])
                    dQ[here] += product(dS, keys.K[kv])
                    if rows.tQ is not None:
                        dK[kv] += product(dtS.T, rows.tQ[here])
                    if keys.tK is not None:
                        dQ[here] += product(dtS, keys.tK[kv])
            dQ *= problem.accumulation.type(problem.scale)
            dq_rows[sequence.row, head, sequence.queries] = dQ
            if call.sink is not None:
                tsink = 0 if direction.tsink is None else direction.tsink[head]
                dsink[sequence.batch, head] = statistics.dsink(call.sink[head], tsink)
        call.store_dK_dV((dK, dV), (dk_rows, dv_rows), (sequence.row, kv_head, sequence.keys))

    run_tasks(plan.threads, call.gradient_tasks(differentiate), call.stop)
    sums = {name: total for step in call.score_steps for name, total in step.gradients().items()}
    if operands.sink is not None:
        sums["sink"] = dsink.sum(axis=0)
    others: dict[str, Any] = {f"d{name}": rounded(total, getattr(operands, name), q) for name, total in sums.items()}
    return Gradients(*gradients, **others)


def _follow_mean(
    mean: np.ndarray, P: np.ndarray, tS: np.ndarray, before: np.ndarray, l: np.ndarray, O: np.ndarray, T: np.ndarray
) -> np.ndarray:
    """Return the new mean of tS over the keys so far; correct T for the change, and subtract the mean from tS in place.

    `mean` is that before this tile; `l` is the row sum after it and `before` the row sum before it, both relative to
    the current row max. Means are in float64, because the rounding errors of all tiles add up.
    """
    moved = (mean * before + np.vecdot(P, tS, dtype=np.float64)) / np.where(l == 0, 1, l)
    T -= (moved - mean).astype(T.dtype)[:, None] * O
    tS -= moved.astype(tS.dtype)[:, None]
    return moved


class _Rows(NamedTuple):
    """Q (S, D) of one query head and its tangent or None, both multiplied by the part of the scale folded into Q."""

    Q: np.ndarray
    tQ: np.ndarray | None


class _Keys(NamedTuple):
    """K and V (S, D) of one key/value head and their tangents or None."""

    K: np.ndarray
    V: np.ndarray
    tK: np.ndarray | None
    tV: np.ndarray | None


class _Statistics(NamedTuple):
    """dO (S, Dv) of one query head, and the statistics (S,) of its rows that every tile needs."""

    dO: np.ndarray
    lse: np.ndarray  # inf for a row that sees no key, so that its P is 0
    lse_tangent: np.ndarray
    delta: np.ndarray
    delta_tangent: np.ndarray

    @staticmethod
    def of(call: Call, direction: Direction, sequence: Sequence, head: int) -> _Statistics:
        here = (sequence.row, head, sequence.queries)
        assert call.dout is not None and call.out is not None and call.lse is not None
        assert direction.tout is not None and direction.tlse is not None
        dtype = call.problem.accumulation
        empty_rows = call.lse[here] == -np.inf
        dO = np.array(load_rows(call.dout[here], dtype))
        dO[empty_rows] = 0  # dO of an empty row may be NaN, and 0 * NaN is NaN
        delta = np.vecdot(dO, load_rows(call.out[here], dtype))
        if call.dlse is not None:
            delta -= np.where(empty_rows, 0, call.dlse[here])
        delta_tangent = np.vecdot(dO, load_rows(direction.tout[here], dtype))
        return _Statistics(dO, np.where(empty_rows, np.inf, call.lse[here]), direction.tlse[here], delta, delta_tangent)

    def dsink(self, sink: np.floating, tsink: np.floating | float) -> np.floating:
        """Return the sink's gradient of a head, the sum of its dS over the rows: the sink is a key whose value is 0."""
        return -(np.exp(sink - self.lse) @ (self.delta_tangent + self.delta * (tsink - self.lse_tangent)))


def through_steps(
    call: Call,
    tile: DifferentiableCoordinates,
    saved: list[object],
    P: np.ndarray,
    gradients: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Take dS and dtS back through the score modifications; they and c are 0 where P is."""
    dS, dtS, _ = gradients
    for gradient in gradients:
        hide_gradient(gradient, P)
    for step, value in zip(call.score_steps[::-1], saved[::-1], strict=True):
        step.second_gradient(dS, dtS, tile, value)
    for gradient in (dS, dtS):
        hide_gradient(gradient, P)  # softcap's derivative is NaN at a masked NaN


class Direction:
    """The tangents of one call as NumPy views (B, H, S, D), and the computations on a tile that use them."""

    def __init__(self, call: Call, operands: Operands) -> None:
        self.call = call
        self.tq, self.tk, self.tv, self.tout = (
            None if array is None else call.heads_first(array)
            for array in (operands.tq, operands.tk, operands.tv, operands.tout)
        )
        self.tlse = None if operands.tlse is None else call.rows_of(operands.tlse)
        self.tsink = None if operands.tsink is None else operands.tsink.numpy().astype(call.problem.accumulation)

    def rows(self, sequence: Sequence, head: int) -> _Rows:
        """Return Q and tQ of a query head."""
        call, here = self.call, (sequence.row, head, sequence.queries)
        Q, tQ = (
            None if x is None else load_rows(x[here], call.problem.accumulation) * call.q_scale
            for x in (call.q, self.tq)
        )
        assert Q is not None
        return _Rows(Q, tQ)

    def keys(self, sequence: Sequence, kv_head: int) -> _Keys:
        """Return K, V and their tangents of a key/value head."""
        call, here = self.call, (sequence.row, kv_head, sequence.keys)
        K, V, tK, tV = (
            None if x is None else load_rows(x[here], call.problem.accumulation)
            for x in (call.k, call.v, self.tk, self.tv)
        )
        assert K is not None and V is not None
        return _Keys(K, V, tK, tV)

    def scores(
        self, rows: _Rows, keys: _Keys, tile: ScoreTile, save: bool
    ) -> tuple[np.ndarray, np.ndarray | None, list[Any]]:
        """Return the modified scores of a tile, their tangent, and with `save` the intermediates of second derivatives.

        The tangent is None if only v has a tangent and nothing is saved.
        """
        call, queries, columns = self.call, slice(*tile.queries), slice(*tile.keys)
        Q, K = rows.Q[queries], keys.K[columns]
        S = Q @ K.T
        call.scale(S)
        if not (save or call.problem.moves_probabilities):
            for step in call.score_steps:
                step.apply(S, tile, save=False)
            return S, None, []
        tS = np.zeros_like(S) if rows.tQ is None else rows.tQ[queries] @ K.T
        if keys.tK is not None:
            tS += Q @ keys.tK[columns].T
        call.scale(tS)
        return S, tS, [step.tangent(S, tS, tile, save) for step in call.score_steps]

    def gradients(
        self, rows: _Rows, keys: _Keys, statistics: _Statistics, sequence: Sequence, tile: ScoreTile
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (dS, dtS, m P c) of a tile.

        dS and dtS are the gradients with respect to q.k and its tangent, before the scale; dV is (m P c)^T dO.
        """
        call, queries, columns = self.call, slice(*tile.queries), slice(*tile.keys)
        dO, lse, lse_tangent, delta, delta_tangent = (
            x[queries] if x.ndim == 2 else x[queries, None] for x in statistics
        )
        S, tS, saved = self.scores(rows, keys, tile, save=True)
        assert tS is not None
        hidden = np.isneginf(S) if np.isnan(lse).any() else False  # by a bias or score_mod; -inf - NaN is NaN
        S -= lse
        np.copyto(S, -np.inf, where=hidden)
        call.hide(S, sequence.band, tile, -np.inf)
        P = np.exp(S, out=S)
        g = dO @ keys.V[columns].T
        h = 0 if keys.tV is None else dO @ keys.tV[columns].T
        keep = call.keep(tile) if call.problem.dropout else 1
        c = tS - lse_tangent
        g *= keep
        dS = P * (c * (g - delta) + (h * keep - delta_tangent))
        dtS = P * (g - delta)
        c *= P * keep
        through_steps(call, tile, saved, P, (dS, dtS, c))
        return dS, dtS, c
