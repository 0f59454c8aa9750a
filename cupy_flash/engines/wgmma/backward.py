"""The backward's tiles, their written cost and their launches."""

from __future__ import annotations

from typing import NamedTuple

from ...device import Device
from ...launch import Constant, Launch
from ...params import Workspace
from ...problem import Problem
from ...tensor_map import Box
from .. import mma
from ..fragments import backward_workspaces, fragment_backward, fragment_constants, is_modified, keeps_scores
from ..shared import known_constants, sequences
from .hopper import (
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

WARPGROUPS = 2  # that compute; one more brings tiles
# Numbers of one thread that live through a step. Up to here the static gate finds no spill.
LIVE = 200
LIVE_OF_SCORES = 32  # where scores take a pass of their own
LIVE_OF_ANOTHER = 16  # scores changed, a mask, dropout: of each beyond the first

# What the cost is made of beside hopper.py's, of one multiprocessor and clock.
ADDED_BYTES = 16  # to global memory
INSTRUCTIONS = 8  # of a lane for a score, beside its exponential
LANES = 128


class Tile(NamedTuple):
    block_q: int
    block_kv: int
    stages: int
    dq_in_bulk: bool

    @property
    def shares(self) -> int:
        """Warpgroups that share keys."""
        return WARPGROUPS * WARPGROUP_ROWS // self.block_kv

    @property
    def dq_shares(self) -> int:
        """Warpgroups that share the queries of dQ."""
        return WARPGROUPS * WARPGROUP_ROWS // self.block_q

    @property
    def threads(self) -> int:
        return 128 * (WARPGROUPS + 1)


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose scores, their gradients and sums fit into registers, and which fit into shared memory. Warpgroups
    share keys, which costs more than it gives, only where nothing else is legal."""
    for block_kv in (128, 64):
        legal = [
            tile
            for block_q in (128, 64)
            for dq_in_bulk in (False, True)[: 1 if problem.deterministic else 2]
            for tile in (Tile(block_q, block_kv, 2, dq_in_bulk),)
            if _live(problem, tile) <= LIVE and _shared_bytes(problem, tile) <= device.shared_bytes
        ]
        if legal:
            return legal
    return []


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Waves of blocks by the time of one. Warpgroups meet at every step, so nothing hides their exponentials."""
    k, v = _padded(problem, tile)
    sums = (columns(problem.head_dim) if tile.shares == 1 else k) + (
        columns(problem.head_dim_v) if tile.shares == 1 else v
    )
    of_scores = problem.head_dim + problem.head_dim_v
    elements = tile.block_q * tile.block_kv
    products = elements * (of_scores + sums + k) / MULTIPLY_ADDS
    work = elements * (1 / EXPONENTIALS + INSTRUCTIONS / LANES)
    loaded = 2 * tile.block_q * (k + v)
    # Of a warpgroup: both factors of scores, of dQ, of dK and dV; of the last the left ones are in registers but where
    # keys are shared.
    read = 2 * (WARPGROUP_ROWS + tile.block_q // tile.shares) * of_scores
    read += 2 * tile.block_kv * (WARPGROUP_ROWS + k // tile.dq_shares)
    read += 2 * tile.block_q * (sums // tile.shares + (2 * WARPGROUP_ROWS if tile.shares > 1 else 0))
    added = 4 * tile.block_q * problem.head_dim
    moved = loaded + WARPGROUPS * read + 2 * elements + (2 * added if tile.dq_in_bulk else 0)
    clocks = max(products + work, moved / SHARED_BYTES, loaded / CACHE_BYTES + added / ADDED_BYTES)
    blocks = max(problem.batch * problem.kv_heads * -(-problem.kv_len // tile.block_kv), 1)
    visited = problem.mask.visited(problem.group * pairs / max(problem.kv_len, 1), tile.block_kv, tile.block_q)
    waves = -(-blocks // device.units)
    return waves * (-(-visited // tile.block_q) * (clocks + STEP) + BLOCK) / CLOCK


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    return backward_workspaces(problem, q_rows, add_dq=True, in_order=problem.deterministic)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    constants: dict[str, Constant] = fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "SHARES": tile.shares,
        "DQ_IN_ORDER": problem.deterministic,
        "DQ_IN_BULK": tile.dq_in_bulk,
        "TAKE_TURNS": False,
    }
    kernel = "wgmma/backward"
    of_q, of_kv = (tile.block_q, PANEL), (tile.block_kv, PANEL)
    boxes = (Box("q", *of_q), Box("k", *of_kv), Box("v", *of_kv), Box("dout", *of_q))
    grid = max(-(-problem.kv_len // tile.block_kv), 1), problem.kv_heads, sequences(problem)
    its = Launch(kernel, known_constants(kernel, constants), grid, tile.threads, _shared_bytes(problem, tile), boxes)
    around = [its, *mma.bias_launches(problem, device)]
    return fragment_backward(problem, around, add_dq=True, in_order=problem.deterministic)


def _padded(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Columns of tiles: whole panels for every share. backward.cu's DIM and DIM_V."""
    k, v = PANEL * max(tile.shares, tile.dq_shares), PANEL * tile.shares
    return -(-problem.head_dim // k) * k, -(-problem.head_dim_v // v) * v


def _live(problem: Problem, tile: Tile) -> int:
    """Registers of one thread that hold scores, their gradients, dK and dV, and what the options ask for."""
    sums = (
        columns(dim) if tile.shares == 1 else padded // tile.shares
        for dim, padded in zip((problem.head_dim, problem.head_dim_v), _padded(problem, tile), strict=True)
    )
    scores = tile.block_q // tile.shares // 2
    passes = is_modified(problem), problem.dense_mask is not None
    of_options = LIVE_OF_SCORES if any(passes) else 0
    of_options += LIVE_OF_ANOTHER * max(sum(passes) + (problem.dropout > 0) - 1, 0)
    of_options += scores if keeps_scores(problem) else 0
    of_options += scores // 4 * ((problem.has_lengths or problem.shard) + tile.dq_in_bulk)
    return sum(sums) // 2 + 2 * scores + of_options


def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of shared memory: K and V, Q and dO of each stage; two places for dS, and for P where warpgroups share
    keys; dQ; two places for lse2 and delta; two mbarriers of each place."""
    k, v = _padded(problem, tile)
    operands = 2 * (tile.block_kv + tile.stages * tile.block_q) * (k + v)
    scores = 2 * 2 * tile.block_q * tile.block_kv * (1 if tile.shares == 1 else 2)
    dq = 4 * tile.block_q * (columns(problem.head_dim) if tile.dq_shares == 1 else k) if tile.dq_in_bulk else 0
    return operands + scores + dq + 2 * 2 * 4 * tile.block_q + 16 * (2 + 2 * tile.stages + 2)
