"""The tables of docs/benchmarks.md, generated from the stored results.

Between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` stands what bench/results says. NAME is the stem of a file
there and what of it: cpu-forward is the section "forward" of bench/results/cpu.json. What a file holds of one thing is
named by the stem alone (static, ring, sweep-forward); static-sass is the last table of static, and sweep-forward-marks
are the regimes of that sweep that have a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import bounds, first, marks, overhead, ring, static, sweep
from .report import Table, left_out, provenance, tables

MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench:(?P=name) -->)", re.DOTALL)
ANY_MARKER = re.compile(r"<!-- /?bench:[\w-]+ -->")


# What a file holds of one thing, by its stem; the files of sweeps begin with "sweep-".
WHOLE: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "static": lambda result: static.tables(result["static"]),
    "ring": lambda result: [ring.memory_table(result["ring"]), ring.plan_table()],
    "overhead": lambda result: overhead.tables(result["overhead"]),
    "first": lambda result: [first.table(result["first"])],
    "bounds": lambda result: [bounds.table(result["bounds"])],
}
SWEEP, MARKS, SASS = "sweep-", "-marks", "static-sass"


def stem(name: str) -> str:
    """The file, without .json, that a block is of."""
    if name.startswith(SWEEP):
        return name.removesuffix(MARKS)
    return name if name in WHOLE else name.rpartition("-")[0]


def block(name: str, results: Path) -> str:
    """The Markdown of one table."""
    path = results / f"{stem(name)}.json"
    if not path.is_file():
        raise ValueError(f"bench:{name} asks for {path.name}, which is not among the results")
    result = json.loads(path.read_text(encoding="utf-8"))
    shown, made, said = _shown(name, result)
    return "\n\n".join([made, *(table.markdown() for table in shown), *said])


def _shown(name: str, result: dict[str, Any]) -> tuple[list[Table], str, list[str]]:
    """The tables of a block, what comes before and what after them."""
    if name.startswith(SWEEP):
        made = f"`{result['command']}` on {result['device']['gpu']}."
        return [marks.table(result)] if name.endswith(MARKS) else sweep.tables(result["cases"]), made, []
    if name == SASS:
        return static.tables(result["static"])[-1:], f"`{result['command']}`.", []
    if name == "ring":
        return WHOLE[name](result), ring.provenance(result), []
    if name == "static":
        return WHOLE[name](result), f"`{result['command']}`.", []
    if name in WHOLE:
        return (
            WHOLE[name](result),
            f"`{result['command']}` on {result['device']['gpu'] or result['device']['cpu']}.",
            [],
        )
    section = name.rpartition("-")[2]
    if section not in ("forward", "backward", "memory") or section not in result:
        raise ValueError(f"bench:{name} asks for the section {section!r}, which {stem(name)}.json does not have")
    absent = left_out(section, result)
    return (
        tables(section, result),
        provenance(section, result),
        ["Not measured: " + "; ".join(absent) + "."] if absent else [],
    )


def regenerate(text: str, results: Path) -> str:
    """The text of a page with every table as the results have it."""
    pairs = list(MARKED.finditer(text))
    if 2 * len(pairs) != len(ANY_MARKER.findall(text)):
        raise ValueError("a bench marker lacks its other half")
    return MARKED.sub(lambda match: f"{match[1]}{block(match['name'], results)}\n{match[3]}", text)


def without_block(text: str, results: Path) -> list[str]:
    """The results of which a page shows nothing."""
    shown = {stem(match["name"]) for match in MARKED.finditer(text)}
    return [path.name for path in sorted(results.glob("*.json")) if path.stem not in shown]
