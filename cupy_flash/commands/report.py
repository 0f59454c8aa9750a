"""python -m cupy_flash report: one file with what a bug report needs."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from .. import evidence
from . import info


def add(commands: Any) -> None:
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
    records = {str(path): _content(path) for path in evidence.files()}
    report = {"info": printed.getvalue().splitlines(), "failed": _failed(records), "evidence": records}
    path = out or Path(f"cupy_flash-report-{time.strftime('%Y%m%d-%H%M%S')}.json")
    with path.open("x", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    print(f"{path}: {len(records)} records, {len(report['failed'])} failed cases")
    return 0


def _content(path: Path) -> Any:
    """A record as JSON; the text of one that is damaged, or why it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return str(error)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _failed(records: dict[str, Any]) -> list[Any]:
    """The cases of checks that have not passed."""
    checks = [record for record in records.values() if isinstance(record, dict)]
    return [case for check in checks for case in check.get("cases", ()) if case.get("verdict") != "passed"]
