"""The records of a call on a KV cache: Cache, a part of its Problem, and CacheOperands, a part of its Operands.

They are not in problem.py because calls without a cache need not import them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from .features import record


class Cache(NamedTuple):
    """The facts of a KV cache that are not in its Problem, whose kv_len is the capacity; lengths are not facts."""

    layout: str  # "bshd" or "bhsd", of the caches, and of q unless it is packed
    dtype: np.dtype  # dtype of the caches: that of q, or float8_e4m3fn
    blocks: int  # pages, or rows of a contiguous cache
    page: int | None  # keys per page; None: contiguous
    appended: int | None  # rows of k per sequence, tokens of a packed batch; None: nothing is appended
    slots: bool
    rotary: tuple[int, bool] | None  # rotated dimensions, and whether pairs are interleaved
    split_size: int | None
    rotary_dtypes: tuple[str, str] | None = None  # dtypes of the tables, cos and sin

    def __str__(self) -> str:
        texts = ["contiguous cache" if self.page is None else f"cache of {self.blocks} pages of {self.page}"]
        if self.dtype.itemsize == 1:
            texts.append(f"{self.dtype.name} keys")
        if self.appended is not None:
            texts.append("append by slots" if self.slots else "append")
        if self.rotary is not None:
            texts.append(f"rotary of {self.rotary[0]} dimensions")
        if self.split_size is not None:
            texts.append(f"pieces of {self.split_size} keys")
        return ", ".join(texts)


_ARRAYS = (
    *("k", "v", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "slots", "positions"),
    *("rotary_cos", "rotary_sin", "out"),
)
_CacheOperands: Any = record(*_ARRAYS, optional=len(_ARRAYS))


class CacheOperands(_CacheOperands):
    """The arrays of a call on a KV cache other than the caches, which are k and v of Operands; None if absent.

    cache_seqlens may be an int, the length of all sequences; the result is written to `out`.
    """

    __slots__ = ()

    k: Array | None
    v: Array | None
    cache_seqlens: Array | int | None
    cache_batch_idx: Array | None
    cache_leftpad: Array | None
    block_table: Array | None
    slots: Array | None
    positions: Array | None
    rotary_cos: Array | None
    rotary_sin: Array | None
    out: Array | None
