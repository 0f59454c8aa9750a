"""The engine of Hopper (sm_90a): warpgroups multiply tiles that another one brings, both while scores become
probabilities. The forward, in fp16 and bf16."""

from __future__ import annotations

from typing import NamedTuple

from ..device import Device
from ..launch import (
    Constant,
    Launch,
    fragment_constants,
    fragment_refusals,
    grid_refusals,
    is_modified,
    known_constants,
    of_something,
    sequences,
)
from ..problem import Problem
from ..tensor_map import Box

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
MEASURED: str | None = None

ARCH = "sm_90a"
LARGEST = 256  # head dimension
WARPGROUP_ROWS = 64  # queries of a warpgroup
PANEL = 64  # columns of a box: rows of 128 bytes
COLUMNS = (64, 96, 128, 192, 256)  # of O, by the products that hopper.cuh has; tile.cuh's fragments_of
# Numbers of one thread that live through a step (scores, probabilities and O), by the warpgroups that share the
# registers: without options, and with those that ask for registers. Up to here the static gate finds no spill.
LIVE = {2: (188, 180), 3: (112, 92)}

# What the cost is made of, of one multiprocessor and clock. Nothing here was measured on a GPU by this project yet.
MULTIPLY_ADDS = 2048
EXPONENTIALS = 16
SHARED_BYTES = 128
CACHE_BYTES = 32  # from the second-level cache
STEP = 100  # clocks of a step for waiting and signalling
BLOCK = 2000  # clocks of a block before its first product and after its last
CLOCK = 1.5e9


class Tile(NamedTuple):
    block_q: int
    block_kv: int
    stages: int

    @property
    def warpgroups(self) -> int:
        """Those that compute; one more brings tiles."""
        return self.block_q // WARPGROUP_ROWS


def refusals(problem: Problem, device: Device) -> list[str]:
    reasons = grid_refusals(problem) + fragment_refusals(problem)
    if problem.engine != "wgmma":
        reasons.append('not measured on a GPU yet, so it serves only who asks for it: engine="wgmma"')
    if device.backend in BACKENDS and device.arch != ARCH:
        reasons.append(f"{device.arch} has not the instructions of {ARCH}")
    if problem.backward:
        reasons.append("it has no gradients yet")
    if problem.dtype.name not in ("float16", "bfloat16"):
        reasons.append(f"{problem.dtype.name} is not float16 or bfloat16")
    if 0 in (problem.batch, problem.q_len, problem.kv_len):
        reasons.append("a tensor without elements has no boxes to copy")
    if not problem.aligned:
        reasons.append("not every row of q, k and v starts at a multiple of 16 bytes: only mma and simt read such")
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > LARGEST:
        reasons.append(f"head dimension {largest} is larger than {LARGEST}")
    elif device.backend in BACKENDS and not tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits the {device.shared_bytes} bytes of shared memory")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose scores, probabilities and sums fit into registers, each with the longest rings that fit."""
    found = []
    of_lengths = problem.q_lengths or problem.kv_lengths or problem.layout == "thd"
    of_scores = is_modified(problem) or problem.dense_mask is not None or problem.mask.left is not None
    options = of_lengths or of_scores or problem.dropout > 0
    for warpgroups, limits in LIVE.items():
        for block_kv in (128, 96, 80, 64):
            if block_kv * 3 // 4 + _columns(problem.head_dim_v) // 2 > limits[options]:
                continue
            shapes = (Tile(WARPGROUP_ROWS * warpgroups, block_kv, stages) for stages in (4, 3, 2))
            found += [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]
    return found


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Waves of blocks by the time of one. Published kernels of this kind come near the sum of products and
    exponentials, not the larger of the two."""
    dims = problem.head_dim + _columns(problem.head_dim_v)
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


def alike(tile: Tile) -> object:
    return tile


def threads(device: Device, tile: Tile, cost: float) -> int:
    return 128 * (tile.warpgroups + 1)


def workspaces(problem: Problem, tile: Tile) -> tuple[str, ...]:
    return ()


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    constants: dict[str, Constant] = fragment_constants(problem) | {
        "THREADS": threads(device, tile, 0),
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
    }
    kernel = "wgmma/forward"
    boxes = (Box("q", tile.block_q, PANEL), Box("k", tile.block_kv, PANEL), Box("v", tile.block_kv, PANEL))
    grid = max(-(-problem.q_len // tile.block_q), 1), problem.heads, sequences(problem)
    launch = Launch(
        kernel,
        known_constants(kernel, constants),
        grid,
        threads(device, tile, 0),
        _shared_bytes(problem, tile),
        boxes,
    )
    return of_something([launch])


def _columns(head_dim_v: int) -> int:
    """Of O: as many as there is a product for."""
    return min(columns for columns in COLUMNS if columns >= min(head_dim_v, LARGEST))


def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of shared memory: Q, in whose place O leaves; K and V of each stage; two mbarriers of each place."""
    k, v = (-(-dim // PANEL) * PANEL for dim in (problem.head_dim, problem.head_dim_v))
    return 2 * tile.block_q * max(k, v) + tile.stages * 2 * tile.block_kv * (k + v) + 16 * (1 + 2 * tile.stages)
