"""The Blackwell engine (sm_100a, sm_103a): fp16 and bf16 on tcgen05 and tensor memory."""

# No `from __future__ import annotations`, as in records.py.
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..device import Device
from ..jit.shared_memory import kernel_constant, shared_bytes
from ..problem.records import FORWARD, Problem
from . import mma
from .fragments import backward_workspaces, fragment_backward, fragment_constants, fragment_refusals
from .launch import Box, Constant, Launch, Workspace
from .shared import ATTENTION_OPTIONS, grid_refusals, known_constants, nonempty, sequences, with_mods
from .shared import advantage as advantage

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
ARCHES: tuple[str, ...] | None = ("sm_100a", "sm_103a")
DTYPES: tuple[str, ...] = ("bfloat16", "float16")
OPTIONS: frozenset[str] | None = ATTENTION_OPTIONS
CACHE_OPTIONS: frozenset[str] | None = None
CACHE_DTYPES: tuple[str, ...] = ()
DERIVATIVES: tuple[str, ...] = ()
STATISTICS: tuple[str, ...] = (FORWARD,)
WEIGHTS: str | None = None
ON_REQUEST = True
MEASURED: str | None = None
HEAD_DIMS: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (192, 128))
GROUP_ROWS: tuple[int, ...] = ()
MICRO_KERNELS: tuple[str, ...] = ("tcgen05",)
KERNELS = "tcgen05"

LARGEST, LARGEST_V = 192, 128  # maximum head dimensions: tensor memory holds O of two tiles of 128 columns
LARGEST_OF_BACKWARD = 128  # tensor memory holds two score tiles, dK and dV
ROWS = 128  # queries of a tile in tensor memory; in a backward also keys
KEYS = 128  # keys of a mainloop step: mma of fewer columns take more clocks per column
PANEL = 64  # columns of a TMA box: 128 bytes, one swizzle row
THREADS = 512
MOST_STAGES = 8  # slots of K and V together
MOST_STAGES_OF_BACKWARD = 4  # slots of Q; dO has one less
WARP_ROWS = 32  # rows of a tile that a warp stores

# Cost model, per SM and clock, from data sheets and published measurements: not measured here yet.
POLYNOMIALS = {64: 5, 96: 5, 128: 2}  # of 16 exponentials, by the padded head dimension, where MUFU is the bottleneck
MULTIPLY_ADDS = 4096
EXPONENTIALS = {"sm_100a": 16, "sm_103a": 32}
PRODUCT_COST = 1.2  # clocks of the products over those at the peak, in a public study of mma with N 128
WAIT = 70  # clocks per 128 x 128 scores that a strict order takes longer, by the model of `python -m bench predict`
BACKWARD_PRODUCT_COST = 1.4  # of these, some have N 64 at D 64
STEP = 200  # clocks of waits and signals per step, which the other tile of queries does not hide
BACKWARD_STEP = 400
TILE_STEPS = 2  # steps that take as long as a prologue and epilogue
BLOCK = 2000  # clocks of the start of a block
CLOCK = 1.85e9


class Tile(NamedTuple):
    """Queries of a block, keys of a mainloop step, slots of K and V together, and whether products wait for each other.

    The slots of a backward are those of Q. Tiles that are not strict rely on mma which run in the order in which a
    thread issues them.
    """

    block_q: int
    block_kv: int
    stages: int
    strict: bool = False


