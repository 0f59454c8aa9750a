"""The CPU engine: tile sizes for NumPy and BLAS, their cost model and the number of threads."""

# No `from __future__ import annotations`, as in records.py.
from typing import NamedTuple

from ..device import Device
from ..problem.features import FLOATING
from ..problem.records import BACKWARD, DOUBLE_BACKWARD, FORWARD, JVP, Problem
from .launch import Launch, Workspace
from .shared import ATTENTION_OPTIONS, SELECTION, dtype_refusals
from .shared import advantage as advantage
from .shared import forms as forms

BACKENDS: tuple[str, ...] = ("cpu",)
ARCHES: tuple[str, ...] | None = None
DTYPES: tuple[str, ...] = FLOATING
OPTIONS: frozenset[str] | None = ATTENTION_OPTIONS | SELECTION
CACHE_OPTIONS: frozenset[str] | None = None
CACHE_DTYPES: tuple[str, ...] = ()
DERIVATIVES: tuple[str, ...] = (JVP, DOUBLE_BACKWARD)
STATISTICS: tuple[str, ...] = (FORWARD, BACKWARD)
WEIGHTS: str | None = "cpu.weights"
ON_REQUEST = False
MEASURED: str | None = "bench/results/cpu.json"
HEAD_DIMS: tuple[tuple[int, int], ...] = ()
GROUP_ROWS: tuple[int, ...] = ()
MICRO_KERNELS: tuple[str, ...] = ()
KERNELS = "cpu.attention"

# Cost model in nanoseconds on one core of a 2.6 GHz server, fitted for S 512 to 2048, D 32 to 128, float32 (python -m
# bench forward backward). Only ratios matter, which are similar on other machines. Tuples are (forward, backward).
FLOP = 0.0095  # per floating-point operation of a matmul
SCORE = (0.55, 1.0)  # per score between the matmuls: exp and sum; exp, product and twice the memory traffic
LOAD = 0.35  # per element of Q, K, V, O or a gradient: load, packing by BLAS, accumulation
EDGE = 0.75  # per score of a partly masked tile: compare positions, write -inf
TILE = (8e3, 16e3)  # per tile: overhead of the NumPy calls
ROWS = 5e4  # per query tile (backward: key tile) with a mask_mod: find its visits, start and finish its sums
MASKED = 2e4  # per visit of a tile to which a mask_mod is applied: overhead of its NumPy calls
SPILL = 0.2  # per score, for each MiB of scores in a tile: they evict operands from the L2 cache

# Tiles are chosen for this many threads on every machine, because tile sizes determine the rounding and results must
# not depend on the number of threads. By this cost model, tiles chosen per thread count would be 0.5 % faster for 1 to
# 16 threads (average of 1,848 problems) and 9 % faster for 64.
THREADS = 16
PIECES = 8  # number of threads for which a backward splits heads, see `pieces`
WAKING = 100e-6  # seconds of work that justify a thread, whose start takes tens of microseconds


class Tile(NamedTuple):
    """Number of queries and keys of a tile."""

    block_q: int
    block_kv: int


def refusals(problem: Problem, device: Device) -> list[str]:
    """Return the reasons against fp8, and against what cpu/selected.py does not compute; [] if there are none."""
    reasons = dtype_refusals(problem)
    if problem.selected is not None:
        weights = f"gradients of {problem.weights}" if problem.weights and problem.backward else problem.weights
        served = weights == "attention_weights"
        absent = ("" if served else weights, "shard" * problem.shard)
        reasons += [f"it computes no {what} with selected keys in this version" for what in absent if what]
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return all tile sizes, which are the same on every machine."""
    return [Tile(block_q, block_kv) for block_q in (64, 128, 256, 512) for block_kv in (128, 256, 512)]


def choices(problem: Problem, device: Device) -> list[Tile]:
    """Return `tiles`: a tune measures the tiles among which a prediction chooses."""
    return tiles(problem, device)


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted core seconds: matmuls, passes over the scores, operand loads and call overhead of every tile.

    They include the idle time of threads when the tasks do not divide evenly among THREADS.
    """
    backward = problem.backward
    if problem.selected is not None:
        pairs = min(pairs, problem.q_len * problem.selected.entries * problem.selected.block)
    block_q, block_kv = max(min(tile.block_q, problem.q_len), 1), max(min(tile.block_kv, problem.kv_len), 1)
    dims = problem.head_dim + problem.head_dim_v
    # Each edge of the mask adds half a tile of masked scores per query (backward: key) tile.
    across = block_kv if backward else block_q
    computed = min(pairs + problem.mask.edges * problem.q_len * across / 2, problem.q_len * problem.kv_len)
    if backward:
        products, loaded = (10 if problem.derivative else 5) * dims, dims / block_kv + 2 * dims / block_q
    elif problem.derivative:
        products, loaded = 6 * dims, 2 * dims / block_q + problem.head_dim_v / block_kv
    else:
        products, loaded = 2 * dims, dims / block_q + problem.head_dim_v / block_kv
    scores = block_q * block_kv
    score = products * FLOP + SCORE[backward] + loaded * LOAD + TILE[backward] / scores
    score += SPILL * scores * problem.accumulation.itemsize * (2 if backward else 1) / 2**20
    edges = problem.mask.edges * problem.q_len * block_kv * EDGE
    heads = problem.batch * problem.heads
    backward_tasks = problem.batch * problem.kv_heads * pieces(problem, block_kv)
    tasks = max(backward_tasks if backward else heads * -(-problem.q_len // block_q), 1)
    work = heads * (computed * score + edges) * 1e-9
    sharing = worth(work, THREADS)
    return work * -(-tasks // sharing) * sharing / tasks


def pieces(problem: Problem, block_kv: int) -> int:
    """Return the number of tasks into which a backward splits the key tiles of a head; only shapes determine it.

    Heads are split where they are too few for PIECES threads, but not where they add to the same elements of a
    gradient. A piece has at least two key tiles, since each loads Q and dO and has its own dQ, which costs 3 to 20 %
    more core time; PIECES is therefore below THREADS.
    """
    if problem.derivative or (problem.bias is not None and problem.bias_gradient) or any(problem.captured_gradient):
        return 1
    heads = max(problem.batch * problem.kv_heads, 1)
    return max(1, min(-(-PIECES // heads), problem.kv_len // (2 * block_kv)))


def alike(tile: Tile) -> object:
    """Return the tile itself, since nothing is compiled for the CPU."""
    return tile


def threads(device: Device, tile: Tile, cost: float) -> int:
    """Return as many threads as `cost` core seconds keep busy, at most one per core."""
    return worth(cost, device.units)


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return (): NumPy allocates as it computes."""
    return ()


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return (): the CPU has no kernels."""
    return ()


def worth(work: float, available: int) -> int:
    """Return the number of threads, at most `available`, that `work` core seconds keep busy; at least one."""
    return max(1, min(available, int(work / WAKING)))
