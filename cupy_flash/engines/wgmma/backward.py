"""The Hopper backward for fp16 and bf16: legal tiles, cost model and launches."""

# No `from __future__ import annotations`, as in records.py.
from functools import lru_cache
from typing import NamedTuple

from ...device import Device
from ...jit.shared_memory import shared_bytes
from ...problem.records import Problem
from .. import mma
from ..fragments import backward_workspaces, fragment_backward, fragment_constants, keeps_scores
from ..launch import Box, Constant, Launch, Workspace
from ..shared import known_constants, loads_by_key, sequences
from .resources import (
    BLOCK,
    CACHE_BYTES,
    CLOCK,
    EXPONENTIALS,
    MULTIPLY_ADDS,
    PANEL,
    SHARED_BYTES,
    STEP,
    WARPGROUP_ROWS,
    columns,
)

WARPGROUPS = 2  # consumer warpgroups; the block has a producer warpgroup as well
# Maximum live registers per thread across a mainloop step; bench/results/static.json shows no spills up to it.
LIVE = 200
LIVE_OF_SCORES = 32  # added if the scores are modified or densely masked
LIVE_OF_ANOTHER = 16  # added per feature (score modification, dense mask, dropout) beyond the first

# Cost model in addition to resources.py's, per SM and clock.
ADDED_BYTES = 16  # bandwidth of red to global memory
INSTRUCTIONS = 8  # per score, without its exponential
LANES = 128


