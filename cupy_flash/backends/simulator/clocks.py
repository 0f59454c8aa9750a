"""What every warp knows of every other's doings: vector clocks, carried by barriers, mbarriers, fences and waits.

A component of a clock is an agent: a warp; an mbarrier, in whose name copies write (its clock: completed phases); a
warpgroup's matrix instructions, or a thread's bulk copies, that read shared memory (their clock: finished groups).
A second clock says how much of what a warp knows the asynchronous proxy may see: what a fence.proxy.async came after.

A wait or a fence orders the lanes that execute it. Until their warp next converges (bar.warp.sync, a block's barrier)
these are its leaders, and only they may rely on what they have waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import Unsupported
from .lanes import Context, Mask

Rows = npt.NDArray[np.int64]
Clock = npt.NDArray[np.uint64]
Agent = tuple[Any, ...]

AGENTS = 256  # as many as a tag can name (checks.py)
_MORE = 16


class Clocks:
    """Clocks by [known or fenced, all lanes or leaders, cluster, warp, agent]; warps count through all blocks of their
    cluster. `grid`: so many warps of the whole grid are agents too, in whose name they access global memory."""

    def __init__(self, context: Context, grid: int = 0):
        self.context = context
        self.warps = context.warps_per_block * context.cluster
        # Without asynchronous instructions the second clock has no reader.
        planes = 2 if context.program.asynchronous else 1
        agents = AGENTS + grid if grid else self.warps
        self._state = np.zeros((planes, 2, context.blocks // context.cluster, self.warps, agents), np.uint64)
        self._state[0][:, :, np.arange(self.warps), np.arange(self.warps)] = 1
        self._leaders = np.zeros((context.warps, 32), bool)
        self.led = False  # whether any warp has leaders
        self.agents: dict[Agent, int] = {}
        self._published: dict[Agent, Clock] = {}  # barrier -> (planes, blocks, agents)
        self.grid = grid > 0
        self.in_grid = context.block_ids[context.block_of_row] * context.warps_per_block + context.warp_of_row
        if self.grid:
            everybody = np.arange(context.warps)
            self._state[0][(slice(None), *self._place(everybody), AGENTS + self.in_grid)] = 1

    def _place(self, rows: Rows) -> tuple[Rows, Rows]:
        return self.context.cluster_of_row[rows], self.context.warp_in_cluster[rows]

    def _lead(self, rows: Rows, lanes: Any) -> Rows:
        return self._leaders[rows, lanes].astype(np.int64)

    @property
    def known(self) -> Clock:
        """(cluster, warp, agent): what all lanes of a warp know."""
        return self._state[0, 0]

    @property
    def fenced(self) -> Clock:
        """(cluster, warp, agent): how much of it the asynchronous proxy may see."""
        return self._state[-1, 0]

    def known_by(self, rows: Rows, lanes: Rows) -> Clock:
        """(n, agents): what threads know."""
        return self._state[0][(self._lead(rows, lanes), *self._place(rows))]

    def known_of(self, rows: Rows, lanes: Rows, agents: Rows) -> Clock:
        """(n, k): what threads know of agents (n, k)."""
        cluster, warp = self._place(rows)
        at = cluster * self.warps + warp
        if self.led:
            at = at + self._lead(rows, lanes) * (len(self.known) * self.warps)
        return self._state[0].reshape(-1)[(at * self._state.shape[-1])[:, None] + agents]

    def fenced_by(self, rows: Rows, lanes: Rows) -> Clock:
        """(n, agents): how much of it the asynchronous proxy may see."""
        return self._state[-1][(self._lead(rows, lanes), *self._place(rows))]

    def leaders_know(self, row: int, agent: int, clock: int) -> list[int]:
        """The leaders of a warp if they know of this clock: what is missing is their convergence with the others."""
        cluster, warp = self._place(np.array(row))
        known = int(self._state[0, 1, cluster, warp, agent]) >= clock
        return [int(lane) for lane in np.flatnonzero(self._leaders[row])] if known else []

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

    def own(self, rows: Rows) -> Clock:
        """The warps' own clocks."""
        cluster, warp = self._place(rows)
        return self.known[cluster, warp, warp]

    def tick(self, rows: Rows) -> None:
        """What the warps do from now on comes after what others may have learnt of them."""
        cluster, warp = self._place(rows)
        self._state[0][:, cluster, warp, warp] += np.uint64(1)
        if self.grid:
            self._state[0][:, cluster, warp, AGENTS + self.in_grid[rows]] += np.uint64(1)

    def converge(self, rows: Rows) -> None:
        """All lanes of these warps know what any of them knows."""
        if self.led:
            rows = rows[self._leaders[rows].any(1)]
            cluster, warp = self._place(rows)
            self._state[:, 0][:, cluster, warp] = self._state[:, 1][:, cluster, warp]
            self._leaders[rows] = False
            self.led = bool(self._leaders.any())

    def _raise(
        self, rows: Rows, lanes: Mask | None, clocks: Any, planes: Any = slice(None), agents: Any = slice(None)
    ) -> None:
        """These lanes (n, 32; None: all) of warps learn of clocks (planes, n, agents)."""

        def learn(which: int, some: Any) -> None:
            state, place = self._state[planes, which], (slice(None), *self._place(rows[some]), agents)
            state[place] = np.maximum(state[place], clocks[:, some])

        learn(1, slice(None))
        if lanes is None:
            learn(0, slice(None))
            return
        absent = (self.context.live[rows] & ~lanes).any(1)
        learn(0, ~absent)
        if absent.any():
            leading = rows[absent]
            self._leaders[leading] |= lanes[absent]
            self.led = True
            # Once each lane has waited, in whatever order, none is ahead of the others.
            self.converge(leading[~(self.context.live[leading] & ~self._leaders[leading]).any(1)])

    def fence(self, rows: Rows, lanes: Mask, up_to: Clock) -> None:
        """fence.proxy.async by these lanes (n, 32): the asynchronous proxy sees all that they know of, but of their
        warps no more than `up_to`."""
        cluster, warp = self._place(rows)
        seen = self._state[0][self._leading(rows, lanes), cluster, warp]
        seen[np.arange(len(rows)), warp] = up_to
        self._raise(rows, lanes, seen[None], slice(-1, None))
        self.tick(rows)

    def _leading(self, rows: Rows, lanes: Mask | None) -> Rows:
        """Whether (0 or 1) there are leaders of a warp among these lanes."""
        if lanes is None:
            return np.ones(len(rows), np.int64)
        return np.asarray((self._leaders[rows] & lanes).any(1), np.int64)

    def snapshot(self, rows: Rows, lanes: Mask | None = None, up_to: Clock | None = None) -> Clock:
        """(planes, n, agents): what lanes of these warps can tell others; of their warps no more than `up_to` (2, n),
        for shared and for global memory."""
        cluster, warp = self._place(rows)
        known = self._state[:, self._leading(rows, lanes), cluster, warp]
        if up_to is not None:
            own = [warp, AGENTS + self.in_grid[rows]] if self.grid else [warp]
            for component, limit in zip(own, up_to, strict=False):
                mine = slice(None), np.arange(len(rows)), component
                known[mine] = np.minimum(known[mine], limit)
        return known

    def publish(
        self, barrier: Agent, rows: Rows, blocks: Rows, lanes: Mask | None = None, up_to: Clock | None = None
    ) -> None:
        """Warps, or these lanes (n, 32) of them, leave at a barrier of these blocks, one a row, what they know; of
        themselves no more than `up_to` (2, n), for shared and for global memory."""
        if barrier not in self._published:
            shape = (len(self._state), self.context.blocks, self._state.shape[-1])
            self._published[barrier] = np.zeros(shape, np.uint64)
        for left, mine in zip(self._published[barrier], self.snapshot(rows, lanes, up_to), strict=True):
            np.maximum.at(left, blocks, mine)
        self.tick(rows)

    def learn(self, barrier: Agent, rows: Rows, blocks: Rows, lanes: Mask | None = None) -> None:
        """Warps, or these lanes (n, 32) of them, learn what was left at a barrier of these blocks, one a row."""
        if barrier in self._published:
            self._raise(rows, lanes, self._published[barrier][:, blocks])

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

    def learn_clock(self, agent: int, rows: Rows, clocks: Any, lanes: Mask | None = None) -> None:
        """Warps, or these lanes (n, 32) of them, learn that an agent has come so far."""
        self._raise(rows, lanes, np.asarray(clocks, np.uint64)[None], slice(0, 1), agent)

    def learn_released(self, row: int, lane: int, clock: Clock, *, same_cluster: bool) -> None:
        """A thread learns a snapshot (planes, agents) by a number in global memory: of another cluster's shared memory
        it means nothing."""
        lanes = np.arange(32)[None] == lane
        agents = slice(None) if same_cluster else slice(AGENTS, None)
        self._raise(np.array([row]), lanes, clock[:, None, agents], agents=agents)


def _widened(clock: Clock) -> Clock:
    return np.concatenate([clock, np.zeros((*clock.shape[:-1], _MORE), np.uint64)], axis=-1)
