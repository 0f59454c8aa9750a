"""Race detector for global memory: happens-before between blocks by release and acquire.

PTX ISA, Memory Consistency Model. A release pattern (st.release, or a fence then a strong write) synchronises with an
acquire pattern (ld.acquire, or a strong read then a fence) that reads the released value, or a value that atomics made
of it, if the scope of each includes the other thread. A relaxed access, or one of too narrow a scope, orders nothing.
An acquire orders the acquiring lane only; the other lanes of its warp are ordered after a __syncwarp (clocks.py).

In kernels whose blocks synchronise in this way (Program.synchronises) every write is recorded with its warp's clock. A
plain access races with a write that does not happen before it, and so does an atomic with a plain write. Atomics do not
race with each other, but the sum of floating-point additions depends on their order, and a kernel whose blocks wait for
each other is meant to fix it: the check float-order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import Race, Unsupported
from ..machine.context import Context, Group, Step
from ..machine.program import Program
from ..machine.ptx import TYPE_BYTES, Instruction
from .clocks import AGENTS, Clocks
from .store import Store

Indices = npt.NDArray[np.int64]
Tags = npt.NDArray[np.uint64]
Clock = npt.NDArray[np.uint64]

# Bit positions in a tag, the 64-bit record of the last write to a unit: clock, instruction number, warp of the grid,
# lane.
_CLOCK, _CODE, _WARP = 40, 21, 5
_SCOPES = ("cta", "cluster", "gpu", "sys")  # narrowest first
STRONG = {"volatile", "relaxed", "acquire", "release", "mmio"}  # qualifiers of strong loads and stores
_LEVELS = {"cta": "cta", "gl": "gpu", "sys": "sys"}  # membar level -> scope


@dataclass(frozen=True, slots=True)
class _Form:
    """The memory-order semantics of one instruction."""

    instruction: Instruction
    number: int
    writes: bool
    strong: bool
    atomic: bool
    compares: bool  # atom.cas, which writes only where the values compare equal
    float_add: bool  # an atomic addition of floating-point numbers
    releases: bool
    acquires: bool
    strong_read: bool  # a later fence makes it an acquire pattern
    scope: str


@dataclass(frozen=True, slots=True)
class _Release:
    """One release: its thread, scope and clock."""

    warp: int  # index of the warp in the grid
    lane: int
    scope: str
    clock: Clock  # (planes, agents)

    @property
    def time(self) -> int:
        """The releasing warp's own clock: of two releases of one thread, the later one includes the earlier."""
        return int(self.clock[0, AGENTS + self.warp])


class _Tracked:
    """The state of the checks for every unit of an allocation.

    Tags of the last plain write and of the last strong one (atomics included), and the number of the releases visible
    there (a key into GridOrder._releases).
    """

    def __init__(self, units: int):
        self.writers, self.atomics = np.zeros(units, np.uint64), np.zeros(units, np.uint64)
        self.released = np.zeros(units, np.int64)


def _scope(modifiers: tuple[str, ...]) -> str:
    if "volatile" in modifiers or "mmio" in modifiers:
        return "sys"
    return next((m for m in modifiers if m in _SCOPES), "gpu")


def fence_scope(instruction: Instruction) -> str:
    """Return the scope of a fence or membar."""
    modifiers = instruction.modifiers
    return _LEVELS[modifiers[0]] if instruction.opcode == "membar" else _scope(modifiers)


