"""A traced mod in words, for `cupy_flash.explain`."""

from __future__ import annotations

from .derive import derivative
from .facts import floating_reads
from .ir import expression
from .trace import Mod


def explain(mod: Mod) -> str:
    """The expressions of a mod, the slope of score_mod, and what it captures, a line each."""
    score, mask = mod.program.score, mod.program.mask
    lines = [f"mods       {' and '.join(mod.names)}"]
    if score is not None:
        lines += [f"score_mod  {expression(score)}", f"slope      {expression(derivative(score).slope)}"]
    if mask is not None:
        lines.append(f"mask_mod   {expression(mask)}")
    differentiated = floating_reads(mod.program)
    for slot, (element, array) in enumerate(zip(mod.program.arrays, mod.arrays, strict=True)):
        gradient = ", with a gradient" if slot in differentiated else ""
        lines.append(f"{f'array{slot}':<11}{element.dtype} {tuple(array.shape)}{gradient}")
    if mod.numbers:
        lines.append(f"numbers    {', '.join(f'n{index} = {number:g}' for index, number in enumerate(mod.numbers))}")
    return "\n".join(lines)
