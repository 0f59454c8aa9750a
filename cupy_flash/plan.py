"""How a problem will run: legal candidates, a written cost, and the smallest. Pure: nothing is computed and no GPU is
asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .device import Device
from .problem import DTYPES, ENGINES, Problem, UnsupportedError


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision: which engine, in which tiles, on how many threads. `print(plan)` tells the story in a line."""

    problem: Problem
    device: Device
    backend: str
    engine: str
    block_q: int
    block_kv: int
    threads: int
    cost: float  # predicted seconds
    refused: tuple[tuple[str, tuple[str, ...]], ...]  # the engines that do not serve the problem, and why

    @property
    def tiles(self) -> str:
        return f"{self.block_q} queries x {self.block_kv} keys, {self.threads} thread{'s' * (self.threads != 1)}"

    def __str__(self) -> str:
        return f"{self.problem} -> {self.engine} on {self.device}: tiles of {self.tiles}"

    def explain(self) -> str:
        """The plan, what it was chosen for, and why the other engines were not."""
        lines = [
            f"problem    {self.problem}",
            f"engine     {self.engine} (backend {self.backend}) on {self.device}",
            f"tiles      {self.tiles}",
            f"why        the smallest predicted time of all legal tiles: {self.cost * 1e3:.3g} ms",
        ]
        lines += [f"not {engine:<7}{reason}" for engine, reasons in self.refused for reason in reasons]
        return "\n".join(lines)


@lru_cache(maxsize=1024)
def plan(problem: Problem, device: Device) -> Plan:
    """The plan of a problem on a device; UnsupportedError with every engine's reasons where none serves it."""
    refused = tuple((engine, reasons) for engine in ENGINES if (reasons := _refusals(engine, problem)))
    if "cpu" in dict(refused):
        lines = [f"no engine of this version serves this problem: {problem}"]
        lines += [f"  - {engine}: {reason}" for engine, reasons in refused for reason in reasons]
        raise UnsupportedError("\n".join(lines))
    tiles = [(block_q, block_kv) for block_q in (32, 64, 128, 256) for block_kv in (64, 128, 256, 512, 1024)]
    cost, block_q, block_kv = min((_cpu_cost(problem, device, *tile), *tile) for tile in tiles)
    tasks = (
        problem.batch * problem.kv_heads
        if problem.backward
        else -(-problem.q_len // block_q) * problem.batch * problem.heads
    )
    # Waking threads takes longer than a small problem does.
    threads = 1 if cost < 200e-6 else max(1, min(device.units, tasks))
    return Plan(problem, device, "cpu", "cpu", block_q, block_kv, threads, cost, refused)


def _refusals(engine: str, problem: Problem) -> tuple[str, ...]:
    """Why an engine does not serve a problem; empty where it does."""
    reasons = []
    if problem.engine not in (None, engine):
        reasons.append(f'engine="{problem.engine}" was asked for')
    if engine != "cpu":
        return (*reasons, "not part of this version, which computes on the CPU alone")
    if problem.backend not in (None, "cpu"):
        reasons.append(f'backend="{problem.backend}" was asked for')
    if problem.device != "cpu":
        reasons.append(f"the arrays are on {problem.device}, and arrays never change device")
    if problem.dtype.name not in DTYPES:
        reasons.append(f"{problem.dtype.name} is not one of {', '.join(DTYPES)}")
    return tuple(reasons)


def _cpu_cost(problem: Problem, device: Device, block_q: int, block_kv: int) -> float:
    return abs(block_q - 256) + abs(block_kv - 512)
