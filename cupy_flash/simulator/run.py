"""The simulator backend: a plan's kernels, compiled to PTX and executed on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..arrays import Array, as_array
from ..device import Device
from ..engines.launch import Launch
from ..gpu import indexer as gpu_indexer
from ..gpu import run_plan
from ..gpu import weights as gpu_weights
from ..gpu.kept_launches import KeptLaunches
from ..gpu.run_plan import compile_launch
from ..gpu.tensor_map import ALIGNMENT, encode_for_simulator
from ..plan.plan import Plan
from ..problem.indexer import Indexer, IndexerOperands
from ..problem.records import Gradients, Operands
from ..problem.weights import Asked, WeightsGradients
from . import Memory, launch
from .asynchrony.copies import Order
from .counters import Counters


def forward(plan: Plan, operands: Operands) -> tuple[Array, ...]:
    """Simulate the forward; returns (out, lse), followed by the statistics of the problem."""
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


def weights(plan: Plan, operands: Operands, asked: Asked) -> tuple[Array, ...]:
    """Simulate a call that returns probabilities; returns its results."""
    return gpu_weights.forward(plan, operands, asked, start)


def weights_backward(plan: Plan, operands: Operands, asked: Asked) -> WeightsGradients:
    """Simulate the backward of a call that returns probabilities; returns the gradients."""
    return gpu_weights.backward(plan, operands, asked, start)


def indexer(function: str, call: Indexer, operands: IndexerOperands, device: Device) -> object:
    """Simulate a function of the lightning indexer; returns its results."""
    return getattr(gpu_indexer, function)(call, operands, device, start)


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
    launches = [(each, work.arguments(each, params, address, encode_for_simulator)) for each in work.launches]
    return _run(launches, work.arch, memory, order, seed)


def repeat(kept: KeptLaunches, inputs: Sequence[Any], addresses: list[int]) -> list[Any] | None:
    """Simulate what an earlier call has launched, on other arrays; returns the outputs."""
    allocated = kept.allocate(inputs[0])
    if allocated is None:
        return None
    outputs, memory = allocated[0], Memory()
    simulated = [
        memory.add(as_array(x, name).numpy(), name, writable=name in kept.written)
        for name, x in zip(kept.inputs, inputs, strict=True)
    ]
    simulated += addresses[len(simulated) :]  # numbers
    simulated += [
        memory.add(as_array(x, name).numpy(), name, initialised=False)
        for name, x in zip(kept.outputs, outputs, strict=True)
    ]
    _run(kept.arguments(simulated, encode_for_simulator), kept.arch, memory, "late", 0)
    return outputs


def _run(
    launches: Iterable[tuple[Launch, tuple[np.ndarray, ...]]], arch: str, memory: Memory, order: Order, seed: int
) -> list[Counters]:
    """Run launches with these arguments in order; return the counters of each."""
    counters = []
    for step, arguments in launches:
        ptx = compile_launch(step, arch.replace("sm_", "compute_")).ptx
        parameters = b""
        for argument in arguments:
            # Pad to the next argument's offset: tensor maps are aligned to ALIGNMENT, Params holds 8-byte numbers.
            parameters = parameters.ljust(-(-len(parameters) // ALIGNMENT) * ALIGNMENT, b"\0") + argument.tobytes()
        counters.append(
            launch(
                ptx, step.function, step.grid, (step.threads, 1, 1), parameters, memory=memory,
                dynamic_shared=step.shared_bytes, order=order, seed=seed,
            )
        )  # fmt: skip
    return counters
