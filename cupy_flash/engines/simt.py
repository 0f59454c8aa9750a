"""The engine for any GPU and every dtype but fp8, with FMA instructions in the accumulation dtype."""

# No `from __future__ import annotations`, as in records.py.
from functools import lru_cache
from typing import NamedTuple

from ..device import Device
from ..jit.shared_memory import shared_bytes
from ..problem.records import BACKWARD, DOUBLE_BACKWARD, FORWARD, JVP, PREFIXES, Problem
from .kv_cache import append_launches, rotated_rows, static_bytes
from .launch import Constant, Launch, Workspace
from .shared import (
    ATTENTION_OPTIONS,
    ELEMENTS,
    KV_CACHE_OPTIONS,
    SELECTION,
    added_launches,
    captured_reads,
    dtype_refusals,
    grid_refusals,
    known_constants,
    nonempty,
    of_bias,
    owned_launches,
    prefix_refusals,
    row_workspaces,
    sequences,
    shared_constants,
    weights_grid,
    with_mods,
)
from .shared import advantage as advantage
from .shared import forms as forms

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
ARCHES: tuple[str, ...] | None = None
DTYPES: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
OPTIONS: frozenset[str] | None = ATTENTION_OPTIONS | SELECTION
CACHE_OPTIONS: frozenset[str] | None = KV_CACHE_OPTIONS | SELECTION | {*PREFIXES}
CACHE_DTYPES: tuple[str, ...] = ()
DERIVATIVES: tuple[str, ...] = (JVP, DOUBLE_BACKWARD)
STATISTICS: tuple[str, ...] = (FORWARD, BACKWARD)
WEIGHTS: str | None = "gpu.weights"
ON_REQUEST = False
MEASURED: str | None = None
HEAD_DIMS: tuple[tuple[int, int], ...] = ((64, 64), (40, 128), (256, 256))
GROUP_ROWS: tuple[int, ...] = ()
MICRO_KERNELS: tuple[str, ...] = ()
KERNELS = "simt"

LARGEST = 576  # maximum head dimension
LANES = 8  # threads per row of the thread grid over a tile; LANES in simt/tile.cuh
# Maximum 32-bit accumulator registers per thread, by itemsize of the accumulation dtype; the rest of the 255 are for
# operands and addresses. bench/results/static.json shows no spills up to these limits; with 128 the fp64 backward
# spills on sm_90a.
ACCUMULATORS = {4: 128, 8: 120}
OF_LISTS = 16  # of them are for the positions and heads of selected keys
FMA_PER_SECOND = 64 * 1.5e9  # per SM: half of its lanes busy with FMAs, the rest with their loads
# A mainloop step loads two tiles one after the other and waits for each. Blocks on one SM overlap their waits, so
# that only those of one block are counted, for steps of the largest tile.
LOAD_SECONDS, LARGEST_STEP = 2 * 600 / 1.5e9, 64


class Tile(NamedTuple):
    """Number of queries, keys and threads of a block."""

    block_q: int
    block_kv: int
    threads: int


def refusals(problem: Problem, device: Device) -> list[str]:
    """Return reasons against fp8, a grid that is too large, and D or Dv > LARGEST."""
    reasons = dtype_refusals(problem) + grid_refusals(problem) + prefix_refusals(problem)
    if problem.selected is not None:
        from . import selected  # imported by the first call with selected keys

        reasons += selected.refusals(problem, DERIVATIVES)
    if problem.dtype.name not in ELEMENTS:
        return reasons  # no kernel has such a type, so there are no tiles
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > LARGEST:
        reasons.append(f"head dimension {largest} is larger than {LARGEST}")
    elif device.backend in BACKENDS and not tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits the {device.shared_bytes} bytes of shared memory")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the tiles whose kernels fit shared memory and registers, with at least one row per row of threads."""
    limit = ACCUMULATORS[problem.accumulation.itemsize] - OF_LISTS * (problem.selected is not None)
    sizes = (
        Tile(block_q, block_kv, threads)
        for threads in (128, 64)
        for block_q in (8, 16, 32, 64)
        for block_kv in (8, 16, 32, 64)
        if min(block_q, block_kv) * LANES >= threads
    )
    return [
        tile
        for tile in sizes
        if max(_shared_bytes(problem, tile).values()) + _static_bytes(problem, tile) <= device.shared_bytes
        and _accumulators(problem, tile) <= limit
    ]


