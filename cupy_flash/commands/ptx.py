"""python -m cupy_flash ptx: print the PTX of a problem's kernels, or what confirms the simulator's execution of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..gpu.run_plan import compile_launch
from ..measure.checks.evidence import Evidence, evidence_for
from .problem_arguments import add_lengths, add_problem, plans

if TYPE_CHECKING:
    from . import Commands


def add(commands: Commands) -> None:
    """Add the command ptx."""
    command = commands.add_parser(
        "ptx",
        help="print or write the PTX of a problem's kernels, or the evidence for its instructions; needs no GPU",
        description="Compile the kernels that the plan of a problem launches (see explain), and print their PTX. It "
        "goes through the cache of kernels.",
    )
    add_problem(command)
    add_lengths(command)
    instead = command.add_mutually_exclusive_group()
    instead.add_argument("--out", type=Path, metavar="FOLDER", help="write a file per kernel instead")
    instead.add_argument(
        "--evidence",
        action="store_true",
        help="print instead, for each form of an instruction in them, the kernel of Triton or Gluon and the "
        "micro-kernel with results by the PTX ISA that confirm how the simulator executes it",
    )
    command.set_defaults(run=run)


def run(out: Path | None, evidence: bool, **arguments: Any) -> int:
    """Print the PTX of each kernel under a comment with its name, write it to a file in a folder, or print evidence."""
    chosen = plans(**arguments)
    target = chosen[0].device.arch.replace("sm_", "compute_")
    launches = {launch.text_key: launch for plan in chosen for launch in plan.launches}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    texts = ((launch, compile_launch(launch, target).ptx) for launch in launches.values())
    if evidence:
        print(table(evidence_for([ptx for _, ptx in texts])))
        return 0
    for number, (launch, ptx) in enumerate(texts, 1):
        if out is None:
            print(f"// {number}/{len(launches)} {launch.kernel}\n{ptx}", flush=True)
        else:
            path = out / f"{number}.{launch.kernel.replace('/', '.')}.ptx"
            path.write_text(ptx, encoding="utf-8")
            print(path, flush=True)
    return 0


def table(rows: list[Evidence]) -> str:
    """Return a table of the kernels that confirm each form of an instruction, and the number of unconfirmed forms."""
    width = max(len(row.form) for row in rows)
    lines = [f"{'instruction':<{width}}  {'other kernel':<28}  micro-kernel"]
    lines += [f"{row.form:<{width}}  {row.other_kernel or '-':<28}  {row.micro_kernel or '-'}" for row in rows]
    nobody = sum(row.other_kernel is None and row.micro_kernel is None for row in rows)
    return "\n".join([*lines, f"{len(rows)} forms, {nobody} confirmed by nobody"])
