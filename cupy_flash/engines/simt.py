"""The engine for any GPU and every dtype but fp8: FMA instructions in the accumulation dtype, no tensor cores."""

from __future__ import annotations

from typing import NamedTuple

from ..device import Device
from ..launch import Constant, Launch
from ..params import Workspace
from ..problem import Problem
from .shared import (
    added_launches,
    captured_reads,
    dtype_refusals,
    grid_refusals,
    known_constants,
    nonempty,
    owned_launches,
    row_workspaces,
    sequences,
    shared_constants,
    with_mods,
)

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
MEASURED: str | None = None

LANES = 8  # threads per row of the thread grid over a tile; LANES in simt/tile.cuh
# Limit of 32-bit accumulator registers per thread, by itemsize of the accumulation dtype; the rest of the 255 holds
# operands and addresses. The static gate finds no spill up to it (bench/results/static.json); with 128 the fp64
# backward spills on sm_90a.
ACCUMULATORS = {4: 128, 8: 120}
FMA_PER_SECOND = 64 * 1.5e9  # per SM: half of its lanes busy with FMAs, the rest with their loads


class Tile(NamedTuple):
    """Queries, keys and threads of a block."""

    block_q: int
    block_kv: int
    threads: int


def refusals(problem: Problem, device: Device) -> list[str]:
    """The engine refuses fp8, a grid that is too large, and head dimensions above 256."""
    reasons = dtype_refusals(problem) + grid_refusals(problem)
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > 256:
        reasons.append(f"head dimension {largest} is larger than 256")
    elif device.backend in BACKENDS and not tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits the {device.shared_bytes} bytes of shared memory")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose kernels fit shared memory and registers; each row of threads owns at least one row of the tile."""
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
        if max(_shared_bytes(problem, tile).values()) <= device.shared_bytes
        and _accumulators(problem, tile) <= ACCUMULATORS[problem.accumulation.itemsize]
    ]


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Waves of blocks times the time of one block: FMAs, and operand loads amortised over the tile's scores."""
    dims = problem.head_dim + problem.head_dim_v
    products = dims * (7 / 2 if problem.backward else 1)
    loads = 4 * dims * (1 / tile.block_q + 1 / tile.block_kv)
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    waves = -(-blocks // device.units)
    # At least one pair: tiles of a problem without pairs are ranked as those of any other.
    scores = tile.block_q * max(pairs, 1) / max(problem.q_len, 1)
    return waves * scores * (products + loads) / FMA_PER_SECOND / (tile.threads / 128)


def alike(tile: Tile) -> object:
    """The queries of a block, the only part of the tile whose effect on the cost depends on the length."""
    return tile.block_q


def threads(device: Device, tile: Tile, cost: float) -> int:
    """The threads of the tile."""
    return tile.threads


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """The delta of every row, for a backward."""
    return row_workspaces(problem, q_rows, "delta") if problem.backward else ()


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """The forward; or delta, a kernel each for dK with dV, dQ and dbias, and dsink."""
    q_tiles = max(-(-problem.q_len // tile.block_q), 1)
    kv_tiles = max(-(-problem.kv_len // tile.block_kv), 1)
    constants: dict[str, Constant] = shared_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "LSE2": False,
        "ADD_DQ": False,
        "DQ_IN_ORDER": False,
    }
    shared = _shared_bytes(problem, tile)

    def launch(kernel: str, grid: tuple[int, int, int]) -> Launch:
        return Launch(kernel, known_constants(kernel, constants), grid, tile.threads, shared.get(kernel, 0))

    if not problem.backward:
        forward = launch("simt/forward", (q_tiles, problem.heads, sequences(problem)))
        return nonempty(with_mods(problem, [forward]))
    backward = [
        launch("delta", (q_tiles, problem.heads, sequences(problem))),
        launch("simt/backward_kv", (kv_tiles, problem.kv_heads, sequences(problem))),
        launch("simt/backward_q", (q_tiles, problem.heads, sequences(problem))),
    ]
    backward += added_launches(problem, launch("simt/backward_captured", (q_tiles, problem.heads, sequences(problem))))
    if problem.bias is not None and problem.bias_gradient and 0 not in problem.bias:
        batch, heads, rows, columns = (1,) * (4 - len(problem.bias)) + problem.bias
        slices = (q_tiles if rows > 1 else 1) * (kv_tiles if columns > 1 else 1)
        backward.append(launch("simt/backward_bias", (slices, heads, batch)))
    backward += owned_launches(problem, tile[:2], lambda grid: launch("simt/backward_bias", grid))
    if problem.sink:
        backward.append(launch("dsink", (problem.heads, 1, 1)))
    return nonempty(with_mods(problem, backward))


def captured_launches(problem: Problem, device: Device) -> list[Launch]:
    """The launch that adds to the gradients of captured arrays which no block owns, for all engines; empty without."""
    if all(read.is_owned for read in captured_reads(problem)):
        return []
    largest = max(tiles(problem, device), key=lambda tile: (tile.block_q * tile.block_kv, tile.threads))
    return [x for x in launches(problem, device, largest) if x.kernel == "simt/backward_captured"]


def _shared_bytes(problem: Problem, tile: Tile) -> dict[str, int]:
    """Bytes of dynamic shared memory per kernel; must match the arrays each kernel declares, padded as in tile.cuh."""
    block_q, block_kv, _ = tile
    size = problem.accumulation.itemsize
    chunk = 16 // size

    def row(dim: int) -> int:
        return (-(-dim // (LANES * chunk)) * LANES | 1) * chunk

    k, v = row(problem.head_dim), row(problem.head_dim_v)
    if not problem.backward:
        return {"simt/forward": size * (block_q * k + block_kv * max(k, v) + block_q * (block_kv + 8))}
    operands = (block_q + block_kv) * (k + v) + 2 * block_q
    by_query = size * (operands + block_q * (block_kv + 8))
    by_key = size * (operands + block_kv * (block_q + 8))
    return {
        "simt/backward_kv": by_key,
        **dict.fromkeys(("simt/backward_q", "simt/backward_bias", "simt/backward_captured"), by_query),
    }


def _accumulators(problem: Problem, tile: Tile) -> int:
    """32-bit accumulator registers per thread: S (and dP), and its share of O, of dQ, or of dK and dV."""
    rows = tile.threads // LANES
    scores = tile.block_q * tile.block_kv // tile.threads
    k, v = (-(-dim // 32) * 32 // LANES for dim in (problem.head_dim, problem.head_dim_v))
    if problem.backward:
        numbers = 2 * scores + max(tile.block_kv // rows * (k + v), tile.block_q // rows * k)
    else:
        numbers = scores + tile.block_q // rows * v
    return numbers * problem.accumulation.itemsize // 4
