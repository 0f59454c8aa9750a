"""How a problem will run: legal candidates, a written cost, the smallest. Pure: nothing is computed, no GPU asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .arrays import Array
from .device import Device
from .problem import DTYPES, ENGINES, Problem, UnsupportedError

Constant = int | bool | str


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a plan: what it is compiled with and how it is started."""

    kernel: str  # "simt/forward": the file below kernels_cu, and its function
    constants: tuple[tuple[str, Constant], ...]  # values for the names of config.cuh
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0

    @property
    def function(self) -> str:
        return self.kernel.rsplit("/")[-1]

    @property
    def tile(self) -> tuple[int, int, int] | None:
        """(queries, keys, threads) of a block; None where a kernel works on rows, without tiles."""
        constants = dict(self.constants)
        if "BLOCK_Q" not in constants:
            return None
        return int(constants["BLOCK_Q"]), int(constants["BLOCK_KV"]), self.threads


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision: which engine, in which tiles, on how many threads. `print(plan)` tells the story in a line."""

    problem: Problem
    device: Device
    engine: str
    block_q: int
    block_kv: int
    threads: int  # of the CPU; of one block on a GPU
    launches: tuple[Launch, ...]  # none on the CPU
    cost: float  # predicted seconds
    refused: tuple[tuple[str, tuple[str, ...]], ...]  # the engines that do not serve the problem, and why

    @property
    def tiles(self) -> str:
        each = "" if self.device.backend == "cpu" else " a block"
        return f"{self.block_q} queries x {self.block_kv} keys, {self.threads} thread{'s' * (self.threads != 1)}{each}"

    def __str__(self) -> str:
        return f"{self.problem} -> {self.engine} on {self.device}: tiles of {self.tiles}"

    def explain(self) -> str:
        """The plan, what it was chosen for, and why the other engines were not."""
        lines = [
            f"problem    {self.problem}",
            f"engine     {self.engine} on {self.device}",
            f"tiles      {self.tiles}",
            f"why        the smallest predicted time of all legal tiles: {self.cost * 1e3:.3g} ms",
        ]
        for launch in self.launches:
            grid = " x ".join(map(str, launch.grid))
            lines.append(
                f"launch     {launch.kernel}: grid {grid}, {launch.shared_bytes / 1024:.1f} KiB of shared memory"
            )
        lines += [f"not {engine:<7}{reason}" for engine, reasons in self.refused for reason in reasons]
        return "\n".join(lines)


@lru_cache(maxsize=1024)
def plan(problem: Problem, device: Device) -> Plan:
    """The plan of a problem on a device; UnsupportedError with every engine's reasons where none serves it."""
    refused = tuple((engine, reasons) for engine in ENGINES if (reasons := _refusals(engine, problem, device)))
    serving = [engine for engine in ENGINES if engine not in dict(refused)]
    if not serving:
        lines = [f"no engine of this version serves this problem: {problem}"]
        lines += [f"  - {engine}: {reason}" for engine, reasons in refused for reason in reasons]
        raise UnsupportedError("\n".join(lines))
    chosen = _cpu_plan if serving[0] == "cpu" else _simt_plan
    return chosen(problem, device, refused)


def launches_at_any_length(problem: Problem, device: Device) -> tuple[Launch, ...]:
    """A launch of every kernel that the plans of this problem may have, whatever its batch, heads and lengths.

    Of all tiles with one block_q the same is best at any length: both its waves and its scores depend on block_q alone.
    """
    plan(problem, device)  # raises where nothing serves the problem
    best: dict[int, SimtTile] = {}
    if device.backend != "cpu":
        for tile in sorted(
            simt_tiles(problem, device), key=lambda tile: (_simt_seconds(problem, 1, device, tile), tile)
        ):
            best.setdefault(tile.block_q, tile)
    return tuple(launch for tile in best.values() for launch in simt_launches(problem, tile))


def _refusals(engine: str, problem: Problem, device: Device) -> tuple[str, ...]:
    """Why an engine does not serve a problem; empty where it does."""
    reasons = []
    if problem.engine not in (None, engine):
        reasons.append(f'engine="{problem.engine}" was asked for')
    if engine in ("mma", "wgmma"):
        return (*reasons, "not part of this version")
    if problem.backend not in (None, device.backend):
        reasons.append(f'backend="{problem.backend}" was asked for')
    if ((problem.backend or device.backend) == "cuda") != problem.device.startswith("cuda"):
        reasons.append(f"the arrays are on {problem.device}, and arrays never change device")
    if problem.dtype.name not in DTYPES:
        reasons.append(f"{problem.dtype.name} is not one of {', '.join(DTYPES)}")
    if (engine == "cpu") != (device.backend == "cpu"):
        reasons.append(f"the call goes to backend {device.backend}")
    if engine == "cpu":
        return tuple(reasons)
    sequences = problem.batch + (problem.layout == "thd")
    for name, count in (("heads", problem.heads), ("sequences", sequences)):
        if count > GRID_LIMIT:
            reasons.append(
                f"{count} {name} are more than the {GRID_LIMIT} blocks of a grid's second and third dimension"
            )
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > 256:
        reasons.append(f"head dimension {largest} is larger than 256")
    elif device.backend != "cpu" and not simt_tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits the {device.shared_bytes} bytes of shared memory")
    return tuple(reasons)


