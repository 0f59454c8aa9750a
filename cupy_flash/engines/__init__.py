"""The engines: one module per kernel family, with its legal tiles, cost model and launches. Nothing is computed here.

To add one, write a module that satisfies `Engine` and add it to `plan.MODULES`; CONTRIBUTING.md lists the other files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..device import Device
from ..launch import Launch
from ..params import Workspace
from ..problem import Problem


class Engine(Protocol):
    """Interface of an engine module. Its tile type is a NamedTuple whose first fields are block_q and block_kv."""

    BACKENDS: tuple[str, ...]  # backends that can run its launches
    MEASURED: str | None  # path of the benchmark results that back its cost model; None: not measured yet

    def refusals(self, problem: Problem, device: Device) -> list[str]:
        """Reasons why the engine cannot serve the problem, beyond those that `plan` checks; empty if it can.

        Must accept any device, also one of another backend.
        """

    def tiles(self, problem: Problem, device: Device) -> Sequence[Any]:
        """Every legal tile: those whose kernels fit the device's shared memory and registers.

        `plan` asks for the last lengths of a bucket, and launches the chosen tile for all lengths of it.
        """

    def seconds(self, problem: Problem, pairs: int, device: Device, tile: Any) -> float:
        """Cost model: predicted seconds. `pairs` is the number of unmasked (query, key) pairs per sequence and head."""

    def alike(self, tile: Any) -> object:
        """Key of tiles whose cost ranking does not depend on the length; compile() builds the best tile per key."""

    def threads(self, device: Device, tile: Any, cost: float) -> int:
        """On a GPU, threads per block; on the CPU, threads to use for a problem of `cost` seconds."""

    def workspaces(self, problem: Problem, tile: Any, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
        """The workspaces that the kernels need for arrays of this many rows.

        Rows are those of one sequence, or of the whole packed batch.
        """

    def launches(self, problem: Problem, device: Device, tile: Any) -> tuple[Launch, ...]:
        """The kernel launches in order; empty on the CPU."""
