"""The tables of the static gate's rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..report import NOTHING, Table
from . import sass, static, static_mods


def tables(section: dict[str, Any]) -> list[Table]:
    """Return the table of kernels, with maxima over tiles and compilers, and the tables of tile steps."""
    compiled = static.Result.of(section).kernels
    groups: dict[tuple[str, str], list[static.Kernel]] = defaultdict(list)
    for kernel in compiled:
        groups[kernel.problem, kernel.kernel].append(kernel)
    archs = list(dict.fromkeys(kernel.arch for kernel in compiled))
    rows = []
    for (problem, name), group in groups.items():
        registers = [max((each.registers for each in group if each.arch == arch), default=0) for arch in archs]
        rows.append(
            [
                problem,
                name,
                str(len({each.tile for each in group})),
                *map(str, registers),
                str(sum(each.spills for each in group)),
                f"{max(each.shared_bytes for each in group) / 1024:.0f}",
                f"{max(each.cubin_bytes for each in group) / 1024:.0f}",
                f"{max(each.seconds for each in group):.1f}",
            ]
        )
    compilers = ", ".join(dict.fromkeys(kernel.compiler for kernel in compiled))
    heading = f"Registers by architecture, the most of all tiles that a plan may choose (NVRTC {compilers})"
    columns = ["problem", "kernel", "tiles", *archs, "spilled bytes", "shared KiB", "cubin KiB", "compile s"]
    return [
        Table(heading, columns, rows),
        *_step_tables(section["steps"]),
        *static_mods.tables(section["mods"]),
    ]


def _step_tables(steps: list[dict[str, Any]]) -> list[Table]:
    if not steps:
        return []
    classes = list(dict.fromkeys(key for step in steps for key in step["per_score"]))
    rows = [
        [
            *_named(step),
            *(f"{step['per_score'].get(key, 0):.1f}" for key in classes),
            str(step["bank_conflicts"]),
            NOTHING if step["bytes_over_least"] is None else f"{step['bytes_over_least']:.3f}",
        ]
        for step in steps
    ]
    columns = ["problem", "kernel", "tile", *classes, "bank conflicts", "bytes over least"]
    step_tables = [Table("One tile step on the simulator, in PTX instructions of a thread per score", columns, rows)]
    tensor_core_steps = [step for step in steps if step["sass"] is not None]
    if tensor_core_steps:
        classes = list(tensor_core_steps[0]["sass"]["per_score"])
        rows = []
        for step in tensor_core_steps:
            per_score, waits = step["sass"]["per_score"], map(sass.Wait._make, step["sass"]["waits"])
            rows.append(
                [
                    *_named(step),
                    *(f"{per_score[key]:.2f}" for key in classes),
                    f"{sum(count for key, count in per_score.items() if key != 'products'):.2f}",
                    f"{step['sass']['longest']:.2f}",
                    " ".join(f"{wait.products}/{wait.exps}" for wait in waits) or NOTHING,
                ]
            )
        columns = [
            "problem", "kernel", "tile", *classes, "all but products", "longest path", "products/exps before each wait"
        ]  # fmt: skip
        step_tables.append(
            Table(
                "The steady loop for sm_80 (Hopper: sm_90a), in SASS instructions of a thread per score", columns, rows
            )
        )
    return step_tables


def _named(step: dict[str, Any]) -> list[str]:
    return [step["problem"], step["kernel"], static.size(step["tile"])]
