"""Launches, workspaces and refusals of kernels for selected keys, which GPU engines share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..problem.records import Problem
from .launch import Constant, Launch, Workspace
from .shared import Grid, has_prefixes, heads_of_list, known_constants, sequences

CHUNKS = 32  # of lists that are sorted side by side; InverseLists::CHUNKS in inverse_lists.cuh
ROW_THREADS = 256  # of the kernels without tiles
KEY_BLOCKS = 4096  # maximum number of blocks per sequence and head of those that clear and round sums


def refusals(problem: Problem, derivatives: tuple[str, ...] = ()) -> list[str]:
    """Return the reasons against what no kernel computes with selected keys; `derivatives` are those of the engine."""
    gradients = [f"gradient of {name}" for name in ("bias",) if problem.bias_gradient and problem.bias is not None]
    gradients += ["gradient of captured arrays"] * any(problem.captured_gradient)
    gradients += ["gradient of statistics"] * bool(problem.statistics)
    prefixes = "attention on shared prefixes" * has_prefixes(problem)
    derivative = "" if problem.derivative in derivatives else problem.derivative
    absent = (derivative, problem.weights, "shard" * problem.shard, prefixes)
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


def list_grid(problem: Problem, block_q: int) -> Grid:
    """Return the grid of a kernel whose blocks own rows of a list: tiles of all lists, groups of heads, sequences."""
    assert problem.selected is not None
    heads, queries = heads_of_list(problem), max(min(problem.selected.rows, problem.q_len), 1)
    tiles = -(-problem.q_len // queries) * -(-queries * heads // block_q)
    return max(tiles, 1), problem.heads // heads, sequences(problem)


def key_grid(problem: Problem, block_kv: int) -> Grid:
    """Return the grid of a kernel whose blocks own at most `block_kv` keys of a block that entries name."""
    assert problem.selected is not None
    width = max(min(problem.selected.block, problem.kv_len), 1)
    return max(-(-problem.kv_len // width) * -(-width // block_kv), 1), problem.kv_heads, sequences(problem)


def row_visits(problem: Problem, pairs: int, block_q: int) -> tuple[int, float]:
    """Return the blocks that own rows of a list, and how many keys each visits."""
    assert problem.selected is not None
    tiles, groups, _ = list_grid(problem, block_q)
    named = min(problem.selected.entries * problem.selected.block, problem.kv_len)
    return tiles * groups * problem.batch, min(pairs / max(problem.q_len, 1), named)


def key_visits(problem: Problem, pairs: int, rows: int, step: int) -> tuple[int, float]:
    """Return the blocks that compute dK and dV in tiles of `rows` keys, and how many rows of lists each visits.

    A block that adds owns `step` rows of a list, and visits keys in tiles of `rows`, each of which counts as a step.
    """
    if adds(problem):
        blocks, named = row_visits(problem, pairs, step)
        return blocks, named * step / rows
    tiles, heads, _ = key_grid(problem, rows)
    _, named = row_visits(problem, pairs, step)
    return tiles * heads * problem.batch, named * problem.q_len * problem.group / max(problem.kv_len, 1)


def adds(problem: Problem) -> bool:
    """Return whether the blocks that own rows of a list add dK and dV to sums, in any order.

    Those of a double backward never do.
    """
    return not problem.deterministic and not problem.derivative


def step(problem: Problem) -> str:
    """Return what the names of a backward's kernels have in common."""
    return "second" if problem.derivative else "backward"


def key_kernel(problem: Problem) -> str:
    """Return the kernel that computes dK and dV."""
    return "selected_backward_add" if adds(problem) else f"selected_{step(problem)}_kv"


def key_launches(
    problem: Problem, constants: Mapping[str, Constant], tile: tuple[int, int], launch: Callable[[str, Grid], Launch]
) -> list[Launch]:
    """Return the launches that compute dK and dV: by additions, or over the lists sorted by the keys that they name.

    `tile` is (rows, keys) of a block; `launch` makes the launch of a tile kernel for a grid.
    """
    assert problem.selected is not None
    constants = {**constants, "THREADS": ROW_THREADS}

    def of_rows(name: str, grid: Grid) -> Launch:
        kernel = f"selected/{name}"
        return Launch(kernel, known_constants(kernel, constants), grid, ROW_THREADS)

    if adds(problem):
        rows = min(max(problem.kv_len, 1), KEY_BLOCKS), problem.kv_heads, sequences(problem)
        added = launch(key_kernel(problem), list_grid(problem, tile[0]))
        return [of_rows("clear_sums", rows), added, of_rows("round_sums", rows)]
    heads, batch = problem.selected.heads, problem.batch
    sorts = (("count_entries", CHUNKS), ("scan_counts", 1), ("fill_lists", CHUNKS))
    return [
        *(of_rows(name, (chunks, heads, batch)) for name, chunks in sorts),
        launch(key_kernel(problem), key_grid(problem, tile[1])),
    ]


def key_workspaces(problem: Problem, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the workspaces of `key_launches`: the sums, or the sorted lists.

    q_rows and kv_rows count one sequence, or a whole packed batch.
    """
    assert problem.selected is not None
    if adds(problem):
        packed = problem.layout == "thd"
        rows = (problem.kv_heads, kv_rows) if packed else (problem.batch, problem.kv_heads, kv_rows)
        return tuple(
            Workspace(
                f"{name}_sums",
                (*rows, dim),
                problem.accumulation,
                (0 if packed else problem.kv_heads * kv_rows * dim, kv_rows * dim, dim, 1),
            )
            for name, dim in (("dk", problem.head_dim), ("dv", problem.head_dim_v))
        )
    heads, entries, block, queries = problem.selected
    lists, blocks = (_parts(problem, x, size) for x, size in ((q_rows, queries), (kv_rows, block)))
    int32 = np.dtype(np.int32)
    return (
        Workspace("inverse_ends", (heads * blocks * CHUNKS,), int32, ()),
        Workspace("inverse_lists", (heads * lists * entries,), int32, ()),
    )


def _parts(problem: Problem, length: int, size: int) -> int:
    """Return the number of parts of `size` rows of all sequences."""
    return length // size + problem.batch if problem.layout == "thd" else problem.batch * -(-length // size)
