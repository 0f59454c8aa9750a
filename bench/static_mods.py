"""Static gate of mods: instructions that score_mod and mask_mod add to the steady mainloop, compared with marks.

The gate fails if a kernel spills with any tile that a plan may choose. Marks are goals, which the table shows; missing
one is not a failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_flash import ahead, device, nvrtc
from cupy_flash.launch import Launch
from cupy_flash.plan import plan
from cupy_flash.problem import Problem
from cupy_flash.source import assemble

from . import sass
from .report import Table
from .run import Progress

LENGTH, HEADS = 4096, 64  # the problem whose tiles are counted
ENGINES = {"mma": "sm_80", "wgmma": "sm_90a"}  # engine -> architecture for which its kernels are compiled
MAINLOOPS = ("forward", "backward", "backward_q", "backward_kv")

slopes, table = np.ones(1, np.float32), np.ones((1, 257), np.float32)
ids = np.zeros((1, 1), np.int32)
MODS: dict[str, dict[str, Any]] = {
    "ALiBi": dict(score_mod=lambda s, b, h, q, kv: s - slopes[h] * abs(q - kv)),
    "softcap": dict(score_mod=lambda s, b, h, q, kv: 20 * np.tanh(s / 20)),
    "table": dict(score_mod=lambda s, b, h, q, kv: s + table[h, np.clip(q - kv, -128, 128) + 128]),
    "causal": dict(mask_mod=lambda b, h, q, kv: q >= kv),
    "document": dict(mask_mod=lambda b, h, q, kv: ids[b, q] == ids[b, kv]),
    "NATTEN": dict(mask_mod=lambda b, h, q, kv: (abs(q // 64 - kv // 64) <= 6) & (abs(q % 64 - kv % 64) <= 6)),
}
SPILL_DIMS = (64, 128)  # head dimensions for which kernels are compiled with every tile that a plan may choose
# Marks (forward, backward): instructions per thread and score that a mod may add, without matrix products. The marks of
# a mask_mod hold for tiles that it sees in full; what these add is the same for every size of tile. A dK/dV kernel of
# mma with COLUMN_WARPS 2 (D 128) computes every score in two warps, so it adds twice what a score takes.
FULL_TILE = 1.0, 1.0
MARKS: dict[str, dict[str, tuple[float, float]]] = {
    "mma": {"ALiBi": (4, 6), "softcap": (9, 14), "table": (6, 8)},
    "wgmma": {"ALiBi": (5, 6), "softcap": (12, 14), "table": (10, 9)},
}


@dataclass(frozen=True)
class Added:
    """The SASS instructions per thread and score that a mod adds to the mainloop of one kernel."""

    mod: str
    kernel: str
    tile: tuple[int, int, int]
    plain: float
    added: float  # instructions on the steady path
    longest: float  # all instructions of the longest path, with the mod: a tile that the mask cuts
    mark: float
    spills: int  # bytes, of the tile that spills most


def count(mods: Iterable[str], progress: Progress) -> list[Added]:
    """Compile the kernels that plans choose with each mod, and the same tiles without; bfloat16, D 128."""
    rows = []
    for engine, arch in ENGINES.items():
        for mod in mods:
            progress(f"mod {mod}, {engine}")
            spills = _most_spilled(engine, arch, mod)
            for backward in (False, True):
                rows += [replace(row, spills=spills[row.kernel]) for row in _count(engine, arch, mod, backward)]
    return rows


def _most_spilled(engine: str, arch: str, mod: str) -> dict[str, int]:
    """Return the most bytes that a kernel spills at any tile that plans choose, by kernel."""
    most: dict[str, int] = {}
    for head_dim in SPILL_DIMS:
        on = device.named(arch, "cuda")
        for launch in ahead.launches(on, dtype="bfloat16", head_dim=head_dim, engine=engine, **MODS[mod]):
            text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
            resources = nvrtc.compile(text, launch.kernel, arch).resources[launch.function]
            spills = resources.spill_stores + resources.spill_loads
            most[launch.kernel] = max(most.get(launch.kernel, 0), spills)
    return most


def _count(engine: str, arch: str, mod: str, backward: bool) -> list[Added]:
    on = device.named(arch, "cuda")
    chosen = plan(_problem(engine, backward, **MODS[mod]), on)
    plain = plan(_problem(engine, backward), on, chosen.tile)
    without = {launch.kernel: launch for launch in plain.launches}
    marks = MARKS[engine].get(mod, FULL_TILE)
    rows = []
    for launch in chosen.launches:
        if launch.function in MAINLOOPS and launch.tile is not None:
            steady, longest, spills = _instructions(launch, arch)
            base, _, _ = _instructions(without[launch.kernel], arch)
            mark = float(marks[backward])
            rows.append(Added(mod, launch.kernel, launch.tile, base, steady - base, longest, mark, spills))
    return rows


def _problem(engine: str, backward: bool, **mods: Any) -> Problem:
    problems = ahead.problems(dtype="bfloat16", head_dim=128, engine=engine, **mods)
    (problem,) = (each for each in problems if each.backward == backward and not each.dlse)
    return problem._replace(q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS, whole_heads=HEADS)


def _instructions(launch: Launch, arch: str) -> tuple[float, float, int]:
    """Return (steady, longest, spilled bytes): mainloop instructions per score, without matrix products."""
    text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
    result = nvrtc.compile(text, launch.kernel, arch)
    assert launch.tile is not None
    block_q, block_kv, threads = launch.tile
    threads -= 128 if launch.kernel.startswith("wgmma/") else 0  # the producer warpgroup has no mainloop math
    loop, products = sass.mainloop(result.code), sass.CLASSES["products"]
    steady, longest = (
        sum(sass.opcode(each) not in products for each in path) * threads / (block_q * block_kv)
        for path in (loop.steady, loop.longest)
    )
    resources = result.resources[launch.function]
    return steady, longest, resources.spill_stores + resources.spill_loads


def complaints(rows: Iterable[Added]) -> list[str]:
    """Return the reasons why the gate fails; empty if it passes."""
    return [f"{row.kernel} with the mod {row.mod}: spills {row.spills} bytes" for row in rows if row.spills]


def tables(rows: Iterable[dict[str, Any]]) -> list[Table]:
    """Return the table of a result's rows."""
    columns = ["mod", "kernel", "tile", "plain", "added", "mark", "longest", "spilled bytes"]
    lines = [
        [
            row["mod"], row["kernel"], "{}x{}/{}".format(*row["tile"]),
            *(f"{row[name]:.2f}" for name in ("plain", "added", "mark", "longest")), str(row["spills"]),
        ]
        for row in rows
    ]  # fmt: skip
    heading = "Instructions that mods add to the steady loop, SASS of a thread for one score but products (bf16, D 128)"
    return [Table(heading, columns, lines)] if lines else []
