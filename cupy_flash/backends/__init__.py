"""forward(problem, operands) and backward(problem, operands): each backend is one way to do the same two things."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from .. import device, partials
from ..arrays import Array
from ..device import Device
from ..launch import Launch
from ..plan import Plan, plan
from ..problem import Gradients, Operands, Problem, UnsupportedError

# Said where CuPy is missing.
EXTRA = '; the extra of your CUDA version brings it: python -m pip install "cupy-flash[cuda13]" (or cuda12)'
SIMULATED = "sm_80"  # what backend="simulator" simulates


def device_of(problem: Problem) -> Device:
    """Where a problem runs: where its arrays live, unless the caller asked for a backend.

    UnsupportedError where that is a GPU which CuPy cannot use.
    """
    backend = problem.backend or problem.device.partition(":")[0]
    if backend == "simulator":
        return device.named(SIMULATED)
    if backend == "cpu" or problem.device == "cpu":  # also where the plan will refuse: arrays never change device
        return device.cpu()
    return _gpu(problem.device)


def _gpu(name: str) -> Device:
    """The GPU that arrays name, "cuda:0"; UnsupportedError where CuPy cannot use it."""
    try:
        return device.gpu(int(name.partition(":")[2]))
    except (ImportError, OSError, RuntimeError) as error:  # no CuPy; no folder for its cache; no driver or no such GPU
        raise UnsupportedError(
            f"the arrays are on {name}, and arrays never change device; CuPy, which starts the kernels there, "
            f"cannot use it: {error}{EXTRA if isinstance(error, ImportError) else ''}"
        ) from error


def plan_for(problem: Problem) -> Plan:
    """The plan of a problem on the device where it runs."""
    return plan(problem, device_of(problem))


def forward(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """(out, lse) of a problem posed as a forward."""
    return run_forward(plan_for(problem), operands)


def backward(problem: Problem, operands: Operands) -> Gradients:
    """The gradients, as Arrays, of a problem posed as a backward."""
    return run_backward(plan_for(problem), operands)


def run_forward(chosen: Plan, operands: Operands) -> tuple[Array, Array]:
    out_and_lse: tuple[Array, Array] = _module(chosen).forward(chosen, operands)
    return out_and_lse


def run_backward(chosen: Plan, operands: Operands) -> Gradients:
    gradients: Gradients = _module(chosen).backward(chosen, operands)
    return gradients


def merge(parts: tuple[Array, Array, Array, Array], layout: str) -> tuple[Array, Array]:
    """(out, lse) of two partial results, where they live."""
    if parts[0].device == "cpu":
        return partials.merge(parts, layout)
    card = _gpu(parts[0].device)
    from . import cuda

    return cuda.merge(parts, layout, card.arch)


def load(launches: Iterable[Launch], on: Device) -> None:
    """The kernels of launches made ready on the current GPU."""
    from . import cuda

    for launch in launches:
        cuda.load(launch, on.arch)


MODULES = {"cpu": ".cpu", "cuda": ".cuda", "simulator": ".simulator.run"}


def _module(chosen: Plan) -> Any:
    """The backend's module, imported when first needed: what it imports takes time, or is not there."""
    return importlib.import_module(MODULES[chosen.device.backend], __package__)
