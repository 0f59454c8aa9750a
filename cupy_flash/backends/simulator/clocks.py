"""What every warp knows of every other's doings: vector clocks, carried by barriers, mbarriers, fences and waits.

A component of a clock is an agent: a warp; an mbarrier, in whose name copies write (its clock: completed phases); a
warpgroup's matrix instructions, or a thread's bulk copies, that read shared memory (their clock: finished groups).
A second clock says how much of what a warp knows the asynchronous proxy may see: what a fence.proxy.async came after.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import Unsupported
from .lanes import Context

Rows = npt.NDArray[np.int64]
Agent = tuple[Any, ...]

AGENTS = 256  # as many as a tag can name (checks.py)
_MORE = 16


class Clocks:
    """known[cluster, warp, agent] and fenced[cluster, warp, agent]; warps count through all blocks of their cluster."""

    def __init__(self, context: Context):
        self.context = context
        self.warps = context.warps_per_block * context.cluster
        # Without asynchronous instructions the second clock has no reader.
        planes = 2 if context.program.asynchronous else 1
        self._state = np.zeros((planes, context.blocks // context.cluster, self.warps, self.warps), np.uint64)
        self.known[:, np.arange(self.warps), np.arange(self.warps)] = 1
        self.agents: dict[Agent, int] = {}
        self._published: dict[Agent, npt.NDArray[np.uint64]] = {}  # barrier -> (planes, blocks, agents)

    @property
    def known(self) -> npt.NDArray[np.uint64]:
        return self._state[0]

    @property
    def fenced(self) -> npt.NDArray[np.uint64]:
        return self._state[-1]

    def agent(self, agent: Agent) -> int:
        """The component of an agent that is no warp."""
        if agent not in self.agents:
            self.agents[agent] = number = self.warps + len(self.agents)
            if number == AGENTS:
                raise Unsupported(f"more than {AGENTS - self.warps} mbarriers and issuers of bulk copies")
            if number == self._state.shape[-1]:
                self._state = _widened(self._state)
                self._published = {key: _widened(clock) for key, clock in self._published.items()}
        return self.agents[agent]

    def name(self, agent: int) -> Agent:
        """The agent of a component."""
        return next(name for name, number in self.agents.items() if number == agent)

    def own(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """The warps' own clocks."""
        warp = self.context.warp_in_cluster[rows]
        return self.known[self.context.cluster_of_row[rows], warp, warp]

    def tick(self, rows: Rows) -> None:
        """What the warps do from now on comes after what others may have learnt of them."""
        warp = self.context.warp_in_cluster[rows]
        self.known[self.context.cluster_of_row[rows], warp, warp] += np.uint64(1)

    def fence(self, rows: Rows) -> None:
        """fence.proxy.async: the asynchronous proxy sees all that the warps know of."""
        place = self.context.cluster_of_row[rows], self.context.warp_in_cluster[rows]
        self.fenced[place] = self.known[place]
        self.tick(rows)

    def publish(self, barrier: Agent, rows: Rows, blocks: Rows, up_to: npt.NDArray[np.uint64] | None = None) -> None:
        """Warps leave at a barrier of these blocks, one a row, what they know; of themselves no more than `up_to`."""
        if barrier not in self._published:
            shape = (len(self._state), self.context.blocks, self._state.shape[-1])
            self._published[barrier] = np.zeros(shape, np.uint64)
        warp = self.context.warp_in_cluster[rows]
        known = self._state[:, self.context.cluster_of_row[rows], warp]
        if up_to is not None:
            known[:, np.arange(len(rows)), warp] = np.minimum(known[:, np.arange(len(rows)), warp], up_to)
        for left, mine in zip(self._published[barrier], known, strict=True):
            np.maximum.at(left, blocks, mine)
        self.tick(rows)

    def learn(self, barrier: Agent, rows: Rows, blocks: Rows) -> None:
        """Warps learn what was left at a barrier of these blocks, one a row."""
        if barrier in self._published:
            place = slice(None), self.context.cluster_of_row[rows], self.context.warp_in_cluster[rows]
            self._state[place] = np.maximum(self._state[place], self._published[barrier][:, blocks])

    def hand_on(self, barrier: Agent, to: Agent, blocks: Rows) -> None:
        """What was left at a barrier in these blocks is from now on to be learnt at another."""
        if barrier not in self._published:
            return
        left = self._published[barrier]
        if to not in self._published:
            self._published[to] = np.zeros_like(left)
        self._published[to][:, blocks] = np.maximum(self._published[to][:, blocks], left[:, blocks])

    def forget(self, barrier: Agent, blocks: Any) -> None:
        """A barrier starts anew in these blocks."""
        if barrier in self._published:
            self._published[barrier][:, blocks] = 0

    def learn_clock(self, agent: int, rows: Rows, clocks: Any) -> None:
        """Warps learn that an agent has come so far."""
        place = self.context.cluster_of_row[rows], self.context.warp_in_cluster[rows], agent
        self.known[place] = np.maximum(self.known[place], np.asarray(clocks, np.uint64))


def _widened(clock: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return np.concatenate([clock, np.zeros((*clock.shape[:-1], _MORE), np.uint64)], axis=-1)
