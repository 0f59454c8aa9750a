"""The engines, one module per kernel family: the problems it serves, its legal tiles, cost model and launches.

To add an engine, write a module that satisfies `Engine` and add it to MODULES, its name to `records.ENGINES`;
CONTRIBUTING.md lists the other files. Other modules find engines in MODULES.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeVar

from ..device import Device
from ..problem.records import Problem
from . import aten, cpu, cpu_decode, mma, mma_decode, simt, tcgen05, wgmma
from .launch import Launch, Workspace


class Tile(Hashable, Protocol):
    """The part of an engine's tile that plans read."""

    @property
    def block_q(self) -> int:
        """Queries of a tile."""

    @property
    def block_kv(self) -> int:
        """Keys of a tile."""


TileT = TypeVar("TileT", bound=Tile)  # an engine's own type of tiles


class Engine(Protocol[TileT]):
    """Interface of an engine module. Its tile type is a NamedTuple whose first fields are block_q and block_kv.

    plan/refusals.py refuses what the attributes do not name; the function `refusals` returns further reasons.
    """

    # The problems that the engine serves
    BACKENDS: tuple[str, ...]  # backends that can run its launches
    ARCHES: tuple[str, ...] | None  # architectures of GPUs that have its instructions; None: all
    DTYPES: tuple[str, ...]  # dtypes of q, k and v; `check` runs every option in the first
    OPTIONS: frozenset[str] | None  # options of attention() that it implements; None: it serves only calls on KV caches
    CACHE_OPTIONS: frozenset[str] | None  # those of attention_with_kv_cache(); None: it reads no KV cache
    CACHE_DTYPES: tuple[str, ...]  # dtypes of caches besides that of q
    DERIVATIVES: tuple[str, ...]  # which of JVP and DOUBLE_BACKWARD it has
    STATISTICS: tuple[str, ...]  # which of FORWARD, with statistics, and BACKWARD, with their gradients, it computes
    WEIGHTS: str | None  # the module of its attention_weights, top_weights and key_importance; None: it has none

    # How it is chosen and checked
    ON_REQUEST: bool  # chosen only by name, after a check and a tune, or if no other engine has the dtype
    MEASURED: str | None  # path of the benchmark results that back its cost model; None: not measured yet
    HEAD_DIMS: tuple[tuple[int, int], ...]  # (D, Dv) with which `check` runs it, one for each family of tiles
    GROUP_ROWS: tuple[int, ...]  # rows of its tiles if a row is a (query, head of the GQA group) pair
    MICRO_KERNELS: tuple[str, ...]  # families of instructions (micro_kernels.py) that `check` runs for it
    KERNELS: str  # its folder in kernels_cu; for the CPU the module that computes in NumPy

    def refusals(self, problem: Problem, device: Device) -> list[str]:
        """Return the reasons why the engine cannot serve the problem, besides missing options; [] if it can.

        The device may be of any backend.
        """

    def tiles(self, problem: Problem, device: Device) -> Sequence[TileT]:
        """Return the legal tiles: those whose kernels fit the device's shared memory and registers.

        `plan` passes the largest lengths of a bucket, and launches the chosen tile for all lengths of the bucket.
        """

    def choices(self, problem: Problem, device: Device) -> Sequence[TileT]:
        """Return the tiles that a tune measures: at least those of `tiles`, among which a prediction chooses."""

    def forms(self, problem: Problem, device: Device, tile: TileT) -> dict[str, Sequence[TileT]]:
        """Return {form of the kernel that only a tune may choose: its tiles with as many rows as `tile`, or with more}.

        `check` runs the tile of each form that is predicted to be the fastest.
        """

    def advantage(self, problem: Problem) -> str:
        """Return why the engine is the default for a problem that it serves; "" if predictions decide."""

    def seconds(self, problem: Problem, pairs: int, device: Device, tile: TileT) -> float:
        """Return predicted seconds (the cost model) for `pairs` unmasked (query, key) pairs per sequence and head."""

    def alike(self, tile: TileT) -> object:
        """Return a key. Tiles with equal keys rank alike at any length, so compile() builds only the best of them."""

    def threads(self, device: Device, tile: TileT, cost: float) -> int:
        """Return the threads per block of a GPU, or on the CPU the threads for a problem of `cost` core seconds."""

    def workspaces(self, problem: Problem, tile: TileT, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
        """Return the workspaces of the kernels; q_rows and kv_rows count one sequence, or a whole packed batch."""

    def launches(self, problem: Problem, device: Device, tile: TileT) -> tuple[Launch, ...]:
        """Return the kernel launches in order; () on the CPU."""


# {name: engine}, the names of `records.ENGINES`
MODULES: dict[str, Engine[Any]] = {
    "cpu": cpu, "cpu_decode": cpu_decode, "aten": aten, "simt": simt, "mma": mma, "mma_decode": mma_decode,
    "wgmma": wgmma, "tcgen05": tcgen05,
}  # fmt: skip
