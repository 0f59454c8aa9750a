"""Who may touch which word of shared memory when: a happens-before race detector over vector clocks.

Every warp counts its synchronisations; a barrier makes each participant know what all others had done. An access races
with an earlier one by another warp if the accessor does not yet know that warp's clock at the time, and with one by
another lane of its own warp if no bar.warp.sync came between. At least one of the two must be a plain write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .errors import PendingCopy, Race, Uninitialised
from .lanes import Context, Group
from .memory import Store
from .ptx import Instruction

Indices = npt.NDArray[np.int64]

_CLOCK, _CODE, _WARP = 32, 10, 5  # a tag: clock, instruction number, warp, lane
_LOG_LIMIT = 512


@dataclass(slots=True)
class _Read:
    """A read that nobody has had to know about yet."""

    group: Group
    index: Indices
    width: int
    number: int
    clocks: npt.NDArray[np.uint64]


class Checks:
    """The state of the checks for one set of resident blocks."""

    def __init__(self, context: Context, unit: int):
        """`unit`: bytes per tracked word, the smallest access to shared memory (at most 4)."""
        self.context, self.unit = context, unit
        self.code = context.program.function.instructions
        warps = context.warps_per_block
        self.known = np.zeros((context.blocks, warps, warps), np.uint64)  # known[block, warp, other warp's clock]
        self.known[:, np.arange(warps), np.arange(warps)] = 1
        units = len(context.shared.data) // unit
        self.writers = np.zeros(units, np.uint64)
        self.readers: npt.NDArray[np.uint64] | None = None
        self.atomics: npt.NDArray[np.uint64] | None = None
        self.pending = np.zeros(units, np.int32)  # instruction number + 1 of an asynchronous copy in flight
        self.any_pending = False
        # Since the last barrier of everybody: nothing to compare with before the first write.
        self.written = False
        self.read = False
        self.log: list[_Read] = []
        self.published: dict[int, npt.NDArray[np.uint64]] = {}  # barrier -> (blocks, warps) clocks

    # ---- time

    def _own_clocks(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        block, warp = self.context.block_of_row[rows], self.context.warp_of_row[rows]
        return self.known[block, warp, warp]

    def _tick(self, rows: npt.NDArray[np.int64]) -> None:
        block, warp = self.context.block_of_row[rows], self.context.warp_of_row[rows]
        self.known[block, warp, warp] += np.uint64(1)

    def warp_barrier(self, group: Group) -> None:
        """The lanes of each warp are ordered."""
        self._tick(group.rows)

    def arrives(self, barrier: int, rows: npt.NDArray[np.int64]) -> None:
        """Warps publish at a barrier what they and, by hearsay, others have done so far."""
        block, warp = self.context.block_of_row[rows], self.context.warp_of_row[rows]
        if barrier not in self.published:
            self.published[barrier] = np.zeros(self.known.shape[:2], np.uint64)
        np.maximum.at(self.published[barrier], block, self.known[block, warp])
        self._tick(rows)

    def completes(self, barrier: int, rows: npt.NDArray[np.int64], blocks: npt.NDArray[np.bool_]) -> None:
        """The waiting warps `rows` learn what was published at the barrier in `blocks`."""
        context = self.context
        block, warp = context.block_of_row[rows], context.warp_of_row[rows]
        self.known[block, warp] = np.maximum(self.known[block, warp], self.published[barrier][block])
        self.published[barrier][blocks] = 0
        # Warps that have exited count too: what they wrote before is still to be ordered.
        if len(rows) == context.warps:
            self.written = self.read = False
            self.log.clear()

    # ---- accesses

    def _units(self, index: Indices, width: int) -> Indices:
        """(accesses, units each): the tracked words of accesses of `width` bytes at byte indices."""
        first = index // self.unit
        count = max(width // self.unit, 1)
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def _who(self, group: Group) -> tuple[Indices, Indices, Indices]:
        """(row, block, warp) of each active lane."""
        rows = group.active(np.broadcast_to(group.rows[:, None], (len(group.rows), 32)))
        return rows, self.context.block_of_row[rows], self.context.warp_of_row[rows]

    def _lane(self, group: Group) -> Indices:
        return group.active(np.broadcast_to(np.arange(32), (len(group.rows), 32)))

    def _tags(self, group: Group, clocks: npt.NDArray[np.uint64], number: int) -> npt.NDArray[np.uint64]:
        warp = self.context.warp_of_row[group.rows].astype(np.uint64)
        base = (clocks << np.uint64(_CLOCK)) | np.uint64(number << _CODE) | (warp << np.uint64(_WARP))
        return group.active(base[:, None] | np.arange(32, dtype=np.uint64))

    def _against(
        self, tags: npt.NDArray[np.uint64], group: Group, units: Indices, instruction: Instruction, what: str
    ) -> None:
        """Raise Race if an access of `tags` (the last ones at the units) is not ordered before this one."""
        found = tags[units]
        if not found.any():
            return
        _, block, warp = self._who(group)
        clock = found >> np.uint64(_CLOCK)
        other = ((found >> np.uint64(_WARP)) & np.uint64(31)).astype(np.int64)
        lane = (found & np.uint64(31)).astype(np.int64)
        warps = self.context.warps_per_block
        known = self.known.reshape(-1)[((block * warps + warp) * warps)[:, None] + other]
        own = other == warp[:, None]
        bad = (clock > known) | (own & (clock == known) & (lane != self._lane(group)[:, None]))
        if bad.any():
            i, j = (int(x) for x in np.argwhere(bad)[0])
            self._report(group, i, int(units[i, j]), int(found[i, j]), instruction, what)

    def _report(self, group: Group, access: int, unit: int, tag: int, instruction: Instruction, what: str) -> NoReturn:
        rows, _, warp = self._who(group)
        me = self.context.thread_name(int(rows[access]), int(self._lane(group)[access]))
        number, other, lane = (tag >> _CODE) & 0x3FFFFF, (tag >> _WARP) & 31, tag & 31
        remedy = "__syncwarp" if other == warp[access] else "barrier"
        raise Race(
            f"{what} of shared byte {self.context.name_shared(unit * self.unit)} without a {remedy} between\n"
            f"  first:  warp {other}, lane {lane}: {self.code[number].where}\n  second: {me}: {instruction.where}"
        )

    def shared_read(self, group: Group, index: Indices, width: int, number: int) -> None:
        """A plain read of shared memory."""
        instruction = self.code[number]
        if self.any_pending or self.written or self.atomics is not None:
            units = self._units(index, width)
            self._not_pending(group, units, instruction)
            if self.written:
                self._against(self.writers, group, units, instruction, "write, then read")
            if self.atomics is not None:
                self._against(self.atomics, group, units, instruction, "atomic write, then plain read")
        self.log.append(_Read(group, index, width, number, self._own_clocks(group.rows)))
        if len(self.log) > _LOG_LIMIT:
            self._flush_log()

    def _flush_log(self) -> None:
        if not self.log:
            return
        if self.readers is None:
            self.readers = np.zeros((len(self.writers), self.context.warps_per_block), np.uint64)
        for read in self.log:
            _, _, warp = self._who(read.group)
            units = self._units(read.index, read.width)
            self.readers[units, warp[:, None]] = self._tags(read.group, read.clocks, read.number)[:, None]
        self.log.clear()
        self.read = True

    def shared_write(self, group: Group, index: Indices, width: int, number: int, *, record: bool = True) -> None:
        """A plain write. `record=False`: only looked at, as when a copy is issued that lands later."""
        instruction = self.code[number]
        units = self._units(index, width)
        self._not_pending(group, units, instruction)
        if self.written:
            self._against(self.writers, group, units, instruction, "write, then write")
        self._against_readers(group, units, instruction)
        if self.atomics is not None:
            self._against(self.atomics, group, units, instruction, "atomic access, then plain write")
        if record:
            self.writers[units] = self._tags(group, self._own_clocks(group.rows), number)[:, None]
            self.written = True

    def _against_readers(self, group: Group, units: Indices, instruction: Instruction) -> None:
        self._flush_log()
        if not self.read or self.readers is None:
            return
        _, block, warp = self._who(group)
        found = self.readers[units]  # (accesses, units, warps)
        late = (found >> np.uint64(_CLOCK)) > self.known[block, warp][:, None, :]
        late[np.arange(len(warp)), :, warp] = False  # a warp's own reads come before its later writes
        if late.any():
            i, j, k = (int(x) for x in np.argwhere(late)[0])
            self._report(group, i, int(units[i, j]), int(found[i, j, k]), instruction, "read, then write")

    def shared_atomic(self, group: Group, index: Indices, width: int, number: int) -> None:
        """An atomic, volatile or relaxed access: it races with plain accesses only."""
        instruction = self.code[number]
        units = self._units(index, width)
        self._not_pending(group, units, instruction)
        if self.written:
            self._against(self.writers, group, units, instruction, "plain write, then atomic access")
        self._against_readers(group, units, instruction)
        if self.atomics is None:
            self.atomics = np.zeros_like(self.writers)
        self.atomics[units] = self._tags(group, self._own_clocks(group.rows), number)[:, None]

    def different_values(self, group: Group, position: int, name: str, instruction: Instruction) -> NoReturn:
        """Two lanes wrote different values to one place in one instruction."""
        rows, _, _ = self._who(group)
        thread = self.context.thread_name(int(rows[position]), int(self._lane(group)[position]))
        raise Race(f"two threads write different values to {name} in one instruction\n  {thread}: {instruction.where}")

    # ---- asynchronous copies

    def copy_issued(self, index: Indices, width: int, number: int) -> None:
        """The bytes belong to a copy until its wait."""
        self.pending[self._units(index, width)] = number + 1
        self.any_pending = True

    def copy_landed(self, group: Group, index: Indices, width: int, number: int) -> None:
        """The waiting thread's write, from now on."""
        units = self._units(index, width)
        self.pending[units] = 0
        self.any_pending = bool(self.pending.any())
        self.writers[units] = self._tags(group, self._own_clocks(group.rows), number)[:, None]
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
