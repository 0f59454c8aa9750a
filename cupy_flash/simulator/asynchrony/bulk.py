"""cp.async.bulk, cp.async.bulk.tensor (TMA) and cp.reduce.async.bulk between global and shared memory.

A load completes at issue (`early`), at a random time (`random`), or when nothing else can run (`late`: the youngest
load whose mbarrier is waited for). A store or reduction reads shared memory at issue or at its wait, and writes global
memory at its wait or much later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OutOfBounds, PendingCopy, ReadOnly, SimulationError, Uninitialised
from ..instructions.access import ATOMIC, addresses, atomic_function
from ..instructions.closures import Compiler, unsupported
from ..instructions.convert import add_flushed
from ..machine.context import DTYPES, Context, Group, Step, Unit
from ..machine.ptx import TYPE_BYTES, Address, Immediate, Instruction, TensorAddress
from ..memory.checks import Checks, Issue
from ..memory.shared_addresses import SharedAddresses, shared_addresses
from .boxes import Pieces, box_pieces, range_pieces, tensor_map_at
from .copies import Order
from .exits import Exits, Use
from .mbarriers import Mbarriers

Indices = npt.NDArray[np.int64]
# Largest number of stores that have read their source and not yet written to global memory.
_MAX_UNWRITTEN = 32
_READ_AT_ISSUE = 0.5  # probability that a store reads its source at issue, if order="random"


@dataclass(slots=True, eq=False)
class _Copy:
    """One bulk copy of n lanes. `targets` are the mbarriers of a load, or the shared source of a store or reduction."""

    instruction: Instruction
    number: int
    pieces: Pieces
    index: Indices  # (n, m) in the shared memory of all blocks
    targets: SharedAddresses
    operation: str = ""  # the operation of a reduction, "" for other copies
    # Only stores and reductions have these:
    groups: Any = None  # (n,): index of the thread's bulk group
    data_read: Any = None  # the bytes read from shared memory
    read: Any = None  # (n,): shared memory has been read
    unwaited: Any = None  # (n,): no wait has covered it yet


class BulkCopies(Unit):
    """The bulk copies in flight of one set of resident blocks."""

    def __init__(self, context: Context, order: Order):
        super().__init__(context)
        self.order, self.checks = order, context.find(Checks)
        self.mbarriers, self.exits = context.unit(Mbarriers), context.unit(Exits)
        self.loads: list[_Copy] = []
        self.stores: list[_Copy] = []
        self.committed = np.zeros((context.warps, 32), np.int64)
        # For each thread: the number of groups that its waits have covered, and (group, instruction) of its last store.
        self._waited = np.zeros((context.warps, 32), np.int64)
        self._last_store = np.full((2, context.warps, 32), -1)

    # ---- loads

    def load(self, copy: _Copy) -> None:
        """Start a load."""
        context = self.context
        phases = self.mbarriers.begin_copy(copy.targets, copy.instruction)
        self.exits.record(copy.targets, copy.instruction, Use.COPY, phases)
        _account(copy, context, writes=False)
        if self.checks is not None:
            self._require_source(copy)
            rank = copy.targets.blocks % context.cluster
            agents = [
                self.checks.clocks.agent(("mbarrier", int(o), int(r)))
                for o, r in zip(copy.targets.offsets, rank, strict=True)
            ]
            targets = copy.targets
            issue = Issue(copy.number, targets.rows[:, None], np.array(agents), phases + 1, targets.lanes)
            self.checks.async_write(issue, _shared_pieces(copy))
        self.loads.append(copy)
        if self.order == "early":
            self._land(copy)

    def _require_source(self, copy: _Copy) -> None:
        pieces, store = copy.pieces, copy.pieces.allocation.store
        if store.defined is None:
            return
        undefined = store.undefined(pieces.global_[pieces.inside] - pieces.allocation.base, pieces.width)
        if undefined.any():
            first = int(pieces.global_[pieces.inside][undefined][0]) - pieces.allocation.start
            self.context.report(
                "uninitialised",
                Uninitialised,
                f"bulk copy reads byte {first} of {pieces.allocation.name!r}, which is uninitialised\n  "
                f"{copy.instruction.where}",
            )

    def land(self, wanted: set[tuple[int, int]] | None = None) -> bool:
        """Complete one load: the youngest that signals a `wanted` mbarrier (offset, block); for None any load.

        Returns False if there is none.
        """
        if not self.loads or wanted is not None and not wanted:
            return False
        random = self.context.random
        if wanted is None and random is not None:
            self._land(self.loads[int(random.integers(len(self.loads)))])
            return True
        candidates = [
            copy
            for copy in self.loads
            if wanted and wanted & set(zip(copy.targets.offsets.tolist(), copy.targets.blocks.tolist(), strict=True))
        ]
        self._land((candidates or self.loads)[-1])
        return True

    def _land(self, copy: _Copy) -> None:
        context, pieces = self.context, copy.pieces
        self.loads.remove(copy)
        data = np.zeros((*copy.index.shape, *_row(pieces.width)), _word(pieces.width))
        data[pieces.inside] = pieces.allocation.store.gather(
            pieces.global_[pieces.inside] - pieces.allocation.base, pieces.width
        )
        context.shared.scatter(copy.index, pieces.width, data)
        self.mbarriers.complete_tx(copy.targets, pieces.bytes, copy.instruction)
        context.events += 1

    # ---- stores and reductions

    def store(self, copy: _Copy) -> None:
        """Start a store or a reduction."""
        context, pieces = self.context, copy.pieces
        if not pieces.allocation.writable:
            raise ReadOnly(f"bulk copy writes to read-only {pieces.allocation.name!r}: {copy.instruction.where}")
        _account(copy, context, writes=True)
        rows, lanes = copy.targets.rows, copy.targets.lanes
        copy.groups = self.committed[rows, lanes]
        self._last_store[0, rows, lanes], self._last_store[1, rows, lanes] = copy.groups, copy.number
        copy.read, copy.unwaited = np.zeros(len(rows), bool), np.ones(len(rows), bool)
        copy.data_read = np.zeros((*copy.index.shape, *_row(pieces.width)), _word(pieces.width))
        if self.checks is not None:
            if copy.operation:
                self._require_source(copy)
            shared_pieces = _shared_pieces(copy)
            inside = np.asarray(pieces.inside.reshape(*shared_pieces.shape, -1).any(axis=2))
            for reader, mine in self._threads(rows, lanes):
                agents = np.array(
                    [self.checks.clocks.agent((*reader, int(r))) for r in context.rank_of_row[rows[mine]]]
                )
                issue = Issue(copy.number, rows[mine][:, None], agents, copy.groups[mine] + 1, lanes[mine])
                self.checks.async_read(issue, shared_pieces[mine], reader, inside[mine])
        self.stores.append(copy)
        random = context.random
        if self.order == "early" or self.order == "random" and random is not None and random.random() < _READ_AT_ISSUE:
            self._take(copy, copy.unwaited.copy())

    def _threads(self, rows: Indices, lanes: Indices) -> list[tuple[tuple[str, int, int], npt.NDArray[np.bool_]]]:
        """Return (agent without its rank, mask over these lanes) for each distinct (warp of a block, lane)."""
        warps = self.context.warp_of_row[rows]
        pairs = sorted({(int(w), int(lane)) for w, lane in zip(warps, lanes, strict=True)})
        return [(("bulk", w, lane), (warps == w) & (lanes == lane)) for w, lane in pairs]

    def commit(self, group: Group) -> None:
        """Execute cp.async.bulk.commit_group."""
        self.committed[group.rows] += group.lanes()

    def wait(self, group: Group, pending: int, *, read: bool) -> None:
        """Execute cp.async.bulk.wait_group{.read}: complete all but the `pending` youngest groups of each thread."""
        context = self.context
        here = np.zeros((context.warps, 32), bool)
        here[group.rows] = group.lanes()
        limit = self.committed - pending
        self._waited[here] = np.maximum(self._waited, limit)[here]
        for copy in self.stores:
            rows, lanes = copy.targets.rows, copy.targets.lanes
            done = copy.unwaited & here[rows, lanes] & (copy.groups < limit[rows, lanes])
            self._take(copy, done)
            if not read:
                self._write(copy, done)
        for copy in self.stores[:-_MAX_UNWRITTEN]:
            self._write(copy, copy.read)
        self.stores = [copy for copy in self.stores if copy.unwaited.any()]
        if self.checks is not None:
            rows, lanes = (group.rows[part] if i == 0 else part for i, part in enumerate(np.nonzero(group.lanes())))
            clocks = self.checks.clocks
            for reader, mine in self._threads(rows, lanes):
                lane = reader[2]
                for rank in np.unique(context.rank_of_row[rows[mine]]):
                    agent = (*reader, int(rank))
                    if agent in clocks.agents:
                        warps = rows[mine][context.rank_of_row[rows[mine]] == rank]
                        mask = np.broadcast_to(np.arange(32) == lane, (len(warps), 32))
                        clocks.acquire_agent(clocks.agents[agent], warps, np.maximum(limit[warps, lane], 0), mask)

    def _take(self, copy: _Copy, lanes: npt.NDArray[np.bool_]) -> None:
        """Read the source of these lanes from shared memory."""
        now = lanes & ~copy.read
        copy.data_read[now] = self.context.shared.gather(copy.index[now], copy.pieces.width)
        copy.read |= now

    def _write(self, copy: _Copy, lanes: npt.NDArray[np.bool_]) -> None:
        """Write the data of these lanes to global memory."""
        pieces, store = copy.pieces, copy.pieces.allocation.store
        for i in np.flatnonzero(lanes & copy.unwaited):
            inside = pieces.inside[i]
            index, data = pieces.global_[i, inside] - pieces.allocation.base, copy.data_read[i, inside]
            if not copy.operation:
                store.scatter(index, pieces.width, data)
                continue
            dtype = np.dtype(DTYPES[pieces.type])
            items, first = store.items(dtype.itemsize)
            targets = (index[:, None] + np.arange(0, pieces.width, dtype.itemsize)).reshape(
                -1
            ) // dtype.itemsize - first
            typed, new = items.view(dtype), np.ascontiguousarray(data).view(dtype).reshape(-1)
            combine = atomic_function(copy.operation, pieces.type)
            # PTX ISA, cp.reduce.async.bulk: .add.f32 flushes subnormals; cp.reduce.async.bulk.tensor does not say.
            if copy.operation == "add" and pieces.type == "f32" and "tensor" not in copy.instruction.modifiers:
                combine = add_flushed
            typed[targets] = combine(typed[targets], new)
        copy.unwaited = copy.unwaited & ~lanes

    def finish(self) -> None:
        """Check at the end of the kernel that every load and store was waited for, and complete the stores."""
        if self.loads:
            message = f"the block ends before its bulk copy completes: {self.loads[0].instruction.where}"
            self.context.report("early-exit", PendingCopy, message)
        last, number = self._last_store
        if (last >= self._waited).any():
            instruction = self.context.program.function.instructions[int(number[last >= self._waited][0])]
            message = f"no cp.async.bulk.wait_group.read before the block ends: {instruction.where}"
            self.context.report("bulk-read-wait", PendingCopy, message)
        for copy in self.stores:
            self._take(copy, copy.unwaited)
            self._write(copy, copy.unwaited)
        self.stores.clear()


def _word(width: int) -> np.dtype[Any]:
    return np.dtype(f"u{min(width, 8)}")


def _row(width: int) -> tuple[int, ...]:
    return (2,) if width == 16 else ()


def _account(copy: _Copy, context: Context, *, writes: bool) -> None:
    moved = copy.pieces.global_[copy.pieces.inside]
    context.counters.count_bulk(copy.number, moved, copy.pieces.width, writes=writes)


def _shared_pieces(copy: _Copy) -> Indices:
    """Return the shared-memory index of each 16-byte piece, (n, pieces)."""
    return copy.index[:, :: 16 // copy.pieces.width]


# ---- instructions


def _bulk(instruction: Instruction, context: Context) -> Step:
    modifiers = instruction.modifiers
    copies = context.unit(BulkCopies)
    if "commit_group" in modifiers:
        return lambda group: copies.commit(group)
    if "wait_group" in modifiers:
        (pending,) = instruction.operands
        assert isinstance(pending, Immediate)
        return lambda group: copies.wait(group, pending.bits, read="read" in modifiers)
    if "prefetch" in modifiers:
        return lambda group: None
    if "global" not in modifiers or "tensor" in modifiers and set(modifiers) & {"im2col", "gather4", "scatter4"}:
        raise unsupported(instruction)
    if "bulk_group" in modifiers:
        return _store(instruction, context)
    if "mbarrier::complete_tx::bytes" not in modifiers:
        raise unsupported(instruction)
    return _load(instruction, context)


def _flat(group: Group, source: Any) -> Indices:
    return group.active(np.broadcast_to(group.read(source).astype(np.int64), (len(group.rows), 32)))


def _split_by_value(group: Group, values: Indices) -> Iterator[Group]:
    """Split the lanes into groups with equal `values`."""
    if (values == values[0]).all():
        yield group
        return
    for value in np.unique(values):
        mask = group.lanes().copy()
        mask[mask] = values == value
        yield group.narrowed(mask)


Reader = tuple[Callable[[Group], Indices], Callable[[Group, SharedAddresses], Pieces]]


def _global_operand(instruction: Instruction, context: Context, operand: Any, size: Any, type_: str) -> Reader:
    """Return two functions of a group, for the global operand (a box or a range): one gives keys (n,), one the Pieces.

    Lanes with equal keys issue one copy.
    """
    if isinstance(operand, TensorAddress):
        address_of = addresses(operand.map, context, instruction)
        coordinates = [context.source(item, "s32", instruction) for item in operand.coordinates.items]

        def map_of(group: Group) -> Indices:
            return group.active(address_of(group))

        def box(group: Group, target: SharedAddresses) -> Pieces:
            tensor = tensor_map_at(map_of(group), instruction, context)
            if len(tensor.shape) != len(coordinates) or f"{len(coordinates)}d" not in instruction.modifiers:
                raise SimulationError(
                    f"a tensor map of {len(tensor.shape)} dimensions with {len(coordinates)} coordinates: "
                    f"{instruction.where}"
                )
            at = np.stack([_flat(group, source) for source in coordinates], axis=1)
            return box_pieces(target.offsets, tensor, at, instruction, context)

        return map_of, box
    start_of = addresses(operand, context, instruction)
    amount = context.source(size, "u32", instruction)

    def size_of(group: Group) -> Indices:
        return _flat(group, amount)

    def plain(group: Group, target: SharedAddresses) -> Pieces:
        start = group.active(start_of(group))
        return range_pieces(target.offsets, start, size_of(group), instruction, type_, context)

    return size_of, plain


def _within(pieces: Pieces, target: SharedAddresses, instruction: Instruction, context: Context) -> Indices:
    """Return the indices of the pieces in the shared memory of all blocks, (n, m)."""
    if (pieces.shared + pieces.width > context.shared_bytes).any():
        raise OutOfBounds(
            f"bulk copy reaches beyond the {context.shared_bytes} bytes of shared memory: {instruction.where}"
        )
    return pieces.shared + (target.blocks * context.shared_stride)[:, None]


def _load(instruction: Instruction, context: Context) -> Step:
    """Compile a bulk load.

    cp.async.bulk{.tensor}... [shared], [global or tensor map], {size,} [mbarrier]{, mask}{, cache policy}
    """
    target, source, *rest = instruction.operands
    size = None if isinstance(source, TensorAddress) else rest.pop(0)
    assert isinstance(target, Address)
    target_of = addresses(target, context, instruction)
    barrier_of = addresses(rest[0], context, instruction)
    multicast = "multicast::cluster" in instruction.modifiers
    mask = context.source(rest[1], "u16", instruction) if multicast else None
    key_of, read = _global_operand(instruction, context, source, size, "b8")
    number = context.number_of[id(instruction)]
    copies = context.unit(BulkCopies)

    def load(group: Group) -> None:
        shared = shared_addresses(instruction, context, group, target_of(group), 16)
        barriers = shared_addresses(instruction, context, group, barrier_of(group), 8)
        pieces = read(group, shared)
        lane = np.arange(len(shared.rows))
        if mask is not None:
            chosen = (_flat(group, mask)[:, None] >> np.arange(16)) & 1
            if chosen[:, context.cluster :].any() or not chosen.any(1).all():
                raise OutOfBounds(
                    f"the multicast mask names no block, or one outside the cluster of {context.cluster}: "
                    f"{instruction.where}"
                )
            lane, rank = np.nonzero(chosen)
            first = shared.blocks - shared.blocks % context.cluster
            shared, barriers = (
                SharedAddresses(p.rows[lane], p.lanes[lane], first[lane] + rank, p.offsets[lane])
                for p in (shared, barriers)
            )
            pieces = Pieces(
                pieces.width, pieces.shared[lane], pieces.global_[lane], pieces.inside[lane], pieces.allocation, "b8"
            )
        index = _within(pieces, shared, instruction, context)
        copies.load(_Copy(instruction, number, pieces, index, barriers))

    def step(group: Group) -> None:
        for part in _split_by_value(group, key_of(group)):
            load(part)

    return step


def _store(instruction: Instruction, context: Context) -> Step:
    """Compile a bulk store or reduction.

    cp{.reduce}.async.bulk{.tensor}... [global or tensor map], [shared]{, size}{, cache policy}
    """
    modifiers = instruction.modifiers
    target, source, *rest = instruction.operands
    operation = next((m for m in modifiers if m in ATOMIC), "") if modifiers[0] == "reduce" else ""
    type_ = modifiers[-1] if modifiers[-1] in TYPE_BYTES else "b8"
    size = None if isinstance(target, TensorAddress) else rest[0]
    source_of = addresses(source, context, instruction)
    key_of, read = _global_operand(instruction, context, target, size, type_)
    number = context.number_of[id(instruction)]
    copies = context.unit(BulkCopies)

    def store(group: Group) -> None:
        shared = shared_addresses(instruction, context, group, source_of(group), 16)
        pieces = read(group, shared)
        index = _within(pieces, shared, instruction, context)
        copies.store(_Copy(instruction, number, pieces, index, shared, operation))

    def step(group: Group) -> None:
        for part in _split_by_value(group, key_of(group)):
            store(part)

    return step


COMPILERS: dict[str, Compiler] = {"cp.bulk": _bulk}
