"""Describes a traced mod as text, for `cupy_flash.explain`."""

from __future__ import annotations

from .derive import derivative, floating_reads
from .ir import expression
from .tiles import TileCounts
from .trace import Mod


def explain(mod: Mod, *, gradients: bool = True) -> str:
    """Return lines with the expressions and captured values of a mod; with gradients, also score_mod's derivative."""
    score, mask = mod.program.score, mod.program.mask
    lines = [f"mods       {' and '.join(mod.names)}"]
    if score is not None:
        lines.append(f"score_mod  {expression(score)}")
    if score is not None and gradients:
        lines.append(f"slope      {expression(derivative(score).slope)}")
    if mask is not None:
        lines.append(f"mask_mod   {expression(mask)}")
    differentiated = floating_reads(mod.program) if gradients else set()
    for slot, (element, array) in enumerate(zip(mod.program.arrays, mod.arrays, strict=True)):
        gradient = ", with a gradient" if slot in differentiated else ""
        lines.append(f"{f'array{slot}':<11}{element.dtype} {tuple(array.shape)}{gradient}")
    if mod.numbers:
        lines.append(f"numbers    {', '.join(f'n{index} = {number:g}' for index, number in enumerate(mod.numbers))}")
    return "\n".join(lines)


def explain_tiles(counts: TileCounts | None, block_q: int, block_kv: int) -> str:
    """Return a line with the number of tiles of each class; `counts` is None if they were not counted."""
    if counts is None:
        return "classes    of tiles are not counted: arrays of the mask are on a GPU, or there are too many tiles"
    total = max(sum(counts), 1)
    shares = (
        f"{count} {name} ({count / total:.0%})"
        for name, count in zip(("skipped", "unmasked", "masked"), counts, strict=True)
    )
    return f"classes    {', '.join(shares)} of the tiles of {block_q} x {block_kv}, all heads and sequences"
