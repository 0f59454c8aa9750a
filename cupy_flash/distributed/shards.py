"""Which positions of a sequence each rank holds, and which pairs of shards see each other: pure arithmetic.

A sequence of 16 positions on 4 ranks, by the rank that holds each:

    contiguous   0000 1111 2222 3333    a piece each, cut as torch.chunk cuts
    zigzag       0011 2233 3322 1100    of twice as many pieces one from the front and one from the back
    striped      0123 0123 0123 0123    every fourth position

Under a causal mask the last rank of contiguous shards has most of the work; the others share it evenly. Pieces are
rounded up, so that the last ones of a length that does not divide are shorter, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..mask import Mask

SHARDINGS = ("contiguous", "zigzag", "striped")

Starts = tuple[tuple[int, int, int], ...]  # for every sequence: first query, first key, offset, as in problem.Shard


class Chunk(NamedTuple):
    """Rows of a shard that are one run of positions in every sequence of the batch."""

    first_row: int  # of the shard, where the chunk begins
    starts: tuple[int, ...]  # the position of every sequence's first row
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))


class Pair(NamedTuple):
    """A chunk of queries and a chunk of keys that some of them see: one call of the engine."""

    queries: Chunk
    keys: Chunk
    starts: Starts
    own: bool  # both at the same place of the rank's own shards: one such pair for every chunk of queries


def positions(length: int, rank: int, ranks: int, sharding: str = "zigzag") -> npt.NDArray[np.int64]:
    """The positions, of a sequence of `length`, that a rank holds, in the order of its rows.

    >>> x = np.arange(100, 110)
    >>> [x[positions(10, rank, 2)].tolist() for rank in range(2)]
    [[100, 101, 102, 109], [103, 104, 105, 106, 107, 108]]
    """
    return np.concatenate([np.asarray(run, np.int64) for run in runs(length, rank, ranks, sharding)])


def packed_rows(cu_seqlens: Sequence[int], rank: int, ranks: int, sharding: str = "zigzag") -> npt.NDArray[np.int64]:
    """The rows, of a packed batch, that a rank holds: every sequence is sharded like one alone.

    Of zigzag shards the front pieces of all sequences come before the back pieces of all.
    """
    bounds = list(cu_seqlens)
    shards = [runs(stop - start, rank, ranks, sharding) for start, stop in zip(bounds, bounds[1:], strict=False)]
    pieces = [
        start + np.asarray(run, np.int64)
        for slot in zip(*shards, strict=True)
        for start, run in zip(bounds, slot, strict=False)
    ]
    return np.concatenate([np.empty(0, np.int64), *pieces])


def runs(length: int, rank: int, ranks: int, sharding: str) -> list[range]:
    """A rank's positions as runs: one, or of zigzag two."""
    if sharding == "striped":
        return [range(rank, max(length, rank), ranks)]
    if sharding == "contiguous":
        return [_piece(length, rank, ranks)]
    if sharding == "zigzag":
        return [_piece(length, rank, 2 * ranks), _piece(length, 2 * ranks - 1 - rank, 2 * ranks)]
    raise ValueError(f"sharding must be one of {', '.join(SHARDINGS)}, not {sharding!r}")


def _piece(length: int, index: int, count: int) -> range:
    size = -(-length // count)
    start = min(index * size, length)
    return range(start, min(start + size, length))


def chunks(lengths: tuple[int, ...], rank: int, ranks: int, sharding: str) -> tuple[Chunk, ...]:
    """The chunks of a rank's shard of sequences of these lengths, in the order of its rows."""
    shards = [runs(length, rank, ranks, sharding) for length in lengths]
    found: list[Chunk] = []
    for slot in range(len(runs(0, rank, ranks, sharding))):
        first_row = found[-1].first_row + found[-1].rows if found else 0
        slots = [shard[slot] for shard in shards]
        found.append(Chunk(first_row, tuple(run.start for run in slots), tuple(map(len, slots))))
    return tuple(found)


class Course(NamedTuple):
    """What one rank does in a ring: at step s it has the keys of rank `rank - s`, counted modulo the ranks."""

    queries: tuple[Chunk, ...]  # of this rank
    keys: tuple[tuple[Chunk, ...], ...]  # that are here, by step
    pairs: tuple[tuple[Pair, ...], ...]  # to compute, by step
    apart: int  # positions between neighbouring rows of a shard


@lru_cache(maxsize=256)
def course(
    q_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], mask: Mask, rank: int, ranks: int, sharding: str
) -> Course:
    """The course of a rank, over as many steps as any rank needs: under a window the farthest keys travel to nobody.

    At step 0 every chunk of queries meets the keys of its own place, seen or not: each row has a result, and a sink
    the one part that it joins.
    """
    apart = ranks if sharding == "striped" else 1
    queries, keys = (
        [chunks(lengths, holder, ranks, sharding) for holder in range(ranks)] for lengths in (q_lengths, kv_lengths)
    )
    offsets = tuple(map(mask.offset, q_lengths, kv_lengths))

    def pairs(of: int, step: int) -> tuple[Pair, ...]:
        found = []
        for (place, chunk), (other_place, other) in product(enumerate(queries[of]), enumerate(keys[of - step])):
            starts = tuple((i, j, i + o - j) for i, j, o in zip(chunk.starts, other.starts, offsets, strict=True))
            own = step == 0 and place == other_place
            if own or _sees(chunk, other, starts, mask, apart):
                found.append(Pair(chunk, other, starts, own))
        return tuple(found)

    # From the last, which is needed unless there is a window.
    steps = next((step + 1 for step in range(ranks - 1, 0, -1) if any(pairs(of, step) for of in range(ranks))), 1)
    return Course(
        queries[rank],
        tuple(keys[rank - step] for step in range(steps)),
        tuple(pairs(rank, step) for step in range(steps)),
        apart,
    )


def _sees(queries: Chunk, keys: Chunk, starts: Starts, mask: Mask, apart: int) -> bool:
    """Whether some query sees some key."""
    for q_len, kv_len, (_, _, offset) in zip(queries.lengths, keys.lengths, starts, strict=True):
        band = mask.band(q_len, kv_len, offset, apart)
        first, last = band.kv_range(0, q_len)
        # Between stripes a narrow window may fall: no row of the other stripe is in it.
        if q_len > 0 and first < last and band.low <= band.high:
            return True
    return False
