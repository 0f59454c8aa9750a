"""Checks of the arrays that a call's mods capture, and which of these get gradients."""

from __future__ import annotations

from ..mods.ir import INPUTS, Program, order
from .checks import ArrayFacts, Requirements


def check_captured(
    requirements: Requirements,
    arrays: dict[str, ArrayFacts],
    program: Program,
    counts: tuple[int, int, int, int],
) -> None:
    """Check that captured arrays are long enough where b, h, q_idx or kv_idx itself is an index.

    `counts` are the numbers of sequences, query heads, queries and keys; for a shard those of the whole call.
    """
    named = (("b", "b", "sequences"), ("h", "h", "query heads"), ("q", "q_idx", "queries"), ("kv", "kv_idx", "keys"))
    extents = {name: (spelled, rows, count) for (name, spelled, rows), count in zip(named, counts, strict=True)}
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
