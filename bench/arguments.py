"""Arguments that several commands of python -m bench have."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """Parse a text as a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def lengths(text: str) -> list[int]:
    """Parse a text as positive integers, separated by commas."""
    return [positive(part) for part in text.split(",")]


def add_out(command: argparse.ArgumentParser, written: str = "the JSON") -> None:
    """Add --out, the folder into which a command writes its files."""
    command.add_argument("--out", type=Path, default=Path("bench/out"), help=f"output folder for {written}")
