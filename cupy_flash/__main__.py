"""Command line: python -m cupy_flash info | check | tune | report | compile | explain | ptx | memory | cache."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import UnsupportedError, __version__
from .commands import check, compile, explain, info, kernel_cache, memory, ptx, report, tune
from .jit.nvrtc import CompileError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the message in one line and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` defaults to the arguments of the process.

    Errors go to stderr. The status is 2 if the command line cannot be parsed (SystemExit), 1 if the command fails.
    """
    parser = Parser(prog="python -m cupy_flash", description="Exact attention for Python arrays.")
    parser.add_argument("--version", action="version", version=f"cupy_flash {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (info, check, tune, report, compile, explain, ptx, memory, kernel_cache):
        command.add(commands)
    arguments = vars(parser.parse_args(argv))
    run = arguments.pop("run")
    try:
        status: int = run(**arguments)
    except BrokenPipeError:  # the reader of the output, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(describe(error), file=sys.stderr)
        return 1
    return status


def describe(error: Exception) -> str:
    """Return the text of an error; for an invalid problem its reasons in one line, without the placeholder arrays."""
    text = str(error)
    if isinstance(error, (CompileError, UnsupportedError)):  # keep the whole compiler log, or every engine's reasons
        return text
    reasons = [line.removeprefix("  - ") for line in text.splitlines() if line.startswith("  - ")]
    return "; ".join(reasons) or text or type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main())
