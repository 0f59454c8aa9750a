"""Launches, workspaces and refusals of kernels for selected keys, which GPU engines share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..problem.records import Problem
from .launch import Constant, Launch, Workspace
from .shared import heads_of_list, known_constants, sequences

CHUNKS = 32  # of lists that are sorted side by side; InverseLists::CHUNKS in inverse_lists.cuh
SORT_THREADS = 256


def selection_refusals(problem: Problem) -> list[str]:
    """Return the reasons against what no kernel computes with selected keys; [] without them."""
    if problem.selected is None:
        return []
    gradients = [f"gradient of {name}" for name in ("bias",) if problem.bias_gradient and problem.bias is not None]
    gradients += ["gradient of captured arrays"] * any(problem.captured_gradient)
    absent = (problem.derivative, problem.weights, " and ".join(problem.statistics), "shard" * problem.shard)
    return [
        f"it computes no {what} with selected keys in this version"
        for what in (*absent, *(gradients if problem.backward else ()))
        if what
    ]


def list_bytes(problem: Problem, tile: tuple[int, int], stages: int = 1) -> int:
    """Return the bytes of static shared memory that locate the rows of a tile, and the keys of each stage."""
    if problem.selected is None:
        return 0
    rows, keys = tile
    return 4 * (2 * rows + (1 if problem.cache is None else 2) * keys * stages)


def list_grid(problem: Problem, block_q: int) -> tuple[int, int, int]:
    """Return the grid of a kernel whose blocks own rows of a list: tiles of all lists, groups of heads, sequences."""
    assert problem.selected is not None
    heads, queries = heads_of_list(problem), max(min(problem.selected.rows, problem.q_len), 1)
    tiles = -(-problem.q_len // queries) * -(-queries * heads // block_q)
    return max(tiles, 1), problem.heads // heads, sequences(problem)


def key_grid(problem: Problem, block_kv: int) -> tuple[int, int, int]:
    """Return the grid of a kernel whose blocks own at most `block_kv` keys of a block that entries name."""
    assert problem.selected is not None
    width = max(min(problem.selected.block, problem.kv_len), 1)
    return max(-(-problem.kv_len // width) * -(-width // block_kv), 1), problem.kv_heads, sequences(problem)


def inverse_launches(problem: Problem, constants: Mapping[str, Constant]) -> list[Launch]:
    """Return the launches that sort the lists by the blocks of keys that they name."""
    assert problem.selected is not None
    constants = {**constants, "THREADS": SORT_THREADS}
    return [
        Launch(
            kernel,
            known_constants(kernel, constants),
            (chunks, problem.selected.heads, problem.batch),
            SORT_THREADS,
        )
        for kernel, chunks in (("selected_count", CHUNKS), ("selected_scan", 1), ("selected_fill", CHUNKS))
    ]


def inverse_workspaces(problem: Problem, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the workspaces of the sorted lists; q_rows and kv_rows count one sequence, or a whole packed batch."""
    assert problem.selected is not None
    heads, entries, block, rows = problem.selected
    lists, blocks = (_parts(problem, x, size) for x, size in ((q_rows, rows), (kv_rows, block)))
    int32 = np.dtype(np.int32)
    return (
        Workspace("inverse_ends", (heads * blocks * CHUNKS,), int32, ()),
        Workspace("inverse_lists", (heads * lists * entries,), int32, ()),
    )


def _parts(problem: Problem, length: int, size: int) -> int:
    """Return the number of parts of `size` rows of all sequences."""
    return length // size + problem.batch if problem.layout == "thd" else problem.batch * -(-length // size)
