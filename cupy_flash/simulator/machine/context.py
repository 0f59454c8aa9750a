"""Group: the lanes that execute an instruction. Context: the registers, memory and launch that it executes on.

A register is an array with one row per warp. Row = warp of the block * blocks + block, so that the same warp of all
resident blocks is one contiguous slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import SimulationError, Unsupported
from ..memory.store import POISON, SHARED_START, Memory, Store
from .program import Program
from .ptx import TYPE_BYTES, Immediate, Instruction, Not, Operand, Register, Special, Symbol, constant_bits

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Step = Callable[["Group"], None]
U = TypeVar("U", bound="Unit")

DTYPES: dict[str, type[np.generic]] = {
    **{f"{kind}{bits}": getattr(np, f"uint{bits}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{"f16": np.uint16, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "tf32": np.uint32},
    "f32x2": np.uint64,
    **{"e4m3": np.uint8, "e5m2": np.uint8, "e4m3x2": np.uint16, "e5m2x2": np.uint16},
    **{"f32": np.float32, "f64": np.float64, "pred": np.bool_},
}


class Group:
    """Lanes at the same instruction. `mask` (rows, 32) is None if all 32 lanes of every row are active."""

    __slots__ = ("block", "rows", "index", "mask", "plain", "total")

    def __init__(self, block: int, rows: npt.NDArray[np.int64], mask: Mask | None, total: int):
        self.block, self.rows, self.mask, self.total = block, rows, mask, total
        self.index: slice | npt.NDArray[np.int64] | None
        if len(rows) == total:
            self.index = None
        elif rows[-1] - rows[0] + 1 == len(rows):
            self.index = slice(int(rows[0]), int(rows[-1]) + 1)
        else:
            self.index = rows
        self.plain = self.index is None and mask is None

    def read(self, view: Any) -> Any:
        """Return this group's rows of a register view; a constant is returned as it is."""
        return view if self.index is None or isinstance(view, np.generic) else view[self.index]

    def spread(self, values: Any) -> Array:
        """Return a result of `read`, with constants broadcast to (rows, 32)."""
        return np.broadcast_to(values, (len(self.rows), 32)) if isinstance(values, np.generic) else values

    def write(self, view: Array, values: Any) -> None:
        """Write the active lanes of a register view."""
        if self.mask is None:
            view[... if self.index is None else self.index] = values
        elif isinstance(self.index, np.ndarray):
            rows = view[self.index]
            np.copyto(rows, values, where=self.mask, casting="unsafe")
            view[self.index] = rows
        else:
            rows = view if self.index is None else view[self.index]
            np.copyto(rows, values, where=self.mask, casting="unsafe")

    def lanes(self) -> Mask:
        """Return the mask (rows, 32), all ones if it is None."""
        return np.ones((len(self.rows), 32), bool) if self.mask is None else self.mask

    def narrowed(self, mask: Mask) -> Group:
        """Return the same rows with fewer lanes."""
        group = Group.__new__(Group)
        group.block, group.rows, group.index, group.total = self.block, self.rows, self.index, self.total
        group.mask, group.plain = mask, False
        return group

    def count(self) -> int:
        """Return the number of active lanes."""
        # For masks of some hundred lanes, count_nonzero takes a tenth of the time of their methods any, all and sum.
        return 32 * len(self.rows) if self.mask is None else int(np.count_nonzero(self.mask))

    def active_rows(self) -> npt.NDArray[np.int64]:
        """Return the row of each active lane."""
        return self.rows.repeat(32 if self.mask is None else self.mask.sum(1))

    def active_lanes(self) -> npt.NDArray[np.int64]:
        """Return the index in its warp of each active lane."""
        return np.tile(np.arange(32), len(self.rows)) if self.mask is None else np.nonzero(self.mask)[1]

    def active(self, values: Array) -> Array:
        """Return the values (rows, 32) of the active lanes, as a flat array."""
        return values.reshape(-1) if self.mask is None else values[self.mask]


