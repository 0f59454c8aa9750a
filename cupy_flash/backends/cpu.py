"""Exact attention on the CPU: the tiles and the algorithm of the GPU kernels, in NumPy and BLAS.

Forward: for every query tile an online softmax over the key tiles it sees. Backward: for every key tile the query tiles
that see it, with the probabilities recomputed from (q, k, lse). Neither holds more than one tile of scores per thread,
so memory is linear in the sequence length.

Threads take whole tasks (a head, or query tiles of one) and BLAS runs on one thread inside each; neither the tiles nor
what a task computes depends on how many threads there are, so the result is bitwise independent of their number.

A NaN or an infinity in a key, value, query or gradient reaches the rows that see it and no other, though 0 * NaN is NaN
in a matrix product: hidden scores are overwritten, and `_product` sums over what has a weight.

Names: a letter of the paper is a tile of it in the accumulation dtype. S scores, P probabilities, O = P V, m the
reference of the exponent, l the row sums, delta = rowsum(dO * O) - dlse.
"""

from __future__ import annotations

import contextvars
import os
import threading
from _thread import start_new_thread
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple
from weakref import WeakSet, ref

import numpy as np

from ..arrays import Array, empty
from ..device import blas_controller
from ..dropout import keep_mask, keep_mask_at, keep_scale
from ..mask import Band
from ..plan import Plan
from ..problem import Gradients, Operands, Problem
from ..score import Bias, Place, Tile, four_dimensional, steps

# A query tile whose scores all lie within this distance of 0 needs no running maximum: the reference of its exponents
# can stay 0. The exponentials then lie between exp(-20) and exp(20) = 5e8, and their products with values of these
# MAGNITUDES stay in fp32's range: no digit is lost below it, and no sum of 2^31 keys, each scaled by up to 2^16 for
# dropout, overflows.
BOUND = 20.0
MAGNITUDES = (2.0**-96, 2.0**50)


