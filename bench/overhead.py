"""Host time of a call before the kernel launch: validation, planning, allocating outputs, packing parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from cupy_flash import backends, device
from cupy_flash.backends import kernels
from cupy_flash.plan import Plan, plan
from cupy_flash.pose import pose
from cupy_flash.problem import Options, Problem

from .report import Table

SHAPE = (2, 1024, 8, 64)
CALLS, ROUNDS = 200, 25


def measure(frameworks: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return the median seconds of each host step of a forward, by the framework of the arrays."""
    return {framework: _steps(framework) for framework in frameworks}


def here() -> tuple[str, ...]:
    """Return the frameworks available on this machine."""
    import torch

    on_gpu = torch.cuda.is_available()
    return ("numpy", "torch", *(("cupy", "torch on the GPU") if on_gpu else ()))


def _steps(framework: str) -> dict[str, float]:
    arrays = tuple(_array(framework) for _ in range(3))
    problem, operands = pose("attention", arrays, Options(causal=True))
    gpu_plan = _plan(problem)
    return {
        "pose": _seconds(lambda: pose("attention", arrays, Options(causal=True))),
        "plan": _seconds(lambda: _plan(problem)),
        "outputs and pack": _seconds(lambda: kernels.forward(gpu_plan, operands, _pack)),
    }


def _plan(problem: Problem) -> Plan:
    """Plan for a GPU even if the arrays are on the CPU."""
    if problem.device != "cpu":
        return backends.plan_for(problem)
    return plan(problem, SIMULATED)


SIMULATED = device.named("sm_90a")


def _pack(work: kernels.Work) -> None:
    work.params(lambda array: array.pointer)


def _array(framework: str) -> Any:
    if framework == "numpy":
        return np.zeros(SHAPE, np.float32)
    if framework == "cupy":
        import cupy

        return cupy.zeros(SHAPE, np.float32)
    import torch

    return torch.zeros(SHAPE, device="cpu" if framework == "torch" else "cuda")


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call, the median of ROUNDS means over CALLS."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - begin) / CALLS)
    return median(rounds)


def tables(section: dict[str, dict[str, float]]) -> list[Table]:
    """Return a table with the microseconds of each step on the host."""
    steps = list(next(iter(section.values())))
    rows = [
        [framework, *(f"{1e6 * seconds[step]:.1f}" for step in steps), f"{1e6 * sum(seconds.values()):.1f}"]
        for framework, seconds in section.items()
    ]
    return [Table("Host time of a forward before its launch, microseconds (median)", ["arrays", *steps, "sum"], rows)]
