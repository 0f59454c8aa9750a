"""python -m bench packed: how evenly blocks of packed batches end, by a model of the order in which they start.

Each SM takes the next block, or under a dynamic tile scheduler the next tile, when it is free. A tile costs its steps
and TILE_OVERHEAD; a block without work costs EMPTY. The result is the time until the last block has ended, divided by
the sum of the tiles over the SMs. The L2 cache is not modelled.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from statistics import mean
from typing import NamedTuple

import numpy as np

from cupy_flash import device
from cupy_flash.plan.plan import plan
from cupy_flash.problem.records import Problem

from ..gpu import Regime
from ..report import Table
from .costs import problem_of
from .predict import ARCH, TILE_OVERHEAD

EMPTY = 0.5  # steps: an estimate of the start and the end of a block
SEQUENCES, SHORTEST, LONGEST, GROUP, BATCHES = 16, 128, 2048, 8, 8
KV_HEADS = (8, 4, 2)
MARK = 1.15
SMS_OF_GROUP = 128  # half of GROUP_BLOCKS in key_blocks.cuh


class Block(NamedTuple):
    """The tile of a sequence and head that a block computes."""

    batch: int
    head: int
    tile: int


def batches() -> list[list[int]]:
    """Return the lengths of the sequences of each modelled batch."""
    return [np.random.default_rng(seed).integers(SHORTEST, LONGEST + 1, SEQUENCES).tolist() for seed in range(BATCHES)]


def forward_order(lengths: Sequence[int], heads: int, block_q: int) -> Iterator[Block]:
    """Yield tiles as TileScheduler numbers them: head after head, of each sequence the last queries first."""
    for head in range(heads):
        for batch, length in enumerate(lengths):
            yield from (Block(batch, head, tile) for tile in reversed(range(-(-length // block_q))))


def grid_order(lengths: Sequence[int], heads: int, block_kv: int) -> Iterator[Block]:
    """Yield the blocks of a backward in the order of their indices in the grid (tiles, heads, sequences)."""
    for batch, length in enumerate(lengths):
        for head in range(heads):
            yield from (Block(batch, head, tile) for tile in range(-(-length // block_kv)))


def longest_first(lengths: Sequence[int], heads: int, block_kv: int) -> Iterator[Block]:
    """Yield the blocks of a backward with LONGEST_FIRST (key_blocks.cuh)."""
    tiles = [-(-length // block_kv) for length in lengths]
    for batch in sorted(range(len(lengths)), key=lambda batch: -tiles[batch]):
        group = max(SMS_OF_GROUP // max(tiles[batch], 1), 1)
        for first in range(0, heads, group):
            for tile in range(tiles[batch]):
                yield from (Block(batch, head, tile) for head in range(first, min(first + group, heads)))


def evenness(costs: Iterable[float], empty: int, units: int) -> float:
    """Return the time until the last of these blocks, and `empty` ones behind them, has ended over that of all SMs."""
    free, total = [0.0] * units, 0.0
    for cost in costs:
        total += cost
        heapq.heapreplace(free, free[0] + cost)
    for _ in range(empty):
        heapq.heapreplace(free, free[0] + EMPTY)
    return max(free) / (total / units)


def problem(causal: bool, is_backward: bool, kv_heads: int) -> Problem:
    """Return the problem of a packed batch at D 128, with the total number of rows of the first of `batches`."""
    rows = max(batches()[0]) if is_backward else sum(batches()[0])
    regime = Regime("bfloat16", 128, LONGEST, causal, is_backward)
    heads = GROUP * kv_heads
    return problem_of(regime, "wgmma")._replace(
        layout="thd", batch=SEQUENCES, heads=heads, kv_heads=kv_heads, q_len=rows, kv_len=rows
    )


def rows() -> list[list[str]]:
    """Return a row per mask, direction and number of heads."""
    gpu, result = device.named(ARCH, "cuda"), []
    for causal in (False, True):
        for is_backward in (False, True):
            for kv_heads in KV_HEADS:
                launches = plan(problem(causal, is_backward, kv_heads), gpu).launches
                tile = next(each.tile for each in launches if each.tile is not None)
                step = backward if is_backward else forward
                ratios = [step(lengths, causal, kv_heads, tile, gpu.units) for lengths in batches()]
                result.append(
                    [
                        "backward" if is_backward else "forward",
                        "causal" if causal else "full",
                        f"{GROUP * kv_heads} / {kv_heads}",
                        f"{tile[0]}x{tile[1]}",
                        *(f"{mean(column):.2f} ({max(column):.2f})" for column in zip(*ratios, strict=True)),
                        ", ".join(each.function for each in launches),
                    ]
                )
    return result


def forward(
    lengths: Sequence[int], causal: bool, kv_heads: int, tile: tuple[int, int, int], units: int
) -> tuple[float, float]:
    """Return how evenly a forward ends, in either order the same."""
    block_q, block_kv, _ = tile

    def cost(block: Block) -> float:
        length = lengths[block.batch]
        keys = min((block.tile + 1) * block_q, length) if causal else length
        return -(-keys // block_kv) + TILE_OVERHEAD

    ratio = evenness(map(cost, forward_order(lengths, GROUP * kv_heads, block_q)), 0, units)
    return ratio, ratio


def backward(
    lengths: Sequence[int], causal: bool, kv_heads: int, tile: tuple[int, int, int], units: int
) -> tuple[float, float]:
    """Return how evenly a backward ends whose blocks start in the order of the grid, and with LONGEST_FIRST."""
    block_q, block_kv, _ = tile

    def cost(block: Block) -> float:
        first = block.tile * block_kv // block_q if causal else 0
        return GROUP * (-(-lengths[block.batch] // block_q) - first) + TILE_OVERHEAD

    grid = -(-max(lengths) // block_kv) * kv_heads * (len(lengths) + 1)
    in_grid, by_length = (
        evenness(map(cost, blocks), grid - len(blocks), units)
        for blocks in (list(order(lengths, kv_heads, block_kv)) for order in (grid_order, longest_first))
    )
    return in_grid, by_length


def table() -> Table:
    """Return the table of all rows."""
    return Table(
        f"Packed batches of {SEQUENCES} sequences of {SHORTEST} to {LONGEST} tokens, D 128: modelled time over the sum "
        f"of the tiles (mark {MARK}), mean and largest of {BATCHES} batches",
        ["step", "mask", "heads", "tile", "in the order of the grid", "as it is", "launches"],
        rows(),
    )
