"""JVP and double backward of attention to selected keys, in the tiles of selected.py.

Formulas and names are those of derivatives.py. A row sees its whole list at once, so that mu, the tangent of lse, is
known before the sums over the keys.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from ..arrays import Array, empty
from ..plan.plan import Plan
from ..problem.records import Gradients, Operands
from .attention import Sequence, hide_gradient
from .blas import product
from .derivatives import Direction, through_steps
from .selected import (
    ListTile,
    SelectedCall,
    Unit,
    averaged,
    probabilities,
    products_of_rows,
    run_tiles,
    softmax,
    sum_gradients,
)


class _Rows(NamedTuple):
    """Q and its tangent (lists, rows, heads, D), with the part of the scale folded into Q, and the keys of a tile."""

    Q: np.ndarray
    tQ: np.ndarray | None
    K: np.ndarray
    V: np.ndarray
    tK: np.ndarray | None
    tV: np.ndarray | None

    @staticmethod
    def of(call: SelectedCall, direction: Direction, sequence: Sequence, unit: Unit, tile: ListTile) -> _Rows:
        dtype = call.problem.accumulation
        here, keys = ((sequence.row, unit.heads, sequence.queries), (sequence.row, unit.kv_head, sequence.keys))
        Q, tQ = (None if x is None else tile.rows_of(x[here], dtype) * call.q_scale for x in (call.q, direction.tq))
        K, V, tK, tV = (
            None if x is None else tile.gather(x[keys], dtype, call.scratch, name)
            for name, x in (("K", call.k), ("V", call.v), ("tK", direction.tk), ("tV", direction.tv))
        )
        assert Q is not None and K is not None and V is not None
        return _Rows(Q, tQ, K, V, tK, tV)


def _scores(
    call: SelectedCall, sequence: Sequence, tile: ListTile, x: _Rows, save: bool
) -> tuple[np.ndarray, np.ndarray, list[object]]:
    """Return the scores of a tile, -inf where hidden, their tangents, and with `save` what second gradients need."""
    S = products_of_rows(x.Q, x.K, call.scratch, "S")
    tS = np.zeros_like(S) if x.tQ is None else products_of_rows(x.tQ, x.K, call.scratch, "tS")
    if x.tK is not None:
        tS += products_of_rows(x.Q, x.tK, call.scratch, "moved")
    call.scale(S)
    call.scale(tS)
    saved = [step.tangent(S, tS, tile, save) for step in call.score_steps]
    call.hide_unseen(S, tile, sequence.band)
    return S, tS, saved


def jvp(plan: Plan, operands: Operands) -> tuple[Array, Array, Array, Array]:
    """Compute out, lse and their tangents, as derivatives.jvp."""
    problem, q = plan.problem, operands.q
    out, tout = (empty((*q.shape[:-1], problem.head_dim_v), problem.dtype, q) for _ in range(2))
    lse, tlse = (empty(problem.lse_shape(q), problem.accumulation, q) for _ in range(2))
    for array, value in ((out, 0), (tout, 0), (lse, -np.inf), (tlse, 0)):
        array.numpy()[...] = value
    call = SelectedCall(plan, operands)
    direction = Direction(call, operands)
    out_rows, tout_rows = call.heads_first(out), call.heads_first(tout)
    lse_rows, tlse_rows = call.rows_of(lse), call.rows_of(tlse)

    def attend(sequence: Sequence, unit: Unit, tile: ListTile) -> None:
        here = (sequence.row, unit.heads, sequence.queries)
        x = _Rows.of(call, direction, sequence, unit, tile)
        P, tS, _ = _scores(call, sequence, tile, x, save=False)
        sink = None if call.sink is None else call.sink[unit.heads]
        l, row_lse = softmax(P, sink)
        hide_gradient(tS, P)
        mu = np.vecdot(P, tS, dtype=np.float64) / l
        if sink is not None and direction.tsink is not None:
            mu += np.exp(sink - np.where(row_lse == -np.inf, 0, row_lse)) * direction.tsink[unit.heads]
        tS -= mu.astype(tS.dtype)[..., None]
        tS *= P
        if problem.dropout:
            kept = call.kept(tile)
            P *= kept
            tS *= kept
        O = averaged(P, x.V, l)
        T = averaged(tS, x.V, l) if problem.moves_probabilities else np.zeros_like(O)
        if x.tV is not None:
            T = T + averaged(P, x.tV, l)
        for result, rows in ((O, out_rows), (T, tout_rows), (row_lse, lse_rows), (mu, tlse_rows)):
            tile.store(result, rows[here])

    run_tiles(plan, call, attend)
    return out, lse, tout, tlse


def double_backward(plan: Plan, operands: Operands) -> Gradients:
    """Compute the gradients of the backward in a direction, as derivatives.double_backward."""
    call = SelectedCall(plan, operands)
    return sum_gradients(plan, operands, call, partial(_differentiate, call, Direction(call, operands)))


def _differentiate(
    call: SelectedCall,
    direction: Direction,
    sequence: Sequence,
    unit: Unit,
    tile: ListTile,
    dq_rows: np.ndarray,
    total: np.ndarray,
) -> np.ndarray | float:
    """Compute the second gradients of a tile, as `sum_gradients` asks."""
    dtype, here = call.problem.accumulation, (sequence.row, unit.heads, sequence.queries)
    assert direction.tout is not None and direction.tlse is not None
    dO, lse, delta = call.row_gradients(tile, here)
    delta_tangent = np.vecdot(dO, tile.rows_of(direction.tout[here], dtype))
    mu = tile.rows_of(direction.tlse[here], dtype)
    x = _Rows.of(call, direction, sequence, unit, tile)
    S, tS, saved = _scores(call, sequence, tile, x, save=True)
    P = probabilities(S, lse)
    g = products_of_rows(dO, x.V, call.scratch, "g")
    h = 0 if x.tV is None else products_of_rows(dO, x.tV, call.scratch, "h")
    kept = call.kept(tile) if call.problem.dropout else 1
    c = tS - mu[..., None]
    dtS = P * (g * kept - delta[..., None])
    dS = c * dtS + P * (h * kept - delta_tangent[..., None])
    c *= P * kept
    through_steps(call, tile, saved, P, (dS, dtS, c))
    lists, rows, heads, _ = P.shape
    dS, dtS, W, dO, Q = (y.reshape(lists, rows * heads, -1) for y in (dS, dtS, c, dO, x.Q))
    dQ = product(dS, x.K)
    if x.tK is not None:
        dQ += product(dtS, x.tK)
    dQ *= dtype.type(call.problem.scale)
    tile.store(dQ.reshape(lists, rows, heads, -1), dq_rows[here])
    if x.tQ is not None:
        dS, Q = np.concatenate((dS, dtS), axis=1), np.concatenate((Q, x.tQ.reshape(Q.shape)), axis=1)
    call.add_to_keys(tile, total, (dS, Q), (W, dO))
    if call.sink is None:
        return 0.0
    tsink = 0 if direction.tsink is None else direction.tsink[unit.heads]
    of_rows = np.exp(call.sink[unit.heads] - lse) * (delta_tangent + delta * (tsink - mu))
    gradients: np.ndarray = -of_rows.sum(axis=(0, 1))
    return gradients
