"""fence and membar. Memory is sequentially consistent here: fences only update the checks (what the async proxy may
see, checks.py; release and acquire in global memory, grid_order.py)."""

from __future__ import annotations

from .closures import Compiler, unsupported
from .lanes import Context, Group, Step
from .ptx import Instruction


def _fence(instruction: Instruction, context: Context) -> Step:
    modifiers = instruction.modifiers
    if modifiers[0] == "mbarrier_init":
        return context.mbarriers.fence
    if modifiers[0] != "proxy":
        order = None if context.checks is None else context.checks.order
        return (lambda group: None) if order is None else order.fence(instruction)
    if modifiers[1:] not in (("async",), ("async", "shared::cta"), ("async", "shared::cluster"), ("async", "global")):
        raise unsupported(instruction)
    if modifiers[-1] == "global":
        return lambda group: None

    def step(group: Group) -> None:
        context.mbarriers.fence(group)
        if context.checks is not None and context.program.asynchronous:
            context.checks.fence_proxy(group)

    return step


COMPILERS: dict[str, Compiler] = {"fence": _fence, "membar": _fence}