class Tile(NamedTuple):
    """Number of keys of a block and of queries of a mainloop step."""

    block_q: int
    block_kv: int
    stages: int
    dq_in_bulk: bool

    @property
    def shares(self) -> int:
        """Number of warpgroups that share a 64-row slice of keys."""
        return WARPGROUPS * WARPGROUP_ROWS // self.block_kv

    @property
    def dq_shares(self) -> int:
        """Number of warpgroups that share a 64-row slice of queries for dQ."""
        return WARPGROUPS * WARPGROUP_ROWS // self.block_q

    @property
    def s_ahead(self) -> bool:
        """Whether S of the next tile overlaps the addition to dQ.

        With 128 queries that spills unless dQ leaves through shared memory; with 64, dK waits too (DEFERRED).
        """
        return self.shares == 1 and self.block_q == 128 and self.dq_in_bulk

    @property
    def threads(self) -> int:
        """Threads per block: the consumer and the producer warpgroups."""
        return 128 * (WARPGROUPS + 1)


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the tiles that fit registers and shared memory.

    block_kv 64, with which warpgroups share keys and repeat work, is only used if 128 does not fit.
    """
    for block_kv in (128, 64):
        legal = [
            tile
            for block_q in (128, 64)
            # The plan takes the first of tiles of equal cost: at 128 queries the one that issues the next S early.
            for dq_in_bulk in ((True, False) if block_q == 128 else (False, True))
            for tile in (Tile(block_q, block_kv, 2, dq_in_bulk),)
            if not (dq_in_bulk and problem.deterministic)
            if _live(problem, tile) <= LIVE and _shared_bytes(problem, tile) <= device.shared_bytes
        ]
        if legal:
            return legal
    return []


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted seconds: waves of blocks x time of one block. Exponentials do not overlap with wgmma."""
    k, v = _padded(problem, tile)
    sums = (columns(problem.head_dim) if tile.shares == 1 else k) + (
        columns(problem.head_dim_v) if tile.shares == 1 else v
    )
    score_dims = problem.head_dim + problem.head_dim_v
    elements = tile.block_q * tile.block_kv
    products = elements * (score_dims + sums + k) / MULTIPLY_ADDS
    work = elements * (1 / EXPONENTIALS + INSTRUCTIONS / LANES)
    loaded = 2 * tile.block_q * (k + v)
    # Shared-memory reads per warpgroup are both operands of S and dP, of dQ, and of dK and dV; the left operand of
    # dV is in registers unless warpgroups share keys.
    read = 2 * (WARPGROUP_ROWS + tile.block_q // tile.shares) * score_dims
    read += 2 * tile.block_kv * (WARPGROUP_ROWS + k // tile.dq_shares)
    read += 2 * tile.block_q * (sums // tile.shares + (2 if tile.shares > 1 else 1) * WARPGROUP_ROWS)
    added = 4 * tile.block_q * problem.head_dim
    moved = loaded + WARPGROUPS * read + 2 * elements + (2 * added if tile.dq_in_bulk else 0)
    clocks = max(products + work, moved / SHARED_BYTES, loaded / CACHE_BYTES + added / ADDED_BYTES)
    blocks = max(problem.batch * problem.kv_heads * -(-problem.kv_len // tile.block_kv), 1)
    visited = problem.mask.visited(problem.group * pairs / max(problem.kv_len, 1), tile.block_kv, tile.block_q)
    waves = -(-blocks // device.units)
    return waves * (-(-visited // tile.block_q) * (clocks + STEP) + BLOCK) / CLOCK


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the workspaces delta, lse2 and dq_sums, and for a deterministic backward dq_semaphore and tile_counter."""
    return backward_workspaces(problem, q_rows, add_dq=True, in_order=problem.deterministic)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launches: row kernels, the backward, and the kernels of mma and simt for bias and captured arrays."""
    kernel, constants = "wgmma/backward", _constants(problem, tile)
    of_q, of_kv = (tile.block_q, PANEL), (tile.block_kv, PANEL)
    boxes = (Box("q", *of_q), Box("k", *of_kv), Box("v", *of_kv), Box("dout", *of_q))
    grid = max(-(-problem.kv_len // tile.block_kv), 1), problem.kv_heads, sequences(problem)
    launch = Launch(kernel, known_constants(kernel, constants), grid, tile.threads, _shared_bytes(problem, tile), boxes)
    tile_launches = [launch, *mma.array_launches(problem, device, mma.bias_tile(problem, device))]
    return fragment_backward(problem, tile_launches, add_dq=True, in_order=problem.deterministic)


def _padded(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Return (D, Dv) rounded up to whole panels, as DIM and DIM_V in wgmma/backward.cuh.

    Warpgroups that share keys have at least one panel each; others have equal numbers of panels of dQ.
    """
    k, v = -(-problem.head_dim // PANEL), -(-problem.head_dim_v // PANEL)
    if tile.shares == 1:
        return PANEL * (k + k % tile.dq_shares), PANEL * v
    return PANEL * max(k, tile.shares), PANEL * max(v, tile.shares)


def _live(problem: Problem, tile: Tile) -> int:
    """Return the registers per thread for S, dP, dK and dV, plus those for the options."""
    # Two consumer warpgroups split an odd number of panels unequally: one has more of dK, the other more of dV. The
    # larger share of dK and the larger share of dV are counted, though no warpgroup has both: with the shares of one
    # warpgroup a softcap at D 192 would be legal, and it spills.
    sums = (
        columns(dim) if tile.shares == 1 else PANEL * -(-dim // (PANEL * tile.shares))
        for dim in (problem.head_dim, problem.head_dim_v)
    )
    scores = tile.block_q // tile.shares // 2
    loads_in_mask = problem.mask_mod and loads_by_key(problem)
    passes = problem.is_modified, problem.dense_mask is not None or loads_in_mask
    option_registers = LIVE_OF_SCORES if any(passes) else 0
    option_registers += LIVE_OF_ANOTHER * max(sum(passes) + (problem.dropout > 0) - 1, 0)
    option_registers += scores if keeps_scores(problem) else 0
    option_registers += scores // 4 * ((problem.has_lengths or problem.shard) + (tile.dq_in_bulk and not tile.s_ahead))
    return sum(sums) // 2 + 2 * scores + option_registers


def _constants(problem: Problem, tile: Tile) -> dict[str, Constant]:
    """Return the constants of the kernel."""
    return fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "SHARES": tile.shares,
        "DQ_IN_ORDER": problem.deterministic,
        "DQ_IN_BULK": tile.dq_in_bulk,
        # The order of a deterministic backward is that of the keys of each head (key_blocks.cuh).
        "LONGEST_FIRST": problem.layout == "thd" and not problem.deterministic,
        "S_AHEAD": tile.s_ahead,
        "PINGPONG": False,
    }


@lru_cache(maxsize=1024)
def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of dynamic shared memory."""
    return shared_bytes("wgmma/backward", _constants(problem, tile))
