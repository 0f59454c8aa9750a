"""The instructions fence and membar.

Memory is sequentially consistent here: fences only update the checks (what the async proxy may see, checks.py; release
and acquire in global memory, grid_order.py).
"""

from __future__ import annotations

from ..instructions.closures import Compiler, unsupported
from ..machine.context import Context, Group, Step
from ..machine.ptx import Instruction
from ..memory.checks import Checks
from ..memory.grid_order import fence_scope
from .mbarriers import Mbarriers


def _fence(instruction: Instruction, context: Context) -> Step:
    modifiers = instruction.modifiers
    checks, mbarriers = context.find(Checks), context.unit(Mbarriers)
    if modifiers[0] == "mbarrier_init":
        return mbarriers.fence_init
    if modifiers[0] != "proxy":
        return _thread_fence(instruction, checks, context)
    if modifiers[1:] not in (("async",), ("async", "shared::cta"), ("async", "shared::cluster"), ("async", "global")):
        raise unsupported(instruction)
    if modifiers[-1] == "global":
        return lambda group: None

    def step(group: Group) -> None:
        mbarriers.fence_proxy(group)
        if checks is not None and context.program.asynchronous:
            checks.fence_proxy(group)

    return step


def _thread_fence(instruction: Instruction, checks: Checks | None, context: Context) -> Step:
    """Compile fence{.sc|.acq_rel|.acquire|.release} and membar."""
    steps: list[Step] = []
    if checks is not None:
        if context.program.relaxed and fence_scope(instruction) != "cta" and instruction.modifiers[0] != "acquire":
            steps.append(checks.fence_release)
        if checks.order is not None:
            steps.append(checks.order.fence(instruction))

    def step(group: Group) -> None:
        for one in steps:
            one(group)

    return step


COMPILERS: dict[str, Compiler] = {"fence": _fence, "membar": _fence}
