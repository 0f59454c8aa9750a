"""Launches, constants and workspaces that the GPU engines of KV caches share."""

from __future__ import annotations

from ..launch import Constant, Launch
from ..params import Workspace
from ..problem import Problem
from .shared import ELEMENTS, known_constants, rows_of_heads, sequences

ROW_THREADS = 128  # threads of a block of append and merge
ROWS_OF_APPEND = 4  # rows of a block of rotary_append.cu
BLOCKS_OF_APPEND = 128  # most blocks for the rows of one sequence and head


def static_bytes(problem: Problem, keys: int) -> int:
    """Bytes of static shared memory of a kernel with tiles of so many keys: the page numbers of tile_pages.cuh.

    They count without pages too, so that the tile, and with it the bits of a result, does not depend on them.
    """
    return 0 if problem.cache is None else 2 * 4 * keys


def append_launches(problem: Problem, constants: dict[str, Constant]) -> list[Launch]:
    """The launch of rotary_append.cu, if rows are appended or rotated; `constants` are the attention kernel's."""
    cache = problem.cache
    if cache is None or (cache.appended is None and cache.rotary is None):
        return []
    rows = max(problem.q_len, 0 if problem.q_len and problem.layout == "thd" else cache.appended or 0)
    heads = problem.kv_heads
    constants = constants | {"THREADS": ROW_THREADS}
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
    """The workspace of the rotated rows of q, where there are rotary tables."""
    if problem.cache is None or problem.cache.rotary is None:
        return ()
    columns = -(-problem.head_dim // 8) * 8
    shape, strides = rows_of_heads(problem, q_rows, columns)
    return (Workspace("q", (*shape, columns), problem.dtype, (*strides, 8)),)


def cache_refusals(problem: Problem) -> list[str]:
    """Why no GPU engine serves the problem's KV cache."""
    if problem.cache is None:
        return []
    reasons = []
    if problem.mods:
        reasons.append("it takes no score_mod or mask_mod with a KV cache in this version")
    return reasons


def forward_refusals(problem: Problem) -> list[str]:
    """Why kernels that take each query tile through all its keys do not serve the problem's KV cache."""
    reasons = cache_refusals(problem)
    if problem.cache is not None and problem.cache.dtype != problem.dtype:
        reasons.append(f"it reads no caches of {problem.cache.dtype.name}, as mma_decode does")
    if problem.cache is not None and problem.cache.split_size is not None:
        reasons.append("it does not compute the keys in pieces of split_size")
    return reasons
