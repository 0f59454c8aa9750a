"""Attention to selected keys on the CPU: the keys of each list are gathered, and no Sq x Sk array exists.

A tile is some lists and the rows that share each of them, for the query heads that share the lists and a key/value
head. Either every list has gathered keys of its own, and the products are batched over the lists; or the tile has one
list, the union of all, and hides from each row what its own list does not name. The smaller predicted time decides, so
that lists of neighbouring queries, which often name the same keys, become one large product.

A row sees its whole list at once, so that its softmax needs no running maximum. Tiles and the order of all sums depend
on shapes and lists alone. NaN and infinities in keys and values that the list of a row does not name do not reach it.

Names are the paper's, as in attention.py; a tile's scores are (lists, rows, heads, keys), in products with (rows,
heads) as one axis.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from ..arrays import Array, empty
from ..dropout import keep_mask_at, keep_scale
from ..plan.plan import Plan
from ..problem.mask import Band
from ..problem.records import Gradients, Operands, Problem
from ..problem.selection import places_of, spans_of_queries
from .attention import Call, Sequence, empty_gradients, hide_gradient, load_rows, rounded
from .blas import product, shaped, square_sum
from .score import Positions
from .statistics import RowStatistics, StatisticsGradients, empty_statistics
from .thread_pool import OrderedSum, run_tasks

LISTS = 64  # lists of which tiles are made together
TILE_BYTES = 2**23  # of gathered keys and scores in a tile of several lists
PIECES = 4  # into which a backward splits the lists of a key/value head if there are few heads
# Cost model in nanoseconds on one core, as in engines/cpu.py: per floating-point operation of a product of one list's
# rows and of a large one, per score between the products, and per number of a gathered key.
FLOP_OF_LIST, FLOP, SCORE, GATHER = 0.03, 0.0095, 1.5, 0.4


class Scratch(threading.local):
    """Buffers that the tiles of a thread use in turn: the system would map and clear fresh memory for each tile."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def array(self, name: str, *shape: int, dtype: np.dtype) -> np.ndarray:
        """Return the buffer of a name in a shape, with any contents."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < math.prod(shape):
            buffer = self._buffers[name] = np.empty(math.prod(shape), dtype)
        return shaped(buffer, *shape)


class Unit(NamedTuple):
    """The lists of one sequence for one key/value head, and the query heads that share them."""

    batch: int
    kv_head: int
    heads: slice
    lists: np.ndarray  # int32 (lists, n)
    q_len: int
    kv_len: int
    positions: Positions
    q_idx: np.ndarray | None  # the positions (Sq,) that mods see in place of those
    block: int  # of keys, at most all of them
    rows: int  # of a list, at most all queries


class ListTile(NamedTuple):
    """The score.Coordinates of scores (lists, rows, heads, keys); rows past the last query count as the last one."""

    batch: int
    head: np.ndarray  # int32 (1, 1, heads, 1)
    q: np.ndarray  # queries, int64 (lists, rows, 1, 1)
    j: np.ndarray  # keys, int64 (lists, 1, 1, keys); where an entry names none, the number of keys
    hidden: np.ndarray | None  # of which rows the lists do not name the key, (lists, rows or 1, 1, keys)
    q_len: int
    kv_len: int
    positions: Positions
    q_idx: np.ndarray | None

    @property
    def queries(self) -> slice:
        """The queries of the tile."""
        first = int(self.q[0, 0, 0, 0])
        return slice(first, min(first + self.q.size, self.q_len))

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The indices of queries and keys, at most the last ones."""
        return np.minimum(self.q, self.q_len - 1), np.minimum(self.j, self.kv_len - 1)

    @property
    def distances(self) -> np.ndarray:
        """The distances in positions between queries and keys."""
        q, j = self.places
        return np.abs((q - j) * self.positions.step + self.positions.offset)

    @property
    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """The q_idx and kv_idx of mods, int32."""
        q, j = self.places
        first_q, first_kv, _, step = self.positions
        q = first_q + step * q if self.q_idx is None else self.q_idx[q]
        return q.astype(np.int32), (first_kv + step * j).astype(np.int32)

    def _index(self, dense: np.ndarray) -> tuple[int | np.ndarray, ...]:
        """Return the index of the tile's scores in an array (B or 1, Hq or 1, Sq or 1, Sk or 1)."""
        whole: tuple[int | np.ndarray, ...] = (self.batch, self.head, *self.places)
        return tuple(0 if size == 1 else index for index, size in zip(whole, dense.shape, strict=True))

    def cut(self, dense: np.ndarray) -> np.ndarray:
        """Return the elements of an array (B or 1, Hq or 1, Sq or 1, Sk or 1), in a shape that broadcasts to scores."""
        return np.asarray(dense[self._index(dense)])

    def add(self, total: np.ndarray, dS: np.ndarray) -> None:
        """Add gradients of the scores to an array (B or 1, Hq or 1, Sq or 1, Sk or 1)."""
        index = np.broadcast_arrays(*self._index(total), np.empty(dS.shape, np.bool_))[:-1]
        np.add.at(total, tuple(index), dS)

    def rows_of(self, X: np.ndarray, dtype: np.dtype, fill: float = 0) -> np.ndarray:
        """Return (heads, S) or (heads, S, D) as (lists, rows, heads) or (..., D), with `fill` past the last row."""
        taken = X[:, self.queries].swapaxes(0, 1)
        rows = np.full((self.q.size, *taken.shape[1:]), fill, dtype)
        rows[: len(taken)] = taken
        return rows.reshape(*self.q.shape[:2], *taken.shape[1:])

    def store(self, X: np.ndarray, to: np.ndarray) -> None:
        """Write numbers (lists, rows, heads), or rows (..., D), to (heads, S) or (heads, S, D)."""
        flat = X.reshape(self.q.size, *X.shape[2:])
        queries = self.queries
        to[:, queries] = flat[: queries.stop - queries.start].swapaxes(0, 1)

    def gather(self, rows: np.ndarray, dtype: np.dtype, scratch: Scratch, name: str) -> np.ndarray:
        """Return the rows (S, D) of the keys, (lists, keys, D), in the accumulation dtype; a view of all of them."""
        j = self.j[:, 0, 0]
        if len(j) == 1 and j.size == len(rows):
            return load_rows(rows, dtype)[None]
        if not rows.flags.c_contiguous:
            return load_rows(rows[self.places[1][:, 0, 0]], dtype)
        taken = scratch.array(name, *j.shape, rows.shape[1], dtype=rows.dtype)
        return load_rows(np.take(rows, j, axis=0, mode="clip", out=taken), dtype)

    def scatter(self, total: np.ndarray, X: np.ndarray) -> None:
        """Add X (lists, keys, D) to the rows of the keys; a last row takes what belongs to no key."""
        row = np.dtype((np.void, total.strides[0]))  # NumPy copies a row as one element faster than its numbers
        rows, taken = total.view(row)[:, 0], np.empty(X.shape[1:], X.dtype)
        taken_rows = taken.view(row)[:, 0]
        for keys, added in zip(self.j[:, 0, 0], X, strict=True):
            np.take(rows, keys, out=taken_rows, mode="clip")
            taken += added
            rows[keys] = taken_rows


