"""The tiles that the CPU engine computes under a mask_mod, which are those that are not EMPTY."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..mods.ir import Node
from ..mods.tiles import CUT, EMPTY, FULL, TileClasses, TileCounts
from ..problem.mask import Band
from .score import KEYS, QUERIES, Cut, Positions

GRAIN = 64  # rows per class along the axis of a loop: visits start and stop at multiples of it
MOST_GRAINS = 256  # maximum grains per axis in an estimate
AT_ONCE = 2**18  # tiles classified at a time, at most: interval arithmetic needs dozens of arrays of that size
SUPER = 32  # tiles per axis of a super-tile
FEW = 2**15  # up to this number of tiles, no super-tiles are needed, and the runs of positional masks are cached


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
        batch, head = (n if name in read else 0 for name, n in (("b", batch), ("h", head)))
        key = (by_query, batch, head, band.q_len, band.kv_len, positions)
        if key not in self._found:
            place = batch, head, band.q_len, band.kv_len, positions, self.block_q, self.block_kv, by_query
            is_small = band.q_len * band.kv_len <= FEW * GRAIN**2
            if self.classes.extremes or not is_small:
                self._found[key] = rows_of(self.classes, *place)
            else:
                self._found[key] = _positional_rows(self.classes.mask, tuple(self.classes.numbers), place)
        return self._found[key]


def rows_of(
    classes: TileClasses, batch: int, head: int, q_len: int, kv_len: int, positions: Positions,
    block_q: int, block_kv: int, by_query: bool,
) -> list[list[Run]]:  # fmt: skip
    """Return the runs of keys of each query tile (by_query), or the runs of queries of each key tile."""
    block, length, across = (block_q, q_len, kv_len) if by_query else (block_kv, kv_len, q_len)
    block_across = block_kv if by_query else block_q
    grain = GRAIN if block_across % GRAIN == 0 else block_across
    firsts = (positions.q_first, positions.kv_first)[:: 1 if by_query else -1]
    rows, columns = (
        _places(first, positions.step, size, step)
        for first, size, step in zip(firsts, (length, across), (block, grain), strict=True)
    )
    found: list[list[Run]] = []
    for first, band in _bands(classes, batch, head, rows, columns, by_query):
        found += runs(band, grain, block_across, first)
    return found


Place = tuple[int, int, int, int, Positions, int, int, bool]  # the arguments of `rows_of` after the classes


@lru_cache(maxsize=32)
def _positional_rows(mask: Node, numbers: tuple[int | float, ...], place: Place) -> list[list[Run]]:
    """Return `rows_of` for a mask_mod without arrays, cached because it is the same in every call."""
    return rows_of(TileClasses(mask, (), numbers), *place)


Places = tuple[np.ndarray, np.ndarray]  # the first and the last position of each tile


def _bands(
    classes: TileClasses, batch: int, head: int, rows: Places, columns: Places, by_query: bool
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first column, classes) for groups of rows of tiles, in order; tiles in other columns are EMPTY.

    Super-tiles of SUPER x SUPER tiles are classified first, and only in those that are CUT is every tile classified,
    so that the time of a long sequence grows with the visited tiles, not with all of them.
    """

    def of(rows: Places, columns: Places) -> np.ndarray:
        across = rows[0][:, None], rows[1][:, None]
        return classes.of(batch, head, *((across, columns) if by_query else (columns, across)))

    count = len(rows[0])
    if count * len(columns[0]) <= FEW:
        yield 0, of(rows, columns)
        return
    for n, super_row in enumerate(of(_merged(rows), _merged(columns))):
        chosen = slice(SUPER * n, SUPER * (n + 1))
        seen = np.flatnonzero(super_row != EMPTY)
        first, stop = (int(seen[0]), int(seen[-1]) + 1) if seen.size else (0, 0)
        by_column = np.repeat(super_row[first:stop], SUPER)[: len(columns[0]) - SUPER * first]
        band = np.repeat(by_column[None], min(SUPER, count - chosen.start), axis=0)
        cut = np.flatnonzero(by_column == CUT)
        for part in np.array_split(cut, -(-cut.size * SUPER // AT_ONCE)) if cut.size else ():
            place = SUPER * first + part
            band[:, part] = of((rows[0][chosen], rows[1][chosen]), (columns[0][place], columns[1][place]))
        yield SUPER * first, band


def _merged(tiles: Places) -> Places:
    """Return the first and the last position of each group of SUPER tiles; the last group may be smaller."""
    firsts, lasts = tiles
    return firsts[::SUPER], np.append(lasts[SUPER - 1 :: SUPER], lasts[len(lasts) // SUPER * SUPER :][-1:])


def classes_of(
    classes: TileClasses, batch: int, head: int, band: Band, positions: Positions, block_q: int, block_kv: int
) -> np.ndarray:
    """Return the classes of all tiles of a sequence, (query tiles, key tiles)."""
    firsts, lasts = _places(positions.q_first, positions.step, band.q_len, block_q)
    keys = _places(positions.kv_first, positions.step, band.kv_len, block_kv)
    return classes.of(batch, head, (firsts[:, None], lasts[:, None]), keys)


def _places(first: int, step: int, length: int, block: int) -> Places:
    """Return the first and the last position of each tile."""
    starts = np.arange(0, length, block)
    return first + step * starts, first + step * (np.minimum(starts + block, length) - 1)


def count_tiles(
    classes: TileClasses, batch: int, head: int, band: Band, positions: Positions, block_q: int, block_kv: int
) -> TileCounts:
    """Count the classes of the tiles of one sequence and head under both the mask_mod and the band."""
    found = in_band(classes_of(classes, batch, head, band, positions, block_q, block_kv), band, block_q, block_kv)
    return TileCounts(*(int((found == of).sum()) for of in (EMPTY, FULL, CUT)))


def in_band(found: np.ndarray, band: Band, block_q: int, block_kv: int) -> np.ndarray:
    """Return the classes of tiles under both a mask_mod, which gives them `found`, and the band."""
    i, j = np.arange(0, band.q_len, block_q)[:, None], np.arange(0, band.kv_len, block_kv)
    last_i, last_j = np.minimum(i + block_q, band.q_len) - 1, np.minimum(j + block_kv, band.kv_len) - 1
    empty = (found == EMPTY) | (last_j < i + band.low) | (j > last_i + band.high)
    full = (found == FULL) & (j >= last_i + band.low) & (last_j <= i + band.high) & ~empty
    return np.select([empty, full], [EMPTY, FULL], CUT)


class VisitCounts(NamedTuple):
    """Numbers of visits of a sequence and of (query, key) pairs in them: all, and those that apply the mask_mod."""

    visits: int
    pairs: int
    masked: int
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
            return VisitCounts(0, 0, 0, 0)
        rows, columns = (max(block // self.grain, 1) for block in (block_q, block_kv)[:: 1 if by_query else -1])
        starts = np.arange(0, len(seen), rows)
        seen, hidden = (np.logical_or.reduceat(grains, starts, axis=0) for grains in (seen, hidden))
        _, start, stop, cut_start, cut_stop = _run_columns(np.where(seen, np.where(hidden, CUT, FULL), EMPTY), columns)
        pairs, cut = (stop - start).sum(), np.maximum(cut_stop - cut_start, 0)
        size = rows * self.grain**2
        return VisitCounts(len(start), int(pairs) * size, int(np.count_nonzero(cut)), int(cut.sum()) * size)


class Run(NamedTuple):
    """A range of positions without an EMPTY class, and the part of it from the first to the last CUT class."""

    start: int
    stop: int
    cut_start: int
    cut_stop: int  # not above cut_start if all classes are FULL


def runs(classes: np.ndarray, grain: int, block: int, first: int = 0) -> list[list[Run]]:
    """Return the runs of each row of classes, split at multiples of `block`.

    Column n of classes covers [(first + n) grain, (first + n + 1) grain).
    """
    rows, *columns = _run_columns(classes, block // grain, first)
    found: list[list[Run]] = [[] for _ in classes]
    for row, *run in zip(rows.tolist(), *((grain * (first + n)).tolist() for n in columns), strict=True):
        found[row].append(Run(*run))
    return found


def _run_columns(classes: np.ndarray, per_block: int, offset: int = 0) -> tuple[np.ndarray, ...]:
    """Return arrays (row, start, stop, cut start, cut stop) of all runs.

    A run also ends where offset + column is a multiple of per_block.
    """
    seen = np.pad(classes != EMPTY, ((0, 0), (1, 1)))
    column = np.arange(offset, offset + classes.shape[1])
    rows, first = np.nonzero(seen[:, 1:-1] & (~seen[:, :-2] | (column % per_block == 0)))
    last = np.nonzero(seen[:, 1:-1] & (~seen[:, 2:] | (column % per_block == per_block - 1)))[1]
    # In the flattened array: the first CUT class at or after the start of a run, and the last at or before its end. If
    # the run has none, they lie outside of it.
    cut, start = np.flatnonzero(classes == CUT), rows * len(column)
    after = np.append(cut, classes.size)[np.searchsorted(cut, start + first)] - start
    before = np.append(-1, cut)[np.searchsorted(cut, start + last, side="right")] - start
    return rows, first, last + 1, np.minimum(after, last + 1), before + 1


def _clipped(found: list[Run], axis: int, start: int, stop: int) -> list[Visit]:
    """Return the visits of the runs inside [start, stop)."""
    visits = []
    for run in found:
        if run.start < stop and run.stop > start:
            cut_start, cut_stop = max(run.cut_start, start), min(run.cut_stop, stop)
            cut = Cut(axis, cut_start, cut_stop) if cut_start < cut_stop else None
            visits.append(Visit(max(run.start, start), min(run.stop, stop), cut))
    return visits
