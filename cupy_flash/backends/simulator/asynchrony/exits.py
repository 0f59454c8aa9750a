"""Block exit: no other block of the cluster may access an exited block's shared memory.

A remote arrival at a block's mbarrier, or a copy into the block, must happen before one of its warps exits: by a wait
for the phase that it belongs to or, for an arrival, by anything else that orders it, usually a cluster barrier. The
check does not depend on whether the access happens to be complete in this run.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import EarlyExit, PendingCopy
from ..machine.context import Context, Unit
from ..machine.ptx import Instruction
from ..memory.checks import Checks
from ..memory.shared_addresses import SharedAddresses
from .clusters import ClusterBarrier

Indices = npt.NDArray[np.int64]

_UNREACHED = np.iinfo(np.int64).max
_CLOCK, _CLUSTER_PHASE, _DONE, _NUMBER = range(4)


class Exits(Unit):
    """Exited blocks of one set of resident blocks, and the accesses that each must be ordered after at its exit."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.checks, self.cluster_barrier = context.find(Checks), context.unit(ClusterBarrier)
        self.exited = np.zeros(context.blocks, bool)
        # Last use of each mbarrier (offset, rank of its block, arrival or copy) by each warp, as (4, warps): _CLOCK is
        # the warp's own clock, _CLUSTER_PHASE its arrivals at the cluster barrier, _DONE the mbarrier's completed
        # phases once the use is complete (0: no use), _NUMBER the instruction.
        self._uses: dict[tuple[int, int, bool], Indices] = {}

    def record(self, targets: SharedAddresses, phases: Indices, instruction: Instruction, *, arrives: bool) -> None:
        """Record lanes that arrive at mbarriers in these phases, or that start copies which signal them."""
        context = self.context
        exited = self.exited[targets.blocks]
        if exited.any():
            i = int(np.flatnonzero(exited)[0])
            name = context.thread_name(int(targets.rows[i]), int(targets.lanes[i]))
            raise EarlyExit(
                f"block {int(context.block_ids[targets.blocks[i]])} has exited, and its shared memory is accessed\n  "
                f"{name}: {instruction.where}"
            )
        if self.checks is None:
            return
        # A block's own warps arrive before it exits anyway.
        foreign = (targets.blocks != context.block_of_row[targets.rows]) | (not arrives)
        rank = targets.blocks % context.cluster
        for offset, r in {(int(o), int(r)) for o, r in zip(targets.offsets[foreign], rank[foreign], strict=True)}:
            mine = foreign & (targets.offsets == offset) & (rank == r)
            rows = targets.rows[mine]
            uses = self._uses.setdefault((offset, r, arrives), np.zeros((4, context.warps), np.int64))
            uses[_CLOCK, rows] = self.checks.clocks.own(rows) if arrives else _UNREACHED
            uses[_CLUSTER_PHASE, rows] = self.cluster_barrier.arrivals[rows] if arrives else _UNREACHED
            uses[_DONE, rows] = phases[mine] + 1
            uses[_NUMBER, rows] = context.number_of[id(instruction)]

    def check_exited(self) -> None:
        """Check every block that has no live lane left, after lanes have exited."""
        context = self.context
        exited = np.logical_not(context.live.reshape(-1, context.blocks, 32).any(axis=(0, 2)))
        ended = np.flatnonzero(exited & ~self.exited)
        self.exited = exited
        for (offset, rank, arrives), uses in self._uses.items():
            for block in ended[ended % context.cluster == rank]:
                self._require_order(int(block), offset, uses, arrives=arrives)

    def _require_order(self, block: int, offset: int, uses: Indices, *, arrives: bool) -> None:
        context = self.context
        assert self.checks is not None
        clocks = self.checks.clocks
        cluster, rank = divmod(block, context.cluster)
        rows = np.flatnonzero(context.block_of_row == block)
        users = np.flatnonzero((context.cluster_of_row == cluster) & (uses[_DONE] > 0))
        agent = clocks.agent(("mbarrier", offset, rank))
        known = clocks.known[cluster, context.warp_in_cluster[rows]].max(0).astype(np.int64)
        done = known[agent] >= uses[_DONE, users]
        done |= known[context.warp_in_cluster[users]] >= uses[_CLOCK, users]
        done |= self.cluster_barrier.waited[rows].max() > uses[_CLUSTER_PHASE, users]
        if done.all():
            return
        user = int(users[np.flatnonzero(~done)[0]])
        name = f"block {int(context.block_ids[block])}"
        other = context.warp_name(cluster, int(context.warp_in_cluster[user]))
        mbarrier = f"the mbarrier at shared byte {context.shared_byte_name(block * context.shared_stride + offset)}"
        instruction = context.program.function.instructions[int(uses[_NUMBER, user])]
        if not arrives:
            raise PendingCopy(
                f"{name} ends before its bulk copy completes: none of its warps has waited for phase "
                f"{int(uses[_DONE, user]) - 1} of {mbarrier}\n  {instruction.where}"
            )
        raise EarlyExit(
            f"{name} may exit before {other} of its cluster arrives at {mbarrier}: it neither waits for that phase "
            f"nor at a cluster barrier\n  {instruction.where}"
        )
