"""python -m cupy_flash check: compare the engines on this machine's GPU with the formula."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from ..engines import MODULES
from ..measure.worker_process import ended_by_signal

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from . import Commands


def add(commands: Commands) -> None:
    """Add the command check."""
    command = commands.add_parser(
        "check",
        help="prove the engines on this GPU: their results against the formula; plans then use what has passed",
        description="Run the instructions and calls of every engine on this machine's GPU, compare them with the "
        "simulator and the formula, and store the verdicts, which later plans consult. A kernel that hangs or crashes "
        "costs its process alone. The exit status is 0 if all engines have passed, else 1; a run that cannot be "
        "completed, because a dependency, memory or disk space is missing, stores no verdict.",
    )
    add_backend(command)
    engines = [name for name, engine in MODULES.items() if "cuda" in engine.BACKENDS]
    command.add_argument("--engine", choices=engines, help="check this engine alone")
    command.add_argument("--quick", action="store_true", help="one call per engine; stores verdicts of failures alone")
    text = "check accesses to tensor memory at run time (sm_100a, sm_103a); stores verdicts of failures alone"
    command.add_argument("--tensor-memory", action="store_true", help=text)
    add_json(command)
    command.set_defaults(run=run)


def add_backend(command: ArgumentParser) -> None:
    """Add the argument that names a simulator in place of the GPU."""
    text = "simulator:ARCH, as in simulator:sm_90a, which takes minutes; default: cuda, this machine's GPU"
    command.add_argument("--backend", default="cuda", metavar="BACKEND", help=text)


def add_json(command: ArgumentParser) -> None:
    """Add the argument that prints the result as JSON."""
    command.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")


def progress(line: str) -> None:
    """Print a line of progress to stderr, where it does not mix with the result."""
    print(line, file=sys.stderr, flush=True)


def run(backend: str, engine: str | None, quick: bool, tensor_memory: bool, **arguments: Any) -> int:
    """Run the check, print its table or JSON, and return 0 if all engines have passed."""
    from ..measure.checks.verdicts import check

    try:
        with ended_by_signal():
            verdicts = check(backend=backend, engine=engine, quick=quick, tensor_memory=tensor_memory, report=progress)
    except KeyboardInterrupt:
        progress("interrupted; no verdict is stored")
        return 130
    except Exception:  # `main` prints it
        progress("the check cannot be completed; no verdict is stored")
        raise
    print(json.dumps(verdicts.as_json(), indent=1) if arguments["json"] else verdicts)
    return 0 if verdicts.passed else 1
