"""The engines: each a module that knows its own tiles, what they cost and what they launch. Nothing is computed here.

Adding one: a module with what `Engine` lists, and its line in `plan.MODULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..device import Device
from ..launch import Launch
from ..params import Workspace
from ..problem import Problem


class Engine(Protocol):
    """What a plan asks of an engine module. Each has a `Tile` of its own, a NamedTuple that starts with block_q,
    block_kv."""

    BACKENDS: tuple[str, ...]  # where it runs
    MEASURED: str | None  # the stored run that its cost was held against; None: no run yet

    def refusals(self, problem: Problem, device: Device) -> list[str]:
        """Why it does not serve the problem, beyond what is common to all engines; on any device, its own or not."""

    def tiles(self, problem: Problem, device: Device) -> Sequence[Any]:
        """Every legal tile: what fits into memory and registers of the device."""

    def seconds(self, problem: Problem, pairs: int, device: Device, tile: Any) -> float:
        """The written cost. `pairs`: how many (query, key) pairs are seen, of one sequence and head."""

    def alike(self, tile: Any) -> object:
        """Equal for tiles of which the same is best at any length, so that a plan may choose one of them alone."""

    def threads(self, device: Device, tile: Any, cost: float) -> int:
        """Of the CPU for a problem of so many seconds; of one block on a GPU."""

    def workspaces(self, problem: Problem, tile: Any, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
        """The memory that the kernels need beside operands and results, for arrays of so many rows: of one sequence, or
        of the whole packed batch."""

    def launches(self, problem: Problem, device: Device, tile: Any) -> tuple[Launch, ...]:
        """The kernels in order; none on the CPU."""
