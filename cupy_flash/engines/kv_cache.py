"""Launches, constants and workspaces that the GPU engines of KV caches share."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.records import Problem
from .launch import Constant, Launch, Workspace
from .shared import ELEMENTS, known_constants, rows_of_heads, sequences

ROW_THREADS = 128  # threads per block of the append and merge kernels
ROWS_OF_APPEND = 4  # rows per block of rotary_append.cu
BLOCKS_OF_APPEND = 128  # maximum number of blocks per sequence and head


def static_bytes(problem: Problem, keys: int) -> int:
    """Return the bytes of static shared memory for the page numbers (tile_pages.cuh) of a tile of `keys` keys.

    A contiguous cache reserves them too, so that it gets the same tile, and thus the same rounding.
    """
    return 0 if problem.cache is None else 2 * 4 * keys


def append_launches(problem: Problem, constants: Mapping[str, Constant]) -> list[Launch]:
    """Return the launch of rotary_append.cu, if rows are appended or rotated, with the attention kernel's constants."""
    cache = problem.cache
    if cache is None or (cache.appended is None and cache.rotary is None):
        return []
    rows = max(problem.q_len, 0 if problem.q_len and problem.layout == "thd" else cache.appended or 0)
    heads = problem.kv_heads
    constants = {**constants, "THREADS": ROW_THREADS}
    if cache.rotary is not None and cache.rotary_dtypes is not None:
        (dims, interleaved), (cos, sin) = cache.rotary, cache.rotary_dtypes
        heads = problem.heads
        constants |= {"ROTARY_DIM": dims, "ROTARY_INTERLEAVED": interleaved}
        constants |= {"cos_element": ELEMENTS[cos], "sin_element": ELEMENTS[sin]}
    blocks = min(-(-rows // ROWS_OF_APPEND), BLOCKS_OF_APPEND)
    return [
        Launch(
            "rotary_append",
            known_constants("rotary_append", constants),
            (blocks, heads, sequences(problem)),
            ROW_THREADS,
        )
    ]


def rotated_rows(problem: Problem, q_rows: int) -> tuple[Workspace, ...]:
    """Return the workspace of the rotated rows of q, if there are rotary tables."""
    if problem.cache is None or problem.cache.rotary is None:
        return ()
    columns = -(-problem.head_dim // 8) * 8
    shape, strides = rows_of_heads(problem, q_rows, columns)
    return (Workspace("q", (*shape, columns), problem.dtype, (*strides, 8)),)
