"""The forward's tiles, their written cost and its launch."""

from __future__ import annotations

from typing import NamedTuple

from ...device import Device
from ...launch import (
    Constant,
    Launch,
    fragment_constants,
    is_modified,
    known_constants,
    of_something,
    sequences,
)
from ...problem import Problem
from ...tensor_map import Box
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
    columns,
)

# Numbers of one thread that live through a step (scores, probabilities and O), by the warpgroups that share the
# registers: without options, and with those that ask for registers. Up to here the static gate finds no spill.
LIVE = {2: (188, 180), 3: (112, 92)}


class Tile(NamedTuple):
    block_q: int
    block_kv: int
    stages: int

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
    of_lengths = problem.q_lengths or problem.kv_lengths or problem.layout == "thd"
    of_scores = is_modified(problem) or problem.dense_mask is not None or problem.mask.left is not None
    options = of_lengths or of_scores or problem.dropout > 0
    for warpgroups, limits in LIVE.items():
        for block_kv in (128, 96, 80, 64):
            if block_kv * 3 // 4 + columns(problem.head_dim_v) // 2 > limits[options]:
                continue
            shapes = (Tile(WARPGROUP_ROWS * warpgroups, block_kv, stages) for stages in (4, 3, 2))
            found += [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]
    return found


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Waves of blocks by the time of one. Published kernels of this kind come near the sum of products and
    exponentials, not the larger of the two."""
    dims = problem.head_dim + columns(problem.head_dim_v)
    elements = tile.block_q * tile.block_kv
    loaded = 2 * tile.block_kv * dims
    # Each warpgroup reads the tiles of K and V, and Q as often.
    read = tile.warpgroups * loaded + 2 * tile.block_q * problem.head_dim
    clocks = max(
        elements * (dims / MULTIPLY_ADDS + 1 / EXPONENTIALS), (loaded + read) / SHARED_BYTES, loaded / CACHE_BYTES
    )
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    # Tiles at an edge of the mask hold hidden scores: half a step and half a tile for each side.
    sides = (problem.mask.left is not None) + (problem.mask.right is not None)
    seen = pairs / max(problem.q_len, 1) + sides * (tile.block_q + tile.block_kv) / 2
    waves = -(-blocks // device.units)
    return waves * (-(-seen // tile.block_kv) * (clocks + STEP) + BLOCK) / CLOCK


def workspaces(problem: Problem, tile: Tile) -> tuple[str, ...]:
    return ()


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    constants: dict[str, Constant] = fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "O_BOXES": _is_stored_in_boxes(problem),
    }
    kernel = "wgmma/forward"
    boxes = [Box("q", tile.block_q, PANEL), Box("k", tile.block_kv, PANEL), Box("v", tile.block_kv, PANEL)]
    if _is_stored_in_boxes(problem):
        boxes.append(Box("out", WARP_ROWS, PANEL))
    grid = max(-(-problem.q_len // tile.block_q), 1), problem.heads, sequences(problem)
    launch = Launch(
        kernel,
        known_constants(kernel, constants),
        grid,
        tile.threads,
        _shared_bytes(problem, tile),
        tuple(boxes),
    )
    return of_something([launch])


def _is_stored_in_boxes(problem: Problem) -> bool:
    """Whether boxes of O may be written: of a packed batch the last would reach into the next sequence, and rows start
    at multiples of 16 bytes."""
    return problem.layout != "thd" and problem.head_dim_v % 8 == 0


def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of shared memory: Q, in whose place O leaves; K and V of each stage; two mbarriers of each place."""
    k, v = (-(-dim // PANEL) * PANEL for dim in (problem.head_dim, problem.head_dim_v))
    return 2 * tile.block_q * max(k, v) + tile.stages * 2 * tile.block_kv * (k + v) + 16 * (1 + 2 * tile.stages)
