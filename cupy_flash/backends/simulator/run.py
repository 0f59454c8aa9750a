"""The backend: the kernels of a plan on NumPy memory, compiled to PTX and interpreted."""

from __future__ import annotations

from ...ahead import compile_launch
from ...arrays import Array
from ...plan import Plan
from ...problem import Gradients, Operands
from .. import kernels
from . import Memory, launch
from .counters import Counters


def forward(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    return kernels.forward(plan, operands, start)


def backward(plan: Plan, operands: Operands) -> Gradients:
    return kernels.backward(plan, operands, start)


def start(work: kernels.Work) -> list[Counters]:
    """Runs every launch, in order; what each did."""
    memory = Memory()
    addresses: dict[int, int] = {}
    for name, array in work.inputs.items():
        addresses[id(array)] = memory.add(array.numpy(), name, writable=False)
    for name, result in work.results.items():
        if result is not None:
            addresses[id(result)] = memory.add(result.numpy(), name, initialised=False)
    params = work.params(lambda array: addresses[id(array)]).tobytes()
    counters = []
    for step in work.launches:
        target = work.arch.replace("sm_", "compute_")
        ptx = compile_launch(step, target).ptx
        block = (step.threads, 1, 1)
        counters.append(
            launch(ptx, step.function, step.grid, block, params, memory=memory, dynamic_shared=step.shared_bytes)
        )
    return counters
