"""ld, st, atom and red: every address is checked, every access counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Misaligned, OutOfBounds, ReadOnly, Unsupported
from ..machine.context import DTYPES, Array, Context, Group, Step
from ..machine.ptx import TYPE_BYTES, Address, Immediate, Instruction, Operand, Register, Symbol, Vector
from ..memory.checks import Checks
from ..memory.grid_order import STRONG
from ..memory.store import LOCAL, PARAM, SHARED, SHARED_START, WINDOW_BITS, Allocation, Store
from .closures import Compiler
from .convert import FORMATS, add_flushed, decode, encode, may_flush, sum_to_odd

Indices = npt.NDArray[np.int64]
_SPACES = {"global", "shared", "local", "param", "const"}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Access:
    """A memory access: `width` bytes per lane in a state space; 'generic' if the instruction names none."""

    instruction: Instruction
    number: int
    space: str
    width: int
    alignment: int
    writes: bool
    type: str = "b8"
    count: int = 1


def access_bytes(instruction: Instruction) -> int:
    """Return the bytes per lane of a ld, st, atom or red."""
    return TYPE_BYTES[instruction.modifiers[-1]] * _form(instruction.modifiers)[2]


@functools.lru_cache(maxsize=1024)
def _form(modifiers: tuple[str, ...]) -> tuple[str, str | None, int]:
    """Return (space or 'generic', type or None, number of components) of a memory access."""
    space = next((m.split("::")[0] for m in modifiers if m.split("::")[0] in _SPACES), "generic")
    count = next((int(m[1:]) for m in modifiers if m in ("v2", "v4", "v8")), 1)
    return space, next((m for m in reversed(modifiers) if m in TYPE_BYTES), None), count


def describe(instruction: Instruction, context: Context, *, writes: bool) -> Access:
    """Return the Access of a ld, st, atom or red."""
    space, type_, count = _form(instruction.modifiers)
    if type_ is None or ("shared::cluster" in instruction.modifiers and instruction.opcode != "ld"):
        raise Unsupported(f"this form of {instruction.opcode} is not simulated: {instruction.where}")
    width = TYPE_BYTES[type_] * count
    if width > 16:
        raise Unsupported(f"accesses of more than 16 bytes per lane are not simulated: {instruction.where}")
    number = context.number_of[id(instruction)]
    return Access(instruction, number, space, width, width, writes, type_, count)


def addresses(operand: Operand, context: Context, instruction: Instruction) -> Callable[[Group], Indices]:
    """Return a function from a group to its addresses [base + offset], int64 (rows, 32), in the state space."""
    if not isinstance(operand, Address):
        raise Unsupported(f"operand {operand} is not an address: {instruction.where}")
    base, offset = operand.base, operand.offset
    if isinstance(base, Register):
        array = context.array(base)

        def of_register(group: Group) -> Indices:
            return group.read(array).astype(np.int64) + offset

        def of_wide_register(group: Group) -> Indices:
            return group.read(array).view(np.int64) + offset

        return of_wide_register if array.itemsize == 8 else of_register
    fixed = base.bits + offset if isinstance(base, Immediate) else context.address_of(base, instruction) + offset

    def constant(group: Group) -> Indices:
        return np.full((len(group.rows), 32), fixed, np.int64)

    return constant


# ---- from addresses to bytes

# (store, byte index of each lane, positions among the active lanes or None for all, name of the memory)
Piece = tuple[Store, Indices, "Indices | None", str]


def pieces(access: Access, space: str, context: Context, group: Group, address: Indices) -> Iterator[Piece]:
    """Check the active lanes' addresses and yield one Piece per store that they point into."""
    low_bits = access.alignment - 1
    flat = group.active(address)
    if low_bits and int(np.bitwise_or.reduce(flat)) & low_bits:
        lane = int(np.flatnonzero(flat & low_bits)[0])
        raise Misaligned(
            f"{space} address {int(flat[lane]):#x} is not aligned to the {access.alignment} bytes accessed\n"
            f"  {_thread(context, group, lane)}: {access.instruction.where}"
        )
    if space == "shared":
        _inside(flat, SHARED_START, SHARED_START + context.shared_bytes, access, space, context, group)
        yield context.shared, group.active(address + group.read(context.shared_base)), None, "shared"
    elif space == "local":
        _inside(flat, 0, context.local_bytes, access, space, context, group)
        yield context.local, group.active(address + group.read(context.local_base)), None, "local"
    elif space == "param":
        _inside(flat, 0, context.parameter_bytes, access, space, context, group)
        yield context.parameters, flat, None, "parameters"
    else:
        yield from _global_pieces(access, context, group, flat)


