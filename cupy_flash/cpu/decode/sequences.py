"""The sequences of a call with few queries or a KV cache, and their tiles of query rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...arrays import Array
from ...engines.cpu_decode import FIXED_ROWS
from ...plan.plan import Plan
from ...problem.kv_cache_contents import Spans, places_of_sequences, positions_of_queries
from ...problem.mask import Mask
from ...problem.records import Operands, Problem
from ..score import four_dimensional
from .append import rotated, scale_pools
from .keys import Keys


class Sequence(NamedTuple):
    """One sequence: views of its rows, its keys, and the positions of both."""

    batch: int
    q: np.ndarray  # (Sq, Hq, D)
    out: np.ndarray  # (Sq, Hq, Dv)
    lse: np.ndarray  # (Hq, Sq)
    keys: Keys
    position: int  # position of query 0 for causal, window and ALiBi
    mask: np.ndarray | None  # bool (Hq, Sq, s)
    mask_start: int  # the key of the mask's first column
    q_idx: np.ndarray | None = None  # int64 (Sq,): the positions that mods see; None without mods
    statistics: tuple[np.ndarray, ...] = ()  # (Hq, Sq): those that the call asks for
    prefix: Keys | None = None  # the keys before `keys`, which the sequences of a group share


class RowTile(NamedTuple):
    """The query rows of all heads at positions [position, position + positions), which are computed together.

    A row is a (query, head of the GQA group) pair with index (query position - position) * G + g. Rows without a query
    of the sequence, and those from positions * G on, are computed and dropped, so that with split_size a query has the
    same row in a tile of the same shape, whatever other queries the call has.
    """

    sequence: Sequence
    queries: slice  # the queries of the sequence in this tile, a slice of `Sequence.q`
    position: int
    positions: int
    rows: int

    def load(self, problem: Problem) -> np.ndarray:
        """Return Q (Hk, rows, D) in the accumulation dtype, with 0 in rows without a query."""
        Q = np.zeros((problem.kv_heads, self.rows, problem.head_dim), problem.accumulation)
        rows = self.sequence.q[self.queries]
        self.of_queries(Q, problem)[...] = rows.reshape(-1, problem.kv_heads, problem.group, problem.head_dim)
        return Q

    def on_prefix(self) -> tuple[RowTile, ...]:
        """Return the tile with the keys of its sequence's prefix, if there is one."""
        prefix = self.sequence.prefix
        return () if prefix is None else (self._replace(sequence=self.sequence._replace(keys=prefix)),)

    def store(self, O: np.ndarray, lse: np.ndarray, problem: Problem) -> None:
        """Write O (Hk, rows, Dv) and lse (Hk, rows) to the rows of the sequence."""
        of_queries = self.of_queries(O, problem)  # (Sq, Hk, G, Dv)
        self.sequence.out[self.queries] = of_queries.reshape(len(of_queries), problem.heads, O.shape[-1])
        self.store_numbers(self.sequence.lse, lse, problem)

    def store_numbers(self, to: np.ndarray, numbers: np.ndarray, problem: Problem) -> None:
        """Write a number of each row (Hk, rows) to an array (Hq, Sq) of the sequence."""
        of_queries = self.of_queries(numbers[..., None], problem)[..., 0]
        to[:, self.queries] = of_queries.reshape(len(of_queries), problem.heads).T

    def of_queries(self, X: np.ndarray, problem: Problem) -> np.ndarray:
        """View the rows (Hk, rows, ...) that are queries as (Sq, Hk, G, ...)."""
        first = self.sequence.position + self.queries.start - self.position
        stop = first + self.queries.stop - self.queries.start
        rows = X[:, first * problem.group : stop * problem.group]
        return rows.reshape(len(rows), stop - first, problem.group, X.shape[-1]).transpose(1, 0, 2, 3)

    def is_partly_hidden(self, mask: Mask, start: int, stop: int) -> bool:
        """Return whether causal, a window or the range of keys hides any of the keys [start, stop) from a row."""
        last, keys = self.position + self.positions - 1, self.sequence.keys
        left, right = mask.left, mask.right
        by_position = (left is not None and start < last - left) or (
            right is not None and stop - 1 > self.position + right
        )
        return by_position or start < keys.start or stop > keys.stop


