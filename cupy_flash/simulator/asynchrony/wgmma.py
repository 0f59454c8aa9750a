"""wgmma: asynchronous warpgroup matrix instructions.

A wgmma reads its operands and writes its accumulators at issue (`early`), at its wait (`late`), or at a random time
between. The checks report every use of its registers in between, in any order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BadDescriptor, BarrierMisuse, Misaligned, MissingFence, OutOfBounds, PendingRegister
from ..instructions.closures import Compiler, unsupported
from ..instructions.convert import elements
from ..machine.context import Array, Context, Group, Mask, Step, Unit
from ..machine.program import registers_of
from ..machine.ptx import Immediate, Instruction, Vector
from ..memory.checks import Checks, Issue
from ..memory.store import SHARED_START, swizzled
from .copies import Order

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}  # K
_FENCES = 32  # number of bits that hold a fence count in `touched`
_EARLIER = 0.3  # probability that an issue first computes its warpgroup's wgmma in flight, if order="random"


# ---- operands in shared memory


@dataclass(frozen=True)
class Layout:
    """A canonical layout of the PTX ISA in 16-byte pieces: `rows` of M or N by `pieces` of K, or transposed."""

    rows: int
    transposed: bool  # MN-major: M or N is contiguous
    swizzle: int  # 128, 64 or 32 bytes; 16: none
    leading: int  # leading dimension byte offset
    stride: int  # stride dimension byte offset
    pieces: int = 2  # of K, if it is contiguous


@lru_cache(maxsize=256)
def offsets(layout: Layout) -> Indices:
    """Return the byte offset of each piece before swizzling, (rows, pieces), or transposed (16 of K, rows / 8)."""
    pitch, span = layout.swizzle, layout.swizzle // 16
    if not layout.transposed:
        row, piece = np.arange(layout.rows)[:, None], np.arange(layout.pieces)
        return row % 8 * pitch + row // 8 * layout.stride + piece * (16 if span > 1 else layout.leading)
    k, piece = np.arange(16)[:, None], np.arange(layout.rows // 8)
    across, along = (layout.leading, layout.stride) if span > 1 else (layout.stride, layout.leading)
    return k % 8 * pitch + k // 8 * along + piece % span * 16 + piece // span * across


_SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}


def byte_fields(descriptor: int) -> tuple[int, int, int]:
    """Return (address, leading and stride dimension byte offsets) of a matrix descriptor of sm_90 or sm_100."""
    return (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4


def descriptor_layout(descriptor: int, rows: int, *, transposed: bool) -> tuple[int, Layout]:
    """Return (address, layout) of a matrix descriptor."""
    address, leading, stride = byte_fields(descriptor)
    return address, Layout(rows, transposed, _SWIZZLES[descriptor >> 62], leading, stride)


# ---- instructions in flight


@dataclass(frozen=True, eq=False)
class _Form:
    """The static operands of one wgmma.mma_async."""

    instruction: Instruction
    number: int
    columns: int  # N
    types: tuple[str, str]  # element types of A and B
    signs: float  # scale-a * scale-b
    transposed: tuple[bool, bool]
    accumulators: Indices  # indices into Context.matrix_registers
    registers: Indices  # indices of A's registers; empty if A is in shared memory
    key: int  # equal for instructions with the same accumulators


@dataclass(slots=True, eq=False)
class _Wgmma:
    """One wgmma.mma_async of n warpgroups: rows (n, 4), shared-memory indices of the operands' pieces (n, pieces)."""

    form: _Form
    warpgroups: Indices
    rows: Indices
    a: Indices | None
    b: Indices
    scale_d: Mask  # D = A B + D; else D = A B
    groups: Indices
    pending: Mask  # not computed yet
    unwaited: Mask  # no wait has covered it yet


