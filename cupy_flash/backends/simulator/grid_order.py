"""Happens-before in global memory, between blocks: what release and acquire order, and what nothing does.

PTX ISA, Memory Consistency Model. A release (st.release, or a fence and then a strong write) of a number, and an
acquire (ld.acquire, or a strong read and then a fence) that reads it, or reads what atomics have made of it, order what
came before the one with what comes after the other, if the scope of each includes the other's thread. A relaxed access,
or one of too narrow a scope, orders nothing. A thread that acquires a number does so for itself: the other lanes of its
warp follow at a __syncwarp (clocks.py).

In kernels whose blocks synchronise so (Program.synchronises) every write is remembered with its warp's clock. A plain
access races with a write that it does not come after. So does an atomic with a plain write; atomics may meet in any
order, but for additions of floating-point numbers, whose sum depends on it: a kernel that lets its blocks wait for each
other means to fix that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from .clocks import AGENTS, Clocks
from .errors import Race, Unsupported
from .lanes import Context, Group, Step
from .memory import Store
from .program import Program
from .ptx import TYPE_BYTES, Instruction

Indices = npt.NDArray[np.int64]
Tags = npt.NDArray[np.uint64]
Clock = npt.NDArray[np.uint64]

_CLOCK, _CODE, _WARP = 40, 21, 5  # a tag: clock, instruction number, warp of the grid, lane
_SCOPES = ("cta", "cluster", "gpu", "sys")  # from the narrowest
STRONG = {"volatile", "relaxed", "acquire", "release", "mmio"}  # loads and stores that are
_LEVELS = {"cta": "cta", "gl": "gpu", "sys": "sys"}  # of membar


@dataclass(frozen=True, slots=True)
class _Form:
    """What an instruction does to the order of global memory."""

    instruction: Instruction
    number: int
    writes: bool
    strong: bool
    atomic: bool
    adds: bool  # floating-point numbers
    releases: bool
    acquires: bool
    reads: bool  # strongly: a fence after it may acquire what it has read
    scope: str


@dataclass(frozen=True, slots=True)
class _Release:
    """What a thread has released at a place: what it knew then, for whom."""

    warp: int  # of the grid
    lane: int
    scope: str
    clock: Clock  # (planes, agents)


class _Tracked:
    """The last plain write and the last atomic or other strong one to each unit of an allocation, as tags; and the
    number of what has been released there."""

    def __init__(self, units: int):
        self.writers, self.atomics = np.zeros(units, np.uint64), np.zeros(units, np.uint64)
        self.released = np.zeros(units, np.int64)


def _scope(modifiers: tuple[str, ...]) -> str:
    if "volatile" in modifiers or "mmio" in modifiers:
        return "sys"
    return next((m for m in modifiers if m in _SCOPES), "gpu")


class GridOrder:
    """The order of one launch: of all its blocks, whether or not they are resident together."""

    def __init__(self, program: Program, blocks: int, warps_per_block: int):
        self.warps, self.per_block = blocks * warps_per_block, warps_per_block
        self.cluster = program.function.cluster[0]
        self.code = program.function.instructions
        if self.warps > 1 << (_CODE - _WARP):
            raise Unsupported(f"{self.warps} warps in blocks that synchronise in global memory")
        writing = [i for i in self.code if i.opcode in ("st", "atom", "red") and i.modifiers[-1] in TYPE_BYTES]
        self.unit = min([4, *(TYPE_BYTES[i.modifiers[-1]] for i in writing)])
        fences = [i.modifiers[0] for i in self.code if i.opcode in ("fence", "membar")]
        self._fences = any(kind in ("acq_rel", "sc", "acquire", "release", *_LEVELS) for kind in fences)
        self._forms: dict[int, _Form] = {}
        self._tracked: dict[int, _Tracked] = {}  # by the id of a store
        self._releases: dict[int, list[_Release]] = {}
        self._count = 0

    def resident(self, context: Context, clocks: Clocks, together: Clock) -> GridOrder:
        """The same order, for the next blocks that become resident. `together`: each warp's clock when its lanes last
        came together."""
        self.context, self.clocks, self.together = context, clocks, together
        self.written = np.zeros((context.warps, 32), bool)  # which lanes have written since then
        self._read = np.zeros((context.warps, 32), np.int64)  # what each lane has read last, and how
        self._fenced: dict[tuple[int, int], _Release] = {}  # what a thread's next strong write releases
        self._seen: dict[tuple[int, int], list[tuple[_Release, str]]] = {}  # what its next fence acquires
        return self

    def come_together(self, rows: Indices) -> None:
        """What any lane of these warps has written comes before what any other does from now on."""
        self.written[rows] = False

    # ---- instructions

    def access(
        self, instruction: Instruction, group: Group, store: Store, index: Indices, width: int,
        selection: Indices | None, name: str,
    ) -> None:  # fmt: skip
        """A load, store or atomic of lanes at byte indices of a store; `selection`: which of the active lanes."""
        form = self._form(instruction)
        if id(store) not in self._tracked:
            if not form.writes:
                return  # nobody has written
            self._tracked[id(store)] = _Tracked((len(store.data) + store.origin) // self.unit + 1)
        tracked = self._tracked[id(store)]
        chosen = slice(None) if selection is None else selection
        rows = group.active(np.broadcast_to(group.rows[:, None], (len(group.rows), 32)))[chosen]
        lanes = group.active(np.broadcast_to(np.arange(32), (len(group.rows), 32)))[chosen]
        units = (index // self.unit)[:, None] + np.arange(max(width // self.unit, 1))
        where = f"byte {{}} of {name!r}"
        self._against(tracked.writers, form, rows, lanes, units, where, store)
        if form.adds or not form.strong:
            self._against(tracked.atomics, form, rows, lanes, units, where, store)
        tags = self._tags(form, rows, lanes)
        if form.adds:
            order = np.argsort(units[:, 0], kind="stable")
            twice = np.flatnonzero(np.diff(units[order, 0]) == 0)
            if len(twice):  # in one step: neither thread knows of the other
                i, j = order[twice[0]], order[twice[0] + 1]
                place = where.format(int(units[i, 0]) * self.unit - store.origin)
                self._complain(form, int(rows[j]), int(lanes[j]), int(tags[i]), place)
        if form.writes:
            if form.releases:
                self._require_convergence(group, instruction)
            self.written[rows, lanes] = True
            (tracked.atomics if form.strong else tracked.writers)[units] = tags[:, None]
            self._release(form, tracked, rows, lanes, units)
        if form.acquires or form.reads and self._fences:
            self._acquire(form, tracked, rows, lanes, units[:, 0])

    def fence(self, instruction: Instruction) -> Step:
        """A step for fence and membar: what was before is released by the next strong write, and what was read is
        acquired."""
        kind = instruction.modifiers[0]
        scope = _LEVELS[kind] if instruction.opcode == "membar" else _scope(instruction.modifiers)

        def step(group: Group) -> None:
            rows, lanes = group.rows, group.lanes()
            at = [(int(rows[i]), int(lane)) for i, lane in np.argwhere(lanes)]
            if kind != "release":
                for row, lane in at:
                    for released, read_at in self._seen.pop((row, lane), ()):
                        self._learn(row, lane, released, min(scope, read_at, key=_SCOPES.index))
            if kind != "acquire":
                clocks = self.clocks.snapshot(rows, lanes, self._up_to(rows, lanes))
                place = {int(row): i for i, row in enumerate(rows)}
                for row, lane in at:
                    warp = int(self.clocks.in_grid[row])
                    self._fenced[row, lane] = _Release(warp, lane, scope, clocks[:, place[row]])
                self.clocks.tick(rows)

        return step

    def _form(self, instruction: Instruction) -> _Form:
        number = self.context.number_of[id(instruction)]
        if number not in self._forms:
            modifiers, atomic = instruction.modifiers, instruction.opcode in ("atom", "red")
            strong = atomic or bool(STRONG & set(modifiers))
            self._forms[number] = _Form(
                instruction,
                number,
                writes=atomic or instruction.opcode == "st",
                strong=strong,
                atomic=atomic,
                adds=atomic and "add" in modifiers and modifiers[-1].startswith(("f", "bf")),
                releases=bool({"release", "acq_rel"} & set(modifiers)),
                # A reduction returns nothing: it acquires nothing.
                acquires=instruction.opcode != "red" and bool({"acquire", "acq_rel"} & set(modifiers)),
                reads=strong and instruction.opcode in ("ld", "atom"),
                scope=_scope(modifiers),
            )
        return self._forms[number]

    # ---- release and acquire

    def _up_to(self, rows: Indices, lanes: npt.NDArray[np.bool_]) -> Clock:
        """What lanes can tell of their warp (Checks.ordered), of global memory alone."""
        own = self.clocks.own(rows)
        limit = np.where((self.written[rows] & ~lanes).any(1), self.together[rows], own)
        return np.array([limit, limit])

    def _require_convergence(self, group: Group, instruction: Instruction) -> None:
        """Raise Race if a lane releases what another lane of its warp has written since they last came together."""
        others = self.written[group.rows] & ~group.lanes()
        if others.any():
            i, lane = (int(x) for x in np.argwhere(others)[0])
            raise Race(
                f"released without a __syncwarp after the write of lane {lane}\n  "
                f"{self.context.thread_name(int(group.rows[i]), int(group.lanes()[i].argmax()))}: {instruction.where}"
            )

    def _release(self, form: _Form, tracked: _Tracked, rows: Indices, lanes: Indices, units: Indices) -> None:
        """What threads release with what they write, and what of earlier releases remains."""
        if not form.strong:
            tracked.released[units] = 0
            return
        before = tracked.released[units[:, 0]]
        fenced = [self._fenced.get((int(row), int(lane))) for row, lane in zip(rows, lanes, strict=True)]
        if not form.releases and (form.atomic or not before.any()) and not any(fenced):
            return  # an atomic passes on what others have released there
        clocks: Clock | None = None
        if form.releases:
            mine = lanes[:, None] == np.arange(32)
            clocks = self.clocks.snapshot(rows, mine)
        for i, (row, lane, unit) in enumerate(zip(rows, lanes, units[:, 0], strict=True)):
            warp = int(self.clocks.in_grid[row])
            kept = [
                old
                for old in self._releases.pop(int(tracked.released[unit]), ())
                if form.atomic or (old.warp, old.lane) == (warp, lane)
            ]
            if clocks is not None:
                kept.append(_Release(warp, int(lane), form.scope, clocks[:, i]))
            elif (fence := fenced[i]) is not None:
                scope = min(fence.scope, form.scope, key=_SCOPES.index)
                kept.append(_Release(warp, int(lane), scope, fence.clock))
            self._count += 1
            self._releases[self._count] = kept
            tracked.released[units[i]] = self._count
        if form.releases:
            self.clocks.tick(np.unique(rows))

    def _acquire(self, form: _Form, tracked: _Tracked, rows: Indices, lanes: Indices, units: Indices) -> None:
        """Threads learn what was released where they read, or their next fence does."""
        found = tracked.released[units]
        # A thread that spins reads the same again and again.
        how = (found * len(_SCOPES) + _SCOPES.index(form.scope)) * 2 + form.acquires
        for i in np.flatnonzero((found != 0) & (how != self._read[rows, lanes])):
            row, lane = int(rows[i]), int(lanes[i])
            for released in self._releases.get(int(found[i]), ()):
                if form.acquires:
                    self._learn(row, lane, released, form.scope)
                else:
                    self._seen.setdefault((row, lane), []).append((released, form.scope))
        self._read[rows, lanes] = how

    def _learn(self, row: int, lane: int, released: _Release, scope: str) -> None:
        """A thread learns of a release, if their scopes include each other."""
        mine, block = int(self.clocks.in_grid[row]) // self.per_block, released.warp // self.per_block
        same_cluster = mine // self.cluster == block // self.cluster
        includes = {"cta": mine == block, "cluster": same_cluster}
        if includes.get(scope, True) and includes.get(released.scope, True):
            self.clocks.learn_released(row, lane, released.clock, same_cluster=same_cluster)

    # ---- races

    def _tags(self, form: _Form, rows: Indices, lanes: Indices) -> Tags:
        base = (self.clocks.own(rows) << np.uint64(_CLOCK)) | np.uint64(form.number << _CODE)
        return base | (self.clocks.in_grid[rows] << _WARP | lanes).astype(np.uint64)

    def _against(
        self, tags: Tags, form: _Form, rows: Indices, lanes: Indices, units: Indices, where: str, store: Store
    ) -> None:
        """Raise Race if an access of `tags` (the last ones at the units) is not ordered before this one."""
        found = tags[units]
        if not found.any():
            return
        clock, lane = found >> np.uint64(_CLOCK), (found & np.uint64(31)).astype(np.int64)
        warp = ((found >> np.uint64(_WARP)) & np.uint64((1 << (_CODE - _WARP)) - 1)).astype(np.int64)
        known = self.clocks.known_of(rows, lanes, AGENTS + warp)
        apart = (warp == self.clocks.in_grid[rows][:, None]) & (clock > self.together[rows][:, None])
        bad = (clock > known) | (apart & (lane != lanes[:, None]))
        if bad.any():
            i, j = (int(x) for x in np.argwhere(bad)[0])
            place = where.format(int(units[i, j]) * self.unit - store.origin)
            self._complain(form, int(rows[i]), int(lanes[i]), int(found[i, j]), place)

    def _complain(self, form: _Form, row: int, lane: int, tag: int, place: str) -> NoReturn:
        first = self.code[(tag >> _CODE) & ((1 << (_CLOCK - _CODE)) - 1)]
        warp, other = (tag >> _WARP) & ((1 << (_CODE - _WARP)) - 1), tag & 31
        me = int(self.clocks.in_grid[row])
        leaders = self.clocks.leaders_know(row, AGENTS + warp, tag >> _CLOCK)
        if warp == me:
            missing = "a __syncwarp"
        elif leaders:
            missing = f"a __syncwarp after the acquire of lane {leaders[0]} of its warp"
        elif warp // self.per_block == me // self.per_block:
            missing = "a barrier"
        else:
            missing = "a release and an acquire whose scopes include both blocks"
        what = "write" if form.writes else "read"
        what = f"write, then {what}" if not form.adds else "floating-point additions, whose sum depends on their order,"
        raise Race(
            f"{what} of {place} without {missing} between\n"
            f"  first:  warp {warp % self.per_block}, lane {other} of block {warp // self.per_block}: {first.where}\n"
            f"  second: {self.context.thread_name(row, lane)}: {form.instruction.where}"
        )
