"""The instructions fence and membar.

Memory is sequentially consistent here: fences only update the checks (what the async proxy may see, checks.py; release
and acquire in global memory, grid_order.py).
"""

from __future__ import annotations

from ..instructions.closures import Compiler, unsupported
from ..machine.context import Context, Group, Step
from ..machine.ptx import Instruction
from ..memory.checks import Checks
from .mbarriers import Mbarriers


def _fence(instruction: Instruction, context: Context) -> Step:
    modifiers = instruction.modifiers
    checks, mbarriers = context.find(Checks), context.unit(Mbarriers)
    if modifiers[0] == "mbarrier_init":
        return mbarriers.fence
    if modifiers[0] != "proxy":
        order = None if checks is None else checks.order
        return (lambda group: None) if order is None else order.fence(instruction)
    if modifiers[1:] not in (("async",), ("async", "shared::cta"), ("async", "shared::cluster"), ("async", "global")):
        raise unsupported(instruction)
    if modifiers[-1] == "global":
        return lambda group: None

    def step(group: Group) -> None:
        mbarriers.fence(group)
        if checks is not None and context.program.asynchronous:
            checks.fence_proxy(group)

    return step


COMPILERS: dict[str, Compiler] = {"fence": _fence, "membar": _fence}