Refused = tuple[tuple[str, tuple[str, ...]], ...]


# The CPU engine.

# Nanoseconds on one core of a 2.6 GHz server, S 512 .. 2048, D 32 .. 128, float32 (python -m bench forward backward).
# What counts is how they compare: on another machine all grow or shrink together. The second of two is the backward's.
FLOP = 0.0095  # one floating-point operation inside a matrix product
SCORE = (0.55, 1.0)  # one score between the products: exp and sum; exp, product and twice the traffic
LOAD = 0.35  # one element of Q, K, V, O or a gradient brought to a tile and packed for BLAS, or added up
EDGE = 0.75  # one score of a tile that the mask cuts through: comparing positions, writing -inf
TILE = (8e3, 16e3)  # one tile: the NumPy calls themselves
SPILL = 0.2  # one score of a tile per MiB of scores: a tile competes with its operands for the second-level cache


def _cpu_plan(problem: Problem, device: Device, refused: Refused) -> Plan:
    tiles = [(block_q, block_kv) for block_q in (64, 128, 256, 512) for block_kv in (128, 256, 512)]
    pairs = problem.mask.band(problem.q_len, problem.kv_len).pairs
    cost, block_q, block_kv = min((_cpu_seconds(problem, pairs, device.units, *tile), *tile) for tile in tiles)
    # Waking a thread takes tens of microseconds: a small problem is done before.
    threads = max(1, min(device.units, int(cost * device.units / 100e-6)))
    return Plan(problem, device, "cpu", block_q, block_kv, threads, (), cost, refused)


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


# The simt engine.

SIMT_LANES = 8  # columns of threads in a tile; tile.cuh's LANES
# Accumulators of one thread, in 32-bit registers, for fp32 and fp64: the rest of 255 holds operands and addresses. Up
# to here the static gate finds no spill (bench/results/static.json); with 128 the backward in fp64 spills on sm_90a.
SIMT_ACCUMULATORS = {4: 128, 8: 120}
GRID_LIMIT = 65535  # blocks in the second and third dimension of a grid
# What the kernels of rows know of a plan. Tiles, masks and scores are nothing to them, so many plans share one.
SIMT_SEQUENCE_CONSTANTS = ("element", "real", "THREADS", "PACKED", "Q_LENGTHS", "KV_LENGTHS", "TOP_LEFT")
SIMT_ROW_CONSTANTS = {
    "delta": (*SIMT_SEQUENCE_CONSTANTS, "HEAD_DIM_V", "DLSE"),
    "dsink": (*SIMT_SEQUENCE_CONSTANTS, "sink_element"),
}
FMA_PER_SECOND = 64 * 1.5e9  # of one multiprocessor: half of its lanes busy with products, the rest with their loads


class SimtTile(NamedTuple):
    block_q: int
    block_kv: int
    threads: int


def _simt_plan(problem: Problem, device: Device, refused: Refused) -> Plan:
    pairs = problem.mask.band(problem.q_len, problem.kv_len).pairs
    cost, tile = min((_simt_seconds(problem, pairs, device, tile), tile) for tile in simt_tiles(problem, device))
    launches = simt_launches(problem, tile)
    return Plan(problem, device, "simt", *tile, launches, cost, refused)


def simt_tiles(problem: Problem, device: Device) -> list[SimtTile]:
    """Tiles whose kernels fit into shared memory and registers. A row of threads has at least one row of the tile."""
    sizes = (
        SimtTile(block_q, block_kv, threads)
        for threads in (128, 64)
        for block_q in (8, 16, 32, 64)
        for block_kv in (8, 16, 32, 64)
        if min(block_q, block_kv) * SIMT_LANES >= threads
    )
    return [
        tile
        for tile in sizes
        if max(_simt_shared(problem, tile).values()) <= device.shared_bytes
        and _simt_accumulators(problem, tile) <= SIMT_ACCUMULATORS[problem.accumulation.itemsize]
    ]


