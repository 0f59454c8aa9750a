"""The simulator backend: a plan's kernels, compiled to PTX and executed on NumPy arrays."""

from __future__ import annotations

from ..arrays import Array
from ..gpu import run_plan
from ..gpu.run_plan import compile_launch
from ..gpu.tensor_map import ALIGNMENT, encode_for_simulator
from ..plan.plan import Plan
from ..problem.records import Gradients, Operands
from . import Memory, launch
from .asynchrony.copies import Order
from .counters import Counters


def forward(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    """Simulate the forward; returns (out, lse)."""
    return run_plan.forward(plan, operands, start)


def jvp(plan: Plan, operands: Operands) -> tuple[Array, Array, Array, Array]:
    """Simulate the JVP; returns (out, lse, tout, tlse)."""
    return run_plan.jvp(plan, operands, start)


def append(plan: Plan, operands: Operands) -> None:
    """Simulate the append of rows to a KV cache."""
    run_plan.append(plan, operands, start)


def backward(plan: Plan, operands: Operands) -> Gradients:
    """Simulate the backward; returns the gradients."""
    return run_plan.backward(plan, operands, start)


def double_backward(plan: Plan, operands: Operands) -> Gradients:
    """Simulate the double backward; returns the second gradients."""
    return run_plan.backward(plan, operands, start)


def start(work: run_plan.Work, *, order: Order = "late", seed: int = 0) -> list[Counters]:
    """Run every launch in order; return the counters of each. `order` and `seed` are those of `launch`."""
    memory = Memory()
    addresses: dict[int, int] = {}
    for name, array in work.inputs.items():
        addresses[id(array)] = memory.add(array.numpy(), name, writable=name in work.written)
    for name, result in work.results.items():
        if result is not None:
            addresses[id(result)] = memory.add(result.numpy(), name, initialised=False)

    def address(array: Array) -> int:
        return addresses[id(array)]

    params = work.params(address)
    counters = []
    for step in work.launches:
        target = work.arch.replace("sm_", "compute_")
        ptx = compile_launch(step, target).ptx
        block = (step.threads, 1, 1)
        parameters = b""
        for argument in work.arguments(step, params, address, encode_for_simulator):
            # Pad to the next argument's offset: tensor maps are aligned to ALIGNMENT, Params holds 8-byte numbers.
            parameters = parameters.ljust(-(-len(parameters) // ALIGNMENT) * ALIGNMENT, b"\0") + argument.tobytes()
        counters.append(
            launch(
                ptx, step.function, step.grid, block, parameters, memory=memory, dynamic_shared=step.shared_bytes,
                order=order, seed=seed,
            )
        )  # fmt: skip
    return counters