class GridOrder:
    """Happens-before in global memory over one launch, across blocks that are not resident at the same time."""

    def __init__(self, program: Program, blocks: int, warps_per_block: int):
        self.warps, self.per_block = blocks * warps_per_block, warps_per_block
        self.cluster = program.function.cluster[0]
        self.code = program.function.instructions
        if self.warps > 1 << (_CODE - _WARP):
            raise Unsupported(
                f"a grid of {self.warps} warps that synchronise in global memory: at most {1 << (_CODE - _WARP)} are "
                f"tracked"
            )
        writing = [i for i in self.code if i.opcode in ("st", "atom", "red") and i.modifiers[-1] in TYPE_BYTES]
        self.unit = min([4, *(TYPE_BYTES[i.modifiers[-1]] for i in writing)])
        fences = [i.modifiers[0] for i in self.code if i.opcode in ("fence", "membar")]
        self._fences = any(kind in ("acq_rel", "sc", "acquire", "release", *_LEVELS) for kind in fences)
        self._forms: dict[int, _Form] = {}
        self._tracked: dict[int, _Tracked] = {}  # id of a store -> its record
        self._releases: dict[int, list[_Release]] = {}
        self._count = 0

    def resident(self, context: Context, clocks: Clocks, converged_at: Clock) -> GridOrder:
        """Attach the next set of resident blocks and return self.

        `converged_at` is each warp's clock when it last converged.
        """
        self.context, self.clocks, self.converged_at = context, clocks, converged_at
        self.written = np.zeros((context.warps, 32), bool)  # lanes that have written since their warp last converged
        self._read = np.zeros((context.warps, 32), np.int64)  # release number and kind of each lane's last read
        # By thread: the release that its next strong write publishes; and what its next fence acquires, the last
        # release by each releasing thread, scope of the release, and scope of the read.
        self._fenced: dict[tuple[int, int], _Release] = {}
        self._seen: dict[tuple[int, int], dict[tuple[int, int, str, str], _Release]] = {}
        return self

    def converge(self, rows: Indices) -> None:
        """Converge the lanes of each of these warps: their writes so far happen before all later accesses."""
        self.written[rows] = False

    # ---- instructions

    def access(
        self, instruction: Instruction, group: Group, store: Store, index: Indices, width: int,
        selection: Indices | None, name: str,
    ) -> None:  # fmt: skip
        """Check and record a load, store or atomic at byte indices of a store.

        `selection` holds positions among the active lanes, None for all.
        """
        form = self._form(instruction)
        if id(store) not in self._tracked:
            if not form.writes:
                return  # no write so far
            self._tracked[id(store)] = _Tracked((len(store.data) + store.origin) // self.unit + 1)
        tracked = self._tracked[id(store)]
        chosen = slice(None) if selection is None else selection
        rows = group.active_rows()[chosen]
        lanes = group.active_lanes()[chosen]
        units = self._units(index, width)
        where = f"byte {{}} of {name!r}"
        self._require_order(tracked.writers, form, rows, lanes, units, where, store, "race")
        if form.float_add or not form.strong:
            check = "float-order" if form.float_add else "race"
            self._require_order(tracked.atomics, form, rows, lanes, units, where, store, check)
        tags = self._tags(form, rows, lanes)
        if form.float_add:
            order = np.argsort(units[:, 0], kind="stable")
            twice = np.flatnonzero(np.diff(units[order, 0]) == 0)
            if len(twice):
                i, j = (int(x) for x in order[twice[0] : twice[0] + 2])
                byte = where.format(int(units[i, 0]) * self.unit - store.origin)
                if rows[i] == rows[j]:
                    self._report_duplicate(form, int(rows[j]), (int(lanes[i]), int(lanes[j])), byte)
                else:
                    self._report_race(form, int(rows[j]), int(lanes[j]), int(tags[i]), byte, "float-order")
        if form.writes:
            if form.releases:
                self._require_convergence(group, instruction)
            if not form.compares:
                self._write(form, tracked, rows, lanes, units, tags)
        if form.acquires or form.strong_read and self._fences:
            self._acquire(form, tracked, rows, lanes, units[:, 0])

    def compared(
        self, instruction: Instruction, group: Group, store: Store, index: Indices, width: int,
        selection: Indices | None, equal: npt.NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Record the writes of an atom.cas that `access` has checked, by the lanes whose values compared equal."""
        form, chosen = self._form(instruction), slice(None) if selection is None else selection
        rows, lanes = group.active_rows()[chosen][equal], group.active_lanes()[chosen][equal]
        tags = self._tags(form, rows, lanes)
        self._write(form, self._tracked[id(store)], rows, lanes, self._units(index[equal], width), tags)

    def fence(self, instruction: Instruction) -> Step:
        """Return a step for fence and membar.

        It acquires the releases seen by earlier strong reads, and makes the next strong write a release.
        """
        kind, scope = instruction.modifiers[0], fence_scope(instruction)

        def step(group: Group) -> None:
            rows, lanes = group.rows, group.lanes()
            at = [(int(rows[i]), int(lane)) for i, lane in np.argwhere(lanes)]
            if kind != "release":
                for row, lane in at:
                    for (*_, read_at), released in self._seen.pop((row, lane), {}).items():
                        self._join(row, lane, released, min(scope, read_at, key=_SCOPES.index))
            if kind != "acquire":
                clocks = self.clocks.snapshot(rows, lanes, self._up_to(rows, lanes))
                place = {int(row): i for i, row in enumerate(rows)}
                for row, lane in at:
                    warp = int(self.clocks.in_grid[row])
                    self._fenced[row, lane] = _Release(warp, lane, scope, clocks[:, place[row]])
                self.clocks.tick(rows)

        return step

    def _units(self, index: Indices, width: int) -> Indices:
        """Return the tracked units of `width` bytes at each byte index, (n, units)."""
        return (index // self.unit)[:, None] + np.arange(max(width // self.unit, 1))

    def _write(self, form: _Form, tracked: _Tracked, rows: Indices, lanes: Indices, units: Indices, tags: Tags) -> None:
        self.written[rows, lanes] = True
        (tracked.atomics if form.strong else tracked.writers)[units] = tags[:, None]
        self._release(form, tracked, rows, lanes, units)

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
                compares=atomic and "cas" in modifiers,
                float_add=atomic and "add" in modifiers and modifiers[-1].startswith(("f", "bf")),
                releases=bool({"release", "acq_rel"} & set(modifiers)),
                # red returns no value, so it cannot acquire.
                acquires=instruction.opcode != "red" and bool({"acquire", "acq_rel"} & set(modifiers)),
                strong_read=strong and instruction.opcode in ("ld", "atom"),
                scope=_scope(modifiers),
            )
        return self._forms[number]

    # ---- release and acquire

    def _up_to(self, rows: Indices, lanes: npt.NDArray[np.bool_]) -> Clock:
        """Return the warps' own clocks that these lanes may publish (Checks.publishable) for global memory, (2, n)."""
        own = self.clocks.own(rows)
        limit = np.where((self.written[rows] & ~lanes).any(1), self.converged_at[rows], own)
        return np.array([limit, limit])

    def _require_convergence(self, group: Group, instruction: Instruction) -> None:
        """Report Race if a lane releases while another lane of its warp has written since the warp last converged."""
        others = self.written[group.rows] & ~group.lanes()
        if others.any():
            i, lane = (int(x) for x in np.argwhere(others)[0])
            self.context.report(
                "race",
                Race,
                f"release without a __syncwarp after the write of lane {lane} of the same warp\n  "
                f"{self.context.thread_name(int(group.rows[i]), int(group.lanes()[i].argmax()))}: {instruction.where}",
            )

    def _release(self, form: _Form, tracked: _Tracked, rows: Indices, lanes: Indices, units: Indices) -> None:
        """Record the releases of these writes, and which earlier releases remain visible at their addresses."""
        if not form.strong:
            tracked.released[units] = 0
            return
        before = tracked.released[units[:, 0]]
        fenced = [self._fenced.get((int(row), int(lane))) for row, lane in zip(rows, lanes, strict=True)]
        if not form.releases and (form.atomic or not before.any()) and not any(fenced):
            return  # an atomic continues the release sequence: earlier releases stay visible
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
            new: _Release | None = None
            if clocks is not None:
                new = _Release(warp, int(lane), form.scope, clocks[:, i])
            elif (fence := fenced[i]) is not None:
                new = replace(fence, scope=min(fence.scope, form.scope, key=_SCOPES.index))
            if new is not None:
                # It includes the thread's earlier releases, of which a spinning atomic would make ever more.
                same = new.warp, new.lane, new.scope
                kept = [*(old for old in kept if (old.warp, old.lane, old.scope) != same), new]
            self._count += 1
            self._releases[self._count] = kept
            tracked.released[units[i]] = self._count
        if form.releases:
            self.clocks.tick(np.unique(rows))

    def _acquire(self, form: _Form, tracked: _Tracked, rows: Indices, lanes: Indices, units: Indices) -> None:
        """Let threads acquire the releases visible where they read, now or at their next fence."""
        numbers = tracked.released[units]
        # Skip repeated reads of one value: a thread may spin on it.
        how = (numbers * len(_SCOPES) + _SCOPES.index(form.scope)) * 2 + form.acquires
        for i in np.flatnonzero((numbers != 0) & (how != self._read[rows, lanes])):
            row, lane = int(rows[i]), int(lanes[i])
            for released in self._releases.get(int(numbers[i]), ()):
                if form.acquires:
                    self._join(row, lane, released, form.scope)
                else:
                    seen = self._seen.setdefault((row, lane), {})
                    key = released.warp, released.lane, released.scope, form.scope
                    if key not in seen or seen[key].time < released.time:
                        seen[key] = released
        self._read[rows, lanes] = how

    def _join(self, row: int, lane: int, released: _Release, scope: str) -> None:
        """Join the clock of a release into a thread's if the scope of each includes the other thread."""
        mine, block = int(self.clocks.in_grid[row]) // self.per_block, released.warp // self.per_block
        same_cluster = mine // self.cluster == block // self.cluster
        includes = {"cta": mine == block, "cluster": same_cluster}
        if includes.get(scope, True) and includes.get(released.scope, True):
            self.clocks.acquire_snapshot(row, lane, released.clock, same_cluster=same_cluster)

    # ---- races

    def _tags(self, form: _Form, rows: Indices, lanes: Indices) -> Tags:
        base = (self.clocks.own(rows) << np.uint64(_CLOCK)) | np.uint64(form.number << _CODE)
        return base | (self.clocks.in_grid[rows] << _WARP | lanes).astype(np.uint64)

    def _require_order(
        self, tags: Tags, form: _Form, rows: Indices, lanes: Indices, units: Indices, where: str, store: Store,
        check: str,
    ) -> None:  # fmt: skip
        """Report Race if the last access in `tags` to any of the units does not happen before this one."""
        last = tags[units]
        if not last.any():
            return
        clock, lane = last >> np.uint64(_CLOCK), (last & np.uint64(31)).astype(np.int64)
        warp = ((last >> np.uint64(_WARP)) & np.uint64((1 << (_CODE - _WARP)) - 1)).astype(np.int64)
        known = self.clocks.known_of(rows, lanes, AGENTS + warp)
        diverged = (warp == self.clocks.in_grid[rows][:, None]) & (clock > self.converged_at[rows][:, None])
        unordered = (clock > known) | (diverged & (lane != lanes[:, None]))
        if unordered.any():
            i, j = (int(x) for x in np.argwhere(unordered)[0])
            byte = where.format(int(units[i, j]) * self.unit - store.origin)
            self._report_race(form, int(rows[i]), int(lanes[i]), int(last[i, j]), byte, check)

    def _report_duplicate(self, form: _Form, row: int, lanes: tuple[int, int], byte: str) -> None:
        self.context.report(
            "float-order",
            Race,
            f"two lanes of one instruction add floating-point numbers to {byte}, in an order that no synchronisation "
            f"can fix, and on which the sum depends\n"
            f"  lane {lanes[0]} and {self.context.thread_name(row, lanes[1])}: {form.instruction.where}",
        )

    def _report_race(self, form: _Form, row: int, lane: int, tag: int, byte: str, check: str) -> None:
        first = self.code[(tag >> _CODE) & ((1 << (_CLOCK - _CODE)) - 1)]
        warp, other = (tag >> _WARP) & ((1 << (_CODE - _WARP)) - 1), tag & 31
        own_warp = int(self.clocks.in_grid[row])
        leaders = self.clocks.leaders_with(row, AGENTS + warp, tag >> _CLOCK)
        if warp == own_warp:
            missing = "a __syncwarp"
        elif leaders:
            missing = f"a __syncwarp after the acquire by lane {leaders[0]} of its warp"
        elif warp // self.per_block == own_warp // self.per_block:
            missing = "a barrier"
        else:
            missing = "a release and an acquire whose scopes include both blocks"
        accesses = f"write, then {'write' if form.writes else 'read'}"
        if check == "float-order":
            accesses = "floating-point additions, whose sum depends on their order,"
        self.context.report(
            check,
            Race,
            f"{accesses} of {byte} without {missing} between\n"
            f"  first:  warp {warp % self.per_block}, lane {other} of block {warp // self.per_block}: {first.where}\n"
            f"  second: {self.context.thread_name(row, lane)}: {form.instruction.where}",
        )
