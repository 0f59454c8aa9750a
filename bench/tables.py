"""The tables of the README, generated from the stored results.

Between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` stands what bench/results says. NAME is the stem of a file
there and what of it: cpu-forward is the section "forward" of bench/results/cpu.json. What a file holds of one thing is
named by the stem alone (static, ring, and the first of BLOCKS); static-sass is the last table of static, and -marks
stands for the regimes of a sweep that have a mark.
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


# What the blocks of GPUs and hosts show of a result.
BLOCKS: dict[str, tuple[str, Callable[[dict[str, Any]], list[Table]]]] = {
    "sweep-forward": ("sweep-forward.json", lambda result: sweep.tables(result["cases"])),
    "sweep-backward": ("sweep-backward.json", lambda result: sweep.tables(result["cases"])),
    "sweep-forward-marks": ("sweep-forward.json", lambda result: [marks.table(result)]),
    "sweep-backward-marks": ("sweep-backward.json", lambda result: [marks.table(result)]),
    "bounds": ("bounds.json", lambda result: [bounds.table(result["bounds"])]),
    "overhead": ("overhead.json", lambda result: overhead.tables(result["overhead"])),
    "first": ("first.json", lambda result: [first.table(result["first"])]),
}


def block(name: str, results: Path) -> str:
    """The Markdown of one table."""
    if name in ("static", "static-sass"):
        result = json.loads((results / "static.json").read_text(encoding="utf-8"))
        every = static.tables(result["static"])
        return "\n\n".join(
            [f"`{result['command']}`.", *(table.markdown() for table in (every if name == "static" else every[-1:]))]
        )
    if name == "ring":
        result = json.loads((results / "ring.json").read_text(encoding="utf-8"))
        both = (ring.memory_table(result["ring"]), ring.plan_table())
        return "\n\n".join([ring.provenance(result), *(table.markdown() for table in both)])
    if name in BLOCKS:
        file, shown = BLOCKS[name]
        result = json.loads((results / file).read_text(encoding="utf-8"))
        made = f"`{result['command']}` on {result['device']['gpu'] or result['device']['cpu']}."
        return "\n\n".join([made, *(table.markdown() for table in shown(result))])
    stem, _, section = name.rpartition("-")
    path = results / f"{stem}.json"
    if not path.is_file():
        raise ValueError(f"bench:{name} asks for {path.name}, which is not among the results")
    result = json.loads(path.read_text(encoding="utf-8"))
    if section not in ("forward", "backward", "memory") or section not in result:
        raise ValueError(f"bench:{name} asks for the section {section!r}, which {path.name} does not have")
    parts = [provenance(section, result), *(table.markdown() for table in tables(section, result))]
    if absent := left_out(section, result):
        parts.append("Not measured: " + "; ".join(absent) + ".")
    return "\n\n".join(parts)


def regenerate(text: str, results: Path) -> str:
    """The text of a README with every table as the results have it."""
    pairs = list(MARKED.finditer(text))
    if 2 * len(pairs) != len(ANY_MARKER.findall(text)):
        raise ValueError("a bench marker lacks its other half")
    return MARKED.sub(lambda match: f"{match[1]}{block(match['name'], results)}\n{match[3]}", text)


def without_block(text: str, results: Path) -> list[str]:
    """The results of which a README shows nothing."""
    shown = {match["name"] for match in MARKED.finditer(text)}
    return [
        path.name
        for path in sorted(results.glob("*.json"))
        if not any(name == path.stem or name.startswith(f"{path.stem}-") for name in shown)
    ]
