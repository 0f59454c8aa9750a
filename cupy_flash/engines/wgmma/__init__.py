"""The Hopper engine (sm_90a): warp-specialised kernels, TMA producers and wgmma consumer warpgroups.

fp16 and bf16 forward and backward, fp8 (e4m3) forward; one module each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from ...arrays import dtype_name
from ...device import Device
from ...problem.records import BACKWARD, FORWARD, FP8, Problem
from ..fragments import fragment_refusals
from ..launch import Launch, Workspace
from ..shared import ATTENTION_OPTIONS, ELEMENTS, grid_refusals
from ..shared import advantage as advantage
from ..shared import forms as forms
from . import backward, forward, forward_fp8
from .resources import ARCH, LARGEST

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
ARCHES: tuple[str, ...] | None = (ARCH,)
DTYPES: tuple[str, ...] = ("bfloat16", "float16", FP8)
OPTIONS: frozenset[str] | None = ATTENTION_OPTIONS | {"q_descale", "k_descale", "v_descale"}
CACHE_OPTIONS: frozenset[str] | None = None
CACHE_DTYPES: tuple[str, ...] = ()
DERIVATIVES: tuple[str, ...] = ()
STATISTICS: tuple[str, ...] = (FORWARD, BACKWARD)
WEIGHTS: str | None = None
ON_REQUEST = True
MEASURED: str | None = None
HEAD_DIMS: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (192, 128), (256, 256))
GROUP_ROWS: tuple[int, ...] = ()
MICRO_KERNELS: tuple[str, ...] = ("wgmma",)
KERNELS = "wgmma"


Tile: TypeAlias = forward.Tile | backward.Tile | forward_fp8.Tile


class Step(Protocol):
    """Interface of the module of a step, which has its own type of tiles."""

    def tiles(self, problem: Problem, device: Device) -> Sequence[Tile]:
        """Return every legal tile."""

    def seconds(self, problem: Problem, pairs: int, device: Device, tile: Any) -> float:
        """Return the predicted seconds."""

    def workspaces(self, problem: Problem, tile: Any, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
        """Return the workspaces of the kernels."""

    def launches(self, problem: Problem, device: Device, tile: Any) -> tuple[Launch, ...]:
        """Return the kernel launches in order."""


def step(problem: Problem) -> Step:
    """Return the module with the problem's tiles, cost model and launches."""
    if dtype_name(problem.dtype) == FP8:
        return forward_fp8
    return backward if problem.backward else forward


def refusals(problem: Problem, device: Device) -> list[str]:
    """Return reasons against unsupported dtypes and head dimensions, and against rows that TMA cannot load."""
    reasons = grid_refusals(problem) + fragment_refusals(problem)
    fp8 = problem.dtype.name == FP8
    if fp8:
        reasons += forward_fp8.refusals(problem)
        reasons += [f"it returns no {' and '.join(problem.statistics)} of fp8 rows"] if problem.statistics else []
    elif problem.dtype.name not in DTYPES:
        reasons.append(f"{problem.dtype.name} is not float16 or bfloat16, nor {FP8}")
    if problem.backward and problem.shared_kv:
        reasons.append("it computes no gradient of values inside keys in this version")
    if problem.empty or 0 in (problem.batch, problem.q_len, problem.kv_len):
        reasons.append("TMA cannot load from a tensor without elements")
    if not problem.aligned:
        reasons.append(
            "not every row of q, k and v starts at a multiple of 16 bytes, or rows are repeated or reversed"
            + (": only mma and simt read such rows" if not fp8 else "")
        )
    if problem.backward and problem.head_dim_v * problem.dtype.itemsize % 16:
        reasons.append(f"rows of dout, {problem.head_dim_v} numbers each, do not all start at a multiple of 16 bytes")
    if problem.dtype.name not in ELEMENTS:
        return reasons  # no kernel has such a type, so there are no tiles
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > LARGEST:
        reasons.append(f"head dimension {largest} is larger than {LARGEST}")
    elif device.backend in BACKENDS and not tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits registers and shared memory")
    return reasons


def tiles(problem: Problem, device: Device) -> Sequence[Tile]:
    """Return the tiles of the forward, the backward or the fp8 forward."""
    return step(problem).tiles(problem, device)


def choices(problem: Problem, device: Device) -> Sequence[Tile]:
    """Return `tiles`: a tune measures the tiles among which a prediction chooses."""
    return tiles(problem, device)


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return the predicted seconds of the forward, the backward or the fp8 forward."""
    return step(problem).seconds(problem, pairs, device, tile)


def alike(tile: Tile) -> object:
    """Return the tile without ping-pong and multicast, to which the cost model gives no benefit at any length."""
    return tile._replace(takes_turns=False, paired=False) if isinstance(tile, forward.Tile) else tile


def threads(device: Device, tile: Tile, cost: float) -> int:
    """Return the threads per block, those of the producer warpgroup included."""
    return tile.threads


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the workspaces of the forward, the backward or the fp8 forward."""
    return step(problem).workspaces(problem, tile, q_rows, kv_rows)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launches of the forward, the backward or the fp8 forward."""
    return step(problem).launches(problem, device, tile)
