"""Simulator counters of attention to selected keys: bytes of global memory, and instructions of the gather.

Marks: a forward moves at most 1.10 times the bytes of its operands and results, where a list's keys count once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.device import named
from cupy_flash.gpu import run_plan
from cupy_flash.jit.source import kernel_folder
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options
from cupy_flash.simulator.run import start

from ..report import Table

QUERIES, KEYS, LENGTH = 8, 512, 4096
MARK = 1.10
HEADER = "selection.cuh"


class Case(NamedTuple):
    """A forward of one sequence, whose query heads share lists and a key/value head."""

    engine: str
    dtype: str
    heads: int
    head_dim: int
    entries: int
    block: int
    rows: int


CASES = (
    Case("mma", "float16", 128, 128, 128, 1, 1),
    Case("mma", "float16", 16, 128, 128, 1, 1),
    Case("mma", "float16", 16, 64, 4, 32, 1),
    Case("mma", "float16", 4, 64, 4, 32, 8),
    Case("simt", "float32", 16, 64, 64, 1, 1),
)


class Count(NamedTuple):
    """The counts of a case."""

    case: Case
    tile: tuple[int, int, int]
    moved: float  # bytes, as a multiple of the least
    lookup: float  # instructions of a thread per score, of finding the keys of a list


def count(case: Case) -> Count:
    """Simulate the forward of a case."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, QUERIES, case.heads, case.head_dim)).astype(case.dtype)
    k, v = (rng.standard_normal((1, KEYS, 1, case.head_dim)).astype(case.dtype) for _ in range(2))
    lists, blocks = QUERIES // case.rows, KEYS // case.block
    selected = np.argsort(rng.random((1, 1, lists, blocks)), axis=-1)[..., : case.entries].astype(np.int32)
    options = Options(selected=selected, selected_block=case.block, selected_rows=case.rows, engine=case.engine)
    problem, operands = pose("bench", (q, k, v), replace(options, backend="simulator"), None, None)
    gpu = named("sm_80")
    long = plan(problem._replace(q_len=LENGTH, kv_len=LENGTH), gpu)  # its tile is that of usual lengths
    chosen = plan(problem, gpu, long.tile)
    counters = []
    results = run_plan.forward(chosen, operands, lambda work: counters.extend(start(work)))
    (counted,) = counters
    listed = case.entries * case.block
    least = lists * listed * 2 * k.itemsize * case.head_dim + selected.nbytes + q.nbytes
    least += sum(x.numpy().nbytes for x in results)
    first, last = _lines_of_lookup()
    lookup = sum(
        sum(classes.values())
        for (file, line), classes in counted.by_source_line().items()
        if file.endswith(HEADER) and first <= line <= last
    )
    tile = chosen.launches[0].tile
    assert tile is not None
    moved = (counted.global_bytes_read + counted.global_bytes_written) / least
    return Count(case, tile, round(moved, 3), round(32 * lookup / (QUERIES * case.heads * listed), 3))


def _lines_of_lookup() -> tuple[int, int]:
    """Return the first and the last line of the function that finds the keys of a tile."""
    text = (kernel_folder() / HEADER).read_text(encoding="utf-8")
    found = re.search(r"  __device__ bool find_keys\(.*?\n  \}\n", text, re.DOTALL)
    assert found is not None
    return text[: found.start()].count("\n") + 1, text[: found.end()].count("\n")


def record(counted: Count) -> dict[str, Any]:
    """Return the counts of a case as a row of a JSON file."""
    return counted.case._asdict() | {"tile": counted.tile, "moved": counted.moved, "lookup": counted.lookup}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows of a JSON file as a table."""
    return Table(
        f"Selected keys: bytes moved (mark {MARK}), and instructions of the look-up per score",
        ["engine", "rows of a query", "entries, keys, queries", "tile", "bytes / least", "look-up"],
        [
            [
                row["engine"],
                f"{row['heads']} heads, D {row['head_dim']}",
                f"{row['entries']} of {row['block']} for {row['rows']}",
                " x ".join(map(str, row["tile"])),
                f"{row['moved']:.2f}",
                f"{row['lookup']:.2f}",
            ]
            for row in rows
        ],
    )
