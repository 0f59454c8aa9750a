"""Sharding of a sequence over ranks, and the schedule of chunk pairs in a ring: pure arithmetic.

The rank that holds each of 16 positions, on 4 ranks:

    contiguous   0000 1111 2222 3333    one piece per rank, as torch.chunk
    zigzag       0011 2233 3322 1100    two pieces per rank, one from the front and one from the back
    striped      0123 0123 0123 0123    every fourth position

Under a causal mask, contiguous gives the last rank most of the work; zigzag and striped balance it. Piece lengths are
rounded up, so the last pieces may be shorter or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..problem.mask import Mask

if TYPE_CHECKING:
    from ..problem.argument_types import Sharding

SHARDINGS = ("contiguous", "zigzag", "striped")

Starts = tuple[tuple[int, int, int], ...]  # (first query, first key, offset) of each sequence, as in problem.Shard


class Chunk(NamedTuple):
    """Consecutive rows of a shard whose positions are evenly spaced in every sequence of the batch."""

    first_row: int  # offset of the chunk in the shard
    starts: tuple[int, ...]  # position of each sequence's first row
    lengths: tuple[int, ...]  # rows of each sequence

    @property
    def rows(self) -> int:
        """Rows of the shard in this chunk, over all sequences."""
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Cumulative lengths of the sequences in this chunk."""
        return (0, *accumulate(self.lengths))


class Pair(NamedTuple):
    """A chunk of queries and a chunk of keys that some of these queries see, for one call of an engine."""

    queries: Chunk
    keys: Chunk
    starts: Starts
    local: bool  # both chunks have the same index in this rank's own shards: one such pair per query chunk


def positions(length: int, rank: int, ranks: int, sharding: Sharding = "zigzag") -> npt.NDArray[np.int64]:
    """Return the positions of a sequence that a rank holds, int64, in the order of its rows.

    Args:
        length: length of the whole sequence.
        rank: 0 to ranks - 1.
        ranks: number of ranks.
        sharding: "zigzag", "contiguous" or "striped": on 4 ranks, 16 positions belong to the ranks 0011 2233 3322 1100,
            0000 1111 2222 3333, or 0123 0123 0123 0123.

    >>> x = np.arange(100, 110)
    >>> [x[positions(10, rank, 2)].tolist() for rank in range(2)]
    [[100, 101, 102, 109], [103, 104, 105, 106, 107, 108]]
    """
    return np.concatenate([np.asarray(run, np.int64) for run in runs(length, rank, ranks, sharding)])


def packed_rows(
    cu_seqlens: Sequence[int], rank: int, ranks: int, sharding: Sharding = "zigzag"
) -> npt.NDArray[np.int64]:
    """Return the rows of a packed batch that a rank holds, int64; every sequence is sharded by `positions`.

    With zigzag, the front pieces of all sequences precede the back pieces.

    Args:
        cu_seqlens: (B + 1,), the boundaries of the whole batch.
        rank: 0 to ranks - 1.
        ranks: number of ranks.
        sharding: as in `positions`.
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
    """Return a rank's positions as ranges: one, or two for zigzag."""
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
    """Return the chunks of a rank's shards, in the order of its rows; `lengths` are those of the whole sequences."""
    shards = [runs(length, rank, ranks, sharding) for length in lengths]
    chunks: list[Chunk] = []
    for slot in range(len(runs(0, rank, ranks, sharding))):
        first_row = chunks[-1].first_row + chunks[-1].rows if chunks else 0
        slots = [shard[slot] for shard in shards]
        chunks.append(Chunk(first_row, tuple(run.start for run in slots), tuple(map(len, slots))))
    return tuple(chunks)


class Schedule(NamedTuple):
    """One rank's part in a ring: at step s it has the keys of rank (rank - s) mod ranks."""

    queries: tuple[Chunk, ...]  # chunks of this rank
    keys: tuple[tuple[Chunk, ...], ...]  # chunks that are present at each step
    pairs: tuple[tuple[Pair, ...], ...]  # pairs to compute at each step
    stride: int  # distance in positions of neighbouring rows of a shard


@lru_cache(maxsize=256)
def ring_schedule(
    q_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], mask: Mask, rank: int, ranks: int, sharding: str
) -> Schedule:
    """Return the schedule of a rank; all ranks have the same number of steps, which a window can reduce.

    Step 0 pairs each query chunk with the key chunk of the same index even if it sees none of its keys, so that every
    row has a result, and exactly one partial result includes the sink.
    """
    stride = ranks if sharding == "striped" else 1
    queries, keys = (
        [chunks(lengths, holder, ranks, sharding) for holder in range(ranks)] for lengths in (q_lengths, kv_lengths)
    )
    offsets = tuple(map(mask.offset, q_lengths, kv_lengths))

    def pairs(rank: int, step: int) -> tuple[Pair, ...]:
        result = []
        for (q_slot, q_chunk), (kv_slot, kv_chunk) in product(enumerate(queries[rank]), enumerate(keys[rank - step])):
            starts = tuple((i, j, i + o - j) for i, j, o in zip(q_chunk.starts, kv_chunk.starts, offsets, strict=True))
            local = step == 0 and q_slot == kv_slot
            if local or _sees(q_chunk, kv_chunk, starts, mask, stride):
                result.append(Pair(q_chunk, kv_chunk, starts, local))
        return tuple(result)

    # The search starts at the last step, which is needed unless a window hides its keys.
    steps = next((step + 1 for step in range(ranks - 1, 0, -1) if any(pairs(r, step) for r in range(ranks))), 1)
    return Schedule(
        queries[rank],
        tuple(keys[rank - step] for step in range(steps)),
        tuple(pairs(rank, step) for step in range(steps)),
        stride,
    )


def _sees(queries: Chunk, keys: Chunk, starts: Starts, mask: Mask, stride: int) -> bool:
    """Return whether any query of a chunk of queries sees any key of a chunk of keys."""
    for q_len, kv_len, (_, _, offset) in zip(queries.lengths, keys.lengths, starts, strict=True):
        band = mask.band(q_len, kv_len, offset, stride)
        first, last = band.kv_range(0, q_len)
        # With striped shards, a window narrower than the stride may contain no row of the other rank: low > high.
        if q_len > 0 and first < last and band.low <= band.high:
            return True
    return False