def _global_pieces(access: Access, context: Context, group: Group, flat: Indices) -> Iterator[Piece]:
    low, high = int(np.minimum.reduce(flat)), int(np.maximum.reduce(flat))
    allocation = context.memory.find(low)
    if allocation is not None and high + access.width <= allocation.stop:
        _writable(allocation, access, context, group, 0)
        yield allocation.store, flat - allocation.base, None, allocation.name
        return
    starts = np.array([a.start for a in context.memory.allocations], np.int64)
    which = np.searchsorted(starts, flat, side="right") - 1
    for i in np.unique(which):
        selection = np.flatnonzero(which == i)
        allocation_i = context.memory.allocations[int(i)] if i >= 0 else None
        stop = allocation_i.stop if allocation_i is not None else 0
        outside = np.flatnonzero(flat[selection] + access.width > stop)
        if allocation_i is None or len(outside):
            lane = int(selection[outside[0]])
            address = int(flat[lane])
            raise OutOfBounds(
                f"{'write' if access.writes else 'read'} of {access.width} bytes at {address:#x}: "
                f"{context.memory.nearest(address)}\n  {_thread(context, group, lane)}: {access.instruction.where}"
            )
        _writable(allocation_i, access, context, group, int(selection[0]))
        yield allocation_i.store, flat[selection] - allocation_i.base, selection, allocation_i.name


def _writable(allocation: Allocation, access: Access, context: Context, group: Group, lane: int) -> None:
    if access.writes and not allocation.writable:
        raise ReadOnly(
            f"write to read-only {allocation.name!r}\n  {_thread(context, group, lane)}: {access.instruction.where}"
        )


def _inside(flat: Indices, start: int, stop: int, access: Access, space: str, context: Context, group: Group) -> None:
    # One maximum finds both ends: an address before the start is a large number without its sign.
    if int(np.maximum.reduce((flat - start).view(np.uint64))) + access.width > stop - start:
        lane = int(np.flatnonzero((flat < start) | (flat + access.width > stop))[0])
        raise OutOfBounds(
            f"{'write' if access.writes else 'read'} of {access.width} bytes at byte {int(flat[lane]) - start} of "
            f"{stop - start} bytes of {space} memory\n  {_thread(context, group, lane)}: {access.instruction.where}"
        )


def _thread(context: Context, group: Group, active_lane: int) -> str:
    row, lane = np.argwhere(group.lanes())[active_lane]
    return context.thread_name(int(group.rows[row]), int(lane))


def split_by_space(
    access: Access, context: Context, group: Group, address: Indices
) -> Iterator[tuple[str, Group, Indices]]:
    """Yield (space, lanes, addresses in that space); a generic access is split by the windows that it addresses."""
    if access.space != "generic":
        yield access.space, group, address
        return
    window = address >> WINDOW_BITS
    active = group.active(window)
    spaces = {SHARED >> WINDOW_BITS: "shared", LOCAL >> WINDOW_BITS: "local", PARAM >> WINDOW_BITS: "param"}
    first = int(active[0])
    if not np.count_nonzero(active != first):
        yield _window(first, spaces, group, address)
        return
    for one in np.unique(active):
        yield _window(int(one), spaces, group.narrowed(group.lanes() & (window == one)), address)


