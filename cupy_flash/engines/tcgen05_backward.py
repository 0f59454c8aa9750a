"""The Blackwell backward for fp16 and bf16: legal tiles, cost model and launches."""

# No `from __future__ import annotations`, as in records.py.
from functools import lru_cache
from typing import NamedTuple

from ..device import Device
from ..jit.shared_memory import shared_bytes
from ..problem.records import Problem
from . import mma
from .fragments import backward_workspaces, fragment_backward, fragment_constants
from .launch import Box, Constant, Launch, Workspace
from .shared import grid_refusals, known_constants, sequences

LARGEST = 128  # maximum head dimensions: tensor memory holds two score tiles, dK and dV
ROWS = 128  # queries and keys of a tile
PANEL = 64  # columns of a TMA box: 128 bytes, one swizzle row
THREADS = 512
MOST_STAGES = 4  # slots of Q; dO has one less

# Cost model, per SM and clock, as for the forward.
MULTIPLY_ADDS = 4096
PRODUCT_COST = 1.4
EXPONENTIALS = 16
STEP = 400  # clocks of waits and signals per step
BLOCK = 3000  # clocks of prologue and epilogue per block
CLOCK = 1.85e9


class Tile(NamedTuple):
    """Queries of a mainloop step, keys of a block, slots of Q, and how dQ is added."""

    block_q: int
    block_kv: int
    stages: int
    dq_in_bulk: bool


def refusals(problem: Problem) -> list[str]:
    """Return reasons against head dimensions, options and grids of the backward."""
    reasons = grid_refusals(problem)
    if problem.shared_kv:
        reasons.append("it computes no gradient of values inside keys in this version")
    if problem.head_dim_v * problem.dtype.itemsize % 16:
        reasons.append(f"rows of dout, {problem.head_dim_v} numbers each, do not all start at a multiple of 16 bytes")
    if (largest := max(problem.head_dim, problem.head_dim_v)) > LARGEST:
        reasons.append(
            f"head dimension {largest} is larger than {LARGEST}: two score tiles, dK and dV do not fit tensor memory"
        )
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the tile with as many stages as fit shared memory."""
    shapes = (Tile(ROWS, ROWS, stages, not problem.deterministic) for stages in range(MOST_STAGES, 1, -1))
    return [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted seconds: waves of blocks x the slower of products and exponentials."""
    elements = tile.block_q * tile.block_kv
    products = elements * (3 * problem.head_dim + 2 * problem.head_dim_v) * PRODUCT_COST / MULTIPLY_ADDS
    clocks = STEP + max(products, elements / EXPONENTIALS)
    blocks = max(problem.batch * problem.kv_heads * -(-problem.kv_len // tile.block_kv), 1)
    visited = problem.mask.visited(problem.group * pairs / max(problem.kv_len, 1), tile.block_kv, tile.block_q)
    waves = -(-blocks // device.units)
    return waves * (-(-visited // tile.block_q) * clocks + BLOCK) / CLOCK


def workspaces(problem: Problem, q_rows: int) -> tuple[Workspace, ...]:
    """Return the workspaces delta, lse2 and dq_sums, and for a deterministic backward dq_semaphore and tile_counter."""
    return backward_workspaces(problem, q_rows, add_dq=True, in_order=problem.deterministic)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launches: row kernels, the backward, and the kernels of mma and simt for bias and captured arrays."""
    kernel, constants = "tcgen05/backward", _constants(problem, tile)
    boxes = tuple(Box(name, ROWS, PANEL) for name in ("q", "k", "v", "dout"))
    grid = max(-(-problem.kv_len // tile.block_kv), 1), problem.kv_heads, sequences(problem)
    launch = Launch(kernel, known_constants(kernel, constants), grid, THREADS, _shared_bytes(problem, tile), boxes)
    tile_launches = [launch, *mma.array_launches(problem, device, mma.bias_tile(problem, device))]
    return fragment_backward(problem, tile_launches, add_dq=True, in_order=problem.deterministic)


def _constants(problem: Problem, tile: Tile) -> dict[str, Constant]:
    """Return the constants of the kernel."""
    return fragment_constants(problem) | {
        "THREADS": THREADS,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "DQ_IN_ORDER": problem.deterministic,
        "DQ_IN_BULK": tile.dq_in_bulk,
    }


@lru_cache(maxsize=1024)
def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of dynamic shared memory."""
    return shared_bytes("tcgen05/backward", _constants(problem, tile))
