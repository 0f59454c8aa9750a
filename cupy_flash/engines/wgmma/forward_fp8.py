"""The Hopper forward for fp8 (e4m3): legal tiles, cost model and launches. A first kernel transposes V."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...device import Device
from ...launch import Constant, Launch
from ...params import Workspace
from ...problem import Problem
from ...tensor_map import Box
from ..fragments import fragment_constants, is_modified
from ..shared import known_constants, nonempty, sequences, with_mods
from .hopper import (
    BLOCK,
    CACHE_BYTES,
    CLOCK,
    EXPONENTIALS,
    MULTIPLY_ADDS,
    PANEL,
    RECORD_BYTES,
    SHARED_BYTES,
    STEP,
    WARP_ROWS,
    WARPGROUP_ROWS,
    columns,
    live_in_loads,
    needs_registers,
)

WIDE_PANEL, NARROW_PANEL = 128, 64  # columns of a TMA box of Q and K, and of V^T: fp8.cuh
ROW = 16  # head dimensions are a multiple: TMA needs rows aligned to 16 bytes

# Limit of registers per thread, by consumer warpgroups: of O and the softmax, without and with options that need
# registers (needs_registers); and of S, P, O and a part of P V in flight together. The static gate finds no spill up to
# it. Tiles of 192 keys spill.
LIVE = {2: (232, 200), 3: (144, 120)}
LIVE_IN_SUMS = {2: 200, 3: 112}
# e4m3 ends at 448 = 2^8.8 and is subnormal below 2^-6, so P is scaled up to 2^8 at the row max; lazy rescaling lets it
# grow by another 2^0.8.
LARGEST_LOG2, RESCALE_ABOVE = 8, 0.8


class Tile(NamedTuple):
    """Queries of a block, keys of a mainloop step, and the columns of O that are summed apart."""

    block_q: int
    block_kv: int
    stages: int
    sum_columns: int  # columns of O per P V wgmma, accumulated separately and then added to O

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; the block has one more, the producer."""
        return self.block_q // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and the producer warpgroup."""
        return 128 * (self.warpgroups + 1)


def refusals(problem: Problem) -> list[str]:
    """Reasons specific to fp8, beyond those of the engine."""
    reasons = ["fp8 has no gradients"] if problem.backward else []
    odd = [dim for dim in {problem.head_dim, problem.head_dim_v} if dim % ROW]
    if odd:
        reasons.append(f"head dimensions of fp8 are multiples of {ROW}, not {', '.join(map(str, sorted(odd)))}")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose S, P and O fit the registers, each with the most pipeline stages that fit shared memory."""
    legal = []
    options = needs_registers(problem)
    modified = is_modified(problem) or problem.dense_mask is not None
    wide = columns(problem.head_dim_v)
    for warpgroups, limits in LIVE.items():
        for block_kv in (128, 64):
            # Registers for the P V accumulator beside P, O and S; with a pass over the scores P V and S do not overlap.
            left = LIVE_IN_SUMS[warpgroups] - wide // 2 - block_kv * (1 if modified else 5) // 8
            widths = [x for x in (128, 96, 64) if wide % x == 0 and x // 2 <= left]
            live = block_kv * 7 // 8 + wide // 2 + live_in_loads(problem, block_kv)
            if not widths or live > limits[options]:
                continue
            shapes = (Tile(WARPGROUP_ROWS * warpgroups, block_kv, stages, widths[0]) for stages in (4, 3, 2))
            legal += [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]
    return legal


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Waves of blocks times the time of one block, with twice the 16-bit wgmma rate, plus the transposition of V."""
    dims = problem.head_dim + columns(problem.head_dim_v)
    elements = tile.block_q * tile.block_kv
    loaded = tile.block_kv * dims
    # Per step, each warpgroup's wgmma read the K and V^T tiles and its rows of Q from shared memory.
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
    """V^T, with whole tiles of keys along its rows.

    Each sequence of a packed batch begins with a tile of its own (vt.cuh). The dtype is uint8, as not every library has
    8-bit floats.
    """
    packed = problem.layout == "thd"
    tiles = kv_rows // tile.block_kv + problem.batch if packed else -(-kv_rows // tile.block_kv)
    keys, dims = tiles * tile.block_kv, problem.head_dim_v
    shape = (1 if packed else problem.batch, problem.kv_heads, dims, keys)
    strides = (problem.kv_heads * dims * keys, dims * keys, keys, 8)
    return (Workspace("vt", shape, np.dtype(np.uint8), strides),)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """The transpose of V, then the forward."""
    constants: dict[str, Constant] = fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "PINGPONG": False,
        "O_BUFFER": False,
        "SUM_COLUMNS": tile.sum_columns,
        "LARGEST_LOG2": LARGEST_LOG2,
        "RESCALE_ABOVE": RESCALE_ABOVE,
        "TMA_STORE_O": problem.layout != "thd",  # in a packed batch a box would overwrite the next sequence
    }
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


def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of shared memory.

    Q (reused to stage the bf16 O for the TMA store), stages x (K + V^T), a full/empty mbarrier pair for Q and for each
    K and V^T, and the records of tiles of keys under a mask_mod.
    """
    qk = -(-problem.head_dim // WIDE_PANEL) * WIDE_PANEL
    out = 2 * -(-problem.head_dim_v // PANEL) * PANEL
    keys = tile.block_kv * (qk + columns(problem.head_dim_v))
    records = RECORD_BYTES if problem.mask_mod else 0
    return tile.block_q * max(qk, out) + tile.stages * keys + 16 * (1 + 2 * tile.stages) + records
