"""Format results as tables, for the terminal and for docs/benchmarks.md."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from .implementations import BASELINE, OURS, OURS_ON_TORCH
from .memory import growth_exponent

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """A table of text: a title, a row of cells per line, and the cells that are the best of their row."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column)

    def markdown(self) -> str:
        """Return the table as Markdown, numbers aligned to the right."""
        lines = [self.columns, ["--:"] * len(self.columns), *self.marked("**{}**")]
        return "\n".join([f"{self.title}:", "", *("| " + " | ".join(line) + " |" for line in lines)])

    def split(self, column: str, title: str, shared: int = 1) -> list[Table]:
        """Return the table in two, the second from `column` on, that have the first `shared` columns in common."""
        at = self.columns.index(column)

        def halves(cells: list[str]) -> tuple[list[str], list[str]]:
            return cells[:at], [*cells[:shared], *cells[at:]]

        (left, right), rows = halves(self.columns), [halves(row) for row in self.rows]
        return [Table(self.title, left, [row[0] for row in rows]), Table(title, right, [row[1] for row in rows])]

    def marked(self, mark: str) -> list[list[str]]:
        """Return the rows with a mark on the best cells."""
        return [
            [mark.format(cell) if (m, n) in self.best else cell for n, cell in enumerate(row)]
            for m, row in enumerate(self.rows)
        ]

    def plain(self) -> str:
        """Return the table for a terminal, in columns of equal width; a star is in front of the best cells."""
        rows = self.marked("*{}")
        widths = [max(map(len, column)) for column in zip(self.columns, *rows, strict=True)]
        lines = [
            "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
            for line in (self.columns, *rows)
        ]
        return "\n".join([self.title, *lines])


def tables(section: str, result: dict[str, Any]) -> list[Table]:
    """Return the tables of one section of a result: "forward", "backward" or "memory"."""
    cases = result[section]["cases"]
    if section == "memory":
        return [_memory_table(cases, stage) for stage in ("forward", "forward + backward")]
    if section == "forward":
        stages: dict[str, tuple[str, ...]] = {"Forward": ("forward",)}
    else:
        stages = {"Forward + backward": ("forward", "backward"), "Backward alone": ("backward",)}
    return [*(_time_table(cases, *stage) for stage in stages.items()), _error_table(cases)]


def provenance(section: str, result: dict[str, Any]) -> str:
    """Return the command, machine, versions and problem sizes behind a section's numbers."""
    device, versions, git, ceilings = (result[key] for key in ("device", "versions", "git", "ceilings"))
    case = result[section]["cases"][0]
    built_with = [f"Python {versions['python']}", f"NumPy {versions['numpy']}", f"cupy_flash {versions['cupy_flash']}"]
    if versions["torch"] is not None:
        built_with.insert(2, f"torch {versions['torch']}")
    if git["commit"] is not None:
        built_with.append(f"commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}")
    ceiling = (
        f"matmul {ceilings['flops_per_second'] / 1e9:.0f} GFLOP/s, copy {ceilings['bytes_per_second'] / 1e9:.0f} GB/s"
    )
    machine = f"{device['cpu']}, {count(device['cores'], 'core')}, {count(device['threads'], 'thread')} ({ceiling})"
    heads = f"H {case['heads']} (key/value heads: {case['kv_heads']})"
    return (
        f"`{result['command']}` on {machine}; {', '.join(built_with)}.\n"
        f"B {case['batch']}, {heads}, D {case['head_dim']}, {case['dtype']}."
    )


def left_out(section: str, result: dict[str, Any]) -> list[str]:
    """Return the implementations missing from the tables, with the reasons."""
    everywhere = [f"{name}: {reason}" for name, reason in result[section]["left_out"].items()]
    per_case = [
        f"{name} at S {case['seqlen']}: {reason}"
        for case in result[section]["cases"]
        for name, reason in case["left_out"].items()
    ]
    return everywhere + list(dict.fromkeys(per_case))  # the same reason for full and causal is listed once


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"


def step_seconds(record: dict[str, Any], name: str, stages: tuple[str, ...]) -> float:
    """Return the median over the samples of the summed seconds of the stages."""
    return median(map(sum, zip(*(record["seconds"][name][stage] for stage in stages), strict=True)))


