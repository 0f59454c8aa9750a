"""The end of a block: its shared memory goes with it, and what others still do there goes astray.

An arrival at the mbarrier of another block, or a copy into a block, has to be over before that block exits, and one of
its warps has to know: by a wait for the phase that it belongs to, or, of an arrival, by anything that orders it before,
a barrier of the cluster above all. Whether it is over in this run, or in any, makes no difference to the check.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .errors import EarlyExit, PendingCopy
from .lanes import Context
from .mbarriers import Lanes
from .ptx import Instruction

Indices = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max
_CLOCK, _TURN, _PHASE, _NUMBER = range(4)


class Exits:
    """Which of the resident blocks have exited, and what each has to have waited for when it does."""

    def __init__(self, context: Context):
        self.context = context
        self.gone = np.zeros(context.blocks, bool)
        # By the mbarrier (offset, rank of its block) and whether warps arrive there or copies report there, the last
        # use by each warp: (_CLOCK: the warp's own, _TURN: its arrivals at the cluster's barrier, _PHASE: the phases of
        # the mbarrier that are completed with it, _NUMBER: its instruction; warps), 0 where there is none.
        self._uses: dict[tuple[int, int, bool], Indices] = {}

    def use(self, places: Lanes, phases: Indices, instruction: Instruction, *, arrives: bool) -> None:
        """Lanes arrive at mbarriers, in these phases, or start copies that report there."""
        context = self.context
        gone = self.gone[places.blocks]
        if gone.any():
            i = int(np.flatnonzero(gone)[0])
            name = context.thread_name(int(places.rows[i]), int(places.lanes[i]))
            raise EarlyExit(
                f"block {int(context.block_ids[places.blocks[i]])} has exited, and its shared memory is used\n  "
                f"{name}: {instruction.where}"
            )
        if context.checks is None:
            return
        # A block knows of the arrivals of its own warps.
        foreign = (places.blocks != context.block_of_row[places.rows]) | (not arrives)
        rank = places.blocks % context.cluster
        for offset, r in {(int(o), int(r)) for o, r in zip(places.offsets[foreign], rank[foreign], strict=True)}:
            mine = foreign & (places.offsets == offset) & (rank == r)
            rows = places.rows[mine]
            uses = self._uses.setdefault((offset, r, arrives), np.zeros((4, context.warps), np.int64))
            uses[_CLOCK, rows] = context.checks.clocks.own(rows) if arrives else _NEVER
            uses[_TURN, rows] = context.cluster_barrier.arrivals[rows] if arrives else _NEVER
            uses[_PHASE, rows] = phases[mine] + 1
            uses[_NUMBER, rows] = context.number_of[id(instruction)]

    def look(self) -> None:
        """Lanes have exited: every block that has none left knows of all that was done to it."""
        context = self.context
        gone = np.logical_not(context.live.reshape(-1, context.blocks, 32).any(axis=(0, 2)))
        ended = np.flatnonzero(gone & ~self.gone)
        self.gone = gone
        for (offset, rank, arrives), uses in self._uses.items():
            for block in ended[ended % context.cluster == rank]:
                self._require_knowledge(int(block), offset, uses, arrives=arrives)

    def _require_knowledge(self, block: int, offset: int, uses: Indices, *, arrives: bool) -> None:
        context = self.context
        assert context.checks is not None
        clocks = context.checks.clocks
        cluster, rank = divmod(block, context.cluster)
        rows = np.flatnonzero(context.block_of_row == block)
        users = np.flatnonzero((context.cluster_of_row == cluster) & (uses[_PHASE] > 0))
        agent = clocks.agent(("mbarrier", offset, rank))
        known = clocks.known[cluster, context.warp_in_cluster[rows]].max(0).astype(np.int64)
        done = known[agent] >= uses[_PHASE, users]
        done |= known[context.warp_in_cluster[users]] >= uses[_CLOCK, users]
        done |= context.cluster_barrier.waited[rows].max() > uses[_TURN, users]
        if done.all():
            return
        user = int(users[np.flatnonzero(~done)[0]])
        name = f"block {int(context.block_ids[block])}"
        other = context.warp_name(cluster, int(context.warp_in_cluster[user]))
        mbarrier = f"the mbarrier at shared byte {context.name_shared(block * context.shared_stride + offset)}"
        instruction = context.program.function.instructions[int(uses[_NUMBER, user])]
        if not arrives:
            raise PendingCopy(
                f"{name} ends before its copy has landed: no warp of it has waited for phase "
                f"{int(uses[_PHASE, user]) - 1} of {mbarrier}\n  {instruction.where}"
            )
        raise EarlyExit(
            f"{name} may exit before {other} of its cluster has arrived at {mbarrier}: neither a wait for that phase "
            f"nor a barrier of the cluster is between\n  {instruction.where}"
        )
