"""Static gate of mods: instructions that score_mod and mask_mod add to the steady mainloop, compared with marks.

The gate fails if a kernel spills with any tile that a plan may choose. Marks are goals, which the table shows; missing
one is not a failure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupy_flash import device
from cupy_flash.engines.launch import Launch
from cupy_flash.gpu import ahead
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.plan.plan import plan
from cupy_flash.problem.records import Problem

from ..report import Table
from ..run import Progress
from . import sass
from .fingerprint import fingerprint

LENGTH, HEADS = 4096, 64  # sequence length and heads of the problem whose tiles are counted
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
# Bytes that a row may spill, never inside the mainloop. Here one number of a persistent tile of D 128 is loaded where a
# block takes its next work item, and stored behind its epilogue.
MAY_SPILL = {"wgmma/backward with the mod NATTEN": 16}
SPILL_DIMS = (64, 128)  # head dimensions for which kernels are compiled with every tile that a plan may choose
# Marks (forward, backward): instructions per thread and score that a mod may add, matrix products not counted. The mark
# of a mask_mod (FULL_TILE) holds for tiles of which it hides nothing, whatever their size. A dK/dV kernel of mma with
# COLUMN_WARPS 2 (D 128) computes every score in two warps, so a mod adds its instructions twice.
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
    fingerprint: str  # see Case.fingerprint
    plain: float
    added: float  # instructions on the steady path
    longest: float  # all instructions of the longest path with the mod, which a tile that the mask cuts takes
    mark: float
    spills: int  # bytes spilled by the tile that spills most

    @property
    def name(self) -> str:
        """The name of this row in messages."""
        return f"{self.kernel} with the mod {self.mod}"


class Case(NamedTuple):
    """A kernel with a mod, in the tile that a plan chooses."""

    mod: str
    arch: str
    mark: float
    launch: Launch
    plain: Launch  # the same kernel and tile without the mod
    candidates: tuple[Launch, ...]  # the kernel with every tile that a plan may choose

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the kernel with the mod, without it, and in all candidate tiles together."""
        return fingerprint(self.launch, self.plain, *self.candidates)

    @property
    def name(self) -> str:
        """The name of this row in messages."""
        return f"{self.launch.kernel} with the mod {self.mod}"


def cases(mods: Iterable[str]) -> list[Case]:
    """Return the kernels that plans choose with each mod; bfloat16, D 128."""
    plans = itertools.product(ENGINES.items(), mods, (False, True))
    return [case for (engine, arch), mod, backward in plans for case in cases_of(engine, arch, mod, backward)]


def cases_of(engine: str, arch: str, mod: str, backward: bool) -> Iterator[Case]:
    """Yield the kernels of one plan that have a mainloop."""
    on = device.named(arch, "cuda")
    chosen = plan(_problem(engine, backward, **MODS[mod]), on)
    plain = {launch.kernel: launch for launch in plan(_problem(engine, backward), on, chosen.tile).launches}
    candidates = [
        launch
        for head_dim in SPILL_DIMS
        for launch in ahead.launches(on, dtype="bfloat16", head_dim=head_dim, engine=engine, **MODS[mod])
    ]
    mark = float(MARKS[engine].get(mod, FULL_TILE)[backward])
    for launch in chosen.launches:
        if launch.function in MAINLOOPS and launch.tile is not None:
            alike = tuple(each for each in candidates if each.kernel == launch.kernel)
            yield Case(mod, arch, mark, launch, plain[launch.kernel], alike)


def count(
    mods: Iterable[str],
    progress: Progress,
    stored: Sequence[Added] = (),
    save: Callable[[list[Added]], object] = lambda _: None,
) -> list[Added]:
    """Compile the kernels that plans choose with each mod, and the same kernels and tiles without it.

    Rows of `stored` whose kernels are chosen today are not compiled again, and those of other mods are kept. `save` is
    called with all rows after each.
    """
    mods = list(mods)
    known = {(row.name, row.fingerprint): row for row in stored}
    rows = {key: row for key, row in known.items() if row.mod not in mods}
    for case in cases(mods):
        progress(case.name)
        key = case.name, case.fingerprint
        rows[key] = known.get(key) or measure(case)
        save(list((known | rows).values()))
    return list(rows.values())


def measure(case: Case) -> Added:
    """Compile the kernels of a case and count their instructions and spills."""
    steady, longest = _instructions(case.launch, case.arch)
    plain, _ = _instructions(case.plain, case.arch)
    spills = max(_spills(launch, case.arch) for launch in case.candidates)
    assert case.launch.tile is not None
    return Added(
        case.mod,
        case.launch.kernel,
        case.launch.tile,
        case.fingerprint,
        plain,
        steady - plain,
        longest,
        case.mark,
        spills,
    )


def _problem(engine: str, backward: bool, **mods: Any) -> Problem:
    problems = ahead.problems(dtype="bfloat16", head_dim=128, engine=engine, **mods)
    (problem,) = (each for each in problems if each.backward == backward and not each.dlse)
    return problem._replace(q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS, whole_heads=HEADS)


def _compiled(launch: Launch, arch: str) -> nvrtc.Compiled:
    return nvrtc.compile(assemble(launch.kernel, dict(launch.constants), dict(launch.headers)), launch.kernel, arch)


def _spills(launch: Launch, arch: str) -> int:
    """Return the bytes of spill stores and spill loads of a kernel."""
    resources = _compiled(launch, arch).resources[launch.function]
    return resources.spill_stores + resources.spill_loads


def _instructions(launch: Launch, arch: str) -> tuple[float, float]:
    """Return instructions per score, without products, of the mainloop's steady path and of its longest path."""
    assert launch.tile is not None
    block_q, block_kv, threads = launch.tile
    threads -= 128 if launch.kernel.startswith("wgmma/") else 0  # the producer warpgroup has no mainloop math
    loop, products = sass.mainloop(_compiled(launch, arch).code), sass.CLASSES["products"]
    steady, longest = (
        sum(sass.opcode(each) not in products for each in path) * threads / (block_q * block_kv)
        for path in (loop.steady, loop.longest)
    )
    return steady, longest


def complaints(rows: Iterable[Added]) -> list[str]:
    """Return the reasons why the gate fails; empty if it passes."""
    return [f"{row.name}: spills {row.spills} bytes" for row in rows if row.spills > MAY_SPILL.get(row.name, 0)]


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
    heading = "SASS instructions of a thread per score that mods add to the steady loop, without products (bf16, D 128)"
    return [Table(heading, columns, lines)] if lines else []
