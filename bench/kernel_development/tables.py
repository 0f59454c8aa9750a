"""Generate the tables of docs/benchmarks.md from bench/results.

The text between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` is generated. NAME is a file stem and a section:
cpu-forward is the section "forward" of bench/results/cpu.json. Files with a single section are named by the stem alone
(static, ring, sweep-forward). static-sass is the table of static with the machine code of the steady loops, and
sweep-forward-marks contains the regimes of that sweep that have a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import decode, decode_gpu, first, overhead, ring
from ..report import Table, left_out, provenance, tables
from . import backward_events, bounds, conversions, events, latent, marks, predict, selected, static_tables, sweep

MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench:(?P=name) -->)", re.DOTALL)
ANY_MARKER = re.compile(r"<!-- /?bench:[\w-]+ -->")


# {stem of a file with a single section: function that returns its tables}. Files of sweeps begin with "sweep-".
WHOLE: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "static": lambda result: static_tables.tables(result["static"]),
    "ring": lambda result: [ring.memory_table(result["ring"]), ring.plan_table()],
    "overhead": lambda result: overhead.tables(result["overhead"]),
    "first": lambda result: [first.table(result["first"])],
    "decode": lambda result: [decode.table(result["decode"])],
    "decode_gpu": lambda result: [decode_gpu.table(result["decode_gpu"])],
    "predict": lambda result: [
        *predict.table(result["predict"]).split("bound by", "What bounds the mainloop"),
        *events.table(result["tcgen05"]).split("bound by", "What bounds a step of 128 x 128 scores", shared=2),
        backward_events.table(result["tcgen05_backward"]),
    ],
    "bounds": lambda result: [bounds.table(result["bounds"])],
    "selected": lambda result: [selected.table(result["selected"])],
    "latent": lambda result: [latent.table(result["latent"])],
    "conversions": lambda result: [
        conversions.table(result["conversions"]),
        conversions.table_of_times(result["predicted"]),
    ],
}
SWEEP, MARKS, SASS = "sweep-", "-marks", "static-sass"


def stem(name: str) -> str:
    """Return the stem of the file that a block is generated from."""
    if name.startswith(SWEEP):
        return name.removesuffix(MARKS)
    return name if name in WHOLE else name.rpartition("-")[0]


def block(name: str, results: Path) -> str:
    """Return the Markdown of one block."""
    path = results / f"{stem(name)}.json"
    if not path.is_file():
        raise ValueError(f"bench:{name}: {results} has no {path.name}")
    result = json.loads(path.read_text(encoding="utf-8"))
    block_tables, source, notes = _block(name, result)
    return "\n\n".join([source, *(table.markdown() for table in block_tables), *notes])


def _block(name: str, result: dict[str, Any]) -> tuple[list[Table], str, list[str]]:
    """Return the tables of a block, the line before them and the notes after them."""
    if name.startswith(SWEEP):
        source = f"`{result['command']}` on {result['device']['gpu']}."
        return [marks.table(result)] if name.endswith(MARKS) else sweep.tables(result["cases"]), source, []
    if name == SASS:
        table = next(table for table in static_tables.tables(result["static"]) if "SASS" in table.title)
        return table.split("all but products", "The same loop", shared=3), f"`{result['command']}`.", []
    if name == "ring":
        return WHOLE[name](result), ring.provenance(result), []
    if name in ("static", "selected", "latent", "conversions"):  # counts, which are the same on every machine
        return WHOLE[name](result), f"`{result['command']}`.", []
    if name in WHOLE:
        return (
            WHOLE[name](result),
            f"`{result['command']}` on {result['device']['gpu'] or result['device']['cpu']}.",
            [],
        )
    section = name.rpartition("-")[2]
    if section not in ("forward", "backward", "memory") or section not in result:
        raise ValueError(f"bench:{name}: {stem(name)}.json has no section {section!r}")
    reasons = left_out(section, result)
    return (
        tables(section, result),
        provenance(section, result),
        ["Not measured: " + "; ".join(reasons) + "."] if reasons else [],
    )


def regenerate(text: str, results: Path) -> str:
    """Return the text of a page with every block regenerated."""
    blocks = list(MARKED.finditer(text))
    if 2 * len(blocks) != len(ANY_MARKER.findall(text)):
        raise ValueError("a bench marker has no matching start or end")
    return MARKED.sub(lambda match: f"{match[1]}{block(match['name'], results)}\n{match[3]}", text)


def without_block(text: str, results: Path) -> list[str]:
    """Return the result files for which a page has no block."""
    stems = {stem(match["name"]) for match in MARKED.finditer(text)}
    return [path.name for path in sorted(results.glob("*.json")) if path.stem not in stems]