def choices(problem: Problem, device: Device) -> list[Tile]:
    """Return `tiles`: a tune measures the tiles among which a prediction chooses."""
    return tiles(problem, device)


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted seconds: waves of blocks x time of one block, plus the latency of the loads of one block.

    A block's time is that of its FMAs and of its operand loads, amortised over the scores of a tile.
    """
    dims = problem.head_dim + (0 if problem.weights else problem.head_dim_v)
    products: float
    if problem.weights:
        products = dims
    elif problem.derivative:
        products = dims * (15 / 2 if problem.backward else 3)
    else:
        products = dims * (7 / 2 if problem.backward else 1)
    loads = 4 * dims * (1 / tile.block_q + 1 / tile.block_kv)
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    waves = -(-blocks // device.units)
    # Count at least one pair, so that tiles are ranked in the usual order for a problem without any.
    scores = tile.block_q * max(pairs, 1) / max(problem.q_len, 1)
    computing = waves * scores * (products + loads) / FMA_PER_SECOND / (tile.threads / 128)
    kernels = 2 if problem.backward else 1  # dK/dV and dQ
    if problem.selected is not None:
        from . import selected

        blocks, named = selected.row_visits(problem, pairs, tile.block_q)
        waves, scores = -(-blocks // device.units), tile.block_q * -(-named // tile.block_kv) * tile.block_kv
        computing = waves * scores * (products + loads) / FMA_PER_SECOND / (tile.threads / 128)
    return computing + kernels * -(-scores // (tile.block_q * LARGEST_STEP)) * LOAD_SECONDS


def alike(tile: Tile) -> object:
    """Return the queries of a block, the only part of a tile whose effect on the cost depends on the length."""
    return tile.block_q


def threads(device: Device, tile: Tile, cost: float) -> int:
    """Return the threads per block."""
    return tile.threads


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the workspaces: delta (and delta_tangent) for a backward, the rotated rows of q for a KV cache."""
    if not problem.backward:
        return rotated_rows(problem, q_rows)
    if problem.weights:
        return ()
    rows = row_workspaces(problem, q_rows, "delta", *(("delta_tangent",) if problem.derivative else ()))
    if problem.selected is None:
        return rows
    from . import selected

    return *rows, *selected.key_workspaces(problem, q_rows, kv_rows)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launch of the forward or JVP, or those of a backward: delta, dK/dV, dQ, dbias and dsink."""
    q_tiles = max(-(-problem.q_len // tile.block_q), 1)
    kv_tiles = max(-(-problem.kv_len // tile.block_kv), 1)
    constants = _constants(problem, tile)
    shared = _shared_bytes(problem, tile)

    def launch(kernel: str, grid: tuple[int, int, int]) -> Launch:
        return Launch(kernel, known_constants(kernel, constants), grid, tile.threads, shared.get(kernel, 0))

    if problem.weights and not problem.backward:
        weights = launch(f"simt/{problem.weights}", weights_grid(problem, *tile[:2]))
        return nonempty(with_mods(problem, [*append_launches(problem, constants), weights]))
    if problem.selected is not None:
        from . import selected

        name = "jvp" if problem.derivative else "forward"
        own = [launch(f"simt/selected_{name}", selected.list_grid(problem, tile.block_q))]
        if problem.backward:
            own = [
                launch("delta", (q_tiles, problem.heads, sequences(problem))),
                *selected.key_launches(
                    problem, constants, tile[:2], lambda kernel, grid: launch(f"simt/{kernel}", grid)
                ),
                launch(f"simt/selected_{selected.step(problem)}_q", selected.list_grid(problem, tile.block_q)),
            ]
            own += [launch("dsink", (problem.heads, 1, 1))] * problem.sink
        return nonempty(with_mods(problem, [*append_launches(problem, constants), *own]))
    if not problem.backward:
        name = "simt/jvp" if problem.derivative else "simt/forward"
        forward = launch(name, (q_tiles, problem.heads, sequences(problem)))
        return nonempty(with_mods(problem, [*append_launches(problem, constants), forward]))
    step = "simt/second" if problem.derivative else "simt/backward"
    row_kernels = [] if problem.weights else [launch("delta", (q_tiles, problem.heads, sequences(problem)))]
    backward = [
        *row_kernels,
        launch(f"{step}_kv", (kv_tiles, problem.kv_heads, sequences(problem))),
        launch(f"{step}_q", (q_tiles, problem.heads, sequences(problem))),
    ]
    backward += added_launches(problem, launch(f"{step}_captured", (q_tiles, problem.heads, sequences(problem))))
    if problem.bias is not None and problem.bias_gradient and 0 not in problem.bias:
        batch, heads, rows, columns = (1,) * (4 - len(problem.bias)) + problem.bias
        slices = (q_tiles if rows > 1 else 1) * (kv_tiles if columns > 1 else 1)
        backward.append(of_bias(problem, launch(f"{step}_bias", (slices, heads, batch))))
    backward += owned_launches(problem, tile[:2], lambda grid: launch(f"{step}_bias", grid))
    if problem.sink and not problem.weights:
        backward.append(launch("dsink", (problem.heads, 1, 1)))
    return nonempty(with_mods(problem, backward))


def _constants(problem: Problem, tile: Tile) -> dict[str, Constant]:
    """Return the constants of the kernels."""
    return shared_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "LSE2": False,
        "ADD_DQ": False,
        "DQ_IN_ORDER": False,
    }


def captured_launches(problem: Problem, device: Device) -> list[Launch]:
    """Return the launches that add to gradients of captured arrays whose elements no block owns, for all engines."""
    if all(read.is_owned for read in captured_reads(problem)):
        return []
    largest = max(tiles(problem, device), key=lambda tile: (tile.block_q * tile.block_kv, tile.threads))
    return [x for x in launches(problem, device, largest) if x.kernel.endswith("_captured")]


@lru_cache(maxsize=1024)
def _shared_bytes(problem: Problem, tile: Tile) -> dict[str, int]:
    """Return the bytes of dynamic shared memory of each tile kernel."""
    if problem.selected is not None:
        from . import selected

        kernels = [f"simt/selected_{'jvp' if problem.derivative else 'forward'}"]
        if problem.backward:
            kernels = [f"simt/{selected.key_kernel(problem)}", f"simt/selected_{selected.step(problem)}_q"]
    elif problem.backward:
        step = "simt/second" if problem.derivative else "simt/backward"
        kernels = [f"{step}_{name}" for name in ("kv", "q", "bias", "captured")]
    elif problem.weights:
        kernels = [f"simt/{problem.weights}"]
    else:
        kernels = ["simt/jvp" if problem.derivative else "simt/forward"]
    constants = _constants(problem, tile)
    return {kernel: shared_bytes(kernel, constants) for kernel in kernels}


def _static_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of static shared memory of the tile kernels."""
    if problem.selected is not None:
        from . import selected

        return selected.list_bytes(problem, tile[:2])
    return static_bytes(problem, tile.block_kv)


def _accumulators(problem: Problem, tile: Tile) -> int:
    """Return the 32-bit accumulator registers per thread: S (and dP), and a share of O, of dQ, or of dK and dV.

    A JVP or double backward has twice as many score tiles, and the tangent of O.
    """
    rows = tile.threads // LANES
    scores = tile.block_q * tile.block_kv // tile.threads * (2 if problem.derivative else 1)
    k, v = (-(-dim // 32) * 32 // LANES for dim in (problem.head_dim, problem.head_dim_v))
    if problem.weights and not problem.backward:
        numbers = 2 * scores  # and the sum of a mean
    elif problem.backward:
        numbers = 2 * scores + max(tile.block_kv // rows * (k + v), tile.block_q // rows * k)
    else:
        numbers = scores + tile.block_q // rows * v * (2 if problem.derivative else 1)
    return numbers * problem.accumulation.itemsize // 4
