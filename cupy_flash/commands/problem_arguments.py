"""Command-line arguments that state a problem, for compile, explain and ptx; records.py declares the options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .. import device
from ..engines import MODULES
from ..gpu import ahead
from ..plan.plan import Plan, plan
from ..problem.features import ARRAY, CAUSAL, CHOICE, FLAG, NUMBER, WINDOW, Feature
from ..problem.records import DTYPES, FEATURES, FP8


def size(text: str) -> int:
    """Return the whole number in `text`, at least 1 and less than 2**31."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1 and less than 2**31, not {text!r}")
    return number


def add_problem(command: argparse.ArgumentParser) -> None:
    """Add the arguments of cupy_flash.compile."""
    command.add_argument("--arch", choices=list(device.GPUS), help="default: that of this machine's GPU")
    command.add_argument("--dtype", choices=(*DTYPES, FP8), default="bfloat16", help="default: bfloat16")
    command.add_argument("--head-dim", type=size, required=True, metavar="D")
    command.add_argument("--head-dim-v", type=size, metavar="DV", help="default: D")
    command.add_argument("--shared-kv", action="store_true", help="values inside keys: v=None, with head_dim_v")
    text = "query heads per key/value head; default: 1"
    command.add_argument("--group", type=size, default=1, metavar="N", help=text)
    command.add_argument("--no-backward", dest="backward", action="store_false", help="forward only (all that fp8 has)")
    command.add_argument("--packed", action="store_true", help="for attention_varlen")
    for feature in FEATURES:
        if feature.kind in KINDS and (feature.constant or feature.kind in CHOOSES_KERNELS or feature.name == "engine"):
            KINDS[feature.kind](command, f"--{feature.name.replace('_', '-')}", feature)


def add_lengths(command: argparse.ArgumentParser) -> None:
    """Add the sizes of a call, on which the choice among a problem's kernels depends."""
    command.add_argument("--batch", type=size, default=1, metavar="B", help="sequences; default: 1")
    command.add_argument("--heads", type=size, metavar="HQ", help="query heads; default: 32 groups")
    command.add_argument("--seqlen", type=size, default=4096, metavar="SQ", help="queries; default: 4096")
    command.add_argument("--seqlen-k", type=size, metavar="SK", help="keys; default: as many as queries")


def plans(
    arch: str | None, batch: int, heads: int | None, seqlen: int, seqlen_k: int | None, **arguments: Any
) -> list[Plan]:
    """Return the plans of a forward and its backward on a GPU; with return_lse, lse has a gradient."""
    on = ahead.device_for(arch)
    group = arguments["group"]
    heads = 32 * group if heads is None else heads
    if heads % group:
        raise ValueError(f"--heads {heads} must be a multiple of --group {group}")
    sizes: dict[str, Any] = dict(batch=batch, heads=heads, whole_heads=heads, kv_heads=heads // group)
    sizes |= dict(q_len=seqlen, kv_len=seqlen if seqlen_k is None else seqlen_k)
    forward, *backward = ahead.problems(**arguments)
    return [plan(problem._replace(**sizes), on) for problem in (forward, *backward[-1:])]


def _add_array(command: argparse.ArgumentParser, flag: str, feature: Feature) -> None:
    """Add a switch for an array that may be given, or an argument for its dtype if several are possible."""
    if feature.element:
        text = "dtype; default: that of q"
        command.add_argument(flag, nargs="?", const=True, choices=feature.dtypes, metavar="DTYPE", help=text)
    else:
        command.add_argument(flag, action="store_true", default=None, help=f"with {feature.name}")


def _add_number(command: argparse.ArgumentParser, flag: str, feature: Feature) -> None:
    command.add_argument(
        flag, nargs="?", type=float, const=feature.example, default=feature.default, metavar="VALUE",
        help="kernels are the same for every value",
    )  # fmt: skip


def _add_flag(command: argparse.ArgumentParser, flag: str, feature: Feature) -> None:
    command.add_argument(flag, action="store_true", help=f"with {feature.name}=True")


def _add_causal(command: argparse.ArgumentParser, flag: str, feature: Feature) -> None:
    command.add_argument(
        flag, nargs="?", const=True, default=feature.default, choices=("top_left", "bottom_right"),
        help="default corner: bottom_right",
    )  # fmt: skip


def _add_window(command: argparse.ArgumentParser, flag: str, feature: Feature) -> None:
    command.add_argument(flag, nargs=2, type=int, metavar=("LEFT", "RIGHT"), help="-1: unbounded")


def _add_engine(command: argparse.ArgumentParser, flag: str, feature: Feature) -> None:
    engines = [name for name, engine in MODULES.items() if "cuda" in engine.BACKENDS]
    command.add_argument(flag, choices=engines, help="default: the one with the smallest predicted time")


CHOOSES_KERNELS = (CAUSAL, WINDOW, FLAG)  # options without a constant in config.cuh that still affect the plan
KINDS: dict[str, Callable[[argparse.ArgumentParser, str, Feature], None]] = {
    ARRAY: _add_array,
    NUMBER: _add_number,
    FLAG: _add_flag,
    CAUSAL: _add_causal,
    WINDOW: _add_window,
    CHOICE: _add_engine,
}
