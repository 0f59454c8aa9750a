"""python -m cupy_flash report: write one file for a bug report."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plan import measurements
from . import info

if TYPE_CHECKING:
    from . import Commands


def add(commands: Commands) -> None:
    """Add the command report."""
    command = commands.add_parser(
        "report",
        help="write info, evidence and the failed cases of checks into one file, for a bug report",
        description="Write the output of info and all evidence, failed cases included, into one text file that can be "
        "attached to a bug report. It contains paths of this machine.",
    )
    text = "default: cupy_flash-report-DATE.json in the current folder"
    command.add_argument("--out", type=Path, metavar="FILE", help=text)
    command.set_defaults(run=run)


def run(out: Path | None) -> int:
    """Write the report and print its path; OSError if the file exists or cannot be written."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        info.run()
    records: dict[str, Any] = {}
    ignored: dict[str, Any] = {}
    for file, record in measurements.stored():
        (ignored if isinstance(record, str) else records)[str(file)] = record
    failed = _failed(records.values())
    report = {"info": printed.getvalue().splitlines(), "failed": failed, "evidence": records, "ignored": ignored}
    path = out or Path(f"cupy_flash-report-{time.strftime('%Y%m%d-%H%M%S')}.json")
    with path.open("x", encoding="utf-8") as opened:
        json.dump(report, opened, indent=1)
    print(f"{path}: {len(records)} records, {len(ignored)} ignored files, {len(failed)} failed cases")
    return 0


def _failed(records: Iterable[Any]) -> list[Any]:
    """Return the cases of the records whose verdict is not "passed"."""
    cases = [case for record in records for case in record.get("cases", ())]
    return [case for case in cases if case.get("verdict") != "passed"]
