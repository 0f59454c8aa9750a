"""tcgen05: the matrix instructions of sm_100a on tensor memory (cta_group::1, kind::f16).

One thread issues tcgen05.mma and .cp, which take effect in issue order: at issue (`early`), when nothing else can run
(`late`), or at random times. tcgen05.commit arrives at an mbarrier once all that its thread has issued before is
complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BadDescriptor, BarrierMisuse, Misaligned, OutOfBounds, PendingCopy
from ..instructions.access import addresses
from ..instructions.closures import Compiler, unsupported
from ..instructions.convert import elements
from ..machine.context import Context, Group, Mask, Step, Unit
from ..machine.ptx import Address, Immediate, Instruction, Operand, Vector
from ..memory.checks import Checks, Issue
from ..memory.shared_addresses import SharedAddresses, shared_addresses
from .copies import Order
from .mbarriers import Mbarriers
from .tcgen05_descriptors import DEPTH, Shape, parts_of, pieces_of, shape_of
from .tensor_memory import LANES, PARTS, Access, TensorMemory

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

_EARLIER = 0.3  # probability that an issue first computes what its blocks have in flight, if order="random"
# Registers of a thread for each repetition of a shape of tcgen05.ld and .st.
_REGISTERS = {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}
# {shape and multicast of tcgen05.cp: (16-byte pieces of a row, the lanes of the rows of each copy, (copies, rows))}.
_EVERY_LANE = np.arange(LANES)
_COPIES = {
    "128x256b": (2, _EVERY_LANE[None]),
    "4x256b": (2, _EVERY_LANE[None, ::32]),
    "128x128b": (1, _EVERY_LANE[None]),
    "64x128b.warpx2::02_13": (1, _EVERY_LANE.reshape(2, 64)),
    "64x128b.warpx2::01_23": (1, _EVERY_LANE.reshape(2, 2, 32).swapaxes(0, 1).reshape(2, 64)),
    "32x128b.warpx4": (1, _EVERY_LANE.reshape(4, 32)),
}


# ---- instructions in flight


@dataclass(slots=True, eq=False)
class _Mma:
    """One tcgen05.mma of n blocks. `a` is an address of tensor memory, or (n, pieces) in shared memory, as `b`."""

    instruction: Instruction
    shape: Shape
    rows: Indices
    blocks: Indices
    d: int
    a: int | Indices
    b: Indices
    adds: Mask
    pending: Mask


@dataclass(slots=True, eq=False)
class _Copy:
    """One tcgen05.cp of n blocks: (n, rows * pieces) in shared memory, to `lanes` (copies, rows) of `columns`."""

    instruction: Instruction
    rows: Indices
    blocks: Indices
    source: Indices
    lanes: Indices
    columns: Indices
    pending: Mask


@dataclass(slots=True, eq=False)
class _Commit:
    """One tcgen05.commit of n blocks. `clocks` count what it covers; `known` is what its threads know."""

    instruction: Instruction
    targets: SharedAddresses
    blocks: Indices
    agents: Indices
    clocks: Indices
    known: Any
    pending: Mask


class Tcgen05Queue(Unit):
    """The tcgen05.mma, .cp and .commit in flight of one set of resident blocks."""

    # Whether the signal of a commit also publishes what its thread has observed before. The PTX ISA promises less: that
    # the mma of the thread are complete.
    CUMULATIVE = True

    def __init__(self, context: Context, order: Order):
        super().__init__(context)
        self.order, self.checks = order, context.find(Checks)
        self.memory, self.mbarriers = context.unit(TensorMemory), context.unit(Mbarriers)
        self.in_flight: list[_Mma | _Copy | _Commit] = []
        self._issued = np.zeros((context.warps, 32), np.int64)  # number of mma and cp, by thread

    def _agents(self, rows: Indices, lanes: Indices) -> tuple[Indices, list[tuple[tuple[str, int, int], Mask]]]:
        """Return the agent of each thread, and (agent without its rank, mask) for each distinct (warp, lane)."""
        context, agents = self.context, np.zeros(len(rows), np.int64)
        warps, readers = context.warp_of_row[rows], []
        for warp, lane in sorted({(int(w), int(x)) for w, x in zip(warps, lanes, strict=True)}):
            mine = (warps == warp) & (lanes == lane)
            readers.append((("tcgen05", warp, lane), mine))
            if self.checks is not None:
                ranks = context.rank_of_row[rows[mine]]
                agents[mine] = [self.checks.clocks.agent(("tcgen05", warp, lane, int(rank))) for rank in ranks]
        return agents, readers

    def issue(self, mma: _Mma, lanes: Indices, number: int) -> None:
        """Start a tcgen05.mma of these threads."""
        context, shape, rows = self.context, mma.shape, mma.rows
        self._issued[rows, lanes] += 1
        where, n = mma.instruction.where, len(rows)
        d = np.broadcast_to((mma.d & 0xFFFF) + np.arange(shape.columns), (n, shape.columns))
        first = mma.d >> 16
        if first not in ((0,) if shape.rows == LANES else (0, 16)):
            raise OutOfBounds(f"the accumulator of a tcgen05.mma starts at lane {first}: {where}")
        self.memory.require_allocated(mma.blocks, d, rows, lanes, where)
        a = None
        if isinstance(mma.a, int):
            a = np.broadcast_to((mma.a & 0xFFFF) + np.arange(DEPTH // 2), (n, DEPTH // 2))
            self.memory.require_allocated(mma.blocks, a, rows, lanes, where)
        if self.checks is not None:
            accesses = [
                (np.broadcast_to(parts_of(shape, address), (n, PARTS * shape.rows // LANES)), columns, writes)
                for columns, address, writes in ((a, mma.a, False), (d, mma.d, True))
                if columns is not None and isinstance(address, int)
            ]
            pieces = mma.b if isinstance(mma.a, int) else np.concatenate([mma.a, mma.b], axis=1)
            self._record(number, rows, lanes, mma.blocks, accesses, pieces)
        operands = shape.columns + (0 if isinstance(mma.a, int) else shape.rows)
        context.counters.count_mma(n, shape.columns, 2 * DEPTH * operands)
        self.in_flight.append(mma)
        self._issue_ends(mma.blocks)

    def copy(self, copy: _Copy, lanes: Indices, number: int) -> None:
        """Start a tcgen05.cp of these threads."""
        rows, n = copy.rows, len(copy.rows)
        self._issued[rows, lanes] += 1
        columns = np.broadcast_to(copy.columns, (n, len(copy.columns)))
        self.memory.require_allocated(copy.blocks, columns, rows, lanes, copy.instruction.where)
        if self.checks is not None:
            parts = np.unique(copy.lanes * PARTS // LANES)
            accesses = [(np.broadcast_to(parts, (n, len(parts))), columns, True)]
            self._record(number, rows, lanes, copy.blocks, accesses, copy.source)
        self.context.counters.count_copy(16 * copy.source.size, 4 * copy.lanes.size * columns.size)
        self.in_flight.append(copy)
        self._issue_ends(copy.blocks)

    def _record(
        self, number: int, rows: Indices, lanes: Indices, blocks: Indices,
        accesses: list[tuple[Indices, Indices, bool]], pieces: Indices,
    ) -> None:  # fmt: skip
        """Check and record (parts, columns, writes) of tensor memory, and reads of pieces of shared memory."""
        assert self.checks is not None
        agents, readers = self._agents(rows, lanes)
        clocks = self._issued[rows, lanes]
        for parts, columns, writes in accesses:
            self.memory.record(Access(number, rows, lanes, agents, clocks, blocks, parts, columns, writes))
        for reader, mine in readers:
            issue = Issue(number, rows[mine][:, None], agents[mine], clocks[mine], lanes[mine])
            self.checks.async_read(issue, pieces[mine], reader)

    def commit(self, instruction: Instruction, targets: SharedAddresses) -> None:
        """Execute tcgen05.commit of these threads."""
        context, rows, lanes = self.context, targets.rows, targets.lanes
        agents, known = self._agents(rows, lanes)[0], None
        if self.checks is not None:
            own = np.zeros((2, len(rows)), np.uint64)
            known = self.checks.clocks.snapshot(rows, np.arange(32) == lanes[:, None], own)
        blocks, clocks = context.block_of_row[rows], self._issued[rows, lanes]
        self.mbarriers.begin_commit(targets, instruction, agents, clocks)
        pending = np.ones(len(rows), bool)
        self.in_flight.append(_Commit(instruction, targets, blocks, agents, clocks, known, pending))
        self._issue_ends(blocks)

    def _issue_ends(self, blocks: Indices) -> None:
        random = self.context.random
        if self.order == "early" or self.order == "random" and random is not None and random.random() < _EARLIER:
            self._complete(blocks, to_first_commit=False)

    def land(self) -> bool:
        """Complete what is in flight up to the first commit, of all blocks or (random) of one; False if nothing is."""
        if not self.in_flight:
            return False
        random = self.context.random
        blocks = np.unique(np.concatenate([one.blocks[one.pending] for one in self.in_flight]))
        self._complete(blocks if random is None else random.choice(blocks, 1), to_first_commit=True)
        return True

    def _complete(self, blocks: Indices, *, to_first_commit: bool) -> None:
        here = np.zeros(self.context.blocks, bool)
        here[blocks] = True
        for one in self.in_flight:
            now = one.pending & here[one.blocks]
            if not now.any():
                continue
            one.pending &= ~now
            if isinstance(one, _Mma):
                self._compute(one, now)
                continue
            if isinstance(one, _Copy):
                self._write(one, now)
                continue
            self._arrive(one, now)
            if to_first_commit:
                here[one.blocks[now]] = False
        self.in_flight = [one for one in self.in_flight if one.pending.any()]

    def _arrive(self, commit: _Commit, now: Mask) -> None:
        targets = SharedAddresses(*(part[now] for part in commit.targets))
        if self.checks is not None:
            clocks = self.checks.clocks
            for offset, agent in {(int(o), int(a)) for o, a in zip(targets.offsets, commit.agents[now], strict=True)}:
                mine = now & (commit.targets.offsets == offset) & (commit.agents == agent)
                at, blocks = ("arrivals", offset), commit.targets.blocks[mine]
                if self.CUMULATIVE:
                    clocks.publish_snapshot(at, blocks, commit.known[:, mine])
                clocks.publish_agent(at, agent, blocks, commit.clocks[mine].astype(np.uint64))
        self.mbarriers.arrive_of_commit(targets, commit.instruction)
        self.context.events += 1

    def finish(self) -> None:
        """Check at the end of the kernel that every mma and cp is complete; `Exits` checks the commits."""
        while self.in_flight and all(isinstance(one, _Commit) for one in self.in_flight):
            self.land()
        if self.in_flight:
            first = next(one for one in self.in_flight if not isinstance(one, _Commit)).instruction
            message = f"the block ends before its tcgen05.{first.modifiers[0]} completes: {first.where}"
            self.context.report("race", PendingCopy, message)
            self._complete(np.arange(self.context.blocks), to_first_commit=False)

    # ---- arithmetic

    def _compute(self, mma: _Mma, now: Mask) -> None:
        shape, memory, blocks = mma.shape, self.memory, mma.blocks[now]
        where, rows = mma.instruction.where, mma.rows[now]
        if isinstance(mma.a, int):
            first = mma.a & 0xFFFF
            words = self._lanes(memory.words[blocks, :, first : first + DEPTH // 2], mma.a, shape)
            defined = self._lanes(memory.defined[blocks, :, first : first + DEPTH // 2], mma.a, shape)
            memory.require_defined(defined, rows, "tcgen05.mma reads A from", where)
            a = elements(words.reshape(len(rows), shape.rows, -1), shape.type)
        else:
            a = self._operand(mma.a[now], shape, 0)
        # Exact products summed in float64, rounded once. The order of summation on a GPU is undocumented.
        product = shape.sign * (a @ self._operand(mma.b[now], shape, 1).swapaxes(1, 2))
        first, adds = mma.d & 0xFFFF, mma.adds[now]
        words, defined = (
            self._lanes(array[:, :, first : first + shape.columns], mma.d, shape)
            for array in (memory.words, memory.defined)
        )
        old = words[blocks].reshape(product.shape).view(np.float32)
        memory.require_defined(defined[blocks][adds], rows[adds], "tcgen05.mma adds to", where)
        total = np.where(adds[:, None, None], old + product, product).astype(np.float32)
        words[blocks] = total.view(np.uint32).reshape(len(blocks), *words.shape[1:])
        defined[blocks] = True

    def _write(self, copy: _Copy, now: Mask) -> None:
        words = self.context.shared.gather(copy.source[now], 16).view(np.uint32)
        place = copy.blocks[now][:, None, None, None], copy.lanes[:, :, None], copy.columns
        self.memory.words[place] = words.reshape(-1, 1, copy.lanes.shape[1], len(copy.columns))
        self.memory.defined[place] = True

    @staticmethod
    def _lanes(columns: Any, address: int, shape: Shape) -> Any:
        """Return a view of the lanes of M rows in columns (n, LANES, columns): for M 64 it is (n, 4, 16, columns)."""
        if shape.rows == LANES:
            return columns
        return columns.reshape(len(columns), 4, 2, 16, columns.shape[2])[:, :, address >> 20 & 1]

    def _operand(self, index: Indices, shape: Shape, which: int) -> Values:
        """Return operand A (`which` 0) or B (1) from shared memory as (n, rows, depth)."""
        values = elements(self.context.shared.gather(index, 16), shape.type)
        if shape.transposed[which]:
            return values.reshape(len(values), DEPTH, -1).swapaxes(1, 2)
        return values.reshape(len(values), -1, DEPTH)


# ---- instructions


def _tcgen05(instruction: Instruction, context: Context) -> Step:
    """Compile tcgen05.alloc, .dealloc, .relinquish_alloc_permit, .ld, .st, .wait, .fence, .mma, .cp and .commit."""
    memory, kind = context.unit(TensorMemory), instruction.modifiers[0]
    of_warps: dict[str, Compiler] = {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "relinquish_alloc_permit": _relinquish,
        "ld": _access,
        "st": _access,
        "wait::ld": lambda *_: lambda group: memory.wait(group.rows, loads=True),
        "wait::st": lambda *_: lambda group: memory.wait(group.rows, loads=False),
    }
    of_threads: dict[str, Compiler] = {
        "mma": _mma,
        "cp": _cp,
        "commit": _commit,
        "fence::before_thread_sync": lambda *_: memory.fence_before,
        "fence::after_thread_sync": lambda *_: memory.fence_after,
    }
    if any(modifier.startswith("cta_group") and modifier != "cta_group::1" for modifier in instruction.modifiers):
        raise unsupported(instruction)
    if kind in of_warps:
        return _whole_warps(of_warps[kind](instruction, context), instruction, context)
    if kind in of_threads:
        return of_threads[kind](instruction, context)
    raise unsupported(instruction)


def _whole_warps(step: Step, instruction: Instruction, context: Context) -> Step:
    """Return the step of an instruction that all 32 threads of a warp must execute together."""

    def whole(group: Group) -> None:
        lanes = group.lanes()
        some = lanes.any(1)
        if not lanes[some].all():
            row = int(group.rows[np.flatnonzero(some & ~lanes.all(1))[0]])
            name = context.thread_name(row, 0)
            raise BarrierMisuse(f"only part of the warp executes it\n  {name}: {instruction.where}")
        step(Group(group.block, group.rows[some], None, context.warps))

    return whole


def _uniform(instruction: Instruction, context: Context, source: Any, what: str) -> Callable[[Group], Indices]:
    """Return a function from a group of whole warps to one number of each."""

    def read(group: Group) -> Indices:
        values = np.broadcast_to(np.asarray(group.read(source), np.int64), (len(group.rows), 32))
        if (values != values[:, :1]).any():
            row = int(group.rows[np.flatnonzero((values != values[:, :1]).any(1))[0]])
            raise BarrierMisuse(f"{what} differs inside the warp of {context.thread_name(row, 0)}: {instruction.where}")
        return values[:, 0]

    return read


def _alloc(instruction: Instruction, context: Context) -> Step:
    """Compile tcgen05.alloc.cta_group::1.sync.aligned{.shared::cta}.b32 [address], columns."""
    address_of, memory = addresses(instruction.operands[0], context, instruction), context.unit(TensorMemory)
    columns = _uniform(
        instruction, context, context.source(instruction.operands[1], "u32", instruction), "the number of columns"
    )
    checks, number = context.find(Checks), context.number_of[id(instruction)]

    def step(group: Group) -> None:
        first = group.narrowed(np.broadcast_to(np.arange(32) == 0, (len(group.rows), 32)))
        targets = shared_addresses(instruction, context, first, address_of(group), 4)
        index = targets.blocks * context.shared_stride + targets.offsets
        starts = [
            memory.allocate(int(row), int(n), instruction.where)
            for row, n in zip(group.rows, columns(group), strict=True)
        ]
        if checks is not None:
            checks.shared_write_without_proxy(first, index, 4, number)
        context.shared.scatter(index, 4, np.array(starts, np.uint32))

    return step


def _dealloc(instruction: Instruction, context: Context) -> Step:
    """Compile tcgen05.dealloc.cta_group::1.sync.aligned.b32 address, columns."""
    memory, number = context.unit(TensorMemory), context.number_of[id(instruction)]
    address, columns = (
        _uniform(instruction, context, context.source(operand, "u32", instruction), what)
        for operand, what in zip(instruction.operands, ("the address", "the number of columns"), strict=True)
    )

    def step(group: Group) -> None:
        for row, at, n in zip(group.rows, address(group), columns(group), strict=True):
            memory.free(int(row), int(at), int(n), number)

    return step


def _relinquish(instruction: Instruction, context: Context) -> Step:
    memory = context.unit(TensorMemory)

    def step(group: Group) -> None:
        memory.relinquished[context.block_of_row[group.rows]] = True

    return step


def access_layout(shape: str, registers: int, split: int) -> tuple[Indices, Indices]:
    """Return (lane, column), from the first ones, of each (register, thread) of tcgen05.ld and .st."""
    register, thread = np.mgrid[:registers, :32]
    match shape:
        case "32x32b":
            return thread, register
        case "16x32bx2":  # threads 16 to 31 have the same lanes, `split` columns further
            return thread % 16, register + thread // 16 * split
        case "16x64b":
            return thread // 4 + thread % 2 * 8, 2 * register + thread // 2 % 2
        case "16x128b":
            return thread // 4 + register % 2 * 8, register // 2 * 4 + thread % 4
    # 16x256b, the accumulators of mma.m16n8
    return thread // 4 + register // 2 % 2 * 8, register // 4 * 8 + thread % 4 * 2 + register % 2


def _access(instruction: Instruction, context: Context) -> Step:
    """Compile tcgen05.ld.sync.aligned.shape.xN.b32 registers, [address]{, split}, and .st with the address first."""
    loads, modifiers, operands = instruction.modifiers[0] == "ld", instruction.modifiers, instruction.operands
    vector, address = operands[:2] if loads else (operands[-1], operands[0])
    shape = next((m for m in modifiers if m in _REGISTERS), None)
    repeated = next((int(m[1:]) for m in modifiers if re.fullmatch(r"x\d+", m)), 0)
    registers = vector.items if isinstance(vector, Vector) else (vector,)
    known = {"ld", "st", "sync", "aligned", shape, f"x{repeated}", "b32"}
    if shape is None or set(modifiers) - known or not isinstance(address, Address):
        raise unsupported(instruction)
    if len(registers) != repeated * _REGISTERS[shape]:
        raise unsupported(instruction)
    split = next((item.bits for item in operands[1:] if isinstance(item, Immediate)), 0)
    lane_of, column_of = access_layout(shape, len(registers), split)
    columns, whole = np.unique(column_of), shape == "32x32b"
    start_of = _uniform(
        instruction, context, context.source(address.base, "u32", instruction), "the address of tensor memory"
    )
    views = [(context.destination if loads else context.source)(item, "b32", instruction) for item in registers]
    memory, number = context.unit(TensorMemory), context.number_of[id(instruction)]

    def step(group: Group) -> None:
        rows, start = group.rows, start_of(group) + address.offset
        lane, first = start >> 16, start & 0xFFFF
        quarter = context.warp_of_row[rows] % 4
        wrong = (lane // 32 != quarter) | (lane % 32 != 0 if whole else lane % 16 != 0)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise OutOfBounds(
                f"an access to lane {int(lane[i])} of tensor memory, where the warp reaches lanes "
                f"{32 * int(quarter[i])} to {32 * int(quarter[i]) + 31}\n  {context.thread_name(int(rows[i]), 0)}: "
                f"{instruction.where}"
            )
        blocks = context.block_of_row[rows]
        touched = first[:, None] + columns
        memory.require_allocated(blocks, touched, rows, None, instruction.where)
        parts = (lane // 16)[:, None] + np.arange(2 if whole else 1)
        memory.record_of_warps(number, rows, parts, touched, writes=not loads)
        place = blocks[:, None, None], lane[:, None, None] + lane_of, first[:, None, None] + column_of
        context.counters.count_tensor_memory(4 * 32 * len(registers) * len(rows), writes=not loads)
        if loads:
            # A use of the registers is a dependency that the hardware keeps: only the memory needs tcgen05.wait::ld.
            memory.require_defined(memory.defined[place], rows, "tcgen05.ld of", instruction.where)
            for view, value in zip(views, memory.words[place].swapaxes(0, 1), strict=True):
                group.write(view, value)
        else:
            values = [np.broadcast_to(group.read(view), (len(rows), 32)) for view in views]
            memory.words[place] = np.stack(values, axis=1)
            memory.defined[place] = True

    return step


def _by_block(blocks: Indices) -> Iterator[Indices]:
    """Split the indices of `blocks` into runs without a repeated block, each thread of a block after the one before."""
    left = np.arange(len(blocks))
    while len(left):
        _, first = np.unique(blocks[left], return_index=True)
        yield left[first]
        left = np.delete(left, first)


def _mma(instruction: Instruction, context: Context) -> Step:
    """Compile tcgen05.mma.cta_group::1.kind::f16 [d], a-descriptor | [a], b-descriptor, shape, enable-input-d."""
    if instruction.modifiers[1:] != ("cta_group::1", "kind::f16") or len(instruction.operands) != 5:
        raise unsupported(instruction)
    d, a, b, shape, adds = instruction.operands
    if not isinstance(d, Address):
        raise unsupported(instruction)
    in_tensor_memory = isinstance(a, Address)
    numbers = [
        _number(d, "u32", instruction, context),
        _number(a, "u32" if in_tensor_memory else "b64", instruction, context),
        _number(b, "b64", instruction, context),
        _number(shape, "u32", instruction, context),
    ]
    accumulates = context.predicate(adds, instruction)
    queue, number = context.unit(Tcgen05Queue), context.number_of[id(instruction)]

    def step(group: Group) -> None:
        rows, lanes = group.active_rows(), group.active_lanes()
        flags = group.active(np.broadcast_to(accumulates(group), (len(group.rows), 32)))
        d_at, a_at, b_at, bits = (read(group) for read in numbers)
        # Threads with the same shape and places in tensor memory issue one _Mma.
        same = np.stack([bits, d_at, a_at if in_tensor_memory else np.zeros_like(a_at)], axis=1)
        for threads in _by_block(context.block_of_row[rows]):
            for key in np.unique(same[threads], axis=0):
                mine = threads[(same[threads] == key).all(1)]
                form = shape_of(int(key[0]), instruction)
                of = rows[mine]
                if in_tensor_memory and form.transposed[0]:
                    raise BadDescriptor(f"A in tensor memory cannot be MN-major: {instruction.where}")
                first: int | Indices = int(key[2])
                if not in_tensor_memory:
                    first = pieces_of(a_at[mine], form.rows, form.transposed[0], of, instruction, context)
                second = pieces_of(b_at[mine], form.columns, form.transposed[1], of, instruction, context)
                mma = _Mma(
                    instruction, form, of, context.block_of_row[of], int(key[1]), first, second, flags[mine],
                    np.ones(len(mine), bool),
                )  # fmt: skip
                queue.issue(mma, lanes[mine], number)

    return step


def _cp(instruction: Instruction, context: Context) -> Step:
    """Compile tcgen05.cp.cta_group::1.shape{.multicast} [address], matrix-descriptor, also with .multicast first."""
    operands = instruction.operands
    form = _COPIES.get(".".join(sorted(instruction.modifiers[2:])))
    if form is None or instruction.modifiers[1] != "cta_group::1" or not isinstance(operands[0], Address):
        raise unsupported(instruction)
    pieces, lanes_of = form
    address, matrix = (
        _number(operands[0], "u32", instruction, context),
        _number(operands[1], "b64", instruction, context),
    )
    queue, number = context.unit(Tcgen05Queue), context.number_of[id(instruction)]

    def step(group: Group) -> None:
        rows, lanes = group.active_rows(), group.active_lanes()
        targets, descriptors = address(group), matrix(group)
        for threads in _by_block(context.block_of_row[rows]):
            for target in np.unique(targets[threads]):
                mine = threads[targets[threads] == target]
                lane, column, of = int(target) >> 16, int(target) & 0xFFFF, rows[mine]
                place = f"\n  {context.thread_name(int(of[0]), int(lanes[mine[0]]))}: {instruction.where}"
                if lane + int(lanes_of.max()) >= LANES:
                    raise OutOfBounds(f"a tcgen05.cp to lane {lane} of tensor memory reaches beyond lane 127{place}")
                if column % 4:
                    raise Misaligned(f"a tcgen05.cp to column {column} of tensor memory, no multiple of 4{place}")
                source = pieces_of(descriptors[mine], lanes_of.shape[1], False, of, instruction, context, pieces)
                copy = _Copy(
                    instruction, of, context.block_of_row[of], source, lane + lanes_of,
                    column + np.arange(4 * pieces), np.ones(len(mine), bool),
                )  # fmt: skip
                queue.copy(copy, lanes[mine], number)

    return step


def _number(operand: Operand, type_: str, instruction: Instruction, context: Context) -> Callable[[Group], Indices]:
    """Return a function from a group to an operand of its active lanes; an address of tensor memory has an offset."""
    offset = operand.offset if isinstance(operand, Address) else 0
    source = context.source(operand.base if isinstance(operand, Address) else operand, type_, instruction)

    def read(group: Group) -> Indices:
        values = np.asarray(group.read(source)).astype(np.uint64).astype(np.int64)
        return group.active(np.broadcast_to(values, (len(group.rows), 32))) + offset

    return read


def _commit(instruction: Instruction, context: Context) -> Step:
    """Compile tcgen05.commit.cta_group::1.mbarrier::arrive::one{.shared::cluster}.b64 [mbarrier]."""
    if "mbarrier::arrive::one" not in instruction.modifiers or "multicast::cluster" in instruction.modifiers:
        raise unsupported(instruction)
    address_of, queue = addresses(instruction.operands[0], context, instruction), context.unit(Tcgen05Queue)

    def step(group: Group) -> None:
        targets = shared_addresses(instruction, context, group, address_of(group), 8)
        for threads in _by_block(context.block_of_row[targets.rows]):
            queue.commit(instruction, SharedAddresses(*(part[threads] for part in targets)))

    return step


COMPILERS: dict[str, Compiler] = {"tcgen05": _tcgen05}