def ratio(record: dict[str, Any], name: str, stages: tuple[str, ...]) -> float:
    """Return the median of the ratios of an implementation's calls to those of BASELINE in the same rounds."""
    ours, theirs = (zip(*(record["seconds"][of][stage] for stage in stages), strict=True) for of in (name, BASELINE))
    return median(sum(one) / sum(other) for one, other in zip(ours, theirs, strict=False))


def names_in(records: list[dict[str, Any]], key: str) -> list[str]:
    """Return the implementations in any of the records, in order of first appearance."""
    return list(dict.fromkeys(name for record in records for name in record[key]))


def _time_table(records: list[dict[str, Any]], title: str, stages: tuple[str, ...]) -> Table:
    names = names_in(records, "seconds")
    # roofline_seconds covers the section's whole step, so it has no meaning for the backward alone.
    has_roofline = stages[0] == "forward"
    compared = {OURS: f"over {BASELINE}", OURS_ON_TORCH: f"torch over {BASELINE}"} if BASELINE in names else {}
    compared = {name: column for name, column in compared.items() if name in names}
    rows, best = [], []
    for number, record in enumerate(records):
        seconds = {name: step_seconds(record, name, stages) for name in record["seconds"]}
        fastest = min(seconds, key=lambda name: seconds[name])
        best.append((number, len(_case(record)) + names.index(fastest)))
        row = [*_case(record), *(_milliseconds(seconds[name]) if name in seconds else NOTHING for name in names)]
        row += [f"{ratio(record, name, stages):.3g}" for name in compared]
        if has_roofline:
            row.append(f"{record['roofline_seconds'] / seconds[OURS]:.0%}")
        rows.append(row)
    columns = ["S", "causal", *names]
    columns += compared.values()
    if has_roofline:
        columns.append("of roofline")
    return Table(f"{title}, milliseconds (median)", columns, rows, frozenset(best))


def _milliseconds(seconds: float) -> str:
    """Format milliseconds with three significant digits, or as an integer from 100 ms on."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _error_table(records: list[dict[str, Any]]) -> Table:
    exact = [record for record in records if "errors" in record]
    names = list(dict.fromkeys(name for record in exact for errors in record["errors"].values() for name in errors))
    rows = [
        [*_case(record), quantity, *(f"{errors[name]:.1e}" if name in errors else NOTHING for name in names)]
        for record in exact
        for quantity, errors in record["errors"].items()
    ]
    return Table("Largest error against fp64", ["S", "causal", "", *names], rows)


def _memory_table(records: list[dict[str, Any]], stage: str) -> Table:
    names = names_in(records, "peaks")
    peaks = {
        name: {record["seqlen"]: record["peaks"][name][stage]["bytes"] for record in records if name in record["peaks"]}
        for name in names
    }
    rows = [
        [
            str(record["seqlen"]),
            *(f"{peaks[name][record['seqlen']] / 2**20:.1f}" if name in record["peaks"] else NOTHING for name in names),
        ]
        for record in records
    ]
    growth = [
        f"S^{growth_exponent(list(points), list(points.values())):.1f}" if len(points) > 1 else NOTHING
        for points in peaks.values()
    ]
    return Table(f"Peak memory beyond inputs and outputs, {stage}, MiB", ["S", *names], [*rows, ["growth", *growth]])


def _case(record: dict[str, Any]) -> list[str]:
    return [str(record["seqlen"]), "yes" if record["causal"] else "no"]


def show(table: Table) -> None:
    """Print a table, with rich if installed."""
    if importlib.util.find_spec("rich") is None:
        print("\n" + table.plain())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    rich_table = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for column in table.columns:
        rich_table.add_column(column.replace(" ", "\n"), justify="right")  # to fit into 80 columns
    for row in table.marked("[bold green]*{}[/]"):
        rich_table.add_row(*row)
    print()
    Console().print(rich_table)


@contextmanager
def progress(section: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr; the context is a function to call with the name of each step as it begins."""
    if importlib.util.find_spec("rich") is None:
        started = 0

        def announce(step: str) -> None:
            nonlocal started
            started += 1
            print(f"{section} {started}/{steps}: {step}", file=sys.stderr, flush=True)

        yield announce
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(section, total=steps)
        increments = iter([0])  # the first step starts at 0 completed

        def advance(step: str) -> None:
            bar.update(task, advance=next(increments, 1), description=f"{section}: {step}")

        yield advance