def _simt_shared(problem: Problem, tile: SimtTile) -> dict[str, int]:
    """Bytes of dynamic shared memory by kernel: the arrays at the head of each, strides as in tile.cuh."""
    block_q, block_kv, _ = tile
    size = problem.accumulation.itemsize
    chunk = 16 // size

    def row(dim: int) -> int:
        return (-(-dim // (SIMT_LANES * chunk)) * SIMT_LANES | 1) * chunk

    k, v = row(problem.head_dim), row(problem.head_dim_v)
    if not problem.backward:
        return {"forward": size * (block_q * k + block_kv * max(k, v) + block_q * (block_kv + 8))}
    operands = (block_q + block_kv) * (k + v) + 2 * block_q
    by_query = size * (operands + block_q * (block_kv + 8))
    by_key = size * (operands + block_kv * (block_q + 8))
    return {"backward_kv": by_key, "backward_q": by_query, "backward_bias": by_query}


def _simt_accumulators(problem: Problem, tile: SimtTile) -> int:
    """Registers of one thread that hold sums: its scores (and their gradients), and its part of O, dQ, or dK and dV."""
    rows = tile.threads // SIMT_LANES
    scores = tile.block_q * tile.block_kv // tile.threads
    k, v = (-(-dim // 32) * 32 // SIMT_LANES for dim in (problem.head_dim, problem.head_dim_v))
    if problem.backward:
        numbers = 2 * scores + max(tile.block_kv // rows * (k + v), tile.block_q // rows * k)
    else:
        numbers = scores + tile.block_q // rows * v
    return numbers * problem.accumulation.itemsize // 4


def _simt_seconds(problem: Problem, pairs: int, device: Device, tile: SimtTile) -> float:
    """Waves of blocks by the time of one: products, and the loads of a tile spread over its scores."""
    dims = problem.head_dim + problem.head_dim_v
    products = dims * (7 / 2 if problem.backward else 1)
    loads = 4 * dims * (1 / tile.block_q + 1 / tile.block_kv)
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    waves = -(-blocks // device.units)
    scores = tile.block_q * max(pairs, 1) / max(problem.q_len, 1)  # none: the tile of any other length
    return waves * scores * (products + loads) / FMA_PER_SECOND / (tile.threads / 128)


def simt_launches(problem: Problem, tile: SimtTile) -> tuple[Launch, ...]:
    block_q, block_kv, threads = tile
    packed = problem.layout == "thd"
    # A packed batch has one more: the rows past its last sequence, which belong to none.
    sequences = problem.batch + packed
    q_tiles, kv_tiles = (max(-(-n // block), 1) for n, block in ((problem.q_len, block_q), (problem.kv_len, block_kv)))
    constants = _simt_constants(problem, tile)
    shared = _simt_shared(problem, tile)

    def launch(kernel: str, grid: tuple[int, int, int]) -> Launch:
        known = SIMT_ROW_CONSTANTS.get(kernel)
        # delta alone reads the gradient of lse: the kernels of tiles are the same with and without.
        its = tuple((name, x) for name, x in constants if (name != "DLSE" if known is None else name in known))
        return Launch(kernel, its, grid, threads, shared.get(kernel.removeprefix("simt/"), 0))

    if not problem.backward:
        return _of_something([launch("simt/forward", (q_tiles, problem.heads, sequences))])
    launches = [
        launch("delta", (q_tiles, problem.heads, sequences)),
        launch("simt/backward_kv", (kv_tiles, problem.kv_heads, sequences)),
        launch("simt/backward_q", (q_tiles, problem.heads, sequences)),
    ]
    if problem.bias is not None and problem.bias_gradient and 0 not in problem.bias:
        batch, heads, rows, columns = (1,) * (4 - len(problem.bias)) + problem.bias
        tiles = (q_tiles if rows > 1 else 1) * (kv_tiles if columns > 1 else 1)
        launches.append(launch("simt/backward_bias", (tiles, heads, batch)))
    if problem.sink:
        launches.append(launch("dsink", (problem.heads, 1, 1)))
    return _of_something(launches)


def _of_something(launches: list[Launch]) -> tuple[Launch, ...]:
    """Without those that an empty batch leaves no block: CUDA refuses a grid of none."""
    return tuple(launch for launch in launches if 0 not in launch.grid)


def partials_launch(dtype: np.dtype, other: np.dtype, lse: Array, head_dim_v: int) -> Launch:
    """The launch that merges two partial results with this lse, (B, H, S) or (H, T), one warp a row."""
    batch, heads, rows = (1, *lse.shape)[-3:]
    constants = (
        ("element", ELEMENTS[dtype.name]),
        ("other_element", ELEMENTS[other.name]),
        ("real", ELEMENTS[lse.dtype.name]),
        ("THREADS", 128),
        ("HEAD_DIM_V", head_dim_v),
    )
    return Launch("partials", constants, (-(-rows // (128 // 32)), heads, batch), 128)


ELEMENTS = {"float16": "half16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


def _simt_constants(problem: Problem, tile: SimtTile) -> tuple[tuple[str, Constant], ...]:
    constants: dict[str, Constant] = {
        "element": ELEMENTS[problem.dtype.name],
        "real": ELEMENTS[problem.accumulation.name],
        "bias_element": ELEMENTS[problem.bias_dtype],
        "sink_element": ELEMENTS[problem.sink_dtype],
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "PACKED": problem.layout == "thd",
        "Q_LENGTHS": problem.q_lengths,
        "KV_LENGTHS": problem.kv_lengths,
        "TOP_LEFT": problem.mask.top_left,
        "WINDOW_LEFT": problem.mask.left is not None,
        "WINDOW_RIGHT": problem.mask.right is not None,
        "DENSE_MASK": problem.dense_mask is not None,
        "SOFTCAP": problem.softcap is not None,
        "ALIBI": problem.alibi,
        "BIAS": problem.bias is not None,
        "SINK": problem.sink,
        "DROPOUT": problem.dropout > 0,
        "DLSE": problem.dlse,
    }
    return tuple(constants.items())
