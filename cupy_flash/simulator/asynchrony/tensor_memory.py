"""Tensor memory (TMEM) of sm_100a: 128 lanes x 512 columns of 32 bits for each block, its allocation and its order.

tcgen05.ld and .st belong to a warp, which reaches the 32 lanes of its index modulo 4; tcgen05.mma and .cp to the
thread that issues them. An access takes effect when the simulator executes it, and the checks report what another
order would see: by happens-before (memory/clocks.py), for every 16 lanes x 1 column, an access that conflicts with an
earlier one must be ordered after its completion, which is a tcgen05.wait for ld and st, and the mbarrier of a
tcgen05.commit for mma and cp.
The PTX ISA asks for tcgen05.fence::before_thread_sync and ::after_thread_sync around each synchronisation as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import (
    BarrierMisuse,
    Deadlock,
    MissingFence,
    OutOfBounds,
    PendingCopy,
    PendingRegister,
    Race,
    SimulationError,
    Uninitialised,
)
from ..machine.context import Context, Group, Mask, Unit
from ..memory.checks import Checks
from ..memory.clocks import AGENTS

Indices = npt.NDArray[np.int64]
Clocks = npt.NDArray[np.uint64]

LANES, COLUMNS = 128, 512
PARTS = 8  # of 16 lanes each, the unit of the checks along the lanes
_NEVER = np.uint64(1 << 40)  # the clock of an access whose warp has not waited for it yet
_UNFENCED = np.uint64(1 << 39)  # added to the clock of one that no fence::before_thread_sync has followed yet


@dataclass(frozen=True)
class Access:
    """n accesses of one instruction, each to `columns` after its first column in `parts` of 16 lanes.

    `lanes` are those of the threads that issue an mma or cp; None: the accesses are those of warps. `agents` are the
    components of the threads, or of the warps, in a clock, and `clocks` their values once the accesses are complete.
    """

    number: int  # of the instruction
    rows: Indices
    lanes: Indices | None
    agents: Indices
    clocks: Any
    blocks: Indices
    parts: Indices  # (n, p)
    columns: Indices  # (n, w)
    writes: bool

    @property
    def place(self) -> tuple[Indices, Indices, Indices]:
        """Index of (n, p, w) places in an array (blocks, PARTS, COLUMNS)."""
        return self.blocks[:, None, None], self.parts[:, :, None], self.columns[:, None, :]


class TensorMemory(Unit):
    """The tensor memory of one set of resident blocks."""

    # Whether the mma and cp of a thread run in the order of their issue, as everybody has measured. The PTX ISA
    # promises it only for mma with the same accumulator and from cp to mma; without it, an mma or cp may overwrite A
    # before an earlier mma has read it.
    IN_ORDER = True

    def __init__(self, context: Context):
        super().__init__(context)
        self.checks = context.find(Checks)
        self.fences = "tcgen05-fence" not in context.unchecked
        blocks = context.blocks if context.program.tensor_memory else 0
        self.words = np.full((blocks, LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.defined = np.zeros((blocks, LANES, COLUMNS), bool)
        # The first column of the allocation that a column belongs to; -1: free.
        self.allocated = np.full((blocks, COLUMNS), -1)
        self.relinquished = np.zeros(blocks, bool)
        if self.checks is None:
            return
        # The last write of each place: its agent, the clock once it is complete, and its instruction.
        shape = (blocks, PARTS, COLUMNS)
        code = context.program.function.instructions
        self._is_copy = np.array([one.opcode == "tcgen05" and one.modifiers[0] == "cp" for one in code])
        self._writer, self._written_at = np.zeros(shape, np.int64), np.zeros(shape, np.uint64)
        self._written_by = np.zeros(shape, np.int32)
        # The last reads: of an mma, and of warps by warpgroup, because a place tells which of its warps reaches it.
        self._mma_reader, self._mma_read_at = np.zeros(shape, np.int64), np.zeros(shape, np.uint64)
        self._mma_read_by = np.zeros(shape, np.int32)
        groups = -(-context.warps_per_block // 4)
        self._read_at = np.zeros((groups, *shape), np.uint64)
        self._read_by = np.zeros((groups, *shape), np.int32)
        # By warp: what its threads knew at their last fence::after_thread_sync, and which lanes have executed a
        # fence::before_thread_sync since the warp's last access.
        self._known_at_fence = np.zeros((context.warps, AGENTS), np.uint64)
        self._fenced_before = np.zeros((context.warps, 32), bool)

    # ---- allocation

    def allocate(self, row: int, columns: int, where: str) -> int:
        """Execute tcgen05.alloc of a warp; returns the address of the first column."""
        block, name = int(self.context.block_of_row[row]), self.context.thread_name(row, 0)
        if not 32 <= columns <= COLUMNS or columns & (columns - 1):
            raise OutOfBounds(f"tcgen05.alloc of {columns} columns, not a power of two of 32 to 512\n  {name}: {where}")
        if self.relinquished[block]:
            raise BarrierMisuse(f"tcgen05.alloc after tcgen05.relinquish_alloc_permit\n  {name}: {where}")
        for start in range(0, COLUMNS, columns):
            mine = slice(start, start + columns)
            if (self.allocated[block, mine] < 0).all():
                self.allocated[block, mine] = start
                self.defined[block, :, mine] = False
                if self.checks is not None:  # what used these columns before was complete when they were freed
                    for clocks in (self._written_at, self._mma_read_at, *self._read_at):
                        clocks[block, :, mine] = 0
                return start
        raise Deadlock(f"tcgen05.alloc waits for {columns} columns that the block itself holds\n  {name}: {where}")

    def free(self, row: int, address: int, columns: int, number: int) -> None:
        """Execute tcgen05.dealloc of a warp, after which no access may be in flight, nor another warp make one."""
        where = self.context.program.function.instructions[number].where
        block, name = int(self.context.block_of_row[row]), self.context.thread_name(row, 0)
        mine = self.allocated[block] == address
        if address >= COLUMNS or int(mine.sum()) != columns:
            raise OutOfBounds(
                f"tcgen05.dealloc of {columns} columns at {address:#x}, which is no allocation\n  {name}: {where}"
            )
        if self.checks is not None:
            one = np.array([row])
            everywhere = np.arange(PARTS)[None], address + np.arange(columns)[None]
            self._check(self._access_of_warps(number, one, *everywhere, writes=True), fences=False)
        self.allocated[block, mine] = -1

    def require_allocated(
        self, blocks: Indices, columns: Indices, rows: Indices, lanes: Indices | None, where: str
    ) -> None:
        """Raise OutOfBounds unless all `columns` (n, w) of these blocks are allocated."""
        outside = (columns >= COLUMNS).any(1)
        outside |= (self.allocated[blocks[:, None], np.minimum(columns, COLUMNS - 1)] < 0).any(1)
        if outside.any():
            i = int(np.flatnonzero(outside)[0])
            name = self.context.thread_name(int(rows[i]), 0 if lanes is None else int(lanes[i]))
            raise OutOfBounds(
                f"columns {int(columns[i].min())} to {int(columns[i].max())} of tensor memory are not allocated\n"
                f"  {name}: {where}"
            )

    def require_defined(self, defined: Any, rows: Indices, what: str, where: str) -> None:
        """Report Uninitialised unless all of `defined` (n, ...) is true."""
        missing = ~defined.all(tuple(range(1, defined.ndim)))
        if missing.any():
            name = self.context.thread_name(int(rows[np.flatnonzero(missing)[0]]), 0)
            self.context.report(
                "uninitialised", Uninitialised, f"{what} tensor memory that nothing has written\n  {name}: {where}"
            )

    # ---- order

    def record(self, access: Access) -> None:
        """Check that an access is ordered after the earlier ones that it conflicts with, and record it."""
        if self.checks is None:
            return
        self._check(access, fences=self.fences)
        place = access.place
        clocks = np.asarray(access.clocks, np.uint64)[:, None, None]
        if access.writes:
            self._writer[place] = access.agents[:, None, None]
            self._written_at[place], self._written_by[place] = clocks, access.number
        elif access.lanes is not None:
            self._mma_reader[place] = access.agents[:, None, None]
            self._mma_read_at[place], self._mma_read_by[place] = clocks, access.number
        else:
            warpgroup = self.context.warp_of_row[access.rows][:, None, None] // 4
            self._read_at[(warpgroup, *place)], self._read_by[(warpgroup, *place)] = clocks, access.number
        if access.lanes is None:
            self._fenced_before[access.rows] = False

    def record_of_warps(self, number: int, rows: Indices, parts: Indices, columns: Indices, *, writes: bool) -> None:
        """Check and record tcgen05.ld or .st of these warps."""
        for mine in self._by_warpgroup(rows):
            self.record(self._access_of_warps(number, rows[mine], parts[mine], columns[mine], writes=writes))

    def _by_warpgroup(self, rows: Indices) -> Iterator[Mask]:
        """Split warps that one instruction executes into sets that do not reach the same lanes of a block."""
        warpgroups = self.context.warp_of_row[rows] // 4
        for warpgroup in np.unique(warpgroups):
            yield warpgroups == warpgroup

    def _access_of_warps(self, number: int, rows: Indices, parts: Indices, columns: Indices, *, writes: bool) -> Access:
        agents, blocks = self.context.warp_in_cluster[rows], self.context.block_of_row[rows]
        return Access(number, rows, None, agents, np.full(len(rows), _NEVER), blocks, parts, columns, writes)

    def _check(self, access: Access, *, fences: bool) -> None:
        """Report an access that is not ordered after an earlier one; `fences`: by fences of tcgen05, too."""
        context, place = self.context, access.place
        known = self._live(access.rows, access.lanes)
        if fences:
            known = np.minimum(known, self._known_at_fence[access.rows, : known.shape[1]])
        agents, warps = access.agents[:, None, None], context.warp_in_cluster[access.rows][:, None, None]

        def require(by: Indices, at: Clocks, instructions: Any, what: str, *, in_order: bool | Mask) -> None:
            by = np.broadcast_to(by, at.shape)
            at = at if fences else at & ~_UNFENCED
            unordered = at > np.take_along_axis(known, by.reshape(len(by), -1), 1).reshape(by.shape)
            # A thread needs no synchronisation with its own warp, but the wait; and the mma and cp of one thread run in
            # order.
            unordered &= (by != warps) | (at == _NEVER)
            unordered &= (by != agents) | np.logical_not(in_order)
            if unordered.any():
                i, j, k = (int(x) for x in np.argwhere(unordered)[0])
                self._report(access, i, int(by[i, j, k]), at[i, j, k], int(instructions[i, j, k]), what)

        then = "write" if access.writes else "read"
        # An mma reads A at its issue, before an earlier mma of its thread has written it, but after an earlier cp has.
        in_order = access.lanes is not None and access.writes
        writers = self._written_by[place]
        require(
            self._writer[place], self._written_at[place], writers, f"write, then {then}",
            in_order=in_order | self._is_copy[writers],
        )  # fmt: skip
        if not access.writes:
            return
        what = "read, then write"
        require(
            self._mma_reader[place], self._mma_read_at[place], self._mma_read_by[place], what,
            in_order=in_order and self.IN_ORDER,
        )  # fmt: skip
        first = context.rank_of_row[access.rows][:, None, None] * context.warps_per_block
        for group, (read_at, read_by) in enumerate(zip(self._read_at, self._read_by, strict=True)):
            warp = np.minimum(4 * group + access.parts[:, :, None] // 2, context.warps_per_block - 1)
            require(first + warp, read_at[place], read_by[place], what, in_order=in_order)

    def _live(self, rows: Indices, lanes: Indices | None) -> Clocks:
        """Return what the threads, or all lanes of the warps, know now, (n, agents)."""
        assert self.checks is not None
        clocks, context = self.checks.clocks, self.context
        if lanes is None:
            known = clocks.known[context.cluster_of_row[rows], context.warp_in_cluster[rows]]
        else:
            known = clocks.known_by(rows, lanes)
        return known[:, :AGENTS]

    def _report(self, access: Access, i: int, by: int, clock: Any, first: int, what: str) -> None:
        """Report one access that is not ordered after an earlier one by the agent `by`, and what is missing."""
        assert self.checks is not None
        context, code = self.context, self.context.program.function.instructions
        lane = None if access.lanes is None else access.lanes[i : i + 1]
        live = self._live(access.rows[i : i + 1], lane)[0]
        name = context.thread_name(int(access.rows[i]), 0 if access.lanes is None else int(access.lanes[i]))
        error: type[SimulationError] = Race
        check, missing = "race", "anything that orders them"
        if clock == _NEVER:
            error, missing = PendingRegister, "the tcgen05.wait of the first"
        elif live[by] >= clock & ~_UNFENCED:
            check, error = "tcgen05-fence", MissingFence
            missing = "a tcgen05.fence::after_thread_sync between the synchronisation and the second"
            if clock & _UNFENCED:
                missing = "a tcgen05.fence::before_thread_sync between the first and the synchronisation"
        elif by >= self.checks.clocks.warps:
            error, missing = PendingCopy, "a wait for the tcgen05.commit of the first"
        context.report(
            check,
            error,
            f"{what} of tensor memory without {missing}\n  first:  {code[first].where}\n"
            f"  second: {name}: {code[access.number].where}",
        )

    def fence_after(self, group: Group) -> None:
        """Execute tcgen05.fence::after_thread_sync."""
        if self.checks is None:
            return
        rows = group.rows[group.lanes().any(1)]
        first = group.lanes()[group.lanes().any(1)].argmax(1)
        live = self._live(rows, first)
        known = self._known_at_fence[:, : live.shape[1]]
        known[rows] = np.maximum(known[rows], live)

    def fence_before(self, group: Group) -> None:
        """Execute tcgen05.fence::before_thread_sync: accesses of a warp need one by each of its threads."""
        if self.checks is None:
            return
        self._fenced_before[group.rows] |= group.lanes()
        done = group.rows[(self._fenced_before | ~self.context.live)[group.rows].all(1)]
        for loads in (True, False):
            self._settle(done, _UNFENCED, self.checks.clocks.own(done), loads=loads)
        self.checks.clocks.tick(group.rows)

    def wait(self, rows: Indices, *, loads: bool) -> None:
        """Execute tcgen05.wait::ld (`loads`) or ::st of these warps."""
        if self.checks is None:
            return
        own = self.checks.clocks.own(rows)
        self._settle(rows, _NEVER, own | _UNFENCED if self.fences else own, loads=loads)
        self.checks.clocks.tick(rows)

    def _settle(self, rows: Indices, mark: np.uint64, new: Clocks, *, loads: bool) -> None:
        """Replace the clocks of these warps' loads or stores that have this mark by `new` (n)."""
        for mine in self._by_warpgroup(rows):
            self._settle_warpgroup(rows[mine], mark, new[mine], loads=loads)

    def _settle_warpgroup(self, rows: Indices, mark: np.uint64, new: Clocks, *, loads: bool) -> None:
        warps = self.context.warp_of_row[rows][:, None]
        place = self.context.block_of_row[rows][:, None], 2 * (warps % 4) + np.arange(2)
        if loads:
            at = self._read_at[(warps // 4, *place)]
            self._read_at[(warps // 4, *place)] = np.where(at & mark != 0, new[:, None, None], at)
            return
        at = self._written_at[place]
        mine = (at & mark != 0) & (self._writer[place] == self.context.warp_in_cluster[rows][:, None, None])
        self._written_at[place] = np.where(mine, new[:, None, None], at)

    def finish(self) -> None:
        """Check at the end of the kernel that no block keeps an allocation."""
        kept = (self.allocated >= 0).any(1)
        if kept.any():
            block = int(self.context.block_ids[np.flatnonzero(kept)[0]])
            raise BarrierMisuse(f"block {block} ends without tcgen05.dealloc of its tensor memory")
