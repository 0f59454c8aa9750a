"""Rows, keys and positions of the sequences of a call on a KV cache, from arrays in host memory.

Sequence b has n_b keys before the call, appends s_b rows and then sees L_b = n_b + s_b keys. Query i of Sq has position
L_b - Sq + i, appended key i position n_b + i. With slots the rows may be stored anywhere: cache_seqlens then counts all
keys, s_b is 0, and the rows of k are the last keys of their sequence.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from .records import Operands, Problem


class Spans(NamedTuple):
    """The lengths of each sequence, int64 (B,)."""

    q_rows: np.ndarray
    k_rows: np.ndarray  # rows of k
    before: np.ndarray  # n_b: keys in the cache before the call
    appended: np.ndarray  # s_b: keys that the call appends; 0 with slots

    @property
    def kv_lengths(self) -> np.ndarray:
        """L_b, the number of keys of each sequence after the append."""
        return self.before + self.appended

    @property
    def q_starts(self) -> np.ndarray:
        """The index of each sequence's first row among all queries."""
        return np.cumsum(self.q_rows) - self.q_rows


def read_spans(problem: Problem, operands: Operands) -> Spans:
    """Return the lengths of the sequences of a call."""
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    none = _equal(problem.batch, 0)
    if operands.cu_seqlens_q is not None:
        q_rows = k_rows = np.diff(operands.cu_seqlens_q.numpy().astype(np.int64))
    else:
        q_rows, k_rows = _equal(problem.batch, problem.q_len), _equal(problem.batch, cache.appended or 0)
    if operands.q.shape[-1] == 0:  # an append has no queries
        q_rows = none
    if given.k_new is None:
        k_rows = none
    lengths = given.cache_seqlens
    if isinstance(lengths, Array):
        before = lengths.numpy().astype(np.int64)
    else:
        before = _equal(problem.batch, problem.kv_len if lengths is None else lengths)
    return Spans(q_rows, k_rows, before, none if cache.slots else k_rows)


@lru_cache(maxsize=16)
def _equal(batch: int, length: int) -> np.ndarray:
    """Return the lengths of a batch whose sequences have one length, int64 (B,), read-only because it is shared."""
    lengths = np.full(batch, length, np.int64)
    lengths.flags.writeable = False
    return lengths


def positions_of_queries(problem: Problem, operands: Operands, spans: Spans) -> np.ndarray:
    """Return the position by which each query is rotated, int64, for all sequences concatenated.

    A query before the first key of its sequence has position 0; if causal, it sees no key.
    """
    assert operands.cache is not None
    if operands.cache.positions is not None:
        return operands.cache.positions.numpy().ravel()[: spans.q_rows.sum()].astype(np.int64)
    return np.maximum(_ranges(spans.kv_lengths - spans.q_rows, spans.q_rows), 0)


def positions_of_keys(problem: Problem, operands: Operands, spans: Spans) -> np.ndarray:
    """Return the position by which each appended key is rotated, int64, for all sequences concatenated."""
    assert operands.cache is not None
    if operands.cache.positions is not None:
        return operands.cache.positions.numpy().ravel()[: spans.k_rows.sum()].astype(np.int64)
    return np.maximum(_ranges(spans.before + spans.appended - spans.k_rows, spans.k_rows), 0)


def appended_places(problem: Problem, operands: Operands, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return (block, row in the block) of each appended row, int64, sequences concatenated; block -1 drops a row.

    A block is a page, or the cache of one sequence.
    """
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    if given.slots is not None:
        slots = given.slots.numpy()
        rows = operands.k.shape[2 if cache.layout == "bhsd" else 1]
        return np.where(slots < 0, -1, slots // rows), slots % rows
    sequences = np.repeat(np.arange(problem.batch), spans.k_rows)
    keys = _ranges(spans.before, spans.k_rows)
    if given.block_table is not None and cache.page is not None:
        return given.block_table.numpy()[sequences, keys // cache.page].astype(np.int64), keys % cache.page
    if given.cache_batch_idx is not None:
        sequences = given.cache_batch_idx.numpy().astype(np.int64)[sequences]
    return sequences, keys


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges start, start + 1, ... of these lengths."""
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
