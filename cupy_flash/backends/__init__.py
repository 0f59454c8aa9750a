"""run(plan, operands): each backend is one way to do the same two things, `forward` and `backward`."""

from __future__ import annotations

from ..arrays import Array
from ..device import cpu as cpu_device
from ..plan import Plan, plan
from ..problem import Gradients, Operands, Problem


def plan_for(problem: Problem) -> Plan:
    """The plan of a problem on the device where its arrays live."""
    return plan(problem, cpu_device())


def forward(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """(out, lse) of a problem posed as a forward."""
    chosen = plan_for(problem)
    from . import cpu

    return cpu.forward(chosen, operands)


def backward(problem: Problem, operands: Operands) -> Gradients:
    """The gradients, as Arrays, of a problem posed as a backward."""
    chosen = plan_for(problem)
    from . import cpu

    return cpu.backward(chosen, operands)
