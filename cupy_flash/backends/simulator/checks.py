"""Who may touch which word of shared memory when: a happens-before race detector over vector clocks.

Every warp counts its synchronisations; a barrier makes each participant know what all others had done. An access races
with an earlier one by another warp if the accessor does not yet know that warp's clock at the time, and with one by
another lane of its own warp if no bar.warp.sync came between. At least one of the two must be a plain write. A lane
that arrives at an mbarrier, or releases a number in global memory, tells of its warp only what all lanes had done when
they last came together: at a barrier, or at a wait for matrix products. What a lane has waited for, other lanes of its
warp may rely on once they have come together (clocks.py).

Asynchronous instructions access memory from their issue to their wait, in the name of an agent of their own
(clocks.py): whoever does not know of the wait races with them. They see ordinary writes only through a
fence.proxy.async, of the writing thread itself or of one that the write comes before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from .clocks import AGENTS, Agent, Clocks
from .errors import MissingFence, PendingCopy, Race, Uninitialised
from .grid_order import GridOrder
from .lanes import Context, Group
from .memory import Store
from .ptx import Instruction

Indices = npt.NDArray[np.int64]

_CLOCK, _CODE, _AGENT = 32, 13, 5  # a tag: clock, instruction number, agent, lane
_LOG_LIMIT = 512
_MORE_READERS = 8


@dataclass(slots=True)
class _Read:
    """A read that nobody has had to know about yet."""

    group: Group
    index: Indices
    width: int
    number: int
    clocks: npt.NDArray[np.uint64]


class Issue(NamedTuple):
    """Asynchronous accesses, one per issuing warp or warpgroup (n): for whom, and what the issuers know."""

    number: int  # of the instruction
    issuers: Any  # (n, warps each) rows
    agents: Indices  # (n,) in whose name
    clocks: Indices  # (n,) that tell of their end
    lanes: Any = None  # (n,) of the issuing thread; None: the warps issue it with all lanes


class Checks:
    """The state of the checks for one set of resident blocks."""

    def __init__(self, context: Context, unit: int, order: GridOrder | None = None):
        """`unit`: bytes per tracked word, the smallest access to shared memory (at most 4). `order`: that of global
        memory, if the kernel's blocks synchronise there."""
        self.context, self.unit = context, unit
        self.code = context.program.function.instructions
        self.clocks = Clocks(context, order.warps if order is not None else 0)
        units = len(context.shared.data) // unit
        self.writers = np.zeros(units, np.uint64)
        self.readers: npt.NDArray[np.uint64] | None = None
        self.atomics: npt.NDArray[np.uint64] | None = None
        self.pending = np.zeros(units, np.int32)  # instruction number + 1 of an asynchronous copy in flight
        self.any_pending = False
        # Since its lanes last came together, by warp: which of them have used shared memory; and its clock before that.
        self._apart = np.zeros((context.warps, 32), bool)
        self.together = np.zeros(context.warps, np.uint64)
        # Since then, by lane: which have written to shared memory without a proxy fence of their own after it. And the
        # clock of each lane's last proxy fence.
        self._unfenced = np.zeros((context.warps, 32), bool)
        self._fenced_at = np.zeros((context.warps, 32), np.uint64)
        self.order = order.resident(context, self.clocks, self.together) if order is not None else None
        # Since the last barrier of everybody: nothing to compare with before the first write.
        self.written = False
        self.read = False
        self.log: list[_Read] = []
        # Columns of `readers`: the warps of a block, then what else reads; and the agent of each by the block's rank.
        self._columns: dict[Agent, int] = {}
        self._agents = np.arange(self.clocks.warps).reshape(context.cluster, -1)
        if context.program.asynchronous:
            self._agents = np.pad(self._agents, ((0, 0), (0, _MORE_READERS)))

    # ---- time

    def come_together(self, rows: Indices) -> None:
        """What any lane of these warps has done so far comes before what any other does from now on."""
        self._apart[rows] = self._unfenced[rows] = False
        self.together[rows] = self.clocks.own(rows)
        if self.order is not None:
            self.order.come_together(rows)
        self.clocks.converge(rows)
        self.clocks.tick(rows)

    def fence_proxy(self, group: Group) -> None:
        """fence.proxy.async: it covers what the executing lanes have done, and what came before that."""
        rows, lanes = group.rows, group.lanes()
        own = self.clocks.own(rows)
        self._unfenced[rows] &= ~lanes
        self._fenced_at[rows] = np.where(lanes, own[:, None], self._fenced_at[rows])
        self.clocks.fence(rows, lanes, np.where(self._unfenced[rows].any(1), self.together[rows], own))

    def arrives(self, barrier: int, rows: npt.NDArray[np.int64]) -> None:
        """Warps publish at a barrier what they and, by hearsay, others have done so far."""
        self.clocks.publish(("barrier", barrier), rows, self.context.block_of_row[rows])
        self.come_together(rows)

    def ordered(self, rows: Indices, lanes: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
        """Up to which of their own clocks lanes (n, 32) of warps can tell what the warp has done in shared and in
        global memory, (2, n): where other lanes have used it since all came together, not further than that."""
        used = [self._apart] if self.order is None else [self._apart, self.order.written]
        own = self.clocks.own(rows)
        return np.array([np.where((apart[rows] & ~lanes).any(1), self.together[rows], own) for apart in used])

    def completes(self, barrier: int, rows: npt.NDArray[np.int64], blocks: npt.NDArray[np.bool_]) -> None:
        """The waiting warps `rows` learn what was published at the barrier in `blocks`."""
        context = self.context
        self.clocks.learn(("barrier", barrier), rows, context.block_of_row[rows])
        self.clocks.forget(("barrier", barrier), blocks)
        # Warps that have exited count too: what they wrote before is still to be ordered. So is what others than warps
        # do.
        if len(rows) == context.warps and not context.program.asynchronous:
            self.written = self.read = False
            self.log.clear()

    # ---- accesses

    def _units(self, index: Indices, width: int) -> Indices:
        """(accesses, units each): the tracked words of accesses of `width` bytes at byte indices."""
        first = index // self.unit
        count = max(width // self.unit, 1)
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def _who(self, group: Group) -> tuple[Indices, Indices, Indices]:
        """(row, cluster, warp in it) of each active lane."""
        rows = group.active(np.broadcast_to(group.rows[:, None], (len(group.rows), 32)))
        return rows, self.context.cluster_of_row[rows], self.context.warp_in_cluster[rows]

    def _lane(self, group: Group) -> Indices:
        return group.active(np.broadcast_to(np.arange(32), (len(group.rows), 32)))

    def _tags(self, group: Group, clocks: npt.NDArray[np.uint64], number: int) -> npt.NDArray[np.uint64]:
        warp = self.context.warp_in_cluster[group.rows].astype(np.uint64)
        base = (clocks << np.uint64(_CLOCK)) | np.uint64(number << _CODE) | (warp << np.uint64(_AGENT))
        return group.active(base[:, None] | np.arange(32, dtype=np.uint64))

    def _against(
        self, tags: npt.NDArray[np.uint64], group: Group, units: Indices, instruction: Instruction, what: str
    ) -> None:
        """Raise Race if an access of `tags` (the last ones at the units) is not ordered before this one."""
        found = tags[units]
        if not found.any():
            return
        rows, _, warp = self._who(group)
        clock = found >> np.uint64(_CLOCK)
        other = ((found >> np.uint64(_AGENT)) & np.uint64(AGENTS - 1)).astype(np.int64)
        lane = (found & np.uint64(31)).astype(np.int64)
        mine = self._lane(group)
        known = self.clocks.known_of(rows, mine, other)
        apart = (other == warp[:, None]) & (clock > self.together[rows][:, None])
        bad = (clock > known) | (apart & (lane != mine[:, None]))
        if bad.any():
            i, j = (int(x) for x in np.argwhere(bad)[0])
            self._report(group, i, int(units[i, j]), int(found[i, j]), instruction, what)

    def _report(self, group: Group, access: int, unit: int, tag: int, instruction: Instruction, what: str) -> NoReturn:
        rows, _, _ = self._who(group)
        me = self.context.thread_name(int(rows[access]), int(self._lane(group)[access]))
        self._complain(tag, unit, int(rows[access]), f"{me}: {instruction.where}", what)

    def _complain(self, tag: int, unit: int, row: int, second: str, what: str) -> NoReturn:
        number, agent, lane = (tag >> _CODE) & ((1 << (_CLOCK - _CODE)) - 1), (tag >> _AGENT) & (AGENTS - 1), tag & 31
        place, first = self.context.name_shared(unit * self.unit), self.code[number].where
        cluster, warp = int(self.context.cluster_of_row[row]), int(self.context.warp_in_cluster[row])
        leaders = self.clocks.leaders_know(row, agent, tag >> _CLOCK) if agent != warp else []
        alone = f"__syncwarp after lane {leaders[0]} of its warp has waited" if leaders else ""
        if agent >= self.clocks.warps:
            doing = {"mbarrier": "fills", "wgmma": "multiplies", "bulk": "copies"}[self.clocks.name(agent)[0]]
            raise PendingCopy(
                f"{what} of shared byte {place} without a {alone or 'wait'} for the instruction that {doing} it\n"
                f"  first:  {first}\n  second: {second}"
            )
        remedy = "__syncwarp" if agent == warp else alone or "barrier"
        raise Race(
            f"{what} of shared byte {place} without a {remedy} between\n"
            f"  first:  {self.context.warp_name(cluster, agent)}, lane {lane}: {first}\n  second: {second}"
        )

    def _used(self, group: Group, *, writes: bool) -> None:
        """Lanes use shared memory: what they do is not ordered with their warp's other lanes, nor seen by the
        asynchronous proxy."""
        lanes = group.lanes()
        self._apart[group.rows] |= lanes
        if writes and self.context.program.asynchronous:
            self._unfenced[group.rows] |= lanes

    def shared_read(self, group: Group, index: Indices, width: int, number: int) -> None:
        """A plain read of shared memory."""
        instruction = self.code[number]
        self._used(group, writes=False)
        if self.any_pending or self.written or self.atomics is not None:
            units = self._units(index, width)
            self._not_pending(group, units, instruction)
            if self.written:
                self._against(self.writers, group, units, instruction, "write, then read")
            if self.atomics is not None:
                self._against(self.atomics, group, units, instruction, "atomic write, then plain read")
        self.log.append(_Read(group, index, width, number, self.clocks.own(group.rows)))
        if len(self.log) > _LOG_LIMIT:
            self._flush_log()

    def _flush_log(self) -> None:
        if not self.log:
            return
        readers = self._all_readers()
        for read in self.log:
            rows, _, _ = self._who(read.group)
            units = self._units(read.index, read.width)
            column = self.context.warp_of_row[rows][:, None]
            readers[units, column] = self._tags(read.group, read.clocks, read.number)[:, None]
        self.log.clear()
        self.read = True

    def shared_write(self, group: Group, index: Indices, width: int, number: int, *, record: bool = True) -> None:
        """A plain write. `record=False`: only looked at, as when a copy is issued that lands later."""
        instruction = self.code[number]
        self._used(group, writes=True)
        units = self._units(index, width)
        self._not_pending(group, units, instruction)
        if self.written:
            self._against(self.writers, group, units, instruction, "write, then write")
        self._against_readers(group, units, instruction)
        if self.atomics is not None:
            self._against(self.atomics, group, units, instruction, "atomic access, then plain write")
        if record:
            self.writers[units] = self._tags(group, self.clocks.own(group.rows), number)[:, None]
            self.written = True

    def _against_readers(self, group: Group, units: Indices, instruction: Instruction) -> None:
        self._flush_log()
        if not self.read or self.readers is None:
            return
        rows, cluster, warp = self._who(group)
        known = self.clocks.known_by(rows, self._lane(group)) if self.clocks.led else self.clocks.known[cluster, warp]
        if self.context.program.asynchronous or self._agents.shape != (1, known.shape[1]):
            # A column is not its agent's component.
            known = np.take_along_axis(known, self._agents[self.context.rank_of_row[rows]], 1)
        found = self.readers[units]  # (accesses, units, columns)
        late = (found >> np.uint64(_CLOCK)) > known[:, None, :]
        if late.any():
            i, j, k = (int(x) for x in np.argwhere(late)[0])
            self._report(group, i, int(units[i, j]), int(found[i, j, k]), instruction, "read, then write")

    def shared_atomic(self, group: Group, index: Indices, width: int, number: int) -> None:
        """An atomic, volatile or relaxed access: it races with plain accesses only."""
        instruction = self.code[number]
        self._used(group, writes=True)
        units = self._units(index, width)
        self._not_pending(group, units, instruction)
        if self.written:
            self._against(self.writers, group, units, instruction, "plain write, then atomic access")
        self._against_readers(group, units, instruction)
        if self.atomics is None:
            self.atomics = np.zeros_like(self.writers)
        self.atomics[units] = self._tags(group, self.clocks.own(group.rows), number)[:, None]

    def different_values(self, group: Group, position: int, name: str, instruction: Instruction) -> NoReturn:
        """Two lanes wrote different values to one place in one instruction."""
        rows, _, _ = self._who(group)
        thread = self.context.thread_name(int(rows[position]), int(self._lane(group)[position]))
        raise Race(f"two threads write different values to {name} in one instruction\n  {thread}: {instruction.where}")

    # ---- accesses of the asynchronous proxy

    def async_read(
        self, issue: Issue, index: Indices, reader: Agent, used: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Matrix instructions or copies begin to read 16-byte pieces at index (n, pieces); `reader`: its block's name
        for whom; `used`: those whose values matter, else all."""
        units = self._pieces(index)
        self._async_not_pending(issue, units)
        if self.written:
            self._async_against(self.writers, issue, units, "write, then asynchronous read")
        if self.atomics is not None:
            self._async_against(self.atomics, issue, units, "atomic write, then asynchronous read")
        undefined = self.context.shared.undefined(index, 16)
        if used is not None:
            undefined &= used
        if undefined.any():
            i, j = (int(x) for x in np.argwhere(undefined)[0])
            raise Uninitialised(
                f"asynchronous read of shared byte {self.context.name_shared(int(index[i, j]))}, which nobody has "
                f"written\n  {self._issuer(issue, i)}"
            )
        column = self._column(reader)
        self._all_readers()[units, column] = self._async_tags(issue)[:, None]
        self.read = True

    def async_write(self, issue: Issue, index: Indices) -> None:
        """Copies begin to write 16-byte pieces at index (n, pieces)."""
        units = self._pieces(index)
        self._async_not_pending(issue, units)
        if self.written:
            self._async_against(self.writers, issue, units, "write, then asynchronous write")
        if self.atomics is not None:
            self._async_against(self.atomics, issue, units, "atomic access, then asynchronous write")
        self._flush_log()
        if self.read and self.readers is not None:
            known = self._seen(issue, fenced=False)
            rank = index[:, 0] // self.context.shared_stride % self.context.cluster
            found = self.readers[units]
            late = (found >> np.uint64(_CLOCK)) > np.take_along_axis(known, self._agents[rank], 1)[:, None, :]
            if late.any():
                i, j, k = (int(x) for x in np.argwhere(late)[0])
                self._async_complain(issue, i, units[i, j], found[i, j, k], "read, then asynchronous write")
        self.writers[units] = self._async_tags(issue)[:, None]
        self.written = True

    def _async_not_pending(self, issue: Issue, units: Indices) -> None:
        if self.any_pending and self.pending[units].any():
            i, j = (int(x) for x in np.argwhere(self.pending[units])[0])
            raise PendingCopy(
                f"shared byte {self.context.name_shared(int(units[i, j]) * self.unit)} is used before the wait for the "
                f"copy that fills it\n  copy: {self.code[int(self.pending[units[i, j]]) - 1].where}\n  "
                f"{self._issuer(issue, i)}"
            )

    def _pieces(self, index: Indices) -> Indices:
        return ((index // self.unit)[:, :, None] + np.arange(16 // self.unit)).reshape(len(index), -1)

    def _seen(self, issue: Issue, *, fenced: bool) -> npt.NDArray[np.uint64]:
        """(n, agents): what the issuing threads know, or how much of it the asynchronous proxy may see."""
        if issue.lanes is not None:
            by = self.clocks.fenced_by if fenced else self.clocks.known_by
            return by(issue.issuers[:, 0], issue.lanes)
        warps = self.context.cluster_of_row[issue.issuers], self.context.warp_in_cluster[issue.issuers]
        return (self.clocks.fenced if fenced else self.clocks.known)[warps].min(1)

    def _async_tags(self, issue: Issue) -> npt.NDArray[np.uint64]:
        base = (np.asarray(issue.clocks, np.uint64) << np.uint64(_CLOCK)) | np.uint64(issue.number << _CODE)
        return base | (np.asarray(issue.agents, np.uint64) << np.uint64(_AGENT))

    def _async_against(self, tags: npt.NDArray[np.uint64], issue: Issue, units: Indices, what: str) -> None:
        """Raise unless every issuer knows of the last accesses and, of those by warps, of a proxy fence since."""
        found = tags[units]
        if not found.any():
            return
        agent = ((found >> np.uint64(_AGENT)) & np.uint64(AGENTS - 1)).astype(np.int64)
        clock, lane = found >> np.uint64(_CLOCK), (found & np.uint64(31)).astype(np.int64)
        known = np.take_along_axis(self._seen(issue, fenced=False), agent, 1)
        late = clock > known
        if issue.lanes is not None:  # and not ordered with the thread that issues it
            row = issue.issuers[:, :1]
            apart = (agent == self.context.warp_in_cluster[row]) & (clock > self.together[row])
            late |= apart & (lane != issue.lanes[:, None])
        if late.any():
            i, j = (int(x) for x in np.argwhere(late)[0])
            self._async_complain(issue, i, units[i, j], found[i, j], what)
        fenced = np.take_along_axis(self._seen(issue, fenced=True), agent, 1)
        unseen = (agent < self.clocks.warps) & (clock > fenced)
        if not unseen.any():
            return
        # Lanes that have fenced what they wrote themselves, and a later barrier told the issuers.
        context = self.context
        rank, warp = agent // context.warps_per_block % context.cluster, agent % context.warps_per_block
        cluster = context.cluster_of_row[issue.issuers[:, :1]]
        rows = warp * context.blocks + cluster * context.cluster + rank
        themselves = self._fenced_at[rows, lane]
        unseen &= (clock > themselves) | (themselves > known)
        if unseen.any():
            i, j = (int(x) for x in np.argwhere(unseen)[0])
            number = (int(found[i, j]) >> _CODE) & ((1 << (_CLOCK - _CODE)) - 1)
            writer = context.thread_name(int(rows[i, j]), int(lane[i, j]))
            raise MissingFence(
                f"{what} of shared byte {context.name_shared(int(units[i, j]) * self.unit)} without a "
                f"fence.proxy.async between, by the writing thread or by one that the write happens before\n"
                f"  first:  {writer}: {self.code[number].where}\n  second: {self._issuer(issue, i)}"
            )

    def _issuer(self, issue: Issue, i: int) -> str:
        row = int(np.atleast_1d(issue.issuers[i])[0])
        if issue.lanes is not None:
            return f"{self.context.thread_name(row, int(issue.lanes[i]))}: {self.code[issue.number].where}"
        name = self.context.thread_name(row, 0)
        return f"{name[: name.index(', lane')]}]{name[name.index(']') + 1 :]}: {self.code[issue.number].where}"

    def _async_complain(self, issue: Issue, i: int, unit: Any, tag: Any, what: str) -> NoReturn:
        row = int(np.atleast_1d(issue.issuers[i])[0])
        self._complain(int(tag), int(unit), row, self._issuer(issue, i), what)

    def _all_readers(self) -> npt.NDArray[np.uint64]:
        if self.readers is None:
            self.readers = np.zeros((len(self.writers), self._agents.shape[1]), np.uint64)
        return self.readers

    def _column(self, reader: Agent) -> int:
        if reader not in self._columns:
            column = self.context.warps_per_block + len(self._columns)
            if column == self._agents.shape[1]:
                # Columns without a reader are in the name of agent 0, who has read nothing there.
                self._agents = np.pad(self._agents, ((0, 0), (0, _MORE_READERS)))
                if self.readers is not None:
                    self.readers = np.pad(self.readers, ((0, 0), (0, _MORE_READERS)))
            self._columns[reader] = column
            self._agents[:, column] = [self.clocks.agent((*reader, rank)) for rank in range(self.context.cluster)]
        return self._columns[reader]

    # ---- asynchronous copies

    def copy_issued(self, index: Indices, width: int, number: int) -> None:
        """The bytes belong to a copy until its wait."""
        self.pending[self._units(index, width)] = number + 1
        self.any_pending = True

    def copy_landed(self, group: Group, index: Indices, width: int, number: int) -> None:
        """The waiting thread's write, from now on."""
        self._used(group, writes=True)
        units = self._units(index, width)
        self.pending[units] = 0
        self.any_pending = bool(self.pending.any())
        self.writers[units] = self._tags(group, self.clocks.own(group.rows), number)[:, None]
        self.written = True

    def _not_pending(self, group: Group, units: Indices, instruction: Instruction) -> None:
        if not self.any_pending:
            return
        found = self.pending[units]
        if found.any():
            i, j = (int(x) for x in np.argwhere(found)[0])
            rows, _, _ = self._who(group)
            thread = self.context.thread_name(int(rows[i]), int(self._lane(group)[i]))
            raise PendingCopy(
                f"shared byte {self.context.name_shared(int(units[i, j]) * self.unit)} is used before the wait for the "
                f"copy that fills it\n  copy: {self.code[int(found[i, j]) - 1].where}\n  {thread}: {instruction.where}"
            )

    # ---- values nobody wrote

    def initialised(
        self, group: Group, store: Store, index: Indices, width: int, name: str, instruction: Instruction,
        selection: Indices | None,
    ) -> None:  # fmt: skip
        """Raise Uninitialised if the store knows of bytes that nobody wrote."""
        if store.defined is None:
            return
        bad = store.undefined(index, width)
        if not bad.any():
            return
        i = int(np.flatnonzero(bad)[0])
        rows, _, _ = self._who(group)
        lane = i if selection is None else int(selection[i])
        thread = self.context.thread_name(int(rows[lane]), int(self._lane(group)[lane]))
        if store is self.context.shared:
            place = f"shared byte {self.context.name_shared(int(index[i]))}"
        else:
            place = f"byte {int(index[i]) - store.origin} of {name!r}"
        raise Uninitialised(f"read of {place}, which nobody has written\n  {thread}: {instruction.where}")


def tracked_unit(code: Sequence[Instruction], access_bytes: Any) -> int:
    """Bytes per tracked word: 4, or less where the kernel touches shared memory in smaller pieces."""
    smallest = 4
    for instruction in code:
        if instruction.opcode in ("ld", "st", "atom", "red"):
            spaces = {m.split("::")[0] for m in instruction.modifiers}
            if not spaces & {"global", "local", "param", "const"}:
                smallest = min(smallest, access_bytes(instruction))
    return smallest
