"""The engine for any GPU and every dtype: exact arithmetic on ordinary lanes, no matrix instructions."""

from __future__ import annotations

from typing import NamedTuple

from ..device import Device
from ..launch import Constant, Launch
from ..params import Workspace
from ..problem import Problem
from .shared import (
    dtype_refusals,
    grid_refusals,
    known_constants,
    nonempty,
    row_workspaces,
    sequences,
    shared_constants,
)

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
MEASURED: str | None = None

LANES = 8  # columns of threads in a tile; tile.cuh's LANES
# Accumulators of one thread, in 32-bit registers, for fp32 and fp64: the rest of 255 holds operands and addresses. Up
# to here the static gate finds no spill (bench/results/static.json); with 128 the backward in fp64 spills on sm_90a.
ACCUMULATORS = {4: 128, 8: 120}
FMA_PER_SECOND = 64 * 1.5e9  # of one multiprocessor: half of its lanes busy with products, the rest with their loads


class Tile(NamedTuple):
    block_q: int
    block_kv: int
    threads: int


def refusals(problem: Problem, device: Device) -> list[str]:
    reasons = dtype_refusals(problem) + grid_refusals(problem)
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > 256:
        reasons.append(f"head dimension {largest} is larger than 256")
    elif device.backend in BACKENDS and not tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits the {device.shared_bytes} bytes of shared memory")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose kernels fit into shared memory and registers. A row of threads has at least one row of the tile."""
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
    """Waves of blocks by the time of one: products, and the loads of a tile spread over its scores."""
    dims = problem.head_dim + problem.head_dim_v
    products = dims * (7 / 2 if problem.backward else 1)
    loads = 4 * dims * (1 / tile.block_q + 1 / tile.block_kv)
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    waves = -(-blocks // device.units)
    scores = tile.block_q * max(pairs, 1) / max(problem.q_len, 1)  # none: the tile of any other length
    return waves * scores * (products + loads) / FMA_PER_SECOND / (tile.threads / 128)


def alike(tile: Tile) -> object:
    # Waves and scores of a block depend on block_q alone.
    return tile.block_q


def threads(device: Device, tile: Tile, cost: float) -> int:
    return tile.threads


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    return row_workspaces(problem, q_rows, "delta") if problem.backward else ()


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
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
        return nonempty([launch("simt/forward", (q_tiles, problem.heads, sequences(problem)))])
    backward = [
        launch("delta", (q_tiles, problem.heads, sequences(problem))),
        launch("simt/backward_kv", (kv_tiles, problem.kv_heads, sequences(problem))),
        launch("simt/backward_q", (q_tiles, problem.heads, sequences(problem))),
    ]
    if problem.bias is not None and problem.bias_gradient and 0 not in problem.bias:
        batch, heads, rows, columns = (1,) * (4 - len(problem.bias)) + problem.bias
        slices = (q_tiles if rows > 1 else 1) * (kv_tiles if columns > 1 else 1)
        backward.append(launch("simt/backward_bias", (slices, heads, batch)))
    if problem.sink:
        backward.append(launch("dsink", (problem.heads, 1, 1)))
    return nonempty(backward)


def _shared_bytes(problem: Problem, tile: Tile) -> dict[str, int]:
    """Bytes of dynamic shared memory by kernel: the arrays at the head of each, strides as in tile.cuh."""
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
    return {"simt/backward_kv": by_key, "simt/backward_q": by_query, "simt/backward_bias": by_query}


def _accumulators(problem: Problem, tile: Tile) -> int:
    """Registers of one thread that hold sums: its scores (and their gradients), and its part of O, dQ, or dK and dV."""
    rows = tile.threads // LANES
    scores = tile.block_q * tile.block_kv // tile.threads
    k, v = (-(-dim // 32) * 32 // LANES for dim in (problem.head_dim, problem.head_dim_v))
    if problem.backward:
        numbers = 2 * scores + max(tile.block_kv // rows * (k + v), tile.block_q // rows * k)
    else:
        numbers = scores + tile.block_q // rows * v
    return numbers * problem.accumulation.itemsize // 4
