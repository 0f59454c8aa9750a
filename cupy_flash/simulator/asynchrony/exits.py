"""Block exit: nothing may access an exited block's shared memory.

A remote arrival at a block's mbarrier, that of a tcgen05.commit, a copy into the block, or a read of its memory by
another block must happen before one of its warps exits: by a wait for the phase that an arrival or copy belongs to or,
except for a commit or a copy, by anything else that orders it, usually a cluster barrier. The check does not depend on
whether the access happens to be complete in this run.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum

import numpy as np
import numpy.typing as npt

from ..errors import EarlyExit, PendingCopy, SimulationError
from ..machine.context import Context, Unit
from ..machine.ptx import Instruction
from ..memory.checks import Checks
from ..memory.shared_addresses import SharedAddresses
from .clusters import ClusterBarrier

Indices = npt.NDArray[np.int64]

_UNREACHED = np.iinfo(np.int64).max
_CLOCK, _CLUSTER_PHASE, _DONE, _NUMBER = range(4)


class Use(Enum):
    """How a block uses the shared memory of another."""

    ARRIVAL = "arrives at"
    COMMIT = "commits to"
    COPY = "copies with"
    READ = "reads"


class Exits(Unit):
    """Exited blocks of one set of resident blocks, and the accesses that must be ordered before each block's exit."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.checks, self.cluster_barrier = context.find(Checks), context.unit(ClusterBarrier)
        self.exited = np.zeros(context.blocks, bool)
        # Last use of each mbarrier (offset, rank of its block, kind of use; reads have offset 0) by each warp, as
        # (4, warps): _CLOCK is the warp's own clock, _CLUSTER_PHASE its arrivals at the cluster barrier, _DONE the
        # mbarrier's completed phases once the use is complete (0: no use), _NUMBER the instruction.
        self._uses: dict[tuple[int, int, Use], Indices] = {}
        # By the same key: the commits of each warp that have not arrived yet.
        self._commits: defaultdict[tuple[int, int], Indices] = defaultdict(lambda: np.zeros(context.warps, np.int64))

    def record(
        self, targets: SharedAddresses, instruction: Instruction, use: Use, phases: Indices | None = None
    ) -> None:
        """Record that lanes arrive at mbarriers in these phases, start copies that signal them, or read memory."""
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
        # A block's own warps arrive and read before it exits anyway, but not their copies and commits.
        asynchronous = use in (Use.COPY, Use.COMMIT)
        foreign = (targets.blocks != context.block_of_row[targets.rows]) | asynchronous
        rank = targets.blocks % context.cluster
        offsets = np.zeros_like(targets.offsets) if use is Use.READ else targets.offsets
        for offset, r in {(int(o), int(r)) for o, r in zip(offsets[foreign], rank[foreign], strict=True)}:
            mine = foreign & (offsets == offset) & (rank == r)
            rows = targets.rows[mine]
            uses = self._uses.setdefault((offset, r, use), np.zeros((4, context.warps), np.int64))
            uses[_CLOCK, rows] = _UNREACHED if asynchronous else self.checks.clocks.own(rows)
            uses[_CLUSTER_PHASE, rows] = _UNREACHED if asynchronous else self.cluster_barrier.arrivals[rows]
            uses[_DONE, rows] = _UNREACHED if phases is None else phases[mine] + 1  # a commit has no phase yet
            uses[_NUMBER, rows] = context.number_of[id(instruction)]

    def record_commit(self, targets: SharedAddresses, instruction: Instruction) -> None:
        """Record that lanes have issued a tcgen05.commit; `commit_arrives` says in which phase it arrives."""
        self.record(targets, instruction, Use.COMMIT)
        for offset, block, row in zip(targets.offsets, targets.blocks, targets.rows, strict=True):
            self._commits[int(offset), int(block) % self.context.cluster][row] += 1

    def commit_arrives(self, targets: SharedAddresses, phases: Indices) -> None:
        """Record the phases in which commits of these lanes arrive."""
        for offset, block, row, phase in zip(targets.offsets, targets.blocks, targets.rows, phases, strict=True):
            key = int(offset), int(block) % self.context.cluster
            self._commits[key][row] -= 1
            if self.checks is not None and self._commits[key][row] == 0:
                self._uses[(*key, Use.COMMIT)][_DONE, row] = phase + 1

    def check_exited(self) -> None:
        """Check every block that has no live lane left, after lanes have exited."""
        context = self.context
        exited = np.logical_not(context.live.reshape(-1, context.blocks, 32).any(axis=(0, 2)))
        ended = np.flatnonzero(exited & ~self.exited)
        self.exited = exited
        for (offset, rank, use), uses in self._uses.items():
            for block in ended[ended % context.cluster == rank]:
                self._require_order(int(block), offset, uses, use)

    def _require_order(self, block: int, offset: int, uses: Indices, use: Use) -> None:
        context = self.context
        assert self.checks is not None
        clocks = self.checks.clocks
        cluster, rank = divmod(block, context.cluster)
        rows = np.flatnonzero(context.block_of_row == block)
        users = np.flatnonzero((context.cluster_of_row == cluster) & (uses[_DONE] > 0))
        agent = None if use is Use.READ else clocks.agent(("mbarrier", offset, rank))
        # A lane keeps its block alive until the lane exits, so a wait by any single lane of the block is enough.
        known = clocks.known_by_leaders[cluster, context.warp_in_cluster[rows]].max(0).astype(np.int64)
        done = np.zeros(len(users), bool) if agent is None else known[agent] >= uses[_DONE, users]
        done |= known[context.warp_in_cluster[users]] >= uses[_CLOCK, users]
        done |= self.cluster_barrier.waited[rows].max() > uses[_CLUSTER_PHASE, users]
        if done.all():
            return
        user = int(users[np.flatnonzero(~done)[0]])
        name = f"block {int(context.block_ids[block])}"
        other = context.warp_name(cluster, int(context.warp_in_cluster[user]))
        mbarrier = f"the mbarrier at shared byte {context.shared_byte_name(block * context.shared_stride + offset)}"
        instruction = context.program.function.instructions[int(uses[_NUMBER, user])]
        if use is Use.READ:
            error: type[SimulationError] = EarlyExit
            message = (
                f"{name} may exit before {other} of its cluster reads its shared memory: it does not wait at a cluster "
                f"barrier after the read"
            )
        elif use is Use.COMMIT:
            error = PendingCopy
            message = (
                f"{name} ends before its tcgen05.commit arrives: none of its warps has waited for the phase of "
                f"{mbarrier}"
            )
        elif use is Use.COPY:
            error = PendingCopy
            message = (
                f"{name} ends before its bulk copy completes: none of its warps has waited for phase "
                f"{int(uses[_DONE, user]) - 1} of {mbarrier}"
            )
        else:
            error = EarlyExit
            message = (
                f"{name} may exit before {other} of its cluster arrives at {mbarrier}: it neither waits for that phase "
                f"nor at a cluster barrier"
            )
        context.report("commit-wait" if use is Use.COMMIT else "early-exit", error, f"{message}\n  {instruction.where}")
