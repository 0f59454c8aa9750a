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
    tiles = [(block_q, block_kv) for block_q in (64, 128, 256, 512) for block_kv in (128, 256, 512)]
    pairs = problem.mask.band(problem.q_len, problem.kv_len).pairs
    cost, block_q, block_kv = min((_cpu_seconds(problem, pairs, device.units, *tile), *tile) for tile in tiles)
    # Waking a thread takes tens of microseconds: a small problem is done before.
    threads = max(1, min(device.units, int(cost * device.units / 100e-6)))
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


# Nanoseconds on one core of a 2.6 GHz server, S 512 .. 2048, D 32 .. 128, float32 (python -m bench forward backward).
# What counts is how they compare: on another machine all grow or shrink together. The second of two is the backward's.
FLOP = 0.0095  # one floating-point operation inside a matrix product
SCORE = (0.55, 1.0)  # one score between the products, exp and sum; exp, product and twice the traffic
LOAD = 0.35  # one element of Q, K, V, O or a gradient brought to a tile and packed for BLAS, or added up
EDGE = 0.75  # one score of a tile that the mask cuts through: comparing positions, writing -inf
TILE = (8e3, 16e3)  # one tile: the NumPy calls themselves
SPILL = 0.2  # one score of a tile per MiB of scores: a tile competes with its operands for the second-level cache


def _cpu_seconds(problem: Problem, pairs: int, threads: int, block_q: int, block_kv: int) -> float:
    """Predicted time. A tile costs its products, its passes over the scores, its operands and its calls.

    `pairs`: how many (query, key) pairs are seen, of one sequence and head.
    """
    backward = problem.backward
    block_q, block_kv = max(min(block_q, problem.q_len), 1), max(min(block_kv, problem.kv_len), 1)
    dims = problem.head_dim + problem.head_dim_v
    sides = (problem.mask.left is not None) + (problem.mask.right is not None)
    # Tiles at an edge of the mask hold hidden scores: half a tile for each query (backward: key) tile and side.
    across = block_kv if backward else block_q
    computed = min(pairs + sides * problem.q_len * across / 2, problem.q_len * problem.kv_len)
    if backward:
        products, loaded = 5 * dims, dims / block_kv + 2 * dims / block_q
    else:
        products, loaded = 2 * dims, dims / block_q + problem.head_dim_v / block_kv
    tile = block_q * block_kv
    score = products * FLOP + SCORE[backward] + loaded * LOAD + TILE[backward] / tile
    score += SPILL * tile * problem.accumulation.itemsize * (2 if backward else 1) / 2**20
    edges = sides * problem.q_len * block_kv * EDGE
    heads = problem.batch * problem.heads
    tasks = max(problem.batch * problem.kv_heads if backward else heads * -(-problem.q_len // block_q), 1)
    rounds = -(-tasks // threads)
    return heads * (computed * score + edges) * 1e-9 * rounds / tasks
