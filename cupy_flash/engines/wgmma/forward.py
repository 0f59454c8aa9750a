"""The forward's tiles, their written cost and its launch."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

from ...device import Device
from ...launch import (
    Constant,
    Launch,
    fragment_constants,
    known_constants,
    of_something,
    sequences,
)
from ...problem import Problem
from ...tensor_map import Box
from .hopper import (
    BLOCK,
    CACHE_BYTES,
    CLEAR,
    CLOCK,
    EXPONENTIALS,
    MULTIPLY_ADDS,
    NEXT_TILE,
    PANEL,
    SHARED_BYTES,
    STEP,
    WARP_ROWS,
    WARPGROUP_ROWS,
    asks_for_registers,
    columns,
)

# Numbers of one thread that live through a step (scores, probabilities and O), by the warpgroups that share the
# registers: of blocks of one tile; of those that draw tiles or whose warpgroups take turns; and with options that ask
# for registers. Up to here the static gate finds no spill.
LIVE = {2: (188, 180, 180), 3: (112, 104, 92)}
RELOAD_ABOVE = {2: 180, 3: 100}  # above so many of them the kernel rematerialises the sequence instead of keeping it
WORK_BYTES = 48  # of tile_scheduler.cuh's struct, in whole 16


class Tile(NamedTuple):
    block_q: int
    block_kv: int
    stages: int
    persistent: bool  # a block for each multiprocessor
    takes_turns: bool  # warpgroups begin products one after the other
    paired: bool  # two blocks of neighbouring tiles bring keys for both

    @property
    def warpgroups(self) -> int:
        """Those that compute; one more brings tiles."""
        return self.block_q // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose scores, probabilities and sums fit into registers, each with the longest rings that fit."""
    found = []
    options = asks_for_registers(problem)
    ways = product(LIVE.items(), (128, 96, 80, 64), (False, True), (False, True), (False, True))
    for (warpgroups, limits), block_kv, persistent, takes_turns, paired in ways:
        block_q = WARPGROUP_ROWS * warpgroups
        if paired and (persistent or not _visit_alike(problem, block_q)):
            continue
        live = _live(problem, block_kv)
        if live > limits[2 if options else persistent or takes_turns]:
            continue
        sizes = ((block_q, block_kv, stages) for stages in (4, 3, 2))
        fitting = [size for size in sizes if _shared_bytes(problem, *size) <= device.shared_bytes]
        found += [Tile(*size, persistent, takes_turns, paired) for size in fitting[:1]]
    return found


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Waves of blocks by the time of one. Published kernels of this kind come near the sum of products and
    exponentials, not the larger of the two. What turns and pairs are worth only a GPU can tell: by this cost,
    nothing."""
    dims = problem.head_dim + columns(problem.head_dim_v)
    elements = tile.block_q * tile.block_kv
    loaded = 2 * tile.block_kv * dims
    # Each warpgroup reads the tiles of K and V, and Q as often.
    read = tile.warpgroups * loaded + 2 * tile.block_q * problem.head_dim
    clocks = max(
        elements * (dims / MULTIPLY_ADDS + 1 / EXPONENTIALS), (loaded + read) / SHARED_BYTES, loaded / CACHE_BYTES
    )
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    visited = problem.mask.visited(pairs / max(problem.q_len, 1), tile.block_q, tile.block_kv)
    waves, clear = float(-(-blocks // device.units)), 0.0
    if tile.persistent:
        clear = CLEAR
        # Unequal tiles, drawn one by one and the longest first, leave nobody waiting.
        waves = max(blocks / device.units, 1.0) if problem.mask.edges else waves
    block = NEXT_TILE if tile.persistent else BLOCK
    return waves * (-(-visited // tile.block_kv) * (clocks + STEP) + block) / CLOCK + clear


def workspaces(problem: Problem, tile: Tile) -> tuple[str, ...]:
    return ("drawn",) * tile.persistent


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    constants: dict[str, Constant] = fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "PERSISTENT": tile.persistent,
        "PINGPONG": tile.takes_turns,
        "RELOAD_SEQUENCE": _reloads_sequence(problem, tile),
        "KV_MULTICAST": tile.paired,
        "TMA_STORE_O": _is_stored_in_boxes(problem),
    }
    kernel = "wgmma/forward"
    keys = tile.block_kv // (1 + tile.paired)
    boxes = [Box("q", tile.block_q, PANEL), Box("k", keys, PANEL), Box("v", keys, PANEL)]
    if _is_stored_in_boxes(problem):
        boxes.append(Box("out", WARP_ROWS, PANEL))
    grid = max(-(-problem.q_len // tile.block_q), 1), problem.heads, sequences(problem)
    if tile.persistent:
        grid = min(math.prod(grid), device.units), 1, 1
    launch = Launch(
        kernel,
        known_constants(kernel, constants),
        grid,
        tile.threads,
        _shared_bytes(problem, tile.block_q, tile.block_kv, tile.stages),
        tuple(boxes),
    )
    return of_something([Launch("wgmma/clear", (), (1, 1, 1), 1), launch] if tile.persistent else [launch])


def _visit_alike(problem: Problem, block_q: int) -> bool:
    """Whether two neighbouring tiles of queries always visit the same keys."""
    return not problem.mask.edges and not problem.has_lengths and -(-problem.q_len // block_q) % 2 == 0


def _live(problem: Problem, block_kv: int) -> int:
    """Registers of a thread for S, P and O."""
    return block_kv * 3 // 4 + columns(problem.head_dim_v) // 2


def _reloads_sequence(problem: Problem, tile: Tile) -> bool:
    """True if S, P and O leave few registers, and the sequence does not depend on the batch entry."""
    same = not (problem.has_lengths or problem.shard)
    return same and _live(problem, tile.block_kv) > RELOAD_ABOVE[tile.warpgroups]


def _is_stored_in_boxes(problem: Problem) -> bool:
    """Whether boxes of O may be written: of a packed batch the last would reach into the next sequence, and rows start
    at multiples of 16 bytes."""
    return problem.layout != "thd" and problem.head_dim_v % 8 == 0


def _shared_bytes(problem: Problem, block_q: int, block_kv: int, stages: int) -> int:
    """Bytes of shared memory: Q, in whose place O leaves; K and V of each stage; two mbarriers of each place; what Q is
    of."""
    k, v = (-(-dim // PANEL) * PANEL for dim in (problem.head_dim, problem.head_dim_v))
    return 2 * block_q * max(k, v) + stages * 2 * block_kv * (k + v) + 16 * (1 + 2 * stages) + WORK_BYTES
