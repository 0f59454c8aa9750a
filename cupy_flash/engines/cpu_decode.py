"""The CPU engine of few queries and of KV caches, which reads every key once for all heads (backends/decode)."""

from __future__ import annotations

from ..device import Device
from ..problem import Problem
from .cpu import FLOP, LOAD, SCORE, TILE, Tile, alike, launches, workspaces, worth
from .shared import dtype_refusals

__all__ = ["BACKENDS", "MEASURED", "alike", "launches", "refusals", "seconds", "threads", "tiles", "workspaces"]

BACKENDS: tuple[str, ...] = ("cpu",)
MEASURED: str | None = "bench/results/decode.json"

# Bytes of K and V of a chunk, all heads, in the accumulation dtype: they stay in the L2 cache between the two products.
# 4096 keys, 32/8 heads, D 128, float32: chunks of 64 keys take 5.9 ms, 128 6.5, 256 6.7, 512 8.6 (one core).
CHUNK_BYTES = 2**19
ROWS = 128  # rows of a tile: pairs of a query and a head of its GQA group
FIXED_ROWS = 16  # rows of a tile with split_size: fixed, so that a query's bits do not depend on the others
SHORTEST = 64  # keys of a chunk
FEW = 8  # most queries of a sequence without a cache: beyond, the engine cpu is faster


def refusals(problem: Problem, device: Device) -> list[str]:
    """Reasons why the engine cannot serve a problem."""
    reasons = dtype_refusals(problem)
    if problem.backward:
        reasons.append("it has no backward")
    if problem.cache is None:
        if problem.q_len > FEW:
            reasons.append(f"without a KV cache it takes at most {FEW} queries, not {problem.q_len}")
        if problem.kv_len < SHORTEST:
            reasons.append(
                f"without a KV cache it takes at least {SHORTEST} keys, which fill a chunk, not {problem.kv_len}"
            )
        features = {
            "a shard": problem.shard,
            "dropout": bool(problem.dropout),
            "a bias": problem.bias is not None,
            "a score_mod or mask_mod": bool(problem.mods),
        }
        reasons += [f"it takes no {name.removeprefix('a ')}" for name, given in features.items() if given]
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """The one tile. With split_size it depends on the group alone, never on batch or lengths."""
    split = None if problem.cache is None else problem.cache.split_size
    key = problem.kv_heads * (problem.head_dim + problem.head_dim_v) * problem.accumulation.itemsize
    chunk = SHORTEST
    while chunk < 512 and 2 * chunk * key <= CHUNK_BYTES:
        chunk *= 2
    if split is None:
        return [Tile(max(ROWS // problem.group, 1), chunk)]
    return [Tile(max(FIXED_ROWS // problem.group, 1), min(chunk, split))]


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Predicted core seconds: matmuls and passes over the scores of all rows, loads of K and V, overhead of the calls.

    With a KV cache every sequence is taken to be as long as the capacity.
    """
    dims = problem.head_dim + problem.head_dim_v
    row_tiles = -(-problem.q_len // tile.block_q)
    rows = problem.q_len * problem.group
    if problem.cache is not None and problem.cache.split_size is not None:
        rows = row_tiles * -(-tile.block_q * problem.group // FIXED_ROWS) * FIXED_ROWS
    keys = pairs / max(problem.q_len, 1)
    score = 2 * dims * FLOP + SCORE[0]
    load = row_tiles * keys * dims * LOAD
    chunks = row_tiles * -(-keys // tile.block_kv)
    return problem.batch * (problem.kv_heads * (rows * keys * score + load) + chunks * TILE[0]) * 1e-9


def threads(device: Device, tile: Tile, cost: float) -> int:
    """As many threads as `cost` keeps busy, at most one per core."""
    return worth(cost, device.units)