class RowScores:
    """The score.Coordinates of the scores (Hk, rows, keys) of a row tile and a chunk of keys."""

    def __init__(self, problem: Problem, tile: RowTile) -> None:
        self.problem, self.tile, self.batch = problem, tile, tile.sequence.batch
        self.start = self.stop = 0

    def at(self, start: int, stop: int) -> RowScores:
        """Set the range of keys to [start, stop), and return this object."""
        self.start, self.stop = start, stop
        return self

    @property
    def head(self) -> np.ndarray:
        """The query head of each row, int32 (Hk, rows, 1)."""
        return _heads(self.problem.kv_heads, self.problem.group, self.tile.rows)

    @property
    def offsets(self) -> np.ndarray:
        """The positions of rows minus those of keys, int64 (rows, keys)."""
        return self.tile.position + _queries(self.tile.rows, self.problem.group) - np.arange(self.start, self.stop)

    @property
    def distances(self) -> np.ndarray:
        """The distances in positions between queries and keys, in the accumulation dtype, (rows, keys)."""
        return np.abs(self.offsets).astype(self.problem.accumulation)

    @property
    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """The q_idx of each row, int32 (rows, 1), 0 for rows without a query, and the kv_idx of each key, (1, keys).

        A chunk may reach past the capacity, where captured arrays have nothing: these keys count as the last one, and
        are hidden by their position.
        """
        sequence, q = self.tile.sequence, np.zeros((1, self.tile.rows, 1), np.int32)
        assert sequence.q_idx is not None
        self.tile.of_queries(q, self.problem)[...] = sequence.q_idx[self.tile.queries, None, None, None]
        kv = np.minimum(np.arange(self.start, self.stop, dtype=np.int32), self.problem.kv_len - 1)
        return q[0], kv[None]

    def cut(self, dense: np.ndarray) -> np.ndarray:
        """Return this tile of a mask (Hq, Sq, s) whose first key is `mask_start`; rows without a query see all keys."""
        sequence, group = self.tile.sequence, self.problem.group
        cut = dense[:, self.tile.queries, self.start - sequence.mask_start : self.stop - sequence.mask_start]
        cut = cut.reshape(self.problem.kv_heads, group, *cut.shape[1:]).transpose(2, 0, 1, 3)
        of_rows = np.ones((self.problem.kv_heads, self.tile.rows, self.stop - self.start), dense.dtype)
        self.tile.of_queries(of_rows, self.problem)[...] = cut
        return of_rows


@lru_cache(maxsize=16)
def _heads(kv_heads: int, group: int, rows: int) -> np.ndarray:
    """Return the query head of each row, int32 (Hk, rows, 1), read-only because it is shared."""
    first = np.arange(kv_heads, dtype=np.int32)[:, None, None] * np.int32(group)
    heads: np.ndarray = first + (np.arange(rows, dtype=np.int32) % group)[:, None]
    heads.flags.writeable = False
    return heads


