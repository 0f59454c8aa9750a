"""python -m cupy_flash tune: measure the tiles of every engine on this machine's GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure.worker_process import ended_by_signal
from ..problem.records import DTYPES, FP8
from .check import add_backend, add_json, progress
from .problem_arguments import size

if TYPE_CHECKING:
    from . import Commands

SEQLENS = (512, 2048, 8192)
TOKENS = 16384  # default of B * S, so that calls of all lengths take similar times
HIDDEN = 2048  # default of H * D, the width of a model with a billion parameters


def add(commands: Commands) -> None:
    """Add the command tune."""
    command = commands.add_parser(
        "tune",
        help="measure every tile that a plan may choose on this GPU; plans then use the fastest",
        description="Measure every tile that a plan may choose, for calls of these sizes or recorded ones, and store "
        "the measurements, which later plans prefer to predictions. Run again, it resumes. Sizes that are not given "
        "are those of common models.",
    )
    add_backend(command)
    text = "measure the calls that a run with CUPY_FLASH_RECORD=FILE has recorded, instead of those below"
    command.add_argument("--like", type=Path, metavar="FILE", help=text)
    command.add_argument("--dtype", choices=(*DTYPES, FP8), default="bfloat16", help="default: bfloat16")
    command.add_argument("--head-dim", type=size, default=128, metavar="D", help="default: 128")
    command.add_argument("--head-dim-v", type=size, metavar="DV", help="default: D")
    command.add_argument("--shared-kv", action="store_true", help="values inside keys: v=None, with head_dim_v")
    command.add_argument("--heads", type=size, metavar="HQ", help=f"default: {HIDDEN} / D")
    command.add_argument("--kv-heads", type=size, metavar="HK", help="default: HQ")
    command.add_argument("--batch", type=size, metavar="B", help=f"default: {TOKENS} / S, at least 1")
    text = f"comma-separated; default: {','.join(map(str, SEQLENS))}"
    command.add_argument("--seqlens", type=sizes, default=SEQLENS, metavar="S,...", help=text)
    command.add_argument("--causal", action="store_true", help="with causal=True")
    command.add_argument("--backward", action="store_true", help="measure the backward too")
    text = "one query per sequence on a KV cache of S keys, as a server decodes"
    command.add_argument("--decode", action="store_true", help=text)
    command.add_argument("--page", type=size, metavar="P", help="with --decode: keys of a page; default: contiguous")
    command.add_argument("--minutes", type=positive, metavar="N", help="start no measurement after N minutes")
    add_json(command)
    command.set_defaults(run=run)


def sizes(text: str) -> tuple[int, ...]:
    """Return the comma-separated whole numbers in `text`, each at least 1."""
    return tuple(size(part) for part in text.split(","))


def positive(text: str) -> float:
    """Return the number in `text`, which must be above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def run(like: Path | None, backend: str, minutes: float | None, **arguments: Any) -> int:
    """Measure, print the speedups, and return 3 if time ran out, 1 if a call could not be measured, else 0."""
    from ..measure.tuning import tune

    decode = arguments["decode"]
    if decode and (arguments["backward"] or arguments["causal"]):
        raise ValueError("--decode has no backward, and its one query sees all keys: omit --backward and --causal")
    if arguments["page"] is not None and not decode:
        raise ValueError("--page is for --decode")
    shapes = [] if like is not None else list(calls(**arguments))
    try:
        with ended_by_signal():
            results = tune(shapes, like=like, backend=backend, minutes=minutes, report=progress)
    except KeyboardInterrupt:
        progress("interrupted; run it again to resume")
        return 130
    print(json.dumps(results.as_json(), indent=1) if arguments["json"] else results)
    if results.complete:
        return 0
    return 1 if any(result.tune is None for result in results.results) else 3


def calls(
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int | None,
    shared_kv: bool,
    heads: int | None,
    kv_heads: int | None,
    batch: int | None,
    seqlens: tuple[int, ...],
    causal: bool,
    backward: bool,
    decode: bool,
    page: int | None,
    json: bool,
) -> list[dict[str, Any]]:
    """Return the calls that the arguments state: for each length a forward and, with `backward`, a backward."""
    heads = heads or max(HIDDEN // head_dim, 1)
    return [
        dict(
            dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, shared_kv=shared_kv, heads=heads,
            kv_heads=kv_heads or heads, batch=batch or max(TOKENS // length, 1), q_len=1 if decode else length,
            kv_len=length, causal=causal or decode, backward=step, cache={"page": page} if decode else None,
        )
        for length in seqlens
        for step in ((False, True) if backward else (False,))
    ]  # fmt: skip
