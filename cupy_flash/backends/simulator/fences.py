"""Fences: memory is sequentially consistent here; what they tell is what the asynchronous proxy may see."""

from __future__ import annotations

from .closures import Compiler, unsupported
from .lanes import Context, Group, Step
from .ptx import Instruction


def _fence(instruction: Instruction, context: Context) -> Step:
    modifiers = instruction.modifiers
    if modifiers[0] == "mbarrier_init":
        return lambda group: context.mbarriers.fence(group.rows)
    if modifiers[0] != "proxy":
        return lambda group: None
    if modifiers[1:] not in (("async",), ("async", "shared::cta"), ("async", "shared::cluster"), ("async", "global")):
        raise unsupported(instruction)
    if modifiers[-1] == "global":
        return lambda group: None

    def step(group: Group) -> None:
        context.mbarriers.fence(group.rows)
        if context.checks is not None:
            context.checks.clocks.fence(group.rows)

    return step


COMPILERS: dict[str, Compiler] = {"fence": _fence, "membar": _fence}
