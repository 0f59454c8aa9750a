"""The engine on the CPU: tiles for NumPy and BLAS, and how many threads they are worth."""

from __future__ import annotations

from typing import NamedTuple

from ..device import Device
from ..launch import Launch
from ..params import Workspace
from ..problem import Problem
from .shared import dtype_refusals

BACKENDS: tuple[str, ...] = ("cpu",)
MEASURED: str | None = "bench/results/cpu.json"

# Nanoseconds on one core of a 2.6 GHz server, S 512 .. 2048, D 32 .. 128, float32 (python -m bench forward backward).
# What counts is how they compare: on another machine all grow or shrink together. The second of two is the backward's.
FLOP = 0.0095  # one floating-point operation inside a matrix product
SCORE = (0.55, 1.0)  # one score between the products: exp and sum; exp, product and twice the traffic
LOAD = 0.35  # one element of Q, K, V, O or a gradient brought to a tile and packed for BLAS, or added up
EDGE = 0.75  # one score of a tile that the mask cuts through: comparing positions, writing -inf
TILE = (8e3, 16e3)  # one tile: the NumPy calls themselves
SPILL = 0.2  # one score of a tile per MiB of scores: a tile competes with its operands for the second-level cache

# Tiles are chosen for this many threads on every machine: their sizes decide how results are rounded, and results
# must not depend on how many threads there are. By these costs the best tiles for each number from 1 to 16 would gain
# 0.5 % on the average of 1,848 problems, and the best for 64 threads 9 %.
THREADS = 16
WAKING = 100e-6  # seconds of work that are worth waking a thread, which takes tens of microseconds


class Tile(NamedTuple):
    block_q: int
    block_kv: int


def refusals(problem: Problem, device: Device) -> list[str]:
    return dtype_refusals(problem)


def tiles(problem: Problem, device: Device) -> list[Tile]:
    return [Tile(block_q, block_kv) for block_q in (64, 128, 256, 512) for block_kv in (128, 256, 512)]


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Core time: a tile costs its products, its passes over the scores, its operands and its calls. Where the tasks do
    not divide among THREADS, that of idle ones too.
    """
    backward = problem.backward
    block_q, block_kv = max(min(tile.block_q, problem.q_len), 1), max(min(tile.block_kv, problem.kv_len), 1)
    dims = problem.head_dim + problem.head_dim_v
    # Tiles at an edge of the mask hold hidden scores: half a tile for each query (backward: key) tile.
    across = block_kv if backward else block_q
    computed = min(pairs + problem.mask.edges * problem.q_len * across / 2, problem.q_len * problem.kv_len)
    if backward:
        products, loaded = 5 * dims, dims / block_kv + 2 * dims / block_q
    else:
        products, loaded = 2 * dims, dims / block_q + problem.head_dim_v / block_kv
    scores = block_q * block_kv
    score = products * FLOP + SCORE[backward] + loaded * LOAD + TILE[backward] / scores
    score += SPILL * scores * problem.accumulation.itemsize * (2 if backward else 1) / 2**20
    edges = problem.mask.edges * problem.q_len * block_kv * EDGE
    heads = problem.batch * problem.heads
    tasks = max(problem.batch * problem.kv_heads if backward else heads * -(-problem.q_len // block_q), 1)
    work = heads * (computed * score + edges) * 1e-9
    sharing = _worth(work, THREADS)
    return work * -(-tasks // sharing) * sharing / tasks


def alike(tile: Tile) -> object:
    return tile


def threads(device: Device, tile: Tile, cost: float) -> int:
    return _worth(cost, device.units)


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    return ()


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    return ()


def _worth(work: float, available: int) -> int:
    """How many threads to use for so many seconds of work: a small problem is done before another thread wakes."""
    return max(1, min(available, int(work / WAKING)))
