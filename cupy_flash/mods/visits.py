"""The tiles that the CPU engine computes under a mask_mod, those that are not EMPTY."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..mask import Band
from ..score import KEYS, QUERIES, Cut, Positions
from .tiles import CUT, EMPTY, FULL, TileClasses

GRAIN = 64  # rows per class along the axis of a loop: visits start and stop at multiples
MOST_GRAINS = 256  # maximum grains per axis in an estimate
AT_ONCE = 2**18  # maximum number of tiles classified at a time: intervals need dozens of arrays


class Visit(NamedTuple):
    """A range of keys that a query tile visits, or of queries that visit a key tile."""

    start: int
    stop: int
    cut: Cut | None  # the part in which the mask_mod may hide scores


class Visits:
    """The visited tiles of a call, computed once for all heads and sequences that share them.

    Threads use it without a lock: two threads may compute the same tiles, in the time that one would wait for the
    other.
    """

    def __init__(self, classes: TileClasses, block_q: int, block_kv: int) -> None:
        self.classes, self.block_q, self.block_kv = classes, block_q, block_kv
        self._found: dict[object, list[list[Run]]] = {}

    def kv_tiles(self, batch: int, head: int, band: Band, positions: Positions, q_start: int) -> list[Visit]:
        """Return the key tiles that the query tile at q_start visits, last first, as Band.kv_tiles."""
        rows = self._rows(batch, head, band, positions, by_query=True)
        q_stop = min(q_start + self.block_q, band.q_len)
        return _clipped(rows[q_start // self.block_q], KEYS, *band.kv_range(q_start, q_stop))[::-1]

    def q_tiles(self, batch: int, head: int, band: Band, positions: Positions, kv_start: int) -> list[Visit]:
        """Return the query tiles that visit the key tile at kv_start, in order, as Band.q_tiles."""
        rows = self._rows(batch, head, band, positions, by_query=False)
        kv_stop = min(kv_start + self.block_kv, band.kv_len)
        return _clipped(rows[kv_start // self.block_kv], QUERIES, *band.q_range(kv_start, kv_stop))

    def _rows(self, batch: int, head: int, band: Band, positions: Positions, by_query: bool) -> list[list[Run]]:
        read = self.classes.mask.inputs
        key = (by_query, batch if "b" in read else 0, head if "h" in read else 0, band.q_len, band.kv_len, positions)
        if key not in self._found:
            block = self.block_kv if by_query else self.block_q
            grain = GRAIN if block % GRAIN == 0 else block
            blocks = (self.block_q, grain) if by_query else (grain, self.block_kv)
            classes = classes_of(self.classes, batch, head, band, positions, *blocks)
            self._found[key] = runs(classes if by_query else classes.T, grain, block)
        return self._found[key]


def classes_of(
    classes: TileClasses, batch: int, head: int, band: Band, positions: Positions, block_q: int, block_kv: int
) -> np.ndarray:
    """Return the classes of all tiles of a sequence, (query tiles, key tiles)."""
    queries = _places(positions.q_first, positions.step, band.q_len, block_q)
    keys = _places(positions.kv_first, positions.step, band.kv_len, block_kv)
    found = np.empty((len(queries[0]), len(keys[0])), np.uint8)
    at_once = max(AT_ONCE // max(len(keys[0]), 1), 1)
    for n in range(0, len(found), at_once):
        rows = slice(n, n + at_once)
        found[rows] = classes.of(batch, head, (queries[0][rows, None], queries[1][rows, None]), keys)
    return found


def _places(first: int, step: int, length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the first and the last row of each tile."""
    starts = np.arange(0, length, block)
    return first + step * starts, first + step * (np.minimum(starts + block, length) - 1)


class TileCounts(NamedTuple):
    """The numbers of tiles that are skipped, computed without a mask, and masked."""

    empty: int
    full: int
    cut: int


def count_tiles(
    classes: TileClasses, batch: int, head: int, band: Band, positions: Positions, block_q: int, block_kv: int
) -> TileCounts:
    """Count the classes of the tiles of one sequence and head under both the mask_mod and the band."""
    found = classes_of(classes, batch, head, band, positions, block_q, block_kv)
    i, j = np.arange(0, band.q_len, block_q)[:, None], np.arange(0, band.kv_len, block_kv)
    last_i, last_j = np.minimum(i + block_q, band.q_len) - 1, np.minimum(j + block_kv, band.kv_len) - 1
    empty = (found == EMPTY) | (last_j < i + band.low) | (j > last_i + band.high)
    full = (found == FULL) & (j >= last_i + band.low) & (last_j <= i + band.high) & ~empty
    skipped, unmasked = int(empty.sum()), int(full.sum())
    return TileCounts(skipped, unmasked, found.size - skipped - unmasked)


