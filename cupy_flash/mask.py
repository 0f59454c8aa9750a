"""Which keys a query sees by position alone, and which tiles that leaves to visit: the Python twin of mask.cuh and
tiles.cuh.

Causal masks and windows are one thing: a band around a diagonal. Query ``i`` sees key ``j`` when

    i + o - left <= j <= i + o + right            o = Sk - Sq (bottom-right), or 0 (top-left)

with ``right = 0`` for causal. Every question an engine asks is then arithmetic on two numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Mask(NamedTuple):
    """The positional mask as asked for, before any sequence length is known. None is unbounded."""

    left: int | None = None
    right: int | None = None
    top_left: bool = False

    def offset(self, q_len: int, kv_len: int) -> int:
        """The diagonal offset o that causal, window and ALiBi share."""
        return 0 if self.top_left else kv_len - q_len

    def band(self, q_len: int, kv_len: int, offset: int | None = None, step: int = 1) -> Band:
        """The mask of one sequence of q_len queries and kv_len keys.

        Of rows that are `step` positions apart, as those of a shard may be, with an offset of their own: query i sees
        key j when i step + offset - left <= j step <= i step + offset + right.
        """
        offset = self.offset(q_len, kv_len) if offset is None else offset
        # An unbounded side, or one past the sequence, is a bound that no pair of positions of this sequence can reach.
        lowest, highest = -q_len - 1, kv_len + 1
        low = lowest if self.left is None else -((self.left - offset) // step)
        high = highest if self.right is None else (offset + self.right) // step
        return Band(min(max(low, lowest), highest), max(min(high, highest), lowest), q_len, kv_len)

    @property
    def edges(self) -> int:
        """How many of its sides are bounded; 0 hides nothing."""
        return (self.left is not None) + (self.right is not None)

    def visited(self, seen: float, rows: int, step: int) -> float:
        """How much of the other axis a tile of `rows` visits, `step` at a time, where each row sees `seen` of it: tiles
        at an edge hold hidden scores, half a step and half a tile at each."""
        return seen + self.edges * (rows + step) / 2

    def __str__(self) -> str:
        if self.left is None and self.right is None:
            return "full"
        corner = "top-left" if self.top_left else "bottom-right"
        if self.left is None and self.right == 0:
            return f"causal ({corner})"
        left, right = ("inf" if side is None else side for side in (self.left, self.right))
        return f"window ({left}, {right}), {corner}"


class Band(NamedTuple):
    """The mask of one sequence: query i sees the keys i + low <= j <= i + high that exist."""

    low: int
    high: int
    q_len: int
    kv_len: int

    def kv_range(self, q_start: int, q_stop: int) -> tuple[int, int]:
        """Keys [start, stop) that at least one query of the tile sees; start == stop when there is none."""
        start = min(max(q_start + self.low, 0), self.kv_len)
        stop = max(min(q_stop + self.high, self.kv_len), start)
        return start, stop

    def q_range(self, kv_start: int, kv_stop: int) -> tuple[int, int]:
        """Queries [start, stop) that see at least one key of the tile; start == stop when there is none."""
        start = min(max(kv_start - self.high, 0), self.q_len)
        stop = max(min(kv_stop - self.low, self.q_len), start)
        return start, stop

    def sees_all(self, q_start: int, q_stop: int, kv_start: int, kv_stop: int) -> bool:
        """Whether every query of the tile sees every key of it: such a tile needs no masking."""
        return q_stop - 1 + self.low <= kv_start and kv_stop - 1 <= q_start + self.high

    def visible(self, q_start: int, q_stop: int, kv_start: int, kv_stop: int) -> np.ndarray:
        """The tile of the mask, bool (q_stop - q_start, kv_stop - kv_start), True = attend."""
        rows = np.arange(q_start, q_stop, dtype=np.int32)[:, None]
        columns = np.arange(kv_start, kv_stop, dtype=np.int32)[None, :]
        visible = np.ones((q_stop - q_start, kv_stop - kv_start), np.bool_)
        if kv_start < q_stop - 1 + self.low:
            visible &= columns >= rows + np.int32(self.low)
        if kv_stop - 1 > q_start + self.high:
            visible &= columns <= rows + np.int32(self.high)
        return visible

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs are seen: the scores that have to be computed."""
        return self._keys_before(self.high + 1) - self._keys_before(self.low)

    def _keys_before(self, side: int) -> int:
        """The sum over queries i of how many of the keys come before key i + side, in closed form."""

        def triangle(rows: int) -> int:
            """The same for `side` 0 and so many queries: each sees a key more than the one before, up to all keys."""
            rows = max(rows, 0)
            rising = min(rows, self.kv_len)
            return rising * (rising - 1) // 2 + (rows - rising) * self.kv_len

        return triangle(side + self.q_len) - triangle(side)

    def kv_tiles(self, q_start: int, q_stop: int, block: int) -> list[tuple[int, int]]:
        """The key tiles that a query tile visits, last first, cut to the keys that any of its queries sees.

        Tiles lie on one grid of `block` keys, so that neighbouring query tiles share them. Last first: the tiles at the
        diagonal, which need masking and hold the largest scores of a causal model, come before the plain ones.
        """
        return _tiles(*self.kv_range(q_start, q_stop), block)[::-1]

    def q_tiles(self, kv_start: int, kv_stop: int, block: int) -> list[tuple[int, int]]:
        """The query tiles that visit a key tile, first to last, cut to the queries that see any of its keys."""
        return _tiles(*self.q_range(kv_start, kv_stop), block)


def _tiles(start: int, stop: int, block: int) -> list[tuple[int, int]]:
    """[start, stop) cut at the multiples of block."""
    grid = range(start - start % block, stop, block) if start < stop else ()
    return [(max(tile, start), min(tile + block, stop)) for tile in grid]
