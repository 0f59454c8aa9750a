"""python -m cupy_flash ptx: print the PTX that the kernels of a problem compile to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..gpu.run_plan import compile_launch
from .problem_arguments import add_lengths, add_problem, plans

if TYPE_CHECKING:
    from . import Commands


def add(commands: Commands) -> None:
    """Add the command ptx."""
    command = commands.add_parser(
        "ptx",
        help="print or write the PTX of a problem's kernels; needs no GPU",
        description="Compile the kernels that the plan of a problem launches (see explain), and print their PTX. It "
        "goes through the cache of kernels.",
    )
    add_problem(command)
    add_lengths(command)
    command.add_argument("--out", type=Path, metavar="FOLDER", help="write a file per kernel instead")
    command.set_defaults(run=run)


def run(out: Path | None, **arguments: Any) -> int:
    """Print the PTX of each kernel under a comment with its name, or write it to a file in a folder."""
    chosen = plans(**arguments)
    target = chosen[0].device.arch.replace("sm_", "compute_")
    launches = {launch.text_key: launch for plan in chosen for launch in plan.launches}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    for number, launch in enumerate(launches.values(), 1):
        ptx = compile_launch(launch, target).ptx
        if out is None:
            print(f"// {number}/{len(launches)} {launch.kernel}\n{ptx}", flush=True)
        else:
            path = out / f"{number}.{launch.kernel.replace('/', '.')}.ptx"
            path.write_text(ptx, encoding="utf-8")
            print(path, flush=True)
    return 0