@lru_cache(maxsize=16)
def _queries(rows: int, group: int) -> np.ndarray:
    """Return the index of each row's query in its tile, int64 (rows, 1), read-only because it is shared."""
    queries = (np.arange(rows) // group)[:, None]
    queries.flags.writeable = False
    return queries


def row_tiles(plan: Plan, sequence: Sequence) -> Iterator[RowTile]:
    """Yield the row tiles of a sequence, of `block_q` queries each.

    With split_size their positions are multiples of `block_q`.
    """
    problem, q_len = plan.problem, len(sequence.q)
    fixed = problem.cache is not None and problem.cache.split_size is not None
    first = sequence.position // plan.block_q * plan.block_q if fixed else sequence.position
    for position in range(first, sequence.position + q_len if q_len else first, plan.block_q):
        start = max(position - sequence.position, 0)
        queries = slice(start, min(position + plan.block_q - sequence.position, q_len))
        if fixed:
            rows = -(-plan.block_q * problem.group // FIXED_ROWS) * FIXED_ROWS
            yield RowTile(sequence, queries, position, plan.block_q, rows)
        else:
            count = queries.stop - queries.start
            yield RowTile(sequence, queries, position, count, count * problem.group)


def sequences_of_cache(
    problem: Problem,
    operands: Operands,
    spans: Spans,
    out: np.ndarray,
    lse: np.ndarray,
    statistics: tuple[np.ndarray, ...] = (),
) -> list[Sequence]:
    """Return the sequences of a call on a KV cache, after the append."""
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    packed = problem.layout == "thd"
    q = operands.q.numpy()
    q, out = (x if packed or cache.layout == "bshd" else x.transpose(0, 2, 1, 3) for x in (q, out))
    if cache.rotary is not None:
        tokens = spans.q_rows.sum()
        flat = q.reshape(-1, *q.shape[-2:]).astype(problem.accumulation)
        flat[:tokens] = rotated(flat[:tokens], positions_of_queries(problem, operands, spans), problem, operands)
        q = flat.reshape(q.shape)
    k, v = (x.numpy() if cache.layout == "bshd" else x.numpy().transpose(0, 2, 1, 3) for x in (operands.k, operands.v))
    scales = None if cache.scale_dtype is None else scale_pools(cache, given)
    mask = None if operands.mask is None else operands.mask.numpy()
    q_idx = positions_of_queries(problem, operands, spans) if problem.mods else None
    groups, prefixes = [-1] * problem.batch, {}
    if given.prefix_table is not None and given.prefix_lengths is not None and given.prefix_group is not None:
        groups = given.prefix_group.numpy().tolist()
        of_groups = zip(given.prefix_table.numpy(), given.prefix_lengths.numpy().tolist(), strict=True)
        prefixes = {
            group: Keys(k, v, table, 0, length, problem.accumulation, scales)
            for group, (table, length) in enumerate(of_groups)
            if length
        }
    pads = [0] * problem.batch if given.cache_leftpad is None else given.cache_leftpad.numpy().tolist()
    sequences = []
    for b, (start, rows, length, place, pad) in enumerate(
        zip(
            spans.q_starts.tolist(), spans.q_rows.tolist(), spans.kv_lengths.tolist(),
            places_of_sequences(problem, operands), pads, strict=True,
        )
    ):  # fmt: skip
        here = (slice(start, start + rows),) if packed else (b,)
        group = groups[b]
        own = int(spans.prefix[b]) if group in prefixes else 0
        keys = Keys(k, v, place, max(pad, own), length, problem.accumulation, scales, own)
        seen, first = None, 0
        if mask is not None:
            one = mask[b if len(mask) > 1 else 0]
            seen, first = np.broadcast_to(one, (problem.heads, *one.shape[1:])), length - mask.shape[3]
        sequences.append(
            Sequence(
                b, q[here], out[here], lse[:, here[0]] if packed else lse[b], keys, length - rows, seen, first,
                None if q_idx is None else q_idx[start : start + rows],
                tuple(x[:, here[0]] if packed else x[b] for x in statistics), prefixes.get(group),
            )
        )  # fmt: skip
    return sequences


def sequences_of_batch(
    problem: Problem, operands: Operands, out: np.ndarray, lse: np.ndarray, statistics: tuple[np.ndarray, ...]
) -> list[Sequence]:
    """Return the sequences of a padded or packed batch without a cache."""
    q, k, v = operands.q.numpy(), operands.k.numpy(), operands.v.numpy()
    if operands.cu_seqlens_q is not None and operands.cu_seqlens_k is not None:
        q_ends, k_ends = operands.cu_seqlens_q.numpy().tolist(), operands.cu_seqlens_k.numpy().tolist()
        return [
            Sequence(
                b, q[q_start:q_end], out[q_start:q_end], lse[:, q_start:q_end],
                Keys(k[None], v[None], (0, k_start), 0, k_end - k_start, problem.accumulation),
                problem.mask.offset(q_end - q_start, k_end - k_start), None, 0,
                statistics=tuple(x[:, q_start:q_end] for x in statistics),
            )
            for b, (q_start, q_end, k_start, k_end) in enumerate(
                zip(q_ends[:-1], q_ends[1:], k_ends[:-1], k_ends[1:], strict=True)
            )
        ]  # fmt: skip
    if problem.layout == "bhsd":
        q, k, v, out = (x.transpose(0, 2, 1, 3) for x in (q, k, v, out))
    q_lengths = _lengths(operands.q_lengths, problem.q_len, problem)
    kv_lengths = _lengths(operands.kv_lengths, problem.kv_len, problem)
    mask = None
    if operands.mask is not None:
        shape = (problem.batch, problem.heads, problem.q_len, problem.kv_len)
        mask = np.broadcast_to(four_dimensional(operands.mask.numpy()), shape)
    return [
        Sequence(
            b, q[b, :q_len], out[b, :q_len], lse[b, :, :q_len], Keys(k, v, (b, 0), 0, kv_len, problem.accumulation),
            problem.mask.offset(q_len, kv_len), None if mask is None else mask[b], 0,
            statistics=tuple(x[b, :, :q_len] for x in statistics),
        )
        for b, (q_len, kv_len) in enumerate(zip(q_lengths, kv_lengths, strict=True))
    ]  # fmt: skip


def _lengths(lengths: Array | None, longest: int, problem: Problem) -> list[int]:
    """Return the lengths of the sequences of a padded batch, all `longest` if there are none."""
    if lengths is None:
        return [longest] * problem.batch
    values: list[int] = lengths.numpy().tolist()
    return values