class WgmmaQueue(Unit):
    """The wgmma in flight of one set of resident blocks."""

    def __init__(self, context: Context, order: Order):
        super().__init__(context)
        self.order, self.checks = order, context.find(Checks)
        registers, warps = context.matrix_registers.shape[:2]
        self.in_flight: list[_Wgmma] = []
        self.committed = np.zeros(warps, np.int64)  # by warpgroup
        self.fences = np.zeros(warps, np.int64)  # wgmma.fence executed, by row
        # The last use of a register by another instruction: that one's number << _FENCES | wgmma.fence executed before.
        self.touched = np.full((registers, warps), -1)
        self.busy = np.zeros(
            (registers, warps), np.int64
        )  # use by a wgmma in flight: 0 none, _Form.key accumulator, -1 A
        self._keys: dict[tuple[int, ...], int] = {}

    def key(self, accumulators: Indices) -> int:
        """Return a number above 0 that identifies this sequence of accumulator registers."""
        return self._keys.setdefault(tuple(accumulators), len(self._keys) + 1)

    def watched(self, step: Step, instruction: Instruction) -> Step:
        """Wrap another instruction's step: report uses of registers in flight, and record uses for the fence check."""
        slots = self.context.program.slots
        names = [r.name for operand in (*instruction.operands, instruction.guard) for r in registers_of(operand)]
        indices = sorted({slots[name][1] for name in names if slots[name][0] == "matrix"})
        if not indices or instruction.opcode == "wgmma" or self.checks is None:
            return step
        used, number = np.array(indices)[:, None], self.context.number_of[id(instruction)]

        def watching(group: Group) -> None:
            if self.in_flight and self.busy[used, group.rows].any():
                row = int(group.rows[np.flatnonzero(self.busy[used, group.rows].any(0))[0]])
                use = f"{self.context.thread_name(row, 0)}: {instruction.where}"
                self.context.report(
                    "wgmma-registers",
                    PendingRegister,
                    f"a register of a wgmma in flight is used before its wgmma.wait_group\n"
                    f"  wgmma: {self._in_flight_at(row)}\n  use:   {use}",
                )
            self.touched[used, group.rows] = self.fences[group.rows] | number << _FENCES
            step(group)

        return watching

    def _in_flight_at(self, row: int) -> str:
        return next(p.form.instruction.where for p in self.in_flight if row in p.rows[p.unwaited])

    def fence(self, rows: Indices) -> None:
        """Execute wgmma.fence."""
        self.fences[rows] += 1

    def issue(self, form: _Form, rows: Indices, a: Indices | None, b: Indices, scale_d: Mask) -> None:
        """Start a wgmma; `rows` (n, 4), `a` and `b` shared-memory indices of the operands' pieces (n, pieces)."""
        warpgroups = self.context.warpgroup_of_row[rows[:, 0]]
        some = np.ones(len(rows), bool)
        wgmma = _Wgmma(form, warpgroups, rows, a, b, scale_d, self.committed[warpgroups], some, some.copy())
        if self.checks is not None:
            self._check(wgmma)
        registers = form.registers[:, None], rows.reshape(-1)
        self.busy[registers] = -1
        self.busy[form.accumulators[:, None], rows.reshape(-1)] = form.key
        self.in_flight.append(wgmma)
        random = self.context.random
        if self.order == "early" or self.order == "random" and random is not None and random.random() < _EARLIER:
            self._compute(warpgroups, None)

    def _check(self, wgmma: _Wgmma) -> None:
        context, form, rows = self.context, wgmma.form, wgmma.rows
        flat = rows.reshape(-1)
        both = np.concatenate([form.accumulators, form.registers])[:, None]
        last = self.touched[both, flat]
        unfenced = (last & ((1 << _FENCES) - 1)) == self.fences[flat]
        if unfenced.any() or (self.fences[flat] == 0).any():
            i, j = (int(x) for x in np.argwhere(unfenced | (self.fences[flat] == 0))[0])
            code = context.program.function.instructions
            use = f"\n  use:   {code[int(last[i, j]) >> _FENCES].where}" if last[i, j] >= 0 else ""
            context.report(
                "wgmma-fence",
                MissingFence,
                f"no wgmma.fence after the last use of its registers by another instruction{use}\n  wgmma: "
                f"{context.thread_name(int(flat[j]), 0)}: {form.instruction.where}",
            )
        d, a = self.busy[form.accumulators[:, None], flat], self.busy[form.registers[:, None], flat]
        clash = ((d != 0) & (d != form.key)).any(0) | (a > 0).any(0)
        if clash.any():
            row = int(flat[np.flatnonzero(clash)[0]])
            context.report(
                "wgmma-registers",
                PendingRegister,
                "a wgmma uses registers of another one in flight, other than as the same accumulators\n  first:  "
                f"{self._in_flight_at(row)}\n  second: {context.thread_name(row, 0)}: {form.instruction.where}",
            )
        checks = self.checks
        assert checks is not None
        pieces = wgmma.b if wgmma.a is None else np.concatenate([wgmma.a, wgmma.b], axis=1)
        warp, rank = context.warp_of_row[rows[:, 0]] // 4, context.rank_of_row[rows[:, 0]]
        for q in np.unique(warp):
            mine = warp == q
            agents = np.array([checks.clocks.agent(("wgmma", int(q), int(r))) for r in rank[mine]])
            issue = Issue(form.number, rows[mine], agents, wgmma.groups[mine] + 1)
            checks.async_read(issue, pieces[mine], ("wgmma", int(q)))

    def commit(self, rows: Indices) -> None:
        """Execute wgmma.commit_group."""
        self.committed[np.unique(self.context.warpgroup_of_row[rows])] += 1

    def wait(self, rows: Indices, pending: int) -> None:
        """Execute wgmma.wait_group: complete all but the `pending` youngest groups."""
        context = self.context
        warpgroups = np.unique(context.warpgroup_of_row[rows])
        limit = self.committed - pending
        self._compute(warpgroups, limit)
        here = np.zeros(context.warps, bool)
        here[warpgroups] = True
        self.busy[:, rows] = 0
        for wgmma in self.in_flight:
            wgmma.unwaited &= ~(here[wgmma.warpgroups] & (wgmma.groups < limit[wgmma.warpgroups]))
            still = wgmma.rows[wgmma.unwaited & here[wgmma.warpgroups]].reshape(-1)
            self.busy[wgmma.form.registers[:, None], still] = -1
            self.busy[wgmma.form.accumulators[:, None], still] = wgmma.form.key
        self.in_flight = [wgmma for wgmma in self.in_flight if wgmma.unwaited.any()]
        if self.checks is not None:
            self.checks.converge(rows)
            clocks, done = self.checks.clocks, np.maximum(limit[context.warpgroup_of_row[rows]], 0)
            warp, rank = context.warp_of_row[rows] // 4, context.rank_of_row[rows]
            for q, r in {(int(q), int(r)) for q, r in zip(warp, rank, strict=True)}:
                mine = (warp == q) & (rank == r)
                clocks.acquire_agent(clocks.agent(("wgmma", q, r)), rows[mine], done[mine])

    def finish(self) -> None:
        """Check at the end of the kernel that every wgmma was waited for."""
        if self.in_flight:
            self.context.report(
                "wgmma-registers",
                PendingRegister,
                f"no wgmma.wait_group before the kernel ends: {self.in_flight[0].form.instruction.where}",
            )

    # ---- arithmetic

    def _compute(self, warpgroups: Indices, limit: Indices | None) -> None:
        """Compute the pending wgmma of these warpgroups in issue order; `limit`: only groups below it."""
        here = np.zeros(self.context.warps, bool)
        here[warpgroups] = True
        held: tuple[_Form, Indices, npt.NDArray[np.float32]] | None = None
        for wgmma in self.in_flight:
            now = wgmma.pending & here[wgmma.warpgroups]
            if limit is not None:
                now &= wgmma.groups < limit[wgmma.warpgroups]
            if not now.any():
                continue
            rows, form = wgmma.rows[now], wgmma.form
            if held is not None and not (held[0].key == form.key and np.array_equal(held[1], rows)):
                self._write(*held)
                held = None
            # Successive wgmma on the same accumulators read them once, and write them once at the end.
            total = self._read(form, rows) if held is None else held[2]
            total = np.where(wgmma.scale_d[now][:, None, None], total, np.float32(0))
            a = self._registers_a(form, rows) if wgmma.a is None else self._operand(wgmma, 0, now)
            b = self._operand(wgmma, 1, now)
            if b.shape[2] == _DEPTH["e4m3"]:
                held = form, rows, _sum_of_14_bits(total, form.signs * a, b)
            else:
                # Exact products summed in float64, rounded once. The order of summation on a GPU is undocumented.
                held = form, rows, (total + form.signs * (a @ b.swapaxes(1, 2))).astype(np.float32)
            wgmma.pending &= ~now
        if held is not None:
            self._write(*held)

    def _read(self, form: _Form, rows: Indices) -> npt.NDArray[np.float32]:
        """Return the accumulators as (n, 64, columns), "Matrix D" of m64nNk16."""
        words = self.context.matrix_registers[form.accumulators[:, None, None], rows]
        # axes: register as (block of 8 columns, upper or lower 8 rows, odd column), n, warp, lane as (row, pair)
        split = words.view(np.float32).reshape(-1, 2, 2, len(rows), 4, 8, 4)
        return split.transpose(3, 4, 1, 5, 0, 6, 2).reshape(len(rows), 64, form.columns)

    def _write(self, form: _Form, rows: Indices, total: npt.NDArray[np.float32]) -> None:
        split = total.reshape(len(rows), 4, 2, 8, form.columns // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        words = np.ascontiguousarray(split).view(np.uint32).reshape(len(form.accumulators), len(rows), 4, 32)
        self.context.matrix_registers[form.accumulators[:, None, None], rows] = words

    def _registers_a(self, form: _Form, rows: Indices) -> Values:
        """Return A from registers as (n, 64, depth), "Matrix A" of m64nNk8, k16 and k32."""
        words = self.context.matrix_registers[form.registers[:, None, None], rows]
        # axes: register as (right half of K, lower 8 rows), n, warp, lane as (row, word)
        split = words.reshape(2, 2, len(rows), 4, 8, 4).transpose(2, 3, 1, 4, 0, 5)
        return elements(split, form.types[0]).reshape(len(rows), 64, -1)

    def _operand(self, wgmma: _Wgmma, which: int, now: Mask) -> Values:
        """Return operand A (`which` 0) or B (1) from shared memory as (n, rows, depth)."""
        index = wgmma.a if which == 0 else wgmma.b
        assert index is not None
        type_, transposed = wgmma.form.types[which], wgmma.form.transposed[which]
        pieces = self.context.shared.gather(index[now], 16)
        values = elements(pieces, type_)
        if transposed:
            return values.reshape(len(values), 16, -1).swapaxes(1, 2)
        return values.reshape(len(values), -1, _DEPTH[type_])


_FRACTION = 13  # bits


def _sum_of_14_bits(total: npt.NDArray[np.float32], a: Values, b: Values) -> npt.NDArray[np.float32]:
    """Return total + a b^T, (n, 64, columns), with Hopper's accumulation of fp8 products."""
    # A product's exponent is the sum of its factors' exponents, not normalised: its fraction may reach 4.
    exponents = [np.where(x == 0, -63, np.frexp(x)[1] - 1).astype(np.int16) for x in (a, b)]
    factors = [x.astype(np.float32) for x in (a, b)]
    result = np.empty_like(total)
    for n, old in enumerate(total):
        top = np.where(old == 0, -126, np.frexp(old)[1] - 1).astype(np.int16)
        depths = range(a.shape[2])
        for k in depths:
            np.maximum(top, np.add.outer(exponents[0][n, :, k], exponents[1][n, :, k]), out=top)
        unit = np.ldexp(np.float32(1), _FRACTION - np.maximum(top, -110))  # 1 / the weight of the last bit
        units = np.trunc(old * unit)
        for k in depths:
            wgmma = np.multiply.outer(factors[0][n, :, k], factors[1][n, :, k])
            units += np.trunc(np.multiply(wgmma, unit, out=wgmma), out=wgmma)
        fraction, exponent = np.frexp(units / unit)
        result[n] = np.ldexp(np.trunc(np.ldexp(fraction, _FRACTION + 1)), exponent - _FRACTION - 1)
    return result


# ---- instructions


def _wgmma(instruction: Instruction, context: Context) -> Step:
    """Compile wgmma.fence, .commit_group, .wait_group and .mma_async."""
    wgmma = context.unit(WgmmaQueue)
    kind = instruction.modifiers[0]
    if kind == "fence":
        return lambda group: wgmma.fence(group.rows)
    if kind == "commit_group":
        return lambda group: wgmma.commit(group.rows)
    if kind == "wait_group":
        (pending,) = instruction.operands
        assert isinstance(pending, Immediate)
        return lambda group: wgmma.wait(group.rows, pending.bits)
    if kind != "mma_async" or "sp" in instruction.modifiers:
        raise unsupported(instruction)
    return _mma_async(instruction, context)


def _form(instruction: Instruction, context: Context) -> _Form:
    """Parse one wgmma.mma_async instruction.

    wgmma.mma_async.sync.aligned.shape.f32.a-type.b-type d, a, b, scale-d, scale-a, scale-b{, trans-a}{, trans-b}
    """
    shape, d_type, a_type, b_type = instruction.modifiers[3:]
    d, a, _, _, *immediates = instruction.operands
    size = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    depth = _DEPTH.get(a_type)
    if size is None or d_type != "f32" or depth is None or depth != _DEPTH.get(b_type) or not isinstance(d, Vector):
        raise unsupported(instruction)
    columns = int(size[1])
    numbers = [item.bits for item in immediates if isinstance(item, Immediate)]
    from_registers = isinstance(a, Vector)
    # Only 16-bit matrices may be MN-major.
    expected = 2 if depth != 16 else 3 if from_registers else 4
    if columns % 8 or not 8 <= columns <= 256 or int(size[2]) != depth or len(numbers) != expected:
        raise unsupported(instruction)
    if depth != 32 and a_type != b_type or len(d.items) != columns // 2:
        raise unsupported(instruction)
    flags = [bool(number) for number in numbers[2:]] or [False, False]
    transposed = (False, flags[0]) if from_registers or depth != 16 else (flags[0], flags[1])
    slots = context.program.slots
    accumulators = np.array([slots[register.name][1] for register in registers_of(d)])
    registers = np.array([slots[register.name][1] for register in registers_of(a)] if from_registers else [], np.int64)
    if from_registers and len(registers) != 4 or len(set(accumulators)) != columns // 2:
        raise unsupported(instruction)
    return _Form(
        instruction, context.number_of[id(instruction)], columns, (a_type, b_type), float(numbers[0] * numbers[1]),
        transposed, accumulators, registers, context.unit(WgmmaQueue).key(accumulators),
    )  # fmt: skip


def _mma_async(instruction: Instruction, context: Context) -> Step:
    form, wgmma = _form(instruction, context), context.unit(WgmmaQueue)
    a, b = instruction.operands[1:3]
    a_source = None if isinstance(a, Vector) else context.source(a, "b64", instruction)
    b_source = context.source(b, "b64", instruction)
    scale_d = context.predicate(instruction.operands[3], instruction)

    def step(group: Group) -> None:
        if context.warps_per_block % 4:
            raise BarrierMisuse(f"the block's last warpgroup is incomplete: {instruction.where}")
        shape = (len(group.rows), 32)
        order = np.lexsort((context.warp_of_row[group.rows], context.warpgroup_of_row[group.rows])).reshape(-1, 4)

        def uniform(values: Any, what: str) -> Any:
            each = np.broadcast_to(values, shape)[order].reshape(len(order), -1)
            if (each != each[:, :1]).any():
                name = context.thread_name(
                    int(group.rows[order[np.flatnonzero((each != each[:, :1]).any(1))[0], 0]]), 0
                )
                raise BarrierMisuse(f"{what} differs inside the warpgroup of {name}: {instruction.where}")
            return each[:, 0]

        rows = group.rows[order]
        a_pieces = None
        if a_source is not None:
            descriptors = uniform(group.read(a_source), "the descriptor of A")
            a_pieces = _pieces(descriptors, 64, form.transposed[0], rows, instruction, context)
        descriptors = uniform(group.read(b_source), "the descriptor of B")
        b_pieces = _pieces(descriptors, form.columns, form.transposed[1], rows, instruction, context)
        wgmma.issue(form, rows, a_pieces, b_pieces, uniform(scale_d(group), "scale-d"))

    return step


def _pieces(
    descriptors: Array, extent: int, transposed: bool, rows: Indices, instruction: Instruction, context: Context
) -> Indices:
    """Return indices, in the shared memory of all blocks, of the pieces of each descriptor's matrix, (n, pieces)."""
    pieces: list[Indices] = []
    for descriptor in map(int, descriptors):
        address, layout = descriptor_layout(descriptor, extent, transposed=transposed)
        if descriptor >> 49 & 7:
            raise unsupported(instruction)  # base offset
        if address & (layout.swizzle // 16 - 1) << 7:
            raise Misaligned(
                f"the matrix at shared address {address:#x} does not start at a repetition of the "
                f"{layout.swizzle}-byte swizzling pattern (base offset 0): {instruction.where}"
            )
        if not transposed and layout.swizzle > 16 and layout.leading != 16:
            context.report(
                "kmajor-lbo",
                BadDescriptor,
                f"the descriptor {descriptor:#x} of a K-major matrix with {layout.swizzle}-byte swizzle has a leading "
                f"dimension byte offset of {layout.leading}, not 16\n  "
                f"{context.thread_name(int(rows[len(pieces), 0]), 0)}: {instruction.where}",
            )
        pieces.append(swizzled(address + offsets(layout), layout.swizzle).reshape(-1))
    addresses = np.array(pieces) - SHARED_START
    outside = (addresses < 0) | (addresses + 16 > context.shared_bytes)
    if outside.any():
        i = int(np.flatnonzero(outside.any(1))[0])
        raise OutOfBounds(
            f"an operand of wgmma reaches beyond the {context.shared_bytes} bytes of shared memory\n  "
            f"{context.thread_name(int(rows[i, 0]), 0)}: {instruction.where}"
        )
    return addresses + context.block_of_row[rows[:, :1]] * context.shared_stride


COMPILERS: dict[str, Compiler] = {"wgmma": _wgmma}
