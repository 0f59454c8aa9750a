"""python -m cupy_flash memory: print a table of the memory that training takes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import memory

if TYPE_CHECKING:
    from . import Commands


def add(commands: Commands) -> None:
    """Add the command memory, whose options are the fields of cupy_flash.memory.Training."""
    command = commands.add_parser("memory", help="how much memory training takes, with standard and flash attention")
    command.set_defaults(run=run)
    command.add_argument(
        "--model",
        required=True,
        help=f"{', '.join(memory.PRESETS)}, or the path of a transformers config.json or of the folder that holds one",
    )
    command.add_argument("--batch", type=int, default=1, help="default: 1")
    command.add_argument("--seq", type=int, metavar="S", help="tokens of a sequence; default: the model's context")
    command.add_argument(
        "--checkpoint",
        choices=list(memory.KEPT),
        default="none",
        help="what the backward recomputes; default: none",
    )
    command.add_argument("--precision", choices=list(memory.ITEMSIZE), default="mixed", help="default: mixed")
    command.add_argument("--fsdp", type=int, default=1, metavar="GPUS", help="GPUs that shard parameters and optimizer")
    command.add_argument("--tensor", type=int, default=1, metavar="GPUS", help="GPUs of tensor parallelism")
    command.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True)
    command.add_argument("--ring", type=int, default=1, metavar="GPUS", help="GPUs of ring attention")
    command.add_argument("--gb", type=float, metavar="N", help="also print what fits into N GB (10^9 bytes)")
    command.add_argument("--plot", type=Path, metavar="FILE", help="also plot to a PNG or SVG; needs matplotlib")


def run(model: str, seq: int | None, gb: float | None, plot: Path | None, **arguments: Any) -> int:
    """Print the memory of one GPU by part, and what fits."""
    if gb is not None and gb <= 0:
        raise ValueError(f"--gb must be more than 0, not {gb:g}")
    limit = None if gb is None else gb * memory.GB
    sizes = memory.load(model)
    training = memory.Training(seqlen=sizes.context if seq is None else seq, **arguments)
    title = f"{model}, {sizes.parameters / 1e9:.3g}e9 parameters: {describe(training)}"
    rows = estimate_rows(sizes, training, limit)
    if plot is not None:
        try:
            memory.plot(sizes, training, plot, limit, title)
        except ValueError as error:  # matplotlib's error for an unknown file suffix
            raise ValueError(f"{plot}: {error}") from error
    print(f"{title}, checkpoint {training.checkpoint}")
    for label, *cells in rows:
        print(f"{label:<42}", *(f"{cell:>10}" for cell in cells))
    return 0


def estimate_rows(
    sizes: memory.Transformer, training: memory.Training, limit: float | None
) -> list[tuple[str | int, ...]]:
    """Return table rows with a column per attention; `limit` in bytes adds the largest batch and sequence that fit."""
    # Standard attention cannot run on a ring: it needs all scores on one GPU.
    attentions = memory.ATTENTIONS if training.ring == 1 else ("flash",)
    columns = [replace(training, attention=attention) for attention in attentions]
    parts = [memory.estimate(sizes, column) for column in columns]
    rows: list[tuple[str | int, ...]] = [("GB on one GPU", *attentions)]
    for part, label in (memory.PARTS | {"total": "total"}).items():
        rows.append((label, *(f"{getattr(column, part) / memory.GB:.2f}" for column in parts)))
    for letter in ("alpha", "beta"):
        values = [getattr(memory.coefficients(sizes, column), letter) for column in columns]
        rows.append((f"{letter} of a block", *(f"{value:.4g}" for value in values)))
    if limit is None:
        return rows
    for checkpoint in memory.KEPT:
        choices = [replace(column, checkpoint=checkpoint) for column in columns]
        batches = [memory.largest_batch(sizes, choice, limit) for choice in choices]
        lengths = [memory.longest_sequence(sizes, choice, limit) for choice in choices]
        rows.append((f"fits into {limit / memory.GB:g} GB, checkpoint {checkpoint}", *attentions))
        rows.append((f"largest batch of {training.seqlen} tokens", *batches))
        rows.append((f"longest sequence in a batch of {training.batch}", *lengths))
    return rows


def describe(training: memory.Training) -> str:
    """Return batch, length, precision and parallelism of a training in one line."""
    shares = [f"{name} {getattr(training, name)}" for name in ("fsdp", "tensor", "ring") if getattr(training, name) > 1]
    if training.tensor > 1 and not training.sequence_parallel:
        shares.append("no sequence parallelism")
    return ", ".join([f"b = {training.batch}", f"s = {training.seqlen}", training.precision, *shares])
