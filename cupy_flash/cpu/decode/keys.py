"""Loads chunks of K and V of one sequence from a contiguous or paged cache; only this module addresses keys."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Scales(NamedTuple):
    """The scales and zeros of a quantised cache (blocks, rows, Hk), or of a chunk of its keys (Hk, keys)."""

    k: np.ndarray
    v: np.ndarray
    k_zero: np.ndarray | None
    v_zero: np.ndarray | None


class Keys:
    """K and V of one sequence, loaded in chunks, all heads at once.

    `k` and `v` are (blocks, rows, Hk, D) in any strides. The keys of a contiguous sequence are rows `first` on of block
    `block`; those of a paged one are in the blocks that `table` names. Only keys in [start, stop) are read: others may
    be NaN, or on pages that do not exist. `scales` are those of a quantised cache. Key `base` is the first one of a
    table: those before it are of a prefix.
    """

    def __init__(
        self,
        k: np.ndarray,
        v: np.ndarray,
        place: tuple[int, int] | np.ndarray,
        start: int,
        stop: int,
        dtype: np.dtype,
        scales: Scales | None = None,
        base: int = 0,
    ) -> None:
        self.pools, self.place, self.dtype = (k, v), place, dtype
        self.start, self.stop, self._scales, self._base = start, stop, scales, base

        # Chunks of a contiguous sequence in the accumulation dtype are views.
        self.are_views = isinstance(place, tuple) and _is_for_blas(k, dtype) and _is_for_blas(v, dtype)

    def load(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return K (Hk, stop - start, D) and V (Hk, stop - start, Dv) of keys [start, stop), in the accumulation dtype.

        The range may exceed [self.start, self.stop): keys outside are 0.
        """
        k, v = self.pools
        if self.are_views and self.start <= start and stop <= self.stop:
            block, row = self.place
            rows = slice(row + start, row + stop)
            return k[block, rows].transpose(1, 0, 2), v[block, rows].transpose(1, 0, 2)
        return self._load(k, start, stop), self._load(v, start, stop)

    def scales(self, start: int, stop: int) -> Scales | None:
        """Return the scales of keys [start, stop), those of keys outside [self.start, self.stop) 0; None without."""
        if self._scales is None:
            return None
        k, v, *zeros = (None if pool is None else self._load(pool[..., None], start, stop) for pool in self._scales)
        assert k is not None and v is not None
        return Scales(k[..., 0], v[..., 0], *(None if x is None else x[..., 0] for x in zeros))

    def _load(self, pool: np.ndarray, start: int, stop: int) -> np.ndarray:
        first, last = max(start, self.start), min(stop, self.stop)
        rows = in_accumulation(self._rows(pool, first, last), self.dtype)
        if (first, last) != (start, stop):
            chunk = np.zeros((stop - start, *rows.shape[1:]), self.dtype)
            chunk[first - start : last - start] = rows
            rows = chunk
        return rows.transpose(1, 0, 2)

    def take(self, pool: np.ndarray, head: int, j: np.ndarray) -> np.ndarray:
        """Return the rows (..., D) of keys `j` of one head below self.stop, in the accumulation dtype."""
        if isinstance(self.place, tuple):
            block, row = self.place
            rows = pool[block, row + j, head]
        else:
            page = pool.shape[1]
            rows = pool[self.place[j // page], j % page, head]
        return in_accumulation(rows, self.dtype)

    def _rows(self, pool: np.ndarray, first: int, last: int) -> np.ndarray:
        """Return rows (last - first, Hk, D), a view if the keys are in one block."""
        if isinstance(self.place, tuple):
            block, row = self.place
            return pool[block, row + first : row + last]
        page, first, last = pool.shape[1], first - self._base, last - self._base
        first_page, last_page = first // page, -(-last // page)
        offset = first - first_page * page
        if last_page - first_page == 1:
            return pool[self.place[first_page], offset : offset + last - first]
        pages = pool[self.place[first_page:last_page]]
        return pages.reshape(-1, *pages.shape[2:])[offset : offset + last - first]


def in_accumulation(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the rows in the accumulation dtype, with strides that BLAS accepts; a view if they already fit."""
    if rows.dtype == dtype:
        return rows if _is_for_blas(rows, dtype) else np.ascontiguousarray(rows)
    if rows.dtype.name == "bfloat16":
        # A bfloat16 is the upper half of a float32: shifting the bits is several times faster than astype.
        wide = rows.view(np.uint16).astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if rows.dtype.itemsize > 2:
        return rows.astype(dtype)
    # A table look-up costs two thirds of NumPy's conversion of float16, and a tenth of ml_dtypes' of float8.
    numbers = np.take(_numbers(rows.dtype), rows.view(f"u{rows.itemsize}"), axis=0, mode="clip")
    return numbers if numbers.ndim == rows.ndim else numbers.reshape(*rows.shape[:-1], 2 * rows.shape[-1])


def _is_for_blas(rows: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether BLAS accepts each head of (..., keys, heads, dim) without a copy."""
    strides, size = rows.strides, dtype.itemsize
    return rows.dtype == dtype and strides[-1] == size and strides[-3] >= size * rows.shape[-1]


@lru_cache(maxsize=5)
def _numbers(dtype: np.dtype) -> np.ndarray:
    """Return a table from the codes of float16, float8 or int8 to float32, or of uint8 to the two of 4 bits."""
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    if dtype == np.uint8:
        return np.stack([codes & 15, codes >> 4], -1).astype(np.float32)
    return codes.view(dtype).astype(np.float32)
