"""The facts of a call's mods: requirements on the arrays that they capture, and which of these get gradients."""

from __future__ import annotations

from ..requirements import ArrayFacts, Requirements, Sizes
from .ir import INPUTS, REAL, Program, order


def check_captured(
    requirements: Requirements,
    arrays: dict[str, ArrayFacts],
    program: Program,
    sizes: Sizes,
    longest: tuple[int, int],
) -> None:
    """The arrays that mods capture: long enough for every b, h, q_idx and kv_idx that is itself an index."""
    extents = {
        "b": ("b", "sequences", sizes.batch),
        "h": ("h", "query heads", sizes.heads),
        "q": ("q_idx", "queries", longest[0]),
        "kv": ("kv_idx", "keys", longest[1]),
    }
    for load in order(program.roots):
        name = f"array{load.value}"
        if load.op != "load" or name not in arrays:
            continue
        shape = arrays[name].shape
        for axis, index in enumerate(load.args):
            if index.op in INPUTS:
                spelled, rows, count = extents[index.op]
                requirements.require(
                    shape[axis] >= count,
                    f"{name} {shape} is indexed by {spelled} in dimension {axis}, and there are {count} {rows}",
                )
            else:
                requirements.require(shape[axis] > 0, f"{name} {shape} has no elements to read")


def floating_reads(program: Program) -> set[int]:
    """The slots of the floating arrays that score_mod reads: those that have a gradient."""
    roots = () if program.score is None else (program.score,)
    return {node.value for node in order(roots) if node.op == "load" and node.kind == REAL}