class VisitCounts(NamedTuple):
    """The visited tiles of a sequence, the pairs in them, and the pairs to which the mask_mod is applied."""

    visits: int
    pairs: int
    cut: int


class VisitEstimate:
    """Estimates the visits of a sequence under a mask_mod, for tiles of any size."""

    def __init__(self, classes: TileClasses, batch: int, head: int, band: Band, positions: Positions) -> None:
        longest = max(band.q_len, band.kv_len)
        self.grain = GRAIN * max(1, -(-longest // (GRAIN * MOST_GRAINS)))
        found = classes_of(classes, batch, head, band, positions, self.grain, self.grain)
        i, j = (self.grain * np.arange(count) for count in found.shape)
        last = self.grain - 1
        in_band = (j + last >= i[:, None] + band.low) & (j <= i[:, None] + last + band.high)
        self.seen, self.hidden = (found != EMPTY) & in_band, (found != FULL) & in_band

    def count(self, block_q: int, block_kv: int, by_query: bool) -> VisitCounts:
        """Count the visits of query tiles to ranges of keys (by_query), or of key tiles to ranges of queries."""
        seen, hidden = (self.seen, self.hidden) if by_query else (self.seen.T, self.hidden.T)
        if not seen.size:
            return VisitCounts(0, 0, 0)
        rows, columns = (max(block // self.grain, 1) for block in (block_q, block_kv)[:: 1 if by_query else -1])
        starts = np.arange(0, len(seen), rows)
        seen, hidden = (np.logical_or.reduceat(grains, starts, axis=0) for grains in (seen, hidden))
        _, start, stop, cut_start, cut_stop = _run_columns(np.where(seen, np.where(hidden, CUT, FULL), EMPTY), columns)
        pairs, cut = (stop - start).sum(), np.maximum(cut_stop - cut_start, 0).sum()
        size = rows * self.grain**2
        return VisitCounts(len(start), int(pairs) * size, int(cut) * size)


class Run(NamedTuple):
    """Consecutive positions without an EMPTY class, and the part from the first to the last class that is not FULL."""

    start: int
    stop: int
    cut_start: int
    cut_stop: int  # not above cut_start if all classes are FULL


def runs(classes: np.ndarray, grain: int, block: int) -> list[list[Run]]:
    """Return the runs of each row of classes, split at multiples of `block`.

    Column n of classes covers [n grain, (n + 1) grain).
    """
    rows, *columns = _run_columns(classes, block // grain)
    found: list[list[Run]] = [[] for _ in classes]
    for row, *run in zip(rows.tolist(), *((grain * n).tolist() for n in columns), strict=True):
        found[row].append(Run(*run))
    return found


def _run_columns(classes: np.ndarray, per_block: int) -> tuple[np.ndarray, ...]:
    """Return (row, start, stop, cut start, cut stop) of all runs, in columns, split at multiples of per_block."""
    seen = np.pad(classes != EMPTY, ((0, 0), (1, 1)))
    column = np.arange(classes.shape[1])
    rows, first = np.nonzero(seen[:, 1:-1] & (~seen[:, :-2] | (column % per_block == 0)))
    last = np.nonzero(seen[:, 1:-1] & (~seen[:, 2:] | (column % per_block == per_block - 1)))[1]
    is_full = classes == FULL
    # For each column, the nearest column that is not FULL at or after it, and at or before it.
    after = np.minimum.accumulate(np.where(is_full, len(column), column)[:, ::-1], axis=1)[:, ::-1]
    before = np.maximum.accumulate(np.where(is_full, -1, column), axis=1)
    return rows, first, last + 1, np.minimum(after[rows, first], last + 1), before[rows, last] + 1


def _clipped(found: list[Run], axis: int, start: int, stop: int) -> list[Visit]:
    """Return the visits of the runs inside [start, stop)."""
    visits = []
    for run in found:
        if run.start < stop and run.stop > start:
            cut_start, cut_stop = max(run.cut_start, start), min(run.cut_stop, stop)
            cut = Cut(axis, cut_start, cut_stop) if cut_start < cut_stop else None
            visits.append(Visit(max(run.start, start), min(run.stop, stop), cut))
    return visits
