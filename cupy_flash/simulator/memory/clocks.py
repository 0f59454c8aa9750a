"""Vector clocks of all warps, joined at barriers, mbarriers, fences and waits.

A clock has a component per agent. Agents are: a warp; an mbarrier, for the copies that signal it (its clock: completed
phases); a warpgroup's wgmma instructions or a thread's bulk copies, which read shared memory (their clock: completed
groups). Each warp has a second clock: the part of the first that a fence.proxy.async has made visible to the async
proxy.

A wait or fence orders only the lanes that execute it. Until the warp next converges (bar.warp.sync, a block barrier)
these lanes are its leaders, with clocks of their own that are ahead of the other lanes'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Unsupported
from ..machine.context import Context, Mask

Rows = npt.NDArray[np.int64]
Clock = npt.NDArray[np.uint64]
Agent = tuple[Any, ...]

AGENTS = 256  # limited by the bits of a tag (checks.py)
_MORE = 16


class Clocks:
    """Clocks by [known or fenced, all lanes or leaders, cluster, warp in the cluster, agent].

    `grid`: number of warps of the whole grid; if not 0, each is an agent too, for accesses to global memory.
    """

    def __init__(self, context: Context, grid: int = 0):
        self.context = context
        self.warps = context.warps_per_block * context.cluster
        # Without asynchronous instructions nothing reads the second clock.
        planes = 2 if context.program.asynchronous else 1
        agents = AGENTS + grid if grid else self.warps
        self._state = np.zeros((planes, 2, context.blocks // context.cluster, self.warps, agents), np.uint64)
        self._state[0][:, :, np.arange(self.warps), np.arange(self.warps)] = 1
        self._leaders = np.zeros((context.warps, 32), bool)
        self.led = False  # whether any warp has lanes that know more than the warp has in common
        self.agents: dict[Agent, int] = {}
        self._published: dict[Agent, Clock] = {}  # barrier -> (planes, blocks, agents)
        self.grid = grid > 0
        self.in_grid = context.block_ids[context.block_of_row] * context.warps_per_block + context.warp_of_row
        if self.grid:
            rows = np.arange(context.warps)
            self._state[0][(slice(None), *self._place(rows), AGENTS + self.in_grid)] = 1

    def _place(self, rows: Rows) -> tuple[Rows, Rows]:
        return self.context.cluster_of_row[rows], self.context.warp_in_cluster[rows]

    def _lead(self, rows: Rows, lanes: Any) -> Rows:
        return self._leaders[rows, lanes].astype(np.int64)

    @property
    def known(self) -> Clock:
        """(cluster, warp, agent): the clock common to all lanes of a warp."""
        return self._state[0, 0]

    @property
    def known_by_leaders(self) -> Clock:
        """(cluster, warp, agent): the clock of a warp's leaders, or `known` if it has none."""
        return self._state[0, 1]

    @property
    def fenced(self) -> Clock:
        """(cluster, warp, agent): the part of `known` that is visible to the async proxy."""
        return self._state[-1, 0]

    def known_by(self, rows: Rows, lanes: Rows) -> Clock:
        """Return the clocks of threads, (n, agents)."""
        return self._state[0][(self._lead(rows, lanes), *self._place(rows))]

    def known_of(self, rows: Rows, lanes: Rows, agents: Rows) -> Clock:
        """Return the components of agents (n, k) in the clocks of threads, (n, k)."""
        cluster, warp = self._place(rows)
        at = cluster * self.warps + warp
        if self.led:
            at = at + self._lead(rows, lanes) * (len(self.known) * self.warps)
        return self._state[0].reshape(-1)[(at * self._state.shape[-1])[:, None] + agents]

    def fenced_by(self, rows: Rows, lanes: Rows) -> Clock:
        """Return the part of `known_by` that is visible to the async proxy, (n, agents)."""
        return self._state[-1][(self._lead(rows, lanes), *self._place(rows))]

    def leaders_with(self, row: int, agent: int, clock: int) -> list[int]:
        """Return the warp's leaders if their clock includes this one, so that only convergence is missing; else []."""
        cluster, warp = self._place(np.array(row))
        known = int(self._state[0, 1, cluster, warp, agent]) >= clock
        return [int(lane) for lane in np.flatnonzero(self._leaders[row])] if known else []

    def agent(self, agent: Agent) -> int:
        """Return the component of an agent other than a warp, added at first use."""
        if agent not in self.agents:
            self.agents[agent] = number = self.warps + len(self.agents)
            if number == AGENTS:
                raise Unsupported(f"more than {AGENTS - self.warps} mbarriers, warpgroups and threads with bulk copies")
            if number == self._state.shape[-1]:
                self._state = _widened(self._state)
                self._published = {key: _widened(clock) for key, clock in self._published.items()}
        return self.agents[agent]

    def name(self, agent: int) -> Agent:
        """Return the agent of a component."""
        return next(name for name, number in self.agents.items() if number == agent)

    def own(self, rows: Rows) -> Clock:
        """Return the warps' own clocks."""
        cluster, warp = self._place(rows)
        return self.known[cluster, warp, warp]

    def tick(self, rows: Rows) -> None:
        """Advance the warps' own clocks, so that clocks published before do not cover later accesses."""
        cluster, warp = self._place(rows)
        self._state[0][:, cluster, warp, warp] += np.uint64(1)
        if self.grid:
            self._state[0][:, cluster, warp, AGENTS + self.in_grid[rows]] += np.uint64(1)

    def converge(self, rows: Rows) -> None:
        """Give all lanes of these warps the leaders' clock."""
        if self.led:
            rows = rows[self._leaders[rows].any(1)]
            cluster, warp = self._place(rows)
            self._state[:, 0][:, cluster, warp] = self._state[:, 1][:, cluster, warp]
            self._leaders[rows] = False
            self.led = bool(self._leaders.any())

    def _join(
        self, rows: Rows, lanes: Mask | None, clocks: Any, planes: Any = slice(None), agents: Any = slice(None)
    ) -> None:
        """Join clocks (planes, n, agents) into those of lanes (n, 32; None: all) of warps; planes: known, fenced."""

        def join(which: int, some: Any) -> None:
            state, place = self._state[planes, which], (slice(None), *self._place(rows[some]), agents)
            state[place] = np.maximum(state[place], clocks[:, some])

        join(1, slice(None))
        if lanes is None:
            join(0, slice(None))
            return
        partial = (self.context.live[rows] & ~lanes).any(1)
        join(0, ~partial)
        if partial.any():
            leading = rows[partial]
            self._leaders[leading] |= lanes[partial]
            self.led = True
            # Once every live lane has waited, in any order, no lane is ahead of the others.
            self.converge(leading[~(self.context.live[leading] & ~self._leaders[leading]).any(1)])

    def fence(self, rows: Rows, lanes: Mask, up_to: Clock) -> None:
        """Execute fence.proxy.async for these lanes (n, 32).

        Their clocks become visible to the async proxy, with the own components of their warps limited to `up_to`.
        """
        cluster, warp = self._place(rows)
        seen = self._state[0][self._leading(rows, lanes), cluster, warp]
        seen[np.arange(len(rows)), warp] = up_to
        self._join(rows, lanes, seen[None], slice(-1, None))
        self.tick(rows)

    def _leading(self, rows: Rows, lanes: Mask | None) -> Rows:
        """Return 1 if any of these lanes is a leader of its warp, else 0, (n,)."""
        if lanes is None:
            return np.ones(len(rows), np.int64)
        return np.asarray((self._leaders[rows] & lanes).any(1), np.int64)

    def snapshot(self, rows: Rows, lanes: Mask | None = None, up_to: Clock | None = None) -> Clock:
        """Return the clocks that lanes of these warps may publish, (planes, n, agents); planes: shared, global memory.

        The warps' own components are limited to `up_to` (2, n).
        """
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
        """Publish a `snapshot` of warps, or of these lanes (n, 32) of them, at a barrier of these blocks (n)."""
        for published, clocks in zip(self._at(barrier), self.snapshot(rows, lanes, up_to), strict=True):
            np.maximum.at(published, blocks, clocks)
        self.tick(rows)

    def _at(self, barrier: Agent) -> Clock:
        """Return the clocks published at a barrier, (planes, blocks, agents)."""
        if barrier not in self._published:
            shape = (len(self._state), self.context.blocks, self._state.shape[-1])
            self._published[barrier] = np.zeros(shape, np.uint64)
        return self._published[barrier]

    def publish_agent(self, barrier: Agent, agent: int, blocks: Rows, clocks: Clock) -> None:
        """Raise one agent's component to `clocks` (n) in the clocks published at a barrier of these blocks (n)."""
        published = self._at(barrier)[0, :, agent]
        published[blocks] = np.maximum(published[blocks], clocks)

    def publish_snapshot(self, barrier: Agent, blocks: Rows, clocks: Clock) -> None:
        """Publish snapshots (planes, n, agents), taken earlier, at a barrier of these blocks (n)."""
        published = self._at(barrier)[:, :, : clocks.shape[2]]
        published[:, blocks] = np.maximum(published[:, blocks], clocks)

    def acquire(self, barrier: Agent, rows: Rows, blocks: Rows, lanes: Mask | None = None) -> None:
        """Join the clocks published at a barrier of these blocks (n) into those of warps, or of these lanes (n, 32)."""
        if barrier in self._published:
            self._join(rows, lanes, self._published[barrier][:, blocks])

    def transfer(self, barrier: Agent, to: Agent, blocks: Rows, to_blocks: Rows | None = None) -> None:
        """Join the clocks published at one barrier of these blocks into those of another (of `to_blocks`, if given)."""
        if barrier not in self._published:
            return
        published, target = self._published[barrier], self._at(to)
        to_blocks = blocks if to_blocks is None else to_blocks
        target[:, to_blocks] = np.maximum(target[:, to_blocks], published[:, blocks])

    def reset(self, barrier: Agent, blocks: Any) -> None:
        """Discard the clocks published at a barrier of these blocks."""
        if barrier in self._published:
            self._published[barrier][:, blocks] = 0

    def acquire_agent(self, agent: int, rows: Rows, clocks: Any, lanes: Mask | None = None) -> None:
        """Raise one agent's component to `clocks` (n) in the clocks of warps, or of these lanes (n, 32) of them."""
        self._join(rows, lanes, np.asarray(clocks, np.uint64)[None], slice(0, 1), agent)

    def acquire_snapshot(self, row: int, lane: int, clock: Clock, *, same_cluster: bool) -> None:
        """Join a snapshot (planes, agents) released in global memory into a thread's clock.

        From another cluster it joins only the components for global memory, as shared memory is not reachable from
        there.
        """
        lanes = np.arange(32)[None] == lane
        agents = slice(None) if same_cluster else slice(AGENTS, None)
        self._join(np.array([row]), lanes, clock[:, None, agents], agents=agents)


def _widened(clock: Clock) -> Clock:
    return np.concatenate([clock, np.zeros((*clock.shape[:-1], _MORE), np.uint64)], axis=-1)
