"""The Hopper forward for fp8 (e4m3), after a kernel that transposes V: legal tiles, cost model and launches."""

# No `from __future__ import annotations`, as in records.py.
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...device import Device
from ...jit.shared_memory import shared_bytes
from ...problem.records import Problem
from ..fragments import fragment_constants
from ..launch import Box, Constant, Launch, Workspace
from ..shared import key_bytes, known_constants, nonempty, sequences, with_mods
from .resources import (
    BLOCK,
    CACHE_BYTES,
    CLOCK,
    EXPONENTIALS,
    MULTIPLY_ADDS,
    PANEL,
    SHARED_BYTES,
    STEP,
    WARP_ROWS,
    WARPGROUP_ROWS,
    columns,
    live_in_loads,
    needs_registers,
)

WIDE_PANEL, NARROW_PANEL = 128, 64  # columns of TMA boxes, as in wgmma/fp8.cuh
ROW = 16  # divisor of head dimensions, because TMA needs rows aligned to 16 bytes

# Maximum registers per thread by consumer warpgroups: LIVE for O and the softmax, without and with options that need
# registers (needs_registers); LIVE_IN_SUMS for S, P, O and a part of P V in flight together, likewise, a sink among
# the options. Up to these limits nothing spills (bench/results/static.json). Tiles of 192 keys spill.
LIVE = {2: (232, 200), 3: (144, 120)}
LIVE_IN_SUMS = {2: (224, 200), 3: (112, 112)}
# The largest e4m3 is 448 = 2^8.8, and numbers below 2^-6 are subnormal, so P is scaled to 2^8 at the row max; lazy
# rescaling lets it grow by another 2^0.8.
LARGEST_LOG2, RESCALE_ABOVE = 8, 0.8


class Tile(NamedTuple):
    """Queries of a block, keys of a mainloop step, stages, and columns of O per P V wgmma."""

    block_q: int
    block_kv: int
    stages: int
    sum_columns: int  # columns of O per P V wgmma, which has its own accumulator that is then added to O

    @property
    def warpgroups(self) -> int:
        """Number of consumer warpgroups; the block has a producer warpgroup as well."""
        return self.block_q // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Threads per block: the consumer and the producer warpgroups."""
        return 128 * (self.warpgroups + 1)


def refusals(problem: Problem) -> list[str]:
    """Return the reasons specific to fp8 why the engine cannot serve a problem."""
    reasons = ["fp8 has no gradients"] if problem.backward else []
    odd = [dim for dim in {problem.head_dim, problem.head_dim_v} if dim % ROW]
    if odd:
        reasons.append(f"head dimensions of fp8 are multiples of {ROW}, not {', '.join(map(str, sorted(odd)))}")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the tiles whose S, P and O fit the registers, each with as many pipeline stages as fit shared memory."""
    legal = []
    options = needs_registers(problem)
    modified = problem.is_modified or problem.dense_mask is not None
    wide = columns(problem.head_dim_v)
    for warpgroups, limits in LIVE.items():
        for block_kv in (128, 64):
            # Registers left for the P V accumulator beside O, P and, unless a pass over the scores separates them, S.
            left = (
                LIVE_IN_SUMS[warpgroups][options or problem.sink] - wide // 2 - block_kv * (1 if modified else 5) // 8
            )
            widths = [x for x in (128, 96, 64) if wide % x == 0 and x // 2 <= left]
            live = block_kv * 7 // 8 + wide // 2 + live_in_loads(problem, block_kv)
            if not widths or live > limits[options]:
                continue
            shapes = (Tile(WARPGROUP_ROWS * warpgroups, block_kv, stages, widths[0]) for stages in (4, 3, 2))
            legal += [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]
    return legal


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted seconds: waves x time of a block, with twice the 16-bit wgmma rate, plus the transpose of V."""
    dims = problem.head_dim + columns(problem.head_dim_v)
    elements = tile.block_q * tile.block_kv
    loaded = tile.block_kv * dims
    # Per step, the wgmma of each warpgroup read the K and V^T tiles and its rows of Q from shared memory.
    read = tile.warpgroups * loaded + tile.block_q * problem.head_dim
    clocks = max(
        elements * (dims / (2 * MULTIPLY_ADDS) + 1 / EXPONENTIALS),
        (loaded + read) / SHARED_BYTES,
        loaded / CACHE_BYTES,
    )
    steps_of_sums = columns(problem.head_dim_v) // tile.sum_columns
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    visited = problem.mask.visited(pairs / max(problem.q_len, 1), tile.block_q, tile.block_kv)
    waves = -(-blocks // device.units)
    transpose = 2 * problem.batch * problem.kv_heads * problem.kv_len * problem.head_dim_v / device.units / CACHE_BYTES
    return (waves * (-(-visited // tile.block_kv) * (clocks + STEP * (1 + steps_of_sums)) + BLOCK) + transpose) / CLOCK


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the workspace of V^T, whose rows are whole tiles of keys.

    Each sequence of a packed batch starts a new tile (wgmma/vt.cuh). The dtype is uint8, because not every library has
    8-bit floats.
    """
    packed = problem.layout == "thd"
    tiles = kv_rows // tile.block_kv + problem.batch if packed else -(-kv_rows // tile.block_kv)
    keys, dims = tiles * tile.block_kv, problem.head_dim_v
    shape = (1 if packed else problem.batch, problem.kv_heads, dims, keys)
    strides = (problem.kv_heads * dims * keys, dims * keys, keys, 8)
    return (Workspace("vt", shape, np.dtype(np.uint8), strides),)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launches of the transpose of V and of the forward."""
    constants = _constants(problem, tile)
    vt, kernel = "wgmma/vt", "wgmma/forward_fp8"
    key_tiles = max(-(-problem.kv_len // tile.block_kv), 1)
    transpose = Launch(
        vt,
        known_constants(vt, constants | {"THREADS": 128}),
        (key_tiles, problem.kv_heads, sequences(problem)),
        128,
    )
    boxes = [
        Box("q", tile.block_q, WIDE_PANEL),
        Box("k", tile.block_kv, WIDE_PANEL),
        Box("vt", columns(problem.head_dim_v), NARROW_PANEL, layout="bhsd"),
    ]
    if problem.layout != "thd":
        boxes.append(Box("out", WARP_ROWS, PANEL))
    grid = max(-(-problem.q_len // tile.block_q), 1), problem.heads, sequences(problem)
    forward = Launch(
        kernel, known_constants(kernel, constants), grid, tile.threads, _shared_bytes(problem, tile), tuple(boxes)
    )
    return nonempty(with_mods(problem, [transpose, forward]))


def _constants(problem: Problem, tile: Tile) -> dict[str, Constant]:
    """Return the constants of the kernel."""
    return fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "KEY_BYTES": key_bytes(problem),
        "PINGPONG": False,
        "O_BUFFER": False,
        "SUM_COLUMNS": tile.sum_columns,
        "LARGEST_LOG2": LARGEST_LOG2,
        "RESCALE_ABOVE": RESCALE_ABOVE,
        "TMA_STORE_O": problem.layout != "thd",  # in a packed batch a box would overwrite the next sequence
    }


@lru_cache(maxsize=1024)
def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of dynamic shared memory."""
    return shared_bytes("wgmma/forward_fp8", _constants(problem, tile))