def forward(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    """(out, lse) of the call."""
    problem, q = plan.problem, operands.q
    out = empty((*q.shape[:-1], problem.head_dim_v), problem.dtype, q)
    lse = empty(problem.lse_shape(q), problem.accumulation, q)
    call = _Call(problem, operands)
    if problem.has_lengths:  # rows of no sequence are no task's
        out.numpy()[...] = 0
        lse.numpy()[...] = -np.inf
    out_rows, lse_rows = call.heads_first(out), call.rows_of(lse)

    def attend(sequence: Sequence, head: int, q_tiles: range) -> None:
        kv_head = head // problem.group
        K = _load(call.k[sequence.row, kv_head, sequence.keys], problem.accumulation)
        V = _load(call.v[sequence.row, kv_head, sequence.keys], problem.accumulation)
        # A bound takes passes over keys and values, which one query does not repay.
        boundable = sequence.q_len > 1 and not call.additive and _are_moderate(V)
        K_norm = _largest_norm(K) if boundable else np.inf
        q_rows = call.q[sequence.row, head, sequence.queries]
        O_rows = out_rows[sequence.row, head, sequence.queries]
        L_rows = lse_rows[sequence.row, head, sequence.queries]
        buffer = np.empty(plan.block_q * plan.block_kv, problem.accumulation)
        for q_start in q_tiles:
            queries = slice(q_start, min(q_start + plan.block_q, sequence.q_len))
            Q = _load(q_rows[queries], problem.accumulation) * problem.accumulation.type(problem.scale)
            O = np.zeros((len(Q), problem.head_dim_v), problem.accumulation)
            bounded = boundable and _largest_norm(Q) * K_norm <= BOUND
            softmax = Softmax(len(Q), problem.accumulation, call.sink_of(head), bounded)
            for kv_start, kv_stop in sequence.band.kv_tiles(queries.start, queries.stop, plan.block_kv):
                call.stop.poll()
                tile = Tile(sequence.batch, head, queries.start, queries.stop, kv_start, kv_stop, sequence.place)
                S = np.matmul(Q, K[kv_start:kv_stop].T, out=_tile_of(buffer, tile))
                for step in call.score_steps:
                    step.apply(S, tile, keep=False)
                call.hide(S, sequence.band, tile)
                softmax.update(S, O)
                if problem.dropout:
                    S *= call.keep(tile)
                O += _product(S, V[kv_start:kv_stop])
            softmax.finish(O, O_rows[queries], L_rows[queries])

    pairs = [(sequence, head) for sequence in call.sequences if sequence.q_len for head in range(problem.heads)]
    # Too few heads for the threads: query tiles are dealt out in turn, so that each piece has its share of a causal
    # triangle.
    pieces = 1 if plan.threads == 1 or not pairs else -(-2 * plan.threads // len(pairs))
    _run(
        plan.threads,
        [
            partial(attend, sequence, head, range(piece * plan.block_q, sequence.q_len, pieces * plan.block_q))
            for sequence, head in pairs
            for piece in range(pieces)
        ],
        call.stop,
    )
    return out, lse


def backward(plan: Plan, operands: Operands) -> Gradients:
    """Gradients of the call, from its result (out, lse) and the gradients of that."""
    problem, q = plan.problem, operands.q
    dq, dk, dv = (empty(operand.shape, problem.dtype, q) for operand in (operands.q, operands.k, operands.v))
    call = _Call(problem, operands)
    if problem.has_lengths:
        for gradient in (dq, dk, dv):
            gradient.numpy()[...] = 0
    dq_rows, dk_rows, dv_rows = (call.heads_first(gradient) for gradient in (dq, dk, dv))
    dsink = np.zeros((problem.batch, problem.heads), problem.accumulation)

    def differentiate(sequence: Sequence, kv_head: int) -> None:
        K = call.k[sequence.row, kv_head, sequence.keys]
        V = call.v[sequence.row, kv_head, sequence.keys]
        dK, dV = np.zeros(K.shape, problem.accumulation), np.zeros(V.shape, problem.accumulation)
        K_norm = _largest_norm(_load(K, problem.accumulation))
        for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
            rows = _QueryRows(plan, call, sequence, head, K_norm)
            dQ = np.zeros((sequence.q_len, problem.head_dim), problem.accumulation)
            for kv_start in range(0, sequence.kv_len, plan.block_kv):
                keys = slice(kv_start, min(kv_start + plan.block_kv, sequence.kv_len))
                K_tile, V_tile = _with_column(K[keys], dK.dtype, 1), _with_column(V[keys], dV.dtype, 1)
                for q_start, q_stop in sequence.band.q_tiles(keys.start, keys.stop, plan.block_q):
                    call.stop.poll()
                    tile = Tile(sequence.batch, head, q_start, q_stop, keys.start, keys.stop, sequence.place)
                    P, dS = rows.recompute(tile, K_tile, V_tile)
                    dV[keys] += _product(P.T, rows.dO[q_start:q_stop, :-1])
                    dK[keys] += _product(dS.T, rows.Q[q_start:q_stop, :-1])
                    dQ[q_start:q_stop] += _product(dS, K_tile[:, :-1])
            dQ *= problem.accumulation.type(problem.scale)
            dq_rows[sequence.row, head, sequence.queries] = dQ
            if call.sink is not None:
                dsink[sequence.batch, head] = rows.dsink(call.sink[head])
        dk_rows[sequence.row, kv_head, sequence.keys] = dK
        dv_rows[sequence.row, kv_head, sequence.keys] = dV

    _run(plan.threads, call.gradient_tasks(differentiate), call.stop)
    sums = {name: total for step in call.score_steps for name, total in step.gradients().items()}
    if operands.sink is not None:
        sums["sink"] = dsink.sum(axis=0)
    others: dict[str, Array] = {}
    for name, total in sums.items():
        operand: Array = getattr(operands, name)
        others[f"d{name}"] = empty(operand.shape, operand.dtype, q)
        others[f"d{name}"].numpy()[...] = total.reshape(operand.shape)
    return Gradients(dq, dk, dv, **others)


class Softmax:
    """The state of an online softmax over one query tile: reference m and sum l of every row, with the sink in both.

    Any reference gives the same result; the running maximum keeps the exponents in range. Where the scores are bounded
    beforehand the reference stays 0: there is no maximum to find and nothing to rescale.
    """

    def __init__(self, rows: int, dtype: np.dtype, sink: np.floating | None, bounded: bool) -> None:
        self.bounded = bounded and (sink is None or bool(abs(sink) <= BOUND))
        if sink is None:
            self.m = np.full(rows, 0 if self.bounded else -np.inf, dtype)
            self.l = np.zeros(rows, dtype)
        else:
            # The sink is a key of score `sink` and value 0, seen before all others.
            self.m = np.full(rows, 0 if self.bounded else sink, dtype)
            self.l = np.full(rows, np.exp(sink) if self.bounded else 1, dtype)

    def update(self, S: np.ndarray, O: np.ndarray) -> None:
        """Scores to unnormalised probabilities, in place; O and l rescaled to the new reference."""
        if not self.bounded:
            m = np.maximum(self.m, S.max(axis=1))
            # A row that has seen nothing has no maximum; any finite reference makes its exponentials 0.
            reference = np.where(m == -np.inf, 0, m)
            rescale = np.exp(self.m - reference)
            S -= reference[:, None]
            O *= rescale[:, None]
            self.l *= rescale
            self.m = m
        np.exp(S, out=S)
        self.l += S @ np.ones(S.shape[1], S.dtype)

    def finish(self, O: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
        """Write O / l and m + log l; a row that saw no key has l = 0, or its sink alone: out 0 and lse -inf, or the
        sink.
        """
        O /= np.where(self.l == 0, 1, self.l)[:, None]
        out[...] = O
        lse[...] = self.m + np.log(self.l)


class Sequence(NamedTuple):
    """One sequence of the batch: the rows of the arrays that are its own, and what its queries see by position."""

    batch: int  # its number, b of the semantics
    row: int  # its batch entry of the arrays: its number, or 0 in a packed batch
    queries: slice
    keys: slice
    band: Band
    place: Place

    @property
    def q_len(self) -> int:
        return self.band.q_len

    @property
    def kv_len(self) -> int:
        return self.band.kv_len


class _Call:
    """The operands of one call as NumPy views with heads first, (B, H, S, D); a packed batch is one row of tokens."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem, self.stop = problem, _Stop()
        self.q, self.k, self.v = (self.heads_first(array) for array in (operands.q, operands.k, operands.v))
        saved = (operands.dout, operands.out)
        self.dout, self.out = (None if array is None else self.heads_first(array) for array in saved)
        self.lse, self.dlse = (
            None if array is None else self.rows_of(array) for array in (operands.lse, operands.dlse)
        )
        self.mask = None if operands.mask is None else four_dimensional(operands.mask.numpy())
        self.bias = None if operands.bias is None else four_dimensional(operands.bias.numpy())
        self.sink = None if operands.sink is None else operands.sink.numpy().astype(problem.accumulation)
        seed = operands.seed.numpy().item() if isinstance(operands.seed, Array) else operands.seed
        self.seed = 0 if seed is None else seed % 2**64  # an int64 stands for the uint64 of its bits
        self.sequences = _sequences(problem, operands)
        self.score_steps = steps(problem, operands)
        # Tasks that add to one slice of it run in turn.
        self.dbias = next((step.dbias for step in self.score_steps if isinstance(step, Bias)), None)

    @property
    def additive(self) -> bool:
        """Whether |q| |k| does not bound the scores."""
        return not all(step.bounded for step in self.score_steps)

    def heads_first(self, array: Array) -> np.ndarray:
        view = array.numpy()
        if self.problem.layout == "thd":
            return view.transpose(1, 0, 2)[None]
        return view.transpose(0, 2, 1, 3) if self.problem.layout == "bshd" else view

    def rows_of(self, array: Array) -> np.ndarray:
        """lse-like arrays as (B, H, S)."""
        return array.numpy()[None] if self.problem.layout == "thd" else array.numpy()

    def sink_of(self, head: int) -> np.floating | None:
        return None if self.sink is None else self.sink[head]

    def hide(self, S: np.ndarray, band: Band, tile: Tile) -> None:
        """Scores of what a query may not see become -inf: by position, by the dense mask, by a bias of -inf."""
        if not band.sees_all(*tile.queries, *tile.keys):
            np.copyto(S, -np.inf, where=~band.visible(*tile.queries, *tile.keys))
        if self.mask is not None:
            np.copyto(S, -np.inf, where=~tile.cut(self.mask))
        if self.bias is not None and np.isnan(_square_sum(S)):  # -inf added to NaN has not hidden it
            np.copyto(S, -np.inf, where=tile.cut(self.bias).astype(S.dtype) == -np.inf)

    def may_hide(self, band: Band, tile: Tile) -> bool:
        """Whether any score of the tile may be hidden."""
        return self.mask is not None or self.bias is not None or not band.sees_all(*tile.queries, *tile.keys)

    def keep(self, tile: Tile) -> np.ndarray:
        """Dropout's factors of the tile: 0, or what keeps the expected value."""
        problem, (q_first, kv_first, _, step) = self.problem, tile.place
        head_index = tile.batch * problem.whole_heads + problem.first_head + tile.head
        if step == 1:
            kept = keep_mask(
                self.seed, head_index, q_first + tile.q_start, q_first + tile.q_stop,
                kv_first + tile.kv_start, kv_first + tile.kv_stop, problem.dropout,
            )  # fmt: skip
        else:
            i, j = q_first + step * np.arange(*tile.queries), kv_first + step * np.arange(*tile.keys)
            kept = keep_mask_at(self.seed, head_index, i, j, problem.dropout)
        return kept * problem.accumulation.type(keep_scale(problem.dropout))

    def gradient_tasks(self, differentiate: Callable[[Sequence, int], None]) -> list[Callable[[], None]]:
        """A task per key/value head; those that add to one slice of a bias gradient follow each other in one task,
        so that every sum has one order."""
        slices: dict[object, list[Callable[[], None]]] = defaultdict(list)
        for sequence in self.sequences:
            for kv_head in range(self.problem.kv_heads):
                target = (sequence.batch, kv_head)
                if self.dbias is not None:
                    target = (target[0] if self.dbias.shape[0] > 1 else 0, target[1] if self.dbias.shape[1] > 1 else 0)
                slices[target].append(partial(differentiate, sequence, kv_head))
        return [partial(_in_turn, tasks) for tasks in slices.values()]


class _QueryRows:
    """What the backward needs of the queries of one head.

    Q (scaled) and dO carry one more column, -lse and -delta, against a column of ones of K and V: the product then is
    score - lse, or dP - delta, without a pass over the tile to subtract it. Where something comes between the product
    and the subtraction (a soft cap, a bias, dropout) the column is 0 and the subtraction a pass of its own. So it is
    for scores beyond BOUND: rounded as the forward rounded them, they lose their error to the lse that has the same.
    """

    def __init__(self, plan: Plan, call: _Call, sequence: Sequence, head: int, K_norm: float) -> None:
        problem, self.call, self.band = plan.problem, call, sequence.band
        rows = (sequence.row, head, sequence.queries)
        # The operands of a backward have them.
        assert call.dout is not None and call.out is not None and call.lse is not None
        # exp(score + inf) would be the probability of a row that sees nothing; exp(-inf) is.
        empty = call.lse[rows] == -np.inf
        self.lse = np.where(empty, np.inf, call.lse[rows])
        self.Q = _with_column(call.q[rows], problem.accumulation, 0)
        self.Q *= problem.accumulation.type(problem.scale)
        self.dO = _with_column(call.dout[rows], problem.accumulation, 0)
        self.dO[empty] = 0  # 0 times whatever stands there, NaN too
        self.delta = np.einsum("id,id->i", self.dO[:, :-1], _load(call.out[rows], problem.accumulation))
        if call.dlse is not None:
            self.delta -= np.where(empty, 0, call.dlse[rows])
        self.folded = not call.score_steps and _largest_norm(self.Q) * K_norm <= BOUND
        if self.folded:
            self.Q[:, -1] = -self.lse
        if not problem.dropout:
            self.dO[:, -1] = -self.delta
        self.S_buffer, self.dP_buffer = (np.empty(plan.block_q * plan.block_kv, problem.accumulation) for _ in range(2))

    def recompute(self, tile: Tile, K: np.ndarray, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(P after dropout, dS before the scale) of a tile, from K and V with their columns of ones."""
        problem, rows = self.call.problem, slice(*tile.queries)
        S = np.matmul(self.Q[rows], K.T, out=_tile_of(self.S_buffer, tile))
        kept = [step.apply(S, tile, keep=True) for step in self.call.score_steps]
        if not self.folded:
            S -= self.lse[rows, None]
        self.call.hide(S, self.band, tile)
        P = np.exp(S, out=S)
        dP = np.matmul(self.dO[rows], V.T, out=_tile_of(self.dP_buffer, tile))
        if problem.dropout:
            keep = self.call.keep(tile)
            dP *= keep
            dP -= self.delta[rows, None]
        dS = np.multiply(P, dP, out=dP)
        may_hide = self.call.may_hide(self.band, tile)
        if may_hide:
            _hide_gradient(dS, P)
        for step, saved in zip(self.call.score_steps[::-1], kept[::-1], strict=True):
            step.gradient(dS, tile, saved)
        if may_hide and kept:
            _hide_gradient(dS, P)  # the slope of a soft cap at a hidden NaN is NaN
        if problem.dropout:
            P *= keep
        return P, dS

    def dsink(self, sink: np.floating) -> np.floating:
        """-sum of P_sink (delta - dlse), P_sink = exp(sink - lse)."""
        return -(np.exp(sink - self.lse) @ self.delta)


def _sequences(problem: Problem, operands: Operands) -> list[Sequence]:
    """The sequences of the batch: whole entries, the valid part of padded ones, or the pieces of a packed row."""
    if operands.cu_seqlens_q is not None and operands.cu_seqlens_k is not None:
        q_bounds, k_bounds = operands.cu_seqlens_q.numpy().tolist(), operands.cu_seqlens_k.numpy().tolist()
        q_starts, q_stops, k_starts, k_stops = q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:]
        row_of = [0] * problem.batch
    else:
        q_starts = k_starts = [0] * problem.batch
        q_stops, k_stops = (
            [longest] * problem.batch if lengths is None else lengths.numpy().tolist()
            for lengths, longest in ((operands.q_lengths, problem.q_len), (operands.kv_lengths, problem.kv_len))
        )
        row_of = list(range(problem.batch))
    starts = None if operands.starts is None else operands.starts.numpy().tolist()
    sequences = []
    for batch, (row, *bounds) in enumerate(zip(row_of, q_starts, q_stops, k_starts, k_stops, strict=True)):
        queries, keys = slice(*bounds[:2]), slice(*bounds[2:])
        lengths = (queries.stop - queries.start, keys.stop - keys.start)
        place = Place(0, 0, problem.mask.offset(*lengths), 1)
        if starts is not None:
            q_first, kv_first, offset = starts[batch]
            place = Place(q_first, kv_first, offset, problem.step)
        band = problem.mask.band(*lengths, place.offset, place.step)
        sequences.append(Sequence(batch, row, queries, keys, band, place))
    return sequences


def _load(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows (S, D) in the accumulation dtype and a form that BLAS takes; a view where they already are."""
    if rows.dtype.name == "bfloat16":
        # A bfloat16 is the upper half of a float32: shifting the bits is several times faster than converting.
        return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    blas_takes_it = rows.strides[-1] == rows.itemsize and rows.strides[0] >= rows.itemsize * rows.shape[-1]
    return rows.astype(dtype, order="K" if blas_takes_it else "C", copy=False)


def _with_column(rows: np.ndarray, dtype: np.dtype, value: float) -> np.ndarray:
    """Rows (S, D) as (S, D + 1) in the accumulation dtype, the last column `value`."""
    wide = np.empty((rows.shape[0], rows.shape[1] + 1), dtype)
    wide[:, :-1] = _load(rows, dtype)
    wide[:, -1] = value
    return wide


def _tile_of(buffer: np.ndarray, tile: Tile) -> np.ndarray:
    """The start of a buffer, shaped as the tile's scores."""
    rows, columns = tile.q_stop - tile.q_start, tile.kv_stop - tile.kv_start
    return buffer[: rows * columns].reshape(rows, columns)


def _largest_norm(rows: np.ndarray) -> float:
    """The largest Euclidean norm of a row; NaN, which makes scores NaN whatever bounds the others, is none."""
    return float(np.sqrt(np.fmax.reduce(np.einsum("id,id->i", rows, rows), initial=0)))


def _are_moderate(rows: np.ndarray) -> bool:
    """Whether all values but zeros and NaN lie within MAGNITUDES."""
    smallest, largest = MAGNITUDES
    magnitudes = np.abs(rows)
    if np.fmin.reduce(magnitudes, axis=None, initial=smallest) < smallest:
        magnitudes[magnitudes == 0] = smallest
    in_range = np.fmin.reduce(magnitudes, axis=None, initial=smallest) == smallest
    return bool(in_range and np.fmax.reduce(magnitudes, axis=None, initial=0) <= largest)


def _product(W: np.ndarray, X: np.ndarray) -> np.ndarray:
    """W X with 0 * NaN = 0 * inf = 0: NaN and infinities of X reach only the rows of W that weigh them.

    No infinity has a negative weight: the weight is a probability, or a dS, which is 0 or NaN for infinite K and Q.
    """
    product = W @ X
    if np.isfinite(_square_sum(product)):
        return product
    finite = np.isfinite(X)
    rows = np.flatnonzero(~finite.all(axis=1))
    if not rows.size:
        return product
    weighted, special = (W[:, rows] != 0).astype(W.dtype), np.where(finite, 0, X)[rows]
    positive, negative, undefined = (
        weighted @ kind.astype(W.dtype) > 0 for kind in (special == np.inf, special == -np.inf, np.isnan(special))
    )
    product = W @ np.where(finite, X, 0)
    product += np.where(positive, np.inf, 0) - np.where(negative, np.inf, 0) + np.where(undefined, np.nan, 0)
    return product


def _square_sum(tile: np.ndarray) -> float:
    """The sum of all squares: finite only where every number is, and the fastest of what BLAS has to find that out."""
    return float(np.vdot(tile, tile))


def _hide_gradient(dS: np.ndarray, P: np.ndarray) -> None:
    """A score of probability 0 has no gradient, also where 0 has been multiplied by NaN or an infinity."""
    if not np.isfinite(_square_sum(dS)):
        np.copyto(dS, 0, where=P == 0)


def _in_turn(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()


class _Stopped(Exception):
    """A task ends early because another one of its call has failed, or the caller was interrupted."""


class _Stop:
    """A request to all threads of one call to end at their next tile."""

    requested = False

    def poll(self) -> None:
        if self.requested:
            raise _Stopped


def _run(threads: int, tasks: list[Callable[[], None]], stop: _Stop | None = None) -> None:
    """Run the tasks, BLAS limited to one thread in each; an exception of any of them reaches the caller.

    An exception in the caller's thread, Ctrl-C among them, reaches it when the other threads have ended too: after a
    tile of theirs where tasks poll `stop`.
    """
    stop = _Stop() if stop is None else stop
    waiting = iter(tasks)  # shared: a thread that is free takes the next
    errors: list[BaseException] = []

    def work() -> None:
        # Infinities are values of the algorithm (a hidden score, the lse of an empty row), not accidents.
        with np.errstate(all="ignore"):
            for task in waiting:
                stop.poll()
                task()

    def help_out() -> None:
        try:
            work()
        except _Stopped:
            pass
        except BaseException as error:
            stop.requested = True
            errors.append(error)

    def work_together() -> None:
        helpers = _Helpers()
        try:
            for _ in range(min(threads, len(tasks)) - 1):
                helpers.start(help_out)
            # NumPy keeps the error state in the context, so that of the caller stays even where an interrupt cuts short
            # the end of `errstate`.
            contextvars.copy_context().run(work)
            helpers.wait()
        except BaseException as error:
            stop.requested = True
            helpers.wait()
            if not isinstance(error, _Stopped):
                raise
        if errors:
            raise errors.pop(0)

    user = _User()
    try:
        try:
            _single_threaded_blas.enter(user)
            work_together()
        finally:
            _single_threaded_blas.leave(user)
    finally:
        # Once more: Ctrl-C may interrupt Python anywhere, and has then cut short the first `leave` or neither.
        _single_threaded_blas.leave(user)


class _Helpers:
    """Threads, and the wait for their end, whatever interrupts the caller or them at any moment.

    Where an exception from outside strikes inside threading.Thread.start, the new thread may wait forever for a lock of
    the caller; where it strikes a thread as it begins, nothing that the thread should do at its end is done. But Python
    itself drops the function that a thread runs when it has ended.
    """

    def __init__(self) -> None:
        self._functions: list[ref[partial[None]]] = []
        self._dropped: SimpleQueue[object] = SimpleQueue()

    def start(self, function: Callable[[], None]) -> None:
        own = partial(function)
        reference = ref(own, self._dropped.put)
        start_new_thread(own, ())
        del own
        self._functions.append(reference)

    def wait(self) -> None:
        """Return when all have ended, but for one whose `start` was interrupted."""
        for function in self._functions:
            while function() is not None:
                self._dropped.get()


class _User:
    """A call that needs BLAS on one thread."""


class _BlasLimit:
    """BLAS limited to one thread, for the whole process: the first user sets the limit, the last one restores it.

    An asynchronous exception may end `enter` and `leave` anywhere. So `leave` may follow any part of `enter` and may be
    called again, and a user whose `leave` has never been completed counts as long as it exists: the next one then
    finds that there is a limit to restore.
    """

    def __init__(self) -> None:
        self._users: WeakSet[_User] = WeakSet()
        self._before: list[int] | None = None  # what is to be restored; None: nothing was changed
        self._lock = threading.RLock()  # reentrant for a signal's handler that calls attention
        if hasattr(os, "register_at_fork"):
            # No thread is in here while the process is forked: the child would wait for it forever.
            os.register_at_fork(
                before=lambda: self._lock.acquire(),
                after_in_parent=lambda: self._lock.release(),
                after_in_child=self._reset,
            )

    def enter(self, user: _User) -> None:
        with self._lock:
            first = not self._users
            self._users.add(user)
            if first:
                limits = [library.num_threads for library in blas_controller().lib_controllers]
                # A limit of one thread that an earlier call has left behind is not what its caller had.
                if self._before is None or limits != [1] * len(limits):
                    self._before = limits
                self._set([1] * len(limits))

    def leave(self, user: _User) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users and self._before is not None:
                self._set(self._before)
                self._before = None

    def _set(self, threads: list[int]) -> None:
        for library, number in zip(blas_controller().lib_controllers, threads, strict=True):
            # threadpoolctl >= 3.8 obeys only the thread that set OpenBLAS's limit first, without a word to others; here
            # the last to leave restores what the first to enter has set.
            disown = getattr(library, "clear_controlling_thread", lambda force: None)
            disown(force=True)
            library.set_num_threads(number)
            disown(force=True)

    def _reset(self) -> None:
        """In a forked child, which has none of the other threads: neither their limit nor their hold on the lock."""
        self._lock = threading.RLock()
        self._users = WeakSet()
        self.leave(_User())


_single_threaded_blas = _BlasLimit()
