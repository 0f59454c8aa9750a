"""The engines: one module per kernel family, with its legal tiles, cost model and launches; backends compute.

To add an engine, write a module that satisfies `Engine` and add it to `plan.MODULES`; CONTRIBUTING.md lists the other
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..device import Device
from ..problem.records import Problem
from .launch import Launch, Workspace


class Engine(Protocol):
    """Interface of an engine module. Its tile type is a NamedTuple whose first fields are block_q and block_kv."""

    BACKENDS: tuple[str, ...]  # backends that can run its launches
    MEASURED: str | None  # path of the benchmark results that back its cost model; None: not measured yet

    def refusals(self, problem: Problem, device: Device) -> list[str]:
        """Return the reasons why the engine cannot serve the problem, besides those that `plan` checks; [] if it can.

        The device may be of any backend.
        """

    def tiles(self, problem: Problem, device: Device) -> Sequence[Any]:
        """Return every legal tile, whose kernels fit the device's shared memory and registers.

        `plan` passes the largest lengths of a bucket, and launches the chosen tile for all lengths of the bucket.
        """

    def seconds(self, problem: Problem, pairs: int, device: Device, tile: Any) -> float:
        """Return predicted seconds (the cost model) for `pairs` unmasked (query, key) pairs per sequence and head."""

    def alike(self, tile: Any) -> object:
        """Return the key of tiles whose cost ranking does not depend on the length; compile() builds one per key."""

    def threads(self, device: Device, tile: Any, cost: float) -> int:
        """Return the threads per block of a GPU, or on the CPU the threads for a problem of `cost` core seconds."""

    def workspaces(self, problem: Problem, tile: Any, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
        """Return the workspaces of the kernels; rows are those of one sequence, or of a whole packed batch."""

    def launches(self, problem: Problem, device: Device, tile: Any) -> tuple[Launch, ...]:
        """Return the kernel launches in order; () on the CPU."""
