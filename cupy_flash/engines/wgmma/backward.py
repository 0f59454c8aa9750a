"""The backward's tiles, their written cost and their launches."""

from __future__ import annotations

from typing import NamedTuple

from ...device import Device
from ...launch import Constant, Launch, fragment_backward, fragment_constants, known_constants, sequences
from ...problem import Problem
from ...tensor_map import Box
from .. import mma
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
ADDED_BYTES = 16  # to global memory, of one multiprocessor and clock
# Numbers of one thread that live through a step: scores and their gradients, dK and dV. Up to here, and with options up
# to there, the static gate finds no spill.
LIVE = 192, 176


class Tile(NamedTuple):
    block_q: int
    block_kv: int
    stages: int

    @property
    def shares(self) -> int:
        """Warpgroups that share keys."""
        return WARPGROUPS * WARPGROUP_ROWS // self.block_kv

    @property
    def threads(self) -> int:
        return 128 * (WARPGROUPS + 1)

    def padded(self, problem: Problem) -> tuple[int, int]:
        """Columns of tiles: whole panels for every share. backward.cu's DIM and DIM_V."""
        dq_shares = WARPGROUPS * WARPGROUP_ROWS // self.block_q
        k, v = PANEL * max(self.shares, dq_shares), PANEL * self.shares
        return -(-problem.head_dim // k) * k, -(-problem.head_dim_v // v) * v


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Tiles whose scores, their gradients and sums fit into registers, each with the longest rings that fit."""
    shapes = (Tile(block_q, block_kv, 2) for block_kv in (128, 64) for block_q in (128, 64))
    legal = [
        tile
        for tile in shapes
        if _live(problem, tile) <= LIVE[0] and _shared_bytes(problem, tile) <= device.shared_bytes
    ]
    return legal


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    return -float(tile.block_q * 1000 + tile.block_kv)


def workspaces(problem: Problem, tile: Tile) -> tuple[str, ...]:
    return ("delta", "lse2", "dq_sums")


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    constants: dict[str, Constant] = fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "SHARES": tile.shares,
    }
    kernel = "wgmma/backward"
    of_q, of_kv = (tile.block_q, PANEL), (tile.block_kv, PANEL)
    boxes = (Box("q", *of_q), Box("k", *of_kv), Box("v", *of_kv), Box("dout", *of_q))
    grid = max(-(-problem.kv_len // tile.block_kv), 1), problem.kv_heads, sequences(problem)
    its = Launch(kernel, known_constants(kernel, constants), grid, tile.threads, _shared_bytes(problem, tile), boxes)
    return fragment_backward(problem, [its, *mma.bias_launches(problem, device)], add_dq=True)


def _live(problem: Problem, tile: Tile) -> int:
    k, v = (
        (columns(dim) if tile.shares == 1 else padded // tile.shares) // 2
        for dim, padded in zip((problem.head_dim, problem.head_dim_v), tile.padded(problem), strict=True)
    )
    return k + v + tile.block_q // tile.shares


def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of shared memory: K and V, Q and dO of each stage, two places for dS, and for P between warpgroups that
    share keys, two of lse2 and delta; two mbarriers of each place."""
    k, v = tile.padded(problem)
    scores = 2 * 2 * tile.block_q * tile.block_kv * (1 if tile.shares == 1 else 2)
    rows = 2 * 2 * 4 * tile.block_q
    return 2 * (tile.block_kv + tile.stages * tile.block_q) * (k + v) + scores + rows + 16 * (2 + 2 * tile.stages + 2)