def _window(window: int, spaces: dict[int, str], group: Group, address: Indices) -> tuple[str, Group, Indices]:
    if window in spaces:
        return spaces[window], group, address - (window << WINDOW_BITS)
    return "global", group, address


def count_access(access: Access, space: str, context: Context, group: Group, address: Indices) -> None:
    """Count the access: shared-memory wavefronts, or global-memory sectors and bytes."""
    if space == "shared":
        words = (address - SHARED_START) >> 2
        copies = 1
        # Blocks usually access the same offsets: if all do, count one block's wavefronts and multiply.
        if group.index is None and context.blocks > 1:
            by_block = words.reshape(context.warps_per_block, context.blocks, 32)
            if group.mask is None and not np.count_nonzero(by_block != by_block[:, :1]):
                words, copies = by_block[:, 0], context.blocks
        context.counters.count_shared(access.number, words, group.mask, access.width, copies)
    elif space == "global":
        context.counters.count_global(access.number, address, group.mask, access.width, writes=access.writes)


def check(
    access: Access, space: str, context: Context, group: Group, piece: Piece, *, strong: bool, reads: bool
) -> None:
    """Check one piece of an access: races in shared and global memory, then reads of uninitialised bytes."""
    checks = context.find(Checks)
    if checks is None:
        return
    store, index, selection, name = piece
    if space == "shared":
        # Races first: the bytes of a copy in flight are still uninitialised, but the missing wait is the real cause.
        if strong:
            checks.shared_atomic(group, index, access.width, access.number)
        elif access.writes:
            checks.shared_write(group, index, access.width, access.number)
        else:
            checks.shared_read(group, index, access.width, access.number)
    elif space == "global" and checks.order is not None:
        checks.order.access(access.instruction, group, store, index, access.width, selection, name)
    if reads:
        checks.require_initialised(group, store, index, access.width, name, access.instruction, selection)


# ---- ld and st