class Lists:
    """The lists of a call, and their tiles."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        assert operands.selected is not None and problem.selected is not None
        self.problem, self.selection = problem, problem.selected
        selected, packed = operands.selected.numpy(), problem.layout == "thd"
        places = places_of(self.selection, selected.shape, spans_of_queries(problem, operands), packed)
        self.lists = [place.of(selected) for place in places]  # (Hs, lists, n) of each sequence

    def units(
        self, batch: int, kv_head: int, lengths: tuple[int, int], positions: Positions, q_idx: np.ndarray | None = None
    ) -> list[Unit]:
        """Return the units of a key/value head: one, or with lists for each query head one for each of its group."""
        group, lists = self.problem.group, self.lists[batch]
        first = kv_head * group
        q_len, kv_len = lengths
        block, rows = min(self.selection.block, max(kv_len, 1)), min(self.selection.rows, q_len)
        after = (q_len, kv_len, positions, q_idx, block, rows)
        if self.selection.heads in (1, self.problem.kv_heads):
            shared = lists[kv_head if self.selection.heads > 1 else 0]
            return [Unit(batch, kv_head, slice(first, first + group), shared, *after)]
        return [
            Unit(batch, kv_head, slice(head, head + 1), lists[head], *after) for head in range(first, first + group)
        ]

    def tiles(self, unit: Unit, start: int, stop: int) -> Iterator[ListTile]:
        """Yield the tiles of the lists [start, stop), of their union or with the keys of each of them."""
        block, kv_len, count = unit.block, unit.kv_len, stop - start
        blocks = -(-kv_len // block)
        entries = unit.lists[start:stop].astype(np.int64)
        entries[(entries < 0) | (entries >= blocks)] = blocks  # the block after the last is that of no key
        named = np.zeros(blocks + 1, np.bool_)
        named[entries] = True
        union = np.flatnonzero(named[:-1])
        rows = count * unit.rows * (unit.heads.stop - unit.heads.start)
        dims, itemsize = self.problem.head_dim + self.problem.head_dim_v, self.problem.accumulation.itemsize
        merged, gathered = len(union) * block, entries.size * block
        one = rows * (2 * dims * FLOP + SCORE) + dims * GATHER
        each = rows // count * (2 * dims * FLOP_OF_LIST + SCORE) + dims * GATHER
        if count == 1:
            yield from self._parts(unit, start, union)
        elif merged * one <= gathered * each and merged * rows * itemsize <= TILE_BYTES:
            yield self._merged(unit, start, entries, union)
        elif gathered * (rows // count + dims) * itemsize <= TILE_BYTES:
            j = _keys_of(entries, block, kv_len)
            hidden = j == kv_len
            queries = np.arange(start * unit.rows, stop * unit.rows)
            yield self._tile(unit, queries, j, hidden[:, None] if hidden.any() else None)
        else:
            middle = start + count // 2
            yield from self.tiles(unit, start, middle)
            yield from self.tiles(unit, middle, stop)

    def listed(self, unit: Unit, queries: np.ndarray) -> ListTile:
        """Return the tile of consecutive queries with the keys of the list of each, in the order of its entries."""
        entries = unit.lists[queries // unit.rows].astype(np.int64)
        blocks = -(-unit.kv_len // unit.block)
        entries[(entries < 0) | (entries >= blocks)] = blocks
        j = _keys_of(entries, unit.block, unit.kv_len)
        return self._tile(unit, queries, j, (j == unit.kv_len)[:, None])

    def _parts(self, unit: Unit, index: int, blocks: np.ndarray) -> Iterator[ListTile]:
        """Yield the tiles of one list, of some of its rows each: all may be as many as there are queries."""
        j = _keys_of(blocks, unit.block, unit.kv_len)
        j = j[j < unit.kv_len]
        row = max(len(j), 1) * (unit.heads.stop - unit.heads.start) * self.problem.accumulation.itemsize
        first, step = index * unit.rows, max(TILE_BYTES // row, LISTS)
        stop = min(first + unit.rows, unit.q_len)
        for at in range(first, stop, step):
            yield self._tile(unit, np.arange(at, min(at + step, stop)), j[None], None)

    def _merged(self, unit: Unit, start: int, entries: np.ndarray, union: np.ndarray) -> ListTile:
        """Return the tile of one list, the union of some, which hides from each row what its own does not name."""
        block, rows, kv_len = unit.block, unit.rows, unit.kv_len
        count = len(entries)
        j = _keys_of(union, block, kv_len)
        j = j[j < kv_len]
        place = np.full(-(-kv_len // block) + 1, len(union))
        place[union] = np.arange(len(union))
        named = np.zeros((count, len(union) + 1), np.bool_)
        named[np.arange(count)[:, None], place[entries]] = True
        hidden = None
        if not named[:, :-1].all():
            hidden = ~named[:, :-1].repeat(block, axis=1)[None, :, : len(j)].repeat(rows, axis=1)
        return self._tile(unit, np.arange(start * rows, (start + count) * rows), j[None], hidden)

    def _tile(self, unit: Unit, queries: np.ndarray, j: np.ndarray, hidden: np.ndarray | None) -> ListTile:
        head = np.arange(unit.heads.start, unit.heads.stop, dtype=np.int32)[:, None]
        q = queries.reshape(len(j), -1, 1, 1)
        hidden = None if hidden is None else hidden[:, :, None]
        j = j[:, None, None]
        return ListTile(unit.batch, head[None, None], q, j, hidden, unit.q_len, unit.kv_len, unit.positions, unit.q_idx)


def either(hidden: np.ndarray | None, other: np.ndarray) -> np.ndarray:
    """Return which scores of a tile either mask hides."""
    return other if hidden is None else hidden | other


def outside(band: Band, tile: ListTile) -> np.ndarray:
    """Return which scores of a tile a band hides."""
    ahead = tile.j - tile.places[0]
    hidden: np.ndarray = (ahead < band.low) | (ahead > band.high)
    return hidden


def products_of_rows(Q: np.ndarray, K: np.ndarray, scratch: Scratch, name: str) -> np.ndarray:
    """Return Q K^T, (lists, rows, heads, keys), of rows (lists, rows, heads, D) and keys (lists, keys, D)."""
    lists, rows, heads, dim = Q.shape
    S = scratch.array(name, lists, rows * heads, K.shape[1], dtype=Q.dtype)
    return np.matmul(Q.reshape(lists, rows * heads, dim), K.swapaxes(1, 2), out=S).reshape(lists, rows, heads, -1)


def statistics_of(problem: Problem, S: np.ndarray, tile: ListTile) -> RowStatistics | None:
    """Return the statistics of the rows of scores, without the entropy, if the problem asks for any."""
    if not problem.statistics:
        return None
    statistics = RowStatistics(S.shape[:-1], problem.accumulation)
    statistics.see_listed(S, tile.j)
    return statistics


def softmax(
    S: np.ndarray, sink: np.ndarray | None, statistics: RowStatistics | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Turn scores into unnormalised probabilities in place; return the sums of rows, 1 in place of 0, and lse.

    `statistics`, which have seen the scores, get the entropy of the rows.
    """
    m = S.max(axis=-1, initial=-np.inf)
    if sink is not None:
        m = np.maximum(m, sink)
    m[m == -np.inf] = 0  # the exponentials of a row that sees no key are then 0
    S -= m[..., None]
    exponents = None if statistics is None else S.copy()
    np.exp(S, out=S)
    l = S.sum(axis=-1)
    if sink is not None:
        of_sink = np.exp(sink - m)
        l += of_sink
    if statistics is not None and exponents is not None:
        statistics.add(exponents, S)
        if sink is not None:
            statistics.add((sink - m)[..., None], of_sink[..., None])
        statistics.finish(l)
    return np.where(l == 0, 1, l), m + np.log(l)


