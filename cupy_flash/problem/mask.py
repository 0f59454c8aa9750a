"""The positional mask and the tiles that it leaves visible, with the arithmetic of kernels_cu/mask.cuh.

Causal masks and windows are both a band around a diagonal. Query ``i`` sees key ``j`` when

    i + o - left <= j <= i + o + right            o = Sk - Sq (bottom-right), or 0 (top-left)

with ``right = 0`` for causal. Tile ranges and masking tests are then arithmetic on two bounds.
"""

# No `from __future__ import annotations`, as in records.py.
from typing import NamedTuple

import numpy as np


class Mask(NamedTuple):
    """Window bounds and alignment of the positional mask, independent of sequence lengths; None is unbounded."""

    left: int | None = None
    right: int | None = None
    top_left: bool = False

    def offset(self, q_len: int, kv_len: int) -> int:
        """Return the offset o of the diagonal: for causal, window and ALiBi, query i has the position of key i + o."""
        return 0 if self.top_left else kv_len - q_len

    def band(self, q_len: int, kv_len: int, offset: int | None = None, step: int = 1) -> "Band":
        """Return the mask of one sequence of q_len queries and kv_len keys.

        In a shard, neighbouring rows are `step` positions apart and `offset` replaces o: query i sees key j when
        i step + offset - left <= j step <= i step + offset + right.
        """
        offset = self.offset(q_len, kv_len) if offset is None else offset
        # Clamp unbounded and far sides to just outside the sequence, which no pair of positions reaches.
        lowest, highest = -q_len - 1, kv_len + 1
        low = lowest if self.left is None else -((self.left - offset) // step)
        high = highest if self.right is None else (offset + self.right) // step
        return Band(min(max(low, lowest), highest), max(min(high, highest), lowest), q_len, kv_len)

    @property
    def edges(self) -> int:
        """Number of bounded sides, 0 to 2; with 0 every key is visible."""
        return (self.left is not None) + (self.right is not None)

    def visited(self, seen: float, rows: int, step: int) -> float:
        """Return the expected number of keys (or queries) that a tile of `rows` visits, if each row sees `seen`.

        Each edge of the mask adds half a `step` and half a tile of masked scores.
        """
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
    """The mask of one sequence: query i sees keys j with i + low <= j <= i + high and 0 <= j < kv_len."""

    low: int
    high: int
    q_len: int
    kv_len: int

    def kv_range(self, q_start: int, q_stop: int) -> tuple[int, int]:
        """Return the keys [start, stop) that at least one query of the tile sees; start == stop if there are none."""
        start = min(max(q_start + self.low, 0), self.kv_len)
        stop = max(min(q_stop + self.high, self.kv_len), start)
        return start, stop

    def q_range(self, kv_start: int, kv_stop: int) -> tuple[int, int]:
        """Return the queries [start, stop) that see at least one key of the tile; start == stop if there are none."""
        start = min(max(kv_start - self.high, 0), self.q_len)
        stop = max(min(kv_stop - self.low, self.q_len), start)
        return start, stop

    def sees_all(self, q_start: int, q_stop: int, kv_start: int, kv_stop: int) -> bool:
        """Return whether every query of the tile sees every key, so that the tile needs no masking."""
        return q_stop - 1 + self.low <= kv_start and kv_stop - 1 <= q_start + self.high

    def visible(self, q_start: int, q_stop: int, kv_start: int, kv_stop: int) -> np.ndarray:
        """Return the mask of a tile, bool (q_stop - q_start, kv_stop - kv_start), True = attend."""
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
        """Return the number of unmasked (query, key) pairs."""
        return self._keys_before(self.high + 1) - self._keys_before(self.low)

    def _keys_before(self, side: int) -> int:
        """Return the sum over queries i of the number of keys j < i + side, in closed form."""

        def triangle(rows: int) -> int:
            """Return 0 + 1 + 2 + ... over `rows` queries, each term at most kv_len: the keys below a diagonal."""
            rows = max(rows, 0)
            rising = min(rows, self.kv_len)
            return rising * (rising - 1) // 2 + (rows - rising) * self.kv_len

        return triangle(side + self.q_len) - triangle(side)

    def kv_tiles(self, q_start: int, q_stop: int, block: int) -> list[tuple[int, int]]:
        """Return the key tiles [start, stop) that a query tile visits, last first, clipped to keys that any query sees.

        Tiles start at multiples of `block`, so that neighbouring query tiles share them. The last tile comes first,
        because the diagonal usually has the largest scores of a causal model, so that the row max rarely changes later.
        """
        return _tiles(*self.kv_range(q_start, q_stop), block)[::-1]

    def q_tiles(self, kv_start: int, kv_stop: int, block: int) -> list[tuple[int, int]]:
        """Return the query tiles [start, stop) that visit a key tile, in order, clipped to queries that see any key."""
        return _tiles(*self.q_range(kv_start, kv_stop), block)


class Selection(NamedTuple):
    """The facts of lists of selected keys: list l of a sequence is that of its rows l * rows to (l + 1) * rows - 1.

    An entry e >= 0 names the keys e * block to (e + 1) * block - 1.
    """

    heads: int  # 1, Hk or Hq
    entries: int  # of a list
    block: int
    rows: int

    def __str__(self) -> str:
        of = "keys" if self.block == 1 else f"blocks of {self.block} keys"
        heads = "every head" if self.heads == 1 else f"each of {self.heads} heads"
        rows = "row" if self.rows == 1 else f"{self.rows} rows"
        return f"up to {self.entries} {of} for {heads} and {rows}"


def _tiles(start: int, stop: int, block: int) -> list[tuple[int, int]]:
    """Split [start, stop) at multiples of `block`."""
    grid = range(start - start % block, stop, block) if start < stop else ()
    return [(max(tile, start), min(tile + block, stop)) for tile in grid]