def components(operand: Operand, access: Access) -> tuple[Operand, ...]:
    """Return the registers of an access, one per component of its vector."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != access.count:
        raise Unsupported(f"{len(items)} registers for .v{access.count}: {access.instruction.where}")
    return items


def _load(instruction: Instruction, context: Context) -> Step:
    access = describe(instruction, context, writes=False)
    target, source = instruction.operands[:2]
    results = [context.destination(item, access.type, instruction) for item in components(target, access)]
    address_of = addresses(source, context, instruction)
    dtype = DTYPES[access.type]
    strong = bool(STRONG & set(instruction.modifiers))
    if access.space == "param" and isinstance(source, Address) and isinstance(source.base, Symbol):
        if source.base.name in context.local_offsets:  # an argument of an inlined call
            access = replace(access, space="local")
        else:
            return _load_parameter(access, context, address_of, results)
    if access.space == "const":
        access = replace(access, space="global")

    def step(group: Group) -> None:
        for space, lanes, address in split_by_space(access, context, group, address_of(group)):
            count_access(access, space, context, lanes, address)
            loaded: Array | None = None
            for piece in pieces(access, space, context, lanes, address):
                store, index, selection, _ = piece
                check(access, space, context, lanes, piece, strong=strong, reads=True)
                values = store.gather(index, access.width).view(dtype).reshape(-1, access.count)
                if selection is None:
                    loaded = values
                else:
                    if loaded is None:
                        loaded = np.empty((len(lanes.active(address)), access.count), dtype)
                    loaded[selection] = values
            assert loaded is not None
            write_lanes(lanes, results, loaded)

    return step


def write_lanes(group: Group, results: list[Array], values: Array) -> None:
    """Write values (active lanes, components) to one register per component."""
    for i, result in enumerate(results):
        column = values[:, i]
        if group.mask is None:
            group.write(result, column.reshape(-1, 32))
        else:
            spread = np.zeros(group.mask.shape, values.dtype)
            spread[group.mask] = column
            group.write(result, spread)


def _load_parameter(
    access: Access, context: Context, address_of: Callable[[Group], Indices], results: list[Array]
) -> Step:
    """Compile ld.param at a fixed address, whose value is a constant of the launch and read at compile time."""
    all_warps = Group(0, np.arange(context.warps), None, context.warps)
    address = address_of(all_warps)
    ((store, index, _, _),) = pieces(access, "param", context, all_warps, address)
    values = store.gather(index[:1], access.width).view(DTYPES[access.type]).reshape(-1)

    def step(group: Group) -> None:
        for result, value in zip(results, values, strict=True):
            group.write(result, value)

    return step


def _store(instruction: Instruction, context: Context) -> Step:
    access = describe(instruction, context, writes=True)
    target, value = instruction.operands[:2]
    sources = [context.source(item, access.type, instruction) for item in components(value, access)]
    address_of = addresses(target, context, instruction)
    strong = bool(STRONG & set(instruction.modifiers))
    checks = context.find(Checks)
    if access.space == "param":
        access = replace(access, space="local")

    def step(group: Group) -> None:
        for space, lanes, address in split_by_space(access, context, group, address_of(group)):
            count_access(access, space, context, lanes, address)
            values = _packed_values(lanes, sources, access)
            for piece in pieces(access, space, context, lanes, address):
                store, index, selection, name = piece
                check(access, space, context, lanes, piece, strong=strong, reads=False)
                mine = values if selection is None else values[selection]
                store.scatter(index, access.width, mine)
                if checks is not None and space != "local":
                    kept = store.gather(index, access.width)
                    differing = kept != mine
                    if np.count_nonzero(differing):
                        lane = int(np.flatnonzero(differing.any(-1) if differing.ndim > 1 else differing)[0])
                        lane = lane if selection is None else int(selection[lane])
                        checks.conflicting_stores(lanes, lane, name, instruction)

    return step


def _packed_values(group: Group, sources: list[Any], access: Access) -> Array:
    """Return the components of the active lanes, packed into unsigned items for Store.scatter."""
    columns = [group.active(group.spread(group.read(source))) for source in sources]
    if len(columns) == 1:
        return np.ascontiguousarray(columns[0]).view(_RAW[access.width])
    rows = np.stack(columns, axis=1)
    raw = rows.view(np.uint64 if access.width == 16 else _RAW[access.width])
    return raw if access.width == 16 else raw[:, 0]


# ---- atom and red

ATOMIC = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}


def atomic_function(operation: str, type_: str) -> Callable[..., Any]:
    """Return the function (old, operands...) -> new of an atomic operation."""
    if type_ in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half_function(operation, type_)
    one = DTYPES[type_](1)
    functions: dict[str, Callable[..., Any]] = {
        "add": np.add,
        "min": np.fmin if type_[0] == "f" else np.minimum,
        "max": np.fmax if type_[0] == "f" else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, new: new,
        "cas": lambda old, compare, new: np.where(old == compare, new, old),
        "inc": lambda old, limit: np.where(old >= limit, old.dtype.type(0), old + one),
        "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - one),
    }
    return functions[operation]


def _half_function(operation: str, type_: str) -> Callable[..., Any]:
    single = type_.removesuffix("x2")
    functions: dict[str, Callable[..., Any]] = {"add": sum_to_odd, "min": np.fmin, "max": np.fmax}
    function = functions[operation]

    def on_bits(old: Array, new: Array) -> Array:
        return encode(function(decode(old, single), decode(new, single)), FORMATS[single])

    if single == type_:
        return lambda old, new: on_bits(old, new).astype(np.uint16)
    half, low = np.uint32(16), np.uint32(0xFFFF)
    return lambda old, new: on_bits(old & low, new & low) | (on_bits(old >> half, new >> half) << half)


def _atomic(instruction: Instruction, context: Context) -> Step:
    access = describe(instruction, context, writes=True)
    operation = next((m for m in instruction.modifiers if m in ATOMIC), None)
    if operation is None:
        raise Unsupported(f"unknown atomic operation: {instruction.where}")
    returns = instruction.opcode == "atom"
    target, *values = instruction.operands[1:] if returns else instruction.operands
    if operation != "cas":
        values = values[:1]
    type_ = access.type
    results: list[Array] = []
    if returns:
        results = [
            context.destination(item, type_, instruction) for item in components(instruction.operands[0], access)
        ]
    # sources[operand][component]
    sources = [[context.source(item, type_, instruction) for item in components(v, access)] for v in values]
    address_of = addresses(target, context, instruction)
    function, dtype = atomic_function(operation, type_), np.dtype(DTYPES[type_])
    in_place = isinstance(function, np.ufunc) and not returns
    adds_float = operation == "add" and type_ == "f32"
    checks = context.find(Checks)

    def step(group: Group) -> None:
        for space, lanes, address in split_by_space(access, context, group, address_of(group)):
            count_access(access, space, context, lanes, address)
            operands = [[lanes.active(lanes.spread(lanes.read(c))) for c in one] for one in sources]
            old = np.empty((len(operands[0][0]), access.count), dtype)
            for piece in pieces(access, space, context, lanes, address):
                store, index, selection, _ = piece
                check(access, space, context, lanes, piece, strong=True, reads=operation != "exch")
                chosen = slice(None) if selection is None else selection
                for i in range(access.count):
                    items, first = store.items(dtype.itemsize)
                    position = (index + i * dtype.itemsize) // dtype.itemsize - first
                    mine = [one[i][chosen] for one in operands]
                    typed = items.view(dtype)
                    order = None if context.random is None else context.random.permutation(len(position))
                    # PTX ISA, atom and red: .add.f32 flushes subnormals in global memory but not in shared memory.
                    if adds_float and space == "global" and may_flush(typed[position], mine[0]):
                        old[chosen, i] = _serialised(add_flushed, typed, position, mine, order, in_place=False)
                    else:
                        old[chosen, i] = _serialised(function, typed, position, mine, order, in_place=in_place)
                if operation == "cas" and space == "global" and checks is not None and checks.order is not None:
                    equal = old[chosen, 0] == operands[0][0][chosen]
                    checks.order.compared(instruction, lanes, store, index, access.width, selection, equal)
                if store.defined is not None:
                    # exch initialises these bytes. The other operations have read them, so they were checked already.
                    defined, first = store.items(access.width, of_defined=True)
                    defined[index // access.width - first] = defined.dtype.type(
                        0x0101010101010101 & ((1 << 8 * defined.itemsize) - 1)
                    )
            if returns:
                write_lanes(lanes, results, old)

    return step


def _serialised(
    function: Callable[..., Any],
    items: Array,
    position: Indices,
    operands: list[Array],
    order: Indices | None,
    *,
    in_place: bool,
) -> Any:
    """Apply an atomic lane by lane in the given order, and return the old value that each lane read.

    Step i handles the i-th lane at every address, so lanes at distinct addresses take one step.
    """
    if order is not None:
        position, operands = position[order], [operand[order] for operand in operands]
    if in_place:
        assert isinstance(function, np.ufunc)
        function.at(items, position, operands[0])
        return items.dtype.type(0)
    sequence = np.argsort(position, kind="stable")
    ordered = position[sequence]
    start = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    turn = np.empty(len(position), np.int64)
    turn[sequence] = np.arange(len(position)) - np.repeat(start, np.diff(np.append(start, len(position))))
    old = np.empty(len(position), items.dtype)
    for i in range(int(turn.max()) + 1):
        lanes = np.flatnonzero(turn == i)
        slots = position[lanes]
        before = items[slots]
        old[lanes] = before
        items[slots] = function(before, *[operand[lanes] for operand in operands])
    if order is None:
        return old
    in_lane_order = np.empty_like(old)
    in_lane_order[order] = old
    return in_lane_order


COMPILERS: dict[str, Compiler] = {"ld": _load, "ldu": _load, "st": _store, "atom": _atomic, "red": _atomic}