def probabilities(S: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Turn scores into exp(S - lse) in place, and return them."""
    unseen = np.isneginf(S) if np.isnan(lse).any() else False  # -inf - NaN is NaN
    S -= lse[..., None]
    P = np.exp(S, out=S)
    np.copyto(P, 0, where=unseen)
    return P


def averaged(P: np.ndarray, V: np.ndarray, l: np.ndarray) -> np.ndarray:
    """Return P V / l, (lists, rows, heads, Dv)."""
    lists, rows, heads, keys = P.shape
    O = product(P.reshape(lists, rows * heads, keys), V).reshape(lists, rows, heads, -1)
    O /= l[..., None]
    return O


class SelectedCall(Call):
    """The operands of one call, and its lists."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        super().__init__(plan, operands)
        self.lists = Lists(plan.problem, operands)
        self.scratch = Scratch()
        self.has_sums = any(step.gradients() for step in self.score_steps)

    def units(self, sequence: Sequence, kv_head: int) -> list[Unit]:
        """Return the units of a key/value head of a sequence."""
        lengths = (sequence.q_len, sequence.kv_len)
        return self.lists.units(sequence.batch, kv_head, lengths, sequence.positions)

    def keys(self, sequence: Sequence, kv_head: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values of a head, (S, D) and (S, Dv), as the caller has them."""
        place = (sequence.row, kv_head, sequence.keys)
        return self.k[place], self.v[place]

    def scores(self, tile: ListTile, band: Band, Q: np.ndarray, K: np.ndarray) -> tuple[np.ndarray, list[object], bool]:
        """Return S, what the gradients of the score modifications need, and whether a score is hidden (S is -inf)."""
        S = products_of_rows(Q, K, self.scratch, "S")
        self.scale(S)
        saved = [step.apply(S, tile, save=self.problem.backward) for step in self.score_steps]
        return S, saved, self.hide_unseen(S, tile, band)

    def hide_unseen(self, S: np.ndarray, tile: ListTile, band: Band) -> bool:
        """Set the scores that a row does not see to -inf, and return whether any score of the tile may be hidden."""
        hidden = tile.hidden
        if self.problem.mask.edges:
            hidden = either(hidden, outside(band, tile))
        if self.mask is not None:
            hidden = either(hidden, ~tile.cut(self.mask))
        if self.mask_mod is not None:
            hidden = either(hidden, ~self.mask_mod.visible(tile))
        if hidden is not None:
            np.copyto(S, -np.inf, where=hidden)
        return hidden is not None or self.bias is not None or self.problem.score_mod

    def row_gradients(self, tile: ListTile, here: tuple[int | slice, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return dO (lists, rows, heads, Dv), lse, and delta (lists, rows, heads) of a tile.

        A row that sees no key has the lse inf, which makes its P = exp(S - lse) = 0.
        """
        dtype = self.problem.accumulation
        assert self.dout is not None and self.out is not None and self.lse is not None
        lse = tile.rows_of(self.lse[here], dtype, -np.inf)
        dead = lse == -np.inf
        lse[dead] = np.inf
        dO = tile.rows_of(self.dout[here], dtype)
        dO[dead] = 0
        delta = np.vecdot(dO, tile.rows_of(self.out[here], dtype))
        if self.dlse is not None:
            delta -= np.where(dead, 0, tile.rows_of(self.dlse[here], dtype))
        return dO, lse, delta

    def gradients_of_statistics(
        self, tile: ListTile, here: tuple[int | slice, ...], dead: np.ndarray
    ) -> StatisticsGradients | None:
        """Return the gradients of the statistics of a tile, if there are any; `dead` rows see no key."""
        if not self.problem.statistics:
            return None
        of_argmax, dtype = np.dtype(np.int32), self.problem.accumulation
        given = [
            None if x is None else tile.rows_of(x[here], of_argmax if fill else dtype, fill)
            for x, fill in zip(self.statistics, (0, -1, 0, 0), strict=True)
        ]
        return StatisticsGradients(dead, *given)

    def add_to_keys(
        self,
        tile: ListTile,
        total: np.ndarray,
        of_K: tuple[np.ndarray, np.ndarray],
        of_V: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Add dK = W^T X and dV = W^T X to the sums (keys, D + Dv), of W (lists, rows, keys) and X (lists, rows, D)."""
        lists, _, keys = of_K[0].shape
        both = self.scratch.array("of_keys", lists, keys, total.shape[1], dtype=self.problem.accumulation)
        dK_dV = both[..., : self.problem.head_dim], both[..., self.problem.head_dim :]
        for (W, X), out in zip((of_K, of_V), dK_dV, strict=True):
            np.matmul(W.swapaxes(1, 2), X, out=out)
        if not math.isfinite(square_sum(both)):
            for (W, X), out in zip((of_K, of_V), dK_dV, strict=True):
                out[...] = product(W.swapaxes(1, 2), X)
        tile.scatter(total, both)

    def kept(self, tile: ListTile) -> np.ndarray:
        """Return the dropout factors of the tile: 0 where dropped, else keep_scale."""
        problem, (q_first, kv_first, _, step) = self.problem, tile.positions
        heads = (problem.first_batch + tile.batch) * problem.whole_heads + problem.first_head + tile.head
        q, j = tile.places
        kept = keep_mask_at(self.seed, heads, q_first + step * q, kv_first + step * j, problem.dropout)
        return kept * problem.accumulation.type(keep_scale(problem.dropout))


def _keys_of(blocks: np.ndarray, block: int, kv_len: int) -> np.ndarray:
    """Return the keys of blocks (..., n), (..., n * block); those past the last one are `kv_len`."""
    if block == 1:
        return blocks
    keys = blocks[..., None] * block + np.arange(block)
    keys = keys.reshape(*blocks.shape[:-1], -1)
    np.minimum(keys, kv_len, out=keys)
    return keys


def forward(plan: Plan, operands: Operands) -> tuple[Array, ...]:
    """Compute attention to the selected keys, as attention.forward."""
    problem, q = plan.problem, operands.q
    out = empty((*q.shape[:-1], problem.head_dim_v), problem.dtype, q)
    lse = empty(problem.lse_shape(q), problem.accumulation, q)
    out.numpy()[...] = 0
    lse.numpy()[...] = -np.inf
    statistics = empty_statistics(problem, q)
    call, dtype = SelectedCall(plan, operands), problem.accumulation
    out_rows, lse_rows = call.heads_first(out), call.rows_of(lse)
    statistics_rows = [(name, call.rows_of(x)) for name, x in zip(problem.statistics, statistics, strict=True)]

    def attend(sequence: Sequence, unit: Unit, tile: ListTile) -> None:
        k, v = call.keys(sequence, unit.kv_head)
        here = (sequence.row, unit.heads, sequence.queries)
        Q = tile.rows_of(call.q[here], dtype)
        Q *= call.q_scale
        S, _, _ = call.scores(tile, sequence.band, Q, tile.gather(k, dtype, call.scratch, "keys"))
        of_rows = statistics_of(problem, S, tile)
        l, row_lse = softmax(S, None if call.sink is None else call.sink[unit.heads], of_rows)
        if problem.dropout:
            S *= call.kept(tile)
        tile.store(averaged(S, tile.gather(v, dtype, call.scratch, "values"), l), out_rows[here])
        tile.store(row_lse, lse_rows[here])
        for name, rows in statistics_rows:
            tile.store(getattr(of_rows, name), rows[here])

    run_tiles(plan, call, attend)
    return out, lse, *statistics


def run_tiles(plan: Plan, call: SelectedCall, attend: Callable[[Sequence, Unit, ListTile], None]) -> None:
    """Run attend(sequence, unit, tile) for the tiles of all lists."""

    def attend_to(sequence: Sequence, unit: Unit, start: int, stop: int) -> None:
        for tile in call.lists.tiles(unit, start, stop):
            call.stop.poll()
            attend(sequence, unit, tile)

    units = [
        (sequence, unit)
        for sequence in call.sequences
        for kv_head in range(plan.problem.kv_heads)
        for unit in call.units(sequence, kv_head)
    ]
    run_tasks(
        plan.threads,
        [
            partial(attend_to, sequence, unit, start, min(start + LISTS, len(unit.lists)))
            for sequence, unit in units
            for start in range(0, len(unit.lists), LISTS)
        ],
        call.stop,
    )


def backward(plan: Plan, operands: Operands) -> Gradients:
    """Compute the gradients, as attention.backward."""
    call = SelectedCall(plan, operands)
    return sum_gradients(plan, operands, call, partial(_differentiate, call))


def sum_gradients(
    plan: Plan,
    operands: Operands,
    call: SelectedCall,
    differentiate: Callable[[Sequence, Unit, ListTile, np.ndarray, np.ndarray], np.ndarray | float],
) -> Gradients:
    """Sum the gradients of all tiles; those of keys in the order of the lists.

    differentiate(sequence, unit, tile, dq_rows, total) stores dQ of a tile, adds dK / scale and dV to `total`
    (keys, D + Dv), and returns the gradients of the sinks.
    """
    problem, q, dtype = plan.problem, operands.q, plan.problem.accumulation
    gradients = empty_gradients(problem, operands)
    dq_rows, dk_rows, dv_rows = (None if x is None else call.heads_first(x) for x in gradients)
    assert dq_rows is not None and dk_rows is not None
    pieces = 1 if call.has_sums else max(1, min(PIECES, -(-2 * PIECES // max(problem.batch * problem.kv_heads, 1))))
    dsink = np.zeros((pieces, problem.batch, problem.heads), dtype)
    heads = range(problem.kv_heads)
    sums = {(sequence.batch, head): OrderedSum(pieces) for sequence in call.sequences for head in heads}

    def sum_piece(sequence: Sequence, kv_head: int, piece: int) -> None:
        """Compute the part of the gradients by every `pieces`-th group of lists."""
        # One more row takes the gradients at entries that name no key, which are 0.
        total = np.zeros((sequence.kv_len + 1, problem.head_dim + problem.head_dim_v), dtype)
        for unit in call.units(sequence, kv_head):
            for start in range(piece * LISTS, len(unit.lists), pieces * LISTS):
                for tile in call.lists.tiles(unit, start, min(start + LISTS, len(unit.lists))):
                    call.stop.poll()
                    dsink[piece, sequence.batch, unit.heads] += differentiate(sequence, unit, tile, dq_rows, total)
        whole = sums[sequence.batch, kv_head].add(piece, total)
        if whole is not None:
            of_keys = whole[:-1, : problem.head_dim], whole[:-1, problem.head_dim :]
            call.store_dK_dV(of_keys, (dk_rows, dv_rows), (sequence.row, kv_head, sequence.keys))

    tasks: list[Callable[[], None]] = [
        partial(sum_piece, sequence, kv_head, piece)
        for sequence in call.sequences
        for kv_head in heads
        for piece in range(pieces)
    ]
    # Gradients of a bias and of captured arrays are sums over all heads: one thread adds to them in order.
    run_tasks(1 if call.has_sums else plan.threads, tasks, call.stop)
    found = {name: total for step in call.score_steps for name, total in step.gradients().items()}
    if operands.sink is not None:
        found["sink"] = dsink.sum(axis=(0, 1))
    others = {f"d{name}": rounded(total, getattr(operands, name), q) for name, total in found.items()}
    return Gradients(*gradients, **others)


def _differentiate(
    call: SelectedCall, sequence: Sequence, unit: Unit, tile: ListTile, dq_rows: np.ndarray, total: np.ndarray
) -> np.ndarray | float:
    """Compute the gradients of a tile, as `sum_gradients` asks."""
    problem, dtype = call.problem, call.problem.accumulation
    here = (sequence.row, unit.heads, sequence.queries)
    k, v = call.keys(sequence, unit.kv_head)
    K, V = (tile.gather(x, dtype, call.scratch, name) for x, name in ((k, "keys"), (v, "values")))
    Q = tile.rows_of(call.q[here], dtype)
    Q *= call.q_scale
    dO, lse, delta = call.row_gradients(tile, here)
    S, saved, may_hide = call.scores(tile, sequence.band, Q, K)
    statistics = call.gradients_of_statistics(tile, here, lse == np.inf)
    log_P = S - lse[..., None] if statistics is not None and statistics.dH is not None else None
    P = probabilities(S, lse)
    dS = products_of_rows(dO, V, call.scratch, "dS")
    kept = call.kept(tile) if problem.dropout else None
    if kept is not None:
        dS *= kept
    dS -= delta[..., None]
    if statistics is not None and log_P is not None:
        dS += statistics.of_entropy(log_P, P)
    dS *= P
    if may_hide:
        hide_gradient(dS, P)
    if statistics is not None:
        statistics.add_of_max_listed(dS, tile.j)
    for step, value in zip(call.score_steps[::-1], saved[::-1], strict=True):
        step.gradient(dS, tile, value)
    if may_hide and saved:
        hide_gradient(dS, P)  # softcap's derivative is NaN at a masked NaN
    if kept is not None:
        P *= kept
    lists, rows, heads, _ = P.shape
    dS, P, Q, dO = (x.reshape(lists, rows * heads, -1) for x in (dS, P, Q, dO))
    dQ = product(dS, K)
    dQ *= dtype.type(problem.scale)
    tile.store(dQ.reshape(lists, rows, heads, -1), dq_rows[here])
    call.add_to_keys(tile, total, (dS, Q), (P, dO))
    if call.sink is None:
        return 0.0
    of_sinks = call.sink[unit.heads] - lse
    gradients: np.ndarray = -(np.exp(of_sinks) * delta).sum(axis=(0, 1))
    if statistics is not None and log_P is not None:
        gradients += statistics.of_sinks(of_sinks).sum(axis=(0, 1))
    return gradients
