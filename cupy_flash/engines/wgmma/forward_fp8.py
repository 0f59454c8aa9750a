"""The forward of fp8 (e4m3): its tiles, their written cost, and its launches: V is turned before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...device import Device
from ...launch import Constant, Launch
from ...params import Workspace
from ...problem import Problem
from ...tensor_map import Box
from ..fragments import fragment_constants
from ..shared import known_constants, nonempty, sequences
from .hopper import (
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
    asks_for_registers,
    columns,
)

WIDE_PANEL, NARROW_PANEL = 128, 64  # columns of a box of Q and K, and of V^T: fp8.cuh
ROW = 16  # numbers: what a box's rows begin with a multiple of

# Numbers of one thread that live through scores and softmax, by the warpgroups that share the registers: without
# options, and with those that ask for registers; and through the sums of a tile. Up to here the static gate finds no
# spill.
LIVE = {2: (232, 200), 3: (144, 120)}
LIVE_IN_SUMS = {2: 200, 3: 120}
# e4m3 ends at 448 = 2^8.8, and loses its last bit below 2^-6: probabilities go up to 2^8 where the reference is, and
# from there to 2^8.8.
LARGEST_LOG2, RESCALE_ABOVE = 8, 0.8


class Tile(NamedTuple):
    block_q: int
    block_kv: int
    stages: int
    sum_columns: int  # of O, whose sums over a tile are made at once

    @property
    def warpgroups(self) -> int:
        """Those that compute; one more brings tiles."""
        return self.block_q // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)


def refusals(problem: Problem) -> list[str]:
    """Beyond those of the engine."""
    reasons = ["fp8 has no gradients"] if problem.backward else []
    odd = [dim for dim in {problem.head_dim, problem.head_dim_v} if dim % ROW]
    if odd:
        reasons.append(f"head dimensions of fp8 are multiples of {ROW}, not {', '.join(map(str, sorted(odd)))}")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose scores, probabilities and sums fit into registers, each with the longest rings that fit."""
    found = []
    options = asks_for_registers(problem)
    wide = columns(problem.head_dim_v)
    for warpgroups, limits in LIVE.items():
        for block_kv in (192, 128, 64):
            left = LIVE_IN_SUMS[warpgroups] - wide // 2 - block_kv // 8  # for the sums
            at_once = [x for x in (128, 96, 64) if wide % x == 0 and x // 2 <= left]
            if not at_once or block_kv * 7 // 8 + wide // 2 > limits[options]:
                continue
            shapes = (Tile(WARPGROUP_ROWS * warpgroups, block_kv, stages, at_once[0]) for stages in (4, 3, 2))
            found += [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]
    return found


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Waves of blocks by the time of one, as of 16-bit numbers with twice the products in a clock; and the pass that
    turns V."""
    dims = problem.head_dim + columns(problem.head_dim_v)
    elements = tile.block_q * tile.block_kv
    loaded = tile.block_kv * dims
    # Each warpgroup reads the tiles of K and V^T, and Q as often.
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
    turned = 2 * problem.batch * problem.kv_heads * problem.kv_len * problem.head_dim_v / device.units / CACHE_BYTES
    return (waves * (-(-visited // tile.block_kv) * (clocks + STEP * (1 + steps_of_sums)) + BLOCK) + turned) / CLOCK


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """V^T: whole tiles of keys along its rows. Each sequence of a packed batch begins with a tile of its own (vt.cuh).
    In bytes, as not every library has a dtype of 8-bit floats."""
    packed = problem.layout == "thd"
    tiles = kv_rows // tile.block_kv + problem.batch if packed else -(-kv_rows // tile.block_kv)
    keys, dims = tiles * tile.block_kv, problem.head_dim_v
    shape = (1 if packed else problem.batch, problem.kv_heads, dims, keys)
    strides = (problem.kv_heads * dims * keys, dims * keys, keys, 8)
    return (Workspace("vt", shape, np.dtype(np.uint8), strides),)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    constants: dict[str, Constant] = fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "TAKE_TURNS": False,
        "SUM_COLUMNS": tile.sum_columns,
        "LARGEST_LOG2": LARGEST_LOG2,
        "RESCALE_ABOVE": RESCALE_ABOVE,
        "O_BOXES": problem.layout != "thd",  # a packed batch's last would reach into the next sequence
    }
    turn, kernel = "wgmma/vt", "wgmma/forward_fp8"
    key_tiles = max(-(-problem.kv_len // tile.block_kv), 1)
    turning = Launch(
        turn,
        known_constants(turn, constants | {"THREADS": 128}),
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
    return nonempty([turning, forward])


def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of shared memory: Q, in whose place O leaves in 16 bits; K and V^T of each stage; two mbarriers of each
    place."""
    qk = -(-problem.head_dim // WIDE_PANEL) * WIDE_PANEL
    out = 2 * -(-problem.head_dim_v // PANEL) * PANEL
    keys = tile.block_kv * (qk + columns(problem.head_dim_v))
    return tile.block_q * max(qk, out) + tile.stages * keys + 16 * (1 + 2 * tile.stages)
