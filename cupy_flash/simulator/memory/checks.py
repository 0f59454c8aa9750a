"""Race detector for shared memory: happens-before with vector clocks (clocks.py), and uninitialised reads.

Every warp counts its synchronisations, and a barrier joins the clocks of its participants. Two accesses of one word
race if they are not ordered, at least one writes, and at least one is not atomic. Accesses of different warps are
ordered if the later warp's clock includes the earlier access; those of different lanes of a warp, if the warp has
converged in between (bar.warp.sync, a barrier, a wgmma wait). An mbarrier arrive (or st.release) by one lane publishes
that lane's accesses plus what its warp did before its last convergence point. A wait by one lane orders the other lanes
of its warp only after they converge (clocks.py).

Asynchronous instructions access memory from issue to wait, as an agent of their own (clocks.py): an access that is not
ordered after the wait races with them. They see ordinary writes only after a fence.proxy.async by the writing thread,
or by a thread that the write happens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import MissingFence, PendingCopy, Race, Uninitialised
from ..machine.context import Context, Group, Unit
from ..machine.ptx import Instruction
from .clocks import AGENTS, Agent, Clocks
from .grid_order import GridOrder
from .store import Store

Indices = npt.NDArray[np.int64]

# Bit positions in a tag, the 64-bit record of the last access to a word: clock, instruction number, agent, lane.
_CLOCK, _CODE, _AGENT = 32, 13, 5
_LOG_LIMIT = 512
# The verb, in error messages, for the access of an asynchronous agent, by the first word of its key.
_DOING = {"mbarrier": "fills", "wgmma": "multiplies", "tcgen05": "reads", "bulk": "copies"}
_MORE_READERS = 8


@dataclass(slots=True)
class _Read:
    """A logged read: reads are entered into Checks.readers only when the next write needs them."""

    group: Group
    index: Indices
    width: int
    number: int
    clocks: npt.NDArray[np.uint64]


class Issue(NamedTuple):
    """n asynchronous accesses of one instruction, one per issuing thread, warp or warpgroup."""

    number: int  # number of the instruction
    issuers: Any  # (n, warps each) rows
    agents: Indices  # (n,) the agent that performs the access
    clocks: Indices  # (n,) the agent's clock once the access is complete
    lanes: Any = None  # (n,) the issuing lane; None: all lanes of the warps issue it


class Checks(Unit):
    """The last accesses to every word of shared memory, for one set of resident blocks."""

    def __init__(self, context: Context, unit: int, order: GridOrder | None = None):
        """Start with nothing recorded.

        `unit` is the number of bytes per tracked word, the smallest shared-memory access of the kernel (at most 4).
        `order` are the checks of global memory, if the kernel's blocks synchronise there.
        """
        super().__init__(context)
        self.unit = unit
        self.code = context.program.function.instructions
        self.clocks = Clocks(context, order.warps if order is not None else 0)
        units = len(context.shared.data) // unit
        self.writers = np.zeros(units, np.uint64)
        self.readers: npt.NDArray[np.uint64] | None = None
        self.atomics: npt.NDArray[np.uint64] | None = None
        self.pending = np.zeros(units, np.int32)  # instruction number + 1 of an asynchronous copy in flight
        self.any_pending = False
        # Per warp: the lanes that have used shared memory since it last converged, and its clock at that point.
        self._used_since = np.zeros((context.warps, 32), bool)
        self.converged_at = np.zeros(context.warps, np.uint64)
        # Per warp: the lanes that have written shared memory since it last converged, without a later proxy fence of
        # their own, and the clock of each lane's last proxy fence.
        self._unfenced = np.zeros((context.warps, 32), bool)
        self._fenced_at = np.zeros((context.warps, 32), np.uint64)
        self.order = order.resident(context, self.clocks, self.converged_at) if order is not None else None
        # Whether any access since the last barrier of all warps needs a comparison.
        self.written = False
        self.read = False
        self.log: list[_Read] = []
        # Columns of `readers`: the warps of a block (if blocks read each other's memory, of its cluster), then its
        # asynchronous readers. _agents maps (rank of the block, column) to the agent.
        self._columns: dict[Agent, int] = {}
        self._agents = np.arange(self.clocks.warps).reshape(context.cluster, -1)
        self._column_of_row = context.warp_of_row
        if context.program.reads_cluster:
            self._agents = np.tile(np.arange(self.clocks.warps), (context.cluster, 1))
            self._column_of_row = context.warp_in_cluster
        self._first_async_column = self._agents.shape[1]
        if context.program.asynchronous:
            self._agents = np.pad(self._agents, ((0, 0), (0, _MORE_READERS)))

    # ---- time

    def converge(self, rows: Indices) -> None:
        """Converge the lanes of each of these warps: all their accesses so far happen before all later ones."""
        self._used_since[rows] = self._unfenced[rows] = False
        self.converged_at[rows] = self.clocks.own(rows)
        if self.order is not None:
            self.order.converge(rows)
        self.clocks.converge(rows)
        self.clocks.tick(rows)

    def fence_proxy(self, group: Group) -> None:
        """Execute fence.proxy.async.

        The executing lanes' writes, and all that happen before, become visible to the async proxy.
        """
        rows, lanes = group.rows, group.lanes()
        own = self.clocks.own(rows)
        self._unfenced[rows] &= ~lanes
        self._fenced_at[rows] = np.where(lanes, own[:, None], self._fenced_at[rows])
        self.clocks.fence(rows, lanes, np.where(self._unfenced[rows].any(1), self.converged_at[rows], own))

    def fence_release(self, group: Group) -> None:
        """Execute a release fence of cluster scope or wider.

        A later relaxed arrival of these warps at the cluster barrier publishes their clocks at the fence.
        """
        rows, lanes = group.rows, group.lanes()
        up_to = self.publishable(rows, lanes)
        warps = self.context.warp_of_row[rows]
        for warp in np.unique(warps):
            mine = warps == warp
            blocks = self.context.block_of_row[rows[mine]]
            self.clocks.publish(("fence", int(warp)), rows[mine], blocks, lanes[mine], up_to[:, mine])

    def barrier_arrive(self, barrier: int, rows: npt.NDArray[np.int64]) -> None:
        """Publish the clocks of warps at a named barrier."""
        self.clocks.publish(("barrier", barrier), rows, self.context.block_of_row[rows])
        self.converge(rows)

    def publishable(self, rows: Indices, lanes: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
        """Return the warps' own clocks that these lanes (n, 32) may publish, (2, n), for shared and for global memory.

        It is the clock at the last convergence if other lanes have used that memory since.
        """
        used = [self._used_since] if self.order is None else [self._used_since, self.order.written]
        own = self.clocks.own(rows)
        return np.array([np.where((since[rows] & ~lanes).any(1), self.converged_at[rows], own) for since in used])

    def barrier_complete(self, barrier: int, rows: npt.NDArray[np.int64], blocks: npt.NDArray[np.bool_]) -> None:
        """Acquire, for the waiting warps `rows`, the clocks published at the named barrier in `blocks`."""
        context = self.context
        self.clocks.acquire(("barrier", barrier), rows, context.block_of_row[rows])
        self.clocks.reset(("barrier", barrier), blocks)
        # The log may be cleared only if all warps took part, because an exited warp's writes still need ordering, and
        # only without asynchronous instructions and reads by other blocks, whose accesses the barrier does not order.
        program = context.program
        if len(rows) == context.warps and not (program.asynchronous or program.reads_cluster):
            self.written = self.read = False
            self.log.clear()

    # ---- accesses

    def _units(self, index: Indices, width: int) -> Indices:
        """Return the tracked words of accesses of `width` bytes at byte indices, (accesses, units each)."""
        first = index // self.unit
        count = max(width // self.unit, 1)
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def _warps(self, group: Group) -> tuple[Indices, Indices, Indices]:
        """Return (row, cluster, warp in the cluster) of each active lane."""
        rows = group.active_rows()
        return rows, self.context.cluster_of_row[rows], self.context.warp_in_cluster[rows]

    def _tags(self, group: Group, clocks: npt.NDArray[np.uint64], number: int) -> npt.NDArray[np.uint64]:
        warp = self.context.warp_in_cluster[group.rows].astype(np.uint64)
        base = (clocks << np.uint64(_CLOCK)) | np.uint64(number << _CODE) | (warp << np.uint64(_AGENT))
        return group.active(base[:, None] | np.arange(32, dtype=np.uint64))

    def _require_order(
        self, tags: npt.NDArray[np.uint64], group: Group, units: Indices, instruction: Instruction, what: str
    ) -> None:
        """Report Race if the last access in `tags` to any of the units does not happen before this one."""
        last = tags[units]
        if not np.count_nonzero(last):
            return
        rows, _, warp = self._warps(group)
        clock = last >> np.uint64(_CLOCK)
        agent = ((last >> np.uint64(_AGENT)) & np.uint64(AGENTS - 1)).astype(np.int64)
        last_lane = (last & np.uint64(31)).astype(np.int64)
        lane = group.active_lanes()
        known = self.clocks.known_of(rows, lane, agent)
        diverged = (agent == warp[:, None]) & (clock > self.converged_at[rows][:, None])
        unordered = (clock > known) | (diverged & (last_lane != lane[:, None]))
        if np.count_nonzero(unordered):
            i, j = (int(x) for x in np.argwhere(unordered)[0])
            self._report_race(group, i, int(units[i, j]), int(last[i, j]), instruction, what)

    def _report_race(self, group: Group, access: int, unit: int, tag: int, instruction: Instruction, what: str) -> None:
        rows = group.active_rows()
        thread = self.context.thread_name(int(rows[access]), int(group.active_lanes()[access]))
        self._report_unordered(tag, unit, int(rows[access]), f"{thread}: {instruction.where}", what)

    def _report_unordered(self, tag: int, unit: int, row: int, second: str, what: str) -> None:
        """Report Race, or PendingCopy if the first access is asynchronous, and name the missing synchronisation."""
        number, agent, lane = (tag >> _CODE) & ((1 << (_CLOCK - _CODE)) - 1), (tag >> _AGENT) & (AGENTS - 1), tag & 31
        place, first = self.context.shared_byte_name(unit * self.unit), self.code[number].where
        cluster, warp = int(self.context.cluster_of_row[row]), int(self.context.warp_in_cluster[row])
        leaders = self.clocks.leaders_with(row, agent, tag >> _CLOCK) if agent != warp else []
        syncwarp = f"__syncwarp after the wait of lane {leaders[0]} of its warp" if leaders else ""
        if agent >= self.clocks.warps:
            doing = _DOING[self.clocks.name(agent)[0]]
            self.context.report(
                "race",
                PendingCopy,
                f"{what} of shared byte {place} without a {syncwarp or 'wait'} for the instruction that {doing} it\n"
                f"  first:  {first}\n  second: {second}",
            )
            return
        missing = "__syncwarp" if agent == warp else syncwarp or "barrier"
        self.context.report(
            "race",
            Race,
            f"{what} of shared byte {place} without a {missing} between\n"
            f"  first:  {self.context.warp_name(cluster, agent)}, lane {lane}: {first}\n  second: {second}",
        )

    def _used(self, group: Group, *, writes: bool) -> None:
        """Record lanes that use shared memory.

        Their accesses are not ordered with the other lanes of their warp until it converges, nor visible to the async
        proxy until a fence.
        """
        where = slice(None) if group.index is None else group.index
        lanes = True if group.mask is None else group.mask
        self._used_since[where] |= lanes
        if writes and self.context.program.asynchronous:
            self._unfenced[where] |= lanes

    def shared_read(self, group: Group, index: Indices, width: int, number: int) -> None:
        """Check and record a plain read of shared memory."""
        instruction = self.code[number]
        self._used(group, writes=False)
        if self.any_pending or self.written or self.atomics is not None:
            units = self._units(index, width)
            self._not_pending(group, units, instruction)
            if self.written:
                self._require_order(self.writers, group, units, instruction, "write, then read")
            if self.atomics is not None:
                self._require_order(self.atomics, group, units, instruction, "atomic write, then plain read")
        self.log.append(_Read(group, index, width, number, self.clocks.own(group.rows)))
        if len(self.log) > _LOG_LIMIT:
            self._flush_log()

    def _flush_log(self) -> None:
        if not self.log:
            return
        readers = self._all_readers()
        for read in self.log:
            units = self._units(read.index, read.width)
            column = self._column_of_row[read.group.active_rows()][:, None]
            readers[units, column] = self._tags(read.group, read.clocks, read.number)[:, None]
        self.log.clear()
        self.read = True

    def shared_write(self, group: Group, index: Indices, width: int, number: int, *, record: bool = True) -> None:
        """Check and record a plain write; `record=False` only checks, at the issue of a copy that writes later."""
        instruction = self.code[number]
        self._used(group, writes=True)
        units = self._units(index, width)
        self._not_pending(group, units, instruction)
        if self.written:
            self._require_order(self.writers, group, units, instruction, "write, then write")
        self._require_order_after_reads(group, units, instruction)
        if self.atomics is not None:
            self._require_order(self.atomics, group, units, instruction, "atomic access, then plain write")
        if record:
            self.writers[units] = self._tags(group, self.clocks.own(group.rows), number)[:, None]
            self.written = True

    def shared_write_without_proxy(self, group: Group, index: Indices, width: int, number: int) -> None:
        """Check and record a write that the async proxy sees without a fence.

        If a thread has written other shared memory since its last proxy fence, this write needs a fence as well.
        """
        lanes = group.lanes() & ~self._unfenced[group.rows]
        self.shared_write(group, index, width, number)
        self.fence_proxy(group.narrowed(lanes))

    def _require_order_after_reads(self, group: Group, units: Indices, instruction: Instruction) -> None:
        self._flush_log()
        if not self.read or self.readers is None:
            return
        rows, cluster, warp = self._warps(group)
        known = (
            self.clocks.known_by(rows, group.active_lanes()) if self.clocks.led else self.clocks.known[cluster, warp]
        )
        if self.context.program.asynchronous or self._agents.shape != (1, known.shape[1]):
            # Order the components of the clock as the columns of `readers`.
            known = np.take_along_axis(known, self._agents[self.context.rank_of_row[rows]], 1)
        last = self.readers[units]  # (accesses, units, columns)
        unordered = (last >> np.uint64(_CLOCK)) > known[:, None, :]
        if np.count_nonzero(unordered):
            i, j, k = (int(x) for x in np.argwhere(unordered)[0])
            self._report_race(group, i, int(units[i, j]), int(last[i, j, k]), instruction, "read, then write")

    def shared_atomic(self, group: Group, index: Indices, width: int, number: int) -> None:
        """Check and record an atomic, volatile or relaxed access, which races with plain accesses only."""
        instruction = self.code[number]
        self._used(group, writes=True)
        units = self._units(index, width)
        self._not_pending(group, units, instruction)
        if self.written:
            self._require_order(self.writers, group, units, instruction, "plain write, then atomic access")
        self._require_order_after_reads(group, units, instruction)
        if self.atomics is None:
            self.atomics = np.zeros_like(self.writers)
        self.atomics[units] = self._tags(group, self.clocks.own(group.rows), number)[:, None]

    def conflicting_stores(self, group: Group, position: int, name: str, instruction: Instruction) -> None:
        """Report a Race between two lanes of one instruction that store different values to one address."""
        rows = group.active_rows()
        thread = self.context.thread_name(int(rows[position]), int(group.active_lanes()[position]))
        self.context.report(
            "race",
            Race,
            f"two threads store different values to one address of {name} in one instruction\n"
            f"  {thread}: {instruction.where}",
        )

    # ---- accesses of the async proxy

    def async_read(
        self, issue: Issue, index: Indices, reader: Agent, used: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Record that wgmma instructions or bulk copies begin to read 16-byte pieces at index (n, pieces).

        `reader` is the key of their agent without the block's rank; `used` are the pieces whose values matter (None:
        all).
        """
        units = self._pieces(index)
        self._async_not_pending(issue, units)
        if self.written:
            self._async_require_order(self.writers, issue, units, "write, then asynchronous read")
        if self.atomics is not None:
            self._async_require_order(self.atomics, issue, units, "atomic write, then asynchronous read")
        undefined = self.context.shared.undefined(index, 16)
        if used is not None:
            undefined &= used
        if undefined.any():
            i, j = (int(x) for x in np.argwhere(undefined)[0])
            self.context.report(
                "uninitialised",
                Uninitialised,
                f"asynchronous read of shared byte {self.context.shared_byte_name(int(index[i, j]))}, which is "
                f"uninitialised\n  {self._issuer(issue, i)}",
            )
        column = self._column(reader)
        self._all_readers()[units, column] = self._async_tags(issue)[:, None]
        self.read = True

    def async_write(self, issue: Issue, index: Indices) -> None:
        """Record that bulk copies begin to write 16-byte pieces at index (n, pieces)."""
        units = self._pieces(index)
        self._async_not_pending(issue, units)
        if self.written:
            self._async_require_order(self.writers, issue, units, "write, then asynchronous write")
        if self.atomics is not None:
            self._async_require_order(self.atomics, issue, units, "atomic access, then asynchronous write")
        self._flush_log()
        if self.read and self.readers is not None:
            known = self._clocks_of(issue, fenced=False)
            rank = index[:, 0] // self.context.shared_stride % self.context.cluster
            last = self.readers[units]
            unordered = (last >> np.uint64(_CLOCK)) > np.take_along_axis(known, self._agents[rank], 1)[:, None, :]
            if unordered.any():
                i, j, k = (int(x) for x in np.argwhere(unordered)[0])
                self._report_async(issue, i, units[i, j], last[i, j, k], "read, then asynchronous write")
        self.writers[units] = self._async_tags(issue)[:, None]
        self.written = True

    def _async_not_pending(self, issue: Issue, units: Indices) -> None:
        if self.any_pending and self.pending[units].any():
            i, j = (int(x) for x in np.argwhere(self.pending[units])[0])
            self._report_pending(int(units[i, j]), self._issuer(issue, i))

    def _pieces(self, index: Indices) -> Indices:
        return ((index // self.unit)[:, :, None] + np.arange(16 // self.unit)).reshape(len(index), -1)

    def _clocks_of(self, issue: Issue, *, fenced: bool) -> npt.NDArray[np.uint64]:
        """Return the clocks of the issuing threads, or (`fenced`) the part visible to the async proxy, (n, agents)."""
        if issue.lanes is not None:
            by = self.clocks.fenced_by if fenced else self.clocks.known_by
            return by(issue.issuers[:, 0], issue.lanes)
        warps = self.context.cluster_of_row[issue.issuers], self.context.warp_in_cluster[issue.issuers]
        return (self.clocks.fenced if fenced else self.clocks.known)[warps].min(1)

    def _async_tags(self, issue: Issue) -> npt.NDArray[np.uint64]:
        base = (np.asarray(issue.clocks, np.uint64) << np.uint64(_CLOCK)) | np.uint64(issue.number << _CODE)
        return base | (np.asarray(issue.agents, np.uint64) << np.uint64(_AGENT))

    def _async_require_order(self, tags: npt.NDArray[np.uint64], issue: Issue, units: Indices, what: str) -> None:
        """Report last accesses that do not happen before the issue or, if by warps, have no proxy fence after them."""
        last = tags[units]
        if not last.any():
            return
        agent = ((last >> np.uint64(_AGENT)) & np.uint64(AGENTS - 1)).astype(np.int64)
        clock, lane = last >> np.uint64(_CLOCK), (last & np.uint64(31)).astype(np.int64)
        known = np.take_along_axis(self._clocks_of(issue, fenced=False), agent, 1)
        unordered = clock > known
        if issue.lanes is not None:  # accesses of the warp's other lanes since it last converged
            row = issue.issuers[:, :1]
            diverged = (agent == self.context.warp_in_cluster[row]) & (clock > self.converged_at[row])
            unordered |= diverged & (lane != issue.lanes[:, None])
        if unordered.any():
            i, j = (int(x) for x in np.argwhere(unordered)[0])
            self._report_async(issue, i, units[i, j], last[i, j], what)
        fenced = np.take_along_axis(self._clocks_of(issue, fenced=True), agent, 1)
        unseen = (agent < self.clocks.warps) & (clock > fenced)
        if not unseen.any():
            return
        # A lane may have fenced its own write, and a later barrier ordered that fence before the issue.
        context = self.context
        rank, warp = agent // context.warps_per_block % context.cluster, agent % context.warps_per_block
        cluster = context.cluster_of_row[issue.issuers[:, :1]]
        rows = warp * context.blocks + cluster * context.cluster + rank
        fenced_at = self._fenced_at[rows, lane]
        unseen &= (clock > fenced_at) | (fenced_at > known)
        if unseen.any():
            i, j = (int(x) for x in np.argwhere(unseen)[0])
            number = (int(last[i, j]) >> _CODE) & ((1 << (_CLOCK - _CODE)) - 1)
            writer = context.thread_name(int(rows[i, j]), int(lane[i, j]))
            context.report(
                "proxy-fence",
                MissingFence,
                f"{what} of shared byte {context.shared_byte_name(int(units[i, j]) * self.unit)} without a "
                f"fence.proxy.async between, by the writing thread or by one that the write happens before\n"
                f"  first:  {writer}: {self.code[number].where}\n  second: {self._issuer(issue, i)}",
            )

    def _issuer(self, issue: Issue, i: int) -> str:
        row = int(np.atleast_1d(issue.issuers[i])[0])
        if issue.lanes is not None:
            return f"{self.context.thread_name(row, int(issue.lanes[i]))}: {self.code[issue.number].where}"
        name = self.context.thread_name(row, 0)
        return f"{name[: name.index(', lane')]}]{name[name.index(']') + 1 :]}: {self.code[issue.number].where}"

    def _report_async(self, issue: Issue, i: int, unit: Any, tag: Any, what: str) -> None:
        row = int(np.atleast_1d(issue.issuers[i])[0])
        self._report_unordered(int(tag), int(unit), row, self._issuer(issue, i), what)

    def _all_readers(self) -> npt.NDArray[np.uint64]:
        if self.readers is None:
            self.readers = np.zeros((len(self.writers), self._agents.shape[1]), np.uint64)
        return self.readers

    def _column(self, reader: Agent) -> int:
        if reader not in self._columns:
            column = self._first_async_column + len(self._columns)
            if column == self._agents.shape[1]:
                # Double the columns, because adding one copies all. Unused ones map to agent 0 and hold no reads.
                more = max(_MORE_READERS, len(self._columns))
                self._agents = np.pad(self._agents, ((0, 0), (0, more)))
                if self.readers is not None:
                    self.readers = np.pad(self.readers, ((0, 0), (0, more)))
            self._columns[reader] = column
            self._agents[:, column] = [self.clocks.agent((*reader, rank)) for rank in range(self.context.cluster)]
        return self._columns[reader]

    # ---- asynchronous copies

    def copy_issued(self, index: Indices, width: int, number: int) -> None:
        """Mark bytes that a cp.async will write, until its wait."""
        self.pending[self._units(index, width)] = number + 1
        self.any_pending = True

    def copy_landed(self, group: Group, index: Indices, width: int, number: int) -> None:
        """Record that a wait covers the copy, so that its bytes now count as written by the waiting thread."""
        self._used(group, writes=True)
        units = self._units(index, width)
        self.pending[units] = 0
        self.any_pending = bool(self.pending.any())
        self.writers[units] = self._tags(group, self.clocks.own(group.rows), number)[:, None]
        self.written = True

    def _not_pending(self, group: Group, units: Indices, instruction: Instruction) -> None:
        if not self.any_pending:
            return
        copies = self.pending[units]
        if np.count_nonzero(copies):
            i, j = (int(x) for x in np.argwhere(copies)[0])
            rows = group.active_rows()
            thread = self.context.thread_name(int(rows[i]), int(group.active_lanes()[i]))
            self._report_pending(int(units[i, j]), f"{thread}: {instruction.where}")

    def _report_pending(self, unit: int, use: str) -> None:
        self.context.report(
            "race",
            PendingCopy,
            f"shared byte {self.context.shared_byte_name(unit * self.unit)} is used before the wait for the cp.async "
            f"that fills it\n  copy: {self.code[int(self.pending[unit]) - 1].where}\n  use:  {use}",
        )

    # ---- uninitialised memory

    def require_initialised(
        self, group: Group, store: Store, index: Indices, width: int, name: str, instruction: Instruction,
        selection: Indices | None,
    ) -> None:  # fmt: skip
        """Report Uninitialised if the store tracks initialisation and any of these bytes was never written."""
        if store.defined is None:
            return
        undefined = store.undefined(index, width)
        if not np.count_nonzero(undefined):
            return
        i = int(np.flatnonzero(undefined)[0])
        rows = group.active_rows()
        lane = i if selection is None else int(selection[i])
        thread = self.context.thread_name(int(rows[lane]), int(group.active_lanes()[lane]))
        if store is self.context.shared:
            byte = f"shared byte {self.context.shared_byte_name(int(index[i]))}"
        else:
            byte = f"byte {int(index[i]) - store.origin} of {name!r}"
        self.context.report(
            "uninitialised", Uninitialised, f"read of {byte}, which is uninitialised\n  {thread}: {instruction.where}"
        )


def tracked_unit(code: Sequence[Instruction], access_bytes: Any) -> int:
    """Bytes per tracked word: 4, or less if the kernel has smaller shared-memory accesses."""
    smallest = 4
    for instruction in code:
        if instruction.opcode in ("ld", "st", "atom", "red"):
            spaces = {m.split("::")[0] for m in instruction.modifiers}
            if not spaces & {"global", "local", "param", "const"}:
                smallest = min(smallest, access_bytes(instruction))
    return smallest
