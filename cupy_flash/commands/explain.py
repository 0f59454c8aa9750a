"""python -m cupy_flash explain: print the plan of a problem for a GPU, which this machine need not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..explanation import Explanation
from .problem_arguments import add_lengths, add_problem, plans

if TYPE_CHECKING:
    from . import Commands


def add(commands: Commands) -> None:
    """Add the command explain."""
    command = commands.add_parser(
        "explain",
        help="print how attention would run: engine, tiles, why, and why not the other engines; needs no GPU",
        description="Print the plan of a forward and of its backward: engine, tiles, why, and why not the other "
        "engines. With --arch no GPU is needed. cupy_flash.explain(q, k, v, ...) does it for arrays.",
    )
    add_problem(command)
    add_lengths(command)
    command.set_defaults(run=run)


def run(**arguments: Any) -> int:
    """Print the plans of a forward and its backward."""
    print("\n\n".join(str(Explanation(plan.explain())) for plan in plans(**arguments)))
    return 0