class Context:
    """The machine state of one set of resident blocks: launch geometry, registers, shared, local and global memory."""

    def __init__(
        self,
        program: Program,
        block_ids: npt.NDArray[np.int64],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        parameters: bytes,
        symbols: dict[str, int],
        shared_bytes: int,
        memory: Memory,
        counters: Counters,
    ):
        self.program, self.memory, self.counters, self.symbols = program, memory, counters, symbols
        self.blocks, self.block_ids, self.grid, self.block = len(block_ids), block_ids, grid, block
        self.threads = block[0] * block[1] * block[2]
        self.warps_per_block = -(-self.threads // 32)
        self.warps = self.warps_per_block * self.blocks
        self.block_of_row = np.arange(self.warps) % self.blocks
        self.warp_of_row = np.arange(self.warps) // self.blocks
        thread = self.warp_of_row[:, None] * 32 + np.arange(32)
        self.live: Mask = thread < self.threads
        # The blocks of a cluster are consecutive along x; `rank` is a block's index in its cluster (%cluster_ctarank).
        self.cluster = program.function.cluster[0]
        self.rank_of_row = self.block_of_row % self.cluster
        self.cluster_of_row = self.block_of_row // self.cluster
        self.warpgroup_of_row = self.warp_of_row // 4 * self.blocks + self.block_of_row
        self.warp_in_cluster = self.rank_of_row * self.warps_per_block + self.warp_of_row
        self._banks: dict[str, Array] = {}  # the registers of a storage class, (registers, warps, 32)
        self.carry = np.zeros((self.warps, 32), bool)
        self._to_read: dict[tuple[tuple[str, int], str], Array] = {}  # views of a slot by the type of an operand
        self._to_write: dict[tuple[tuple[str, int], str], Array] = {}
        # The registers of wgmma instructions, (registers, warps, 32).
        self.matrix_registers = np.full((program.slot_counts["matrix"], self.warps, 32), 0xFFFFFFFF, np.uint32)
        self.specials = self._specials(thread)
        self.shared_bytes = shared_bytes
        # The shared memory of all blocks is one array; each block starts at a multiple of shared_stride.
        self.shared_stride = -(-shared_bytes // 128) * 128
        self.shared = Store(np.full(self.blocks * self.shared_stride, POISON, np.uint8), tracked=True)
        self.shared_base = (self.block_of_row * self.shared_stride)[:, None] - SHARED_START
        self.parameters = Store(np.frombuffer(parameters.ljust(-(-len(parameters) // 16) * 16, b"\0"), np.uint8))
        self.parameter_bytes = len(parameters)
        self.local_offsets, self.local_bytes = self._local_layout()
        self.local = Store(np.full(self.warps * 32 * self.local_bytes, POISON, np.uint8))
        self.local_base = (np.arange(self.warps * 32) * self.local_bytes).reshape(-1, 32)
        self.number_of = {id(one): i for i, one in enumerate(program.function.instructions)}
        self.shared_symbols: dict[str, int] = {}
        self._units: dict[type[Unit], Any] = {}
        self.random: np.random.Generator | None = None
        self.clock = 0
        self.first_elected = 0  # elect.sync takes the first member lane at or after this one
        self.events = 0  # count of events that may end a wait
        self.unchecked: frozenset[str] = frozenset()  # named checks that this launch does not make

    def report(self, check: str, error: type[SimulationError], message: str) -> None:
        """Raise the error of a named check, unless this launch does not make it."""
        if check not in self.unchecked:
            raise error(f"{message}\n  check: {check}")

    # ---- units

    def register(self, unit: Unit) -> None:
        """Make a unit available to `unit` and `find` under its class."""
        self._units[type(unit)] = unit

    def unit(self, kind: type[U]) -> U:
        """Return the registered unit of this class."""
        unit: U = self._units[kind]
        return unit

    def find(self, kind: type[U]) -> U | None:
        """Return the registered unit of this class, or None."""
        return self._units.get(kind)

    def forget_units(self) -> None:
        """Drop the units, because they and their context refer to each other."""
        self._units.clear()

    # ---- layout

    def _specials(self, thread: Array) -> dict[str, Any]:
        def everywhere(values: Array) -> Array:
            return np.broadcast_to(values.astype(np.uint32), (self.warps, 32))

        x, y, _ = self.block
        specials: dict[str, Any] = {
            "tid.x": everywhere(thread % x),
            "tid.y": everywhere(thread // x % y),
            "tid.z": everywhere(thread // (x * y)),
            "laneid": everywhere(np.arange(32)),
            "warpid": everywhere(self.warp_of_row[:, None]),
            "nwarpid": np.uint32(self.warps_per_block),
            "smid": np.uint32(0),
            "gridid": np.uint32(0),
        }
        ids = self.block_ids[self.block_of_row][:, None]
        gx, gy, _ = self.grid
        for axis, n, extent, index in zip(
            "xyz", self.block, self.grid, (ids % gx, ids // gx % gy, ids // (gx * gy)), strict=True
        ):
            specials[f"ntid.{axis}"], specials[f"nctaid.{axis}"] = np.uint32(n), np.uint32(extent)
            specials[f"ctaid.{axis}"] = everywhere(index)
            size = self.cluster if axis == "x" else 1
            specials[f"cluster_ctaid.{axis}"] = everywhere(index % size)
            specials[f"clusterid.{axis}"] = everywhere(index // size)
            specials[f"cluster_nctaid.{axis}"], specials[f"nclusterid.{axis}"] = (
                np.uint32(size),
                np.uint32(extent // size),
            )
        specials["cluster_ctarank"] = everywhere(self.rank_of_row[:, None])
        specials["cluster_nctarank"] = np.uint32(self.cluster)
        lane = np.arange(32, dtype=np.uint64)
        one = np.uint64(1)
        for name, bits in (
            ("eq", one << lane),
            ("lt", (one << lane) - one),
            ("le", (one << (lane + one)) - one),
            ("gt", ~((one << (lane + one)) - one)),
            ("ge", ~((one << lane) - one)),
        ):
            specials[f"lanemask_{name}"] = everywhere(bits & np.uint64(0xFFFFFFFF))
        return specials

    def _local_layout(self) -> tuple[dict[str, int], int]:
        """Return (offset of each variable in a thread's local memory, bytes per thread rounded up to 16)."""
        offsets, end = {}, 0
        for variable in self.program.function.variables.values():
            if variable.space in ("local", "param"):
                offsets[variable.name] = end = -(-end // variable.align) * variable.align
                end += variable.size
        return offsets, -(-end // 16) * 16

    # ---- operands

    def array(self, register: Register) -> Array:
        """Return the storage of a register, (warps, 32), as unsigned integers (bool for a predicate)."""
        slot = self.program.slots[register.name]
        if slot[0] == "matrix":
            return self.matrix_registers[slot[1]]
        kind, number = slot
        if kind not in self._banks:
            dtype, count = np.dtype(DTYPES[kind]), self.program.slot_counts[kind]
            # Uninitialised registers hold all ones, which is NaN in every float format.
            poison = 1 if kind == "pred" else POISON
            self._banks[kind] = np.full((count, self.warps, 32 * dtype.itemsize), poison, np.uint8).view(dtype)
        return self._banks[kind][number]

    def address_of(self, symbol: Symbol, instruction: Instruction) -> int:
        """Return the address of a variable in its own state space (for a global variable, the generic address)."""
        if symbol.name in self.local_offsets:
            return self.local_offsets[symbol.name] + symbol.offset
        if symbol.name not in self.symbols:
            raise Unsupported(f"unknown variable {symbol.name!r}: {instruction.where}")
        return self.symbols[symbol.name] + symbol.offset

    def source(self, operand: Operand, type_: str, instruction: Instruction) -> Any:
        """Return a source operand: a (warps, 32) view of its register with the dtype of `type_`, or a NumPy scalar."""
        match operand:
            case Register(name, _):
                key = self.program.slots[name], type_
                if key not in self._to_read:
                    self._to_read[key] = self._view_to_read(operand, type_, instruction)
                return self._to_read[key]
            case Immediate():
                if type_ == "pred":
                    return np.bool_(operand.bits != 0)
                return _scalar(constant_bits(operand, type_), type_)
            case Symbol():
                return _scalar(self.address_of(operand, instruction), type_)
            case Special(name):
                if name not in self.specials:
                    raise Unsupported(f"special register %{name} is not simulated: {instruction.where}")
                value, dtype = self.specials[name], DTYPES[type_]
                same = np.dtype(dtype).itemsize == 4
                return value.view(dtype) if same else value.astype(dtype)
        raise Unsupported(f"source operand {operand} is not supported: {instruction.where}")

    def _view_to_read(self, register: Register, type_: str, instruction: Instruction) -> Array:
        array, dtype = self.array(register), np.dtype(DTYPES[type_])
        if (type_ == "pred") != (register.type == "pred"):
            raise Unsupported(f"operand of type .{register.type}, but .{type_} is needed: {instruction.where}")
        if array.itemsize == dtype.itemsize:
            return array.view(dtype)
        if array.itemsize < dtype.itemsize:
            raise Unsupported(f"register {register.name} is narrower than .{type_}: {instruction.where}")
        return array.view(dtype)[:, :: array.itemsize // dtype.itemsize]

    def destination(self, operand: Operand, type_: str, instruction: Instruction) -> Array:
        """Return a view for results of `type_`; a wider register sign- or zero-extends them."""
        if operand is None:  # the sink _
            return np.empty((self.warps, 32), DTYPES[type_])
        if not isinstance(operand, Register):
            raise Unsupported(f"destination operand {operand} is not a register: {instruction.where}")
        key = self.program.slots[operand.name], type_
        if key not in self._to_write:
            self._to_write[key] = self._view_to_write(operand, type_, instruction)
        return self._to_write[key]

    def _view_to_write(self, register: Register, type_: str, instruction: Instruction) -> Array:
        array, dtype = self.array(register), np.dtype(DTYPES[type_])
        if array.itemsize == dtype.itemsize or array.dtype == np.bool_:
            return array.view(dtype)
        if array.itemsize < dtype.itemsize:
            raise Unsupported(f"register {register.name} is narrower than .{type_}: {instruction.where}")
        return array.view(f"{'i' if dtype.kind == 'i' else 'u'}{array.itemsize}")

    def predicate(self, operand: Operand, instruction: Instruction) -> Callable[[Group], Any]:
        """Return a function from a group to its predicate values."""
        if isinstance(operand, Not):
            negated = self.source(operand.register, "pred", instruction)
            return lambda group: ~group.read(negated)
        view = self.source(operand, "pred", instruction)
        return lambda group: group.read(view)

    def thread_name(self, row: int, lane: int) -> str:
        """Return the thread for an error message: threadIdx, warp, lane and blockIdx."""
        thread = int(self.warp_of_row[row]) * 32 + lane
        bx, by, _ = self.block
        gx, gy, _ = self.grid
        block = int(self.block_ids[self.block_of_row[row]])
        return (
            f"thread ({thread % bx}, {thread // bx % by}, {thread // (bx * by)}) [warp {thread // 32}, lane {lane}]"
            f" of block ({block % gx}, {block // gx % gy}, {block // (gx * gy)})"
        )

    def warp_name(self, cluster: int, warp: int) -> str:
        """Return a warp's name for an error message: its index in the cluster, and its block unless the rank is 0."""
        rank, warp = divmod(warp, self.warps_per_block)
        return f"warp {warp}" + (f" of block {int(self.block_ids[cluster * self.cluster + rank])}" if rank else "")

    def shared_byte_name(self, index: int) -> str:
        """Return the byte for an error message: offset in its block's shared memory, and offset in the variable."""
        offset = index % self.shared_stride + SHARED_START
        inside = [(start, name) for name, start in self.shared_symbols.items() if start <= offset]
        name = f" (byte {offset - max(inside)[0]} of {max(inside)[1]})" if inside else ""
        return f"{offset - SHARED_START}{name}"


class Unit:
    """A part of the machine with state of its own, such as the mbarriers: it registers itself with its context."""

    def __init__(self, context: Context):
        self.context = context
        context.register(self)


@functools.lru_cache(maxsize=4096)
def _scalar(bits: int, type_: str) -> Any:
    size = np.dtype(DTYPES[type_]).itemsize
    return np.frombuffer((bits % (1 << 8 * size)).to_bytes(size, "little"), DTYPES[type_])[0]


def operand_type(instruction: Instruction) -> str:
    """Return the type of an instruction, its last modifier: f32 of add.rn.f32."""
    type_ = instruction.modifiers[-1]
    if type_ not in TYPE_BYTES:
        raise Unsupported(f"the instruction has no type: {instruction.where}")
    return type_