def refusals(problem: Problem, device: Device) -> list[str]:
    """Return reasons against unsupported dtypes and head dimensions, and rows that TMA cannot load."""
    reasons = fragment_refusals(problem)
    if problem.dtype.name not in DTYPES:
        reasons.append(f"{problem.dtype.name} is not float16 or bfloat16")
    if problem.empty or 0 in (problem.batch, problem.q_len, problem.kv_len):
        reasons.append("TMA cannot load from a tensor without elements")
    if not problem.aligned:
        reasons.append(
            "not every row of q, k and v starts at a multiple of 16 bytes, or rows are repeated or reversed: "
            "only mma and simt read such rows"
        )
    if problem.backward:
        return reasons + _backward_refusals(problem)
    if problem.head_dim > LARGEST:
        reasons.append(f"head dimension {problem.head_dim} is larger than {LARGEST}")
    if problem.head_dim_v > LARGEST_V:
        reasons.append(f"head dimension {problem.head_dim_v} of v is larger than {LARGEST_V}")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return tiles of two and of one tile of queries per block, with as many stages as fit shared memory.

    A backward has one tile of queries at a time.
    """
    if problem.backward:
        shapes = (Tile(ROWS, ROWS, stages) for stages in range(MOST_STAGES_OF_BACKWARD, 1, -1))
        return [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]
    legal = []
    for block_q in (2 * ROWS, ROWS):
        shapes = (Tile(block_q, KEYS, stages) for stages in range(MOST_STAGES, 1, -1))
        legal += [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]
    return legal


def choices(problem: Problem, device: Device) -> Sequence[Tile]:
    """Return `tiles`, and once more with a strict order of mma those that rely on one."""
    legal = tiles(problem, device)
    return legal + [tile._replace(strict=True) for tile in legal if problem.backward or _p_over_s(problem, tile)]


def forms(problem: Problem, device: Device, tile: Tile) -> dict[str, Sequence[Tile]]:
    """Return the strict form of the tiles with as many queries, if they rely on the order of mma."""
    strict = [each for each in choices(problem, device) if each.strict and each.block_q == tile.block_q]
    return {"strict": strict} if strict else {}


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted seconds: waves of blocks x the slower of products and exponentials.

    The times are added where nothing hides the softmax: with one tile of queries whose P lies over S.
    """
    if problem.backward:
        return _backward_seconds(problem, pairs, device, tile)
    dims = problem.head_dim + problem.head_dim_v
    elements = tile.block_q * tile.block_kv
    products = elements * dims * PRODUCT_COST / MULTIPLY_ADDS
    exponentials = elements / EXPONENTIALS.get(device.arch, 16)
    clocks = STEP + WAIT * tile.strict * tile.block_q / ROWS
    is_hidden = tile.block_q > ROWS or not _p_over_s(problem, tile)
    clocks += max(products, exponentials) if is_hidden else products + exponentials
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    steps = -(-problem.mask.visited(pairs / max(problem.q_len, 1), tile.block_q, tile.block_kv) // tile.block_kv)
    waves = max(blocks / device.units, 1.0) if problem.mask.edges else float(-(-blocks // device.units))
    return (waves * (max(steps, 1) + TILE_STEPS) * clocks + BLOCK) / CLOCK


def alike(tile: Tile) -> object:
    """Return the tile: no two tiles rank alike at all lengths."""
    return tile


def threads(device: Device, tile: Tile, cost: float) -> int:
    """Return the threads per block, those of all roles."""
    return THREADS


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the workspaces of the backward; the forward needs none."""
    if not problem.backward:
        return ()
    return backward_workspaces(problem, q_rows, add_dq=True, in_order=problem.deterministic)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launch of the forward, or those of the backward.

    If tiles of queries differ in cost, each has a block of its own, and the longest start first; else there is a block
    for each SM.
    """
    if problem.backward:
        return _backward_launches(problem, device, tile)
    kernel = "tcgen05/forward"
    boxes = [Box("q", ROWS, PANEL), Box("k", tile.block_kv, PANEL), Box("v", tile.block_kv, PANEL)]
    if _is_stored_in_boxes(problem):
        boxes.append(Box("out", WARP_ROWS, PANEL))
    packed = problem.layout == "thd"
    q_tiles = problem.q_len // tile.block_q + sequences(problem) if packed else -(-problem.q_len // tile.block_q)
    blocks = q_tiles * problem.heads * (1 if packed else problem.batch)
    if not (problem.mask.edges or problem.mask_mod or problem.has_lengths):
        blocks = min(blocks, device.units)
    constants = known_constants(kernel, _tile_constants(problem, tile) | {"POLYNOMIALS": _polynomials(problem, device)})
    launch = Launch(kernel, constants, (blocks, 1, 1), THREADS, _shared_bytes(problem, tile), tuple(boxes))
    return nonempty(with_mods(problem, [launch]))


def _backward_refusals(problem: Problem) -> list[str]:
    """Return reasons against head dimensions, options and grids of the backward."""
    reasons = grid_refusals(problem)
    if problem.shared_kv:
        reasons.append("it computes no gradient of values inside keys in this version")
    if problem.head_dim_v * problem.dtype.itemsize % 16:
        reasons.append(f"rows of dout, {problem.head_dim_v} numbers each, do not all start at a multiple of 16 bytes")
    if (largest := max(problem.head_dim, problem.head_dim_v)) > LARGEST_OF_BACKWARD:
        reasons.append(
            f"head dimension {largest} is larger than {LARGEST_OF_BACKWARD}: dK and dV do not fit tensor memory beside "
            "two score tiles"
        )
    return reasons


def _backward_seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted seconds: waves of blocks x the slower of products and exponentials."""
    elements = tile.block_q * tile.block_kv
    products = elements * (3 * problem.head_dim + 2 * problem.head_dim_v) * BACKWARD_PRODUCT_COST / MULTIPLY_ADDS
    clocks = max(products, elements / EXPONENTIALS.get(device.arch, 16)) + BACKWARD_STEP + WAIT * tile.strict
    blocks = max(problem.batch * problem.kv_heads * -(-problem.kv_len // tile.block_kv), 1)
    visited = problem.mask.visited(problem.group * pairs / max(problem.kv_len, 1), tile.block_kv, tile.block_q)
    steps = -(-visited // tile.block_q) + TILE_STEPS
    return (-(-blocks // device.units) * steps * clocks + BLOCK) / CLOCK


def _backward_launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launches: row kernels, the backward, and the kernels of mma and simt for bias and captured arrays."""
    kernel, boxes = "tcgen05/backward", tuple(Box(name, ROWS, PANEL) for name in ("q", "k", "v", "dout"))
    constants = known_constants(kernel, _tile_constants(problem, tile))
    grid = max(-(-problem.kv_len // tile.block_kv), 1), problem.kv_heads, sequences(problem)
    launch = Launch(kernel, constants, grid, THREADS, _shared_bytes(problem, tile), boxes)
    tile_launches = [launch, *mma.array_launches(problem, device, mma.bias_tile(problem, device))]
    return fragment_backward(problem, tile_launches, add_dq=True, in_order=problem.deterministic)


def _tile_constants(problem: Problem, tile: Tile) -> dict[str, Constant]:
    """Return the constants of the kernel."""
    if problem.backward:
        of_step = {"DQ_IN_ORDER": problem.deterministic, "DQ_IN_BULK": not problem.deterministic}
    else:
        of_step = {
            "PERSISTENT": True,
            "STAGED_BIAS": problem.bias is not None,
            "TMA_STORE_O": _is_stored_in_boxes(problem),
        }
    return (
        fragment_constants(problem)
        | of_step
        | {
            "THREADS": THREADS,
            "BLOCK_Q": tile.block_q,
            "BLOCK_KV": tile.block_kv,
            "STAGES": tile.stages,
            "STRICT": tile.strict,
        }
    )


def _polynomials(problem: Problem, device: Device) -> int:
    """Return how many of 16 exponentials a polynomial computes: none where MUFU is twice as fast."""
    return POLYNOMIALS.get(-(-problem.head_dim // 32) * 32, 0) if device.arch != "sm_103a" else 0


def _is_stored_in_boxes(problem: Problem) -> bool:
    """Return whether O is stored with TMA.

    It is not in packed batches, where a box would overwrite the next sequence; if rows are not 16-byte aligned; or
    beside Q of 192 columns, which leaves no shared memory for O.
    """
    return problem.layout != "thd" and problem.head_dim_v % 8 == 0 and problem.head_dim <= LARGEST_V


@lru_cache(maxsize=1024)
def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of dynamic shared memory."""
    kernel = "tcgen05/backward" if problem.backward else "tcgen05/forward"
    return shared_bytes(kernel, _tile_constants(problem, tile))


def _p_over_s(problem: Problem, tile: Tile) -> bool:
    """Return whether the forward stores P over S in tensor memory, and so relies on the order of mma."""
    return bool(kernel_constant("tcgen05/forward", "P_OVER_S", _tile_constants(problem, tile)))
