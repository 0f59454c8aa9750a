"""The tables of the README, generated from the stored results.

Between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` stands what bench/results says. NAME is the stem of a file
there, a dash and a section of it: cpu-forward is the section "forward" of bench/results/cpu.json; or static,
static-sass (its last table alone), ring, sweep-forward or sweep-backward.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import ring, static, sweep
from .report import left_out, provenance, tables

MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench:(?P=name) -->)", re.DOTALL)
ANY_MARKER = re.compile(r"<!-- /?bench:[\w-]+ -->")


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
    if name in ("sweep-forward", "sweep-backward"):
        result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        made = f"`{result['command']}` on {result['device']['gpu']}."
        return "\n\n".join([made, *(table.markdown() for table in sweep.tables(result["cases"]))])
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
