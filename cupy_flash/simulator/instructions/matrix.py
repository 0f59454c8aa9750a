"""Warp-level matrix instructions: mma.sync, ldmatrix, stmatrix, movmatrix. Section numbers refer to PTX ISA 9.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..machine.context import Array, Context, Group, Step
from ..machine.ptx import Instruction, Operand, Vector
from .access import Access, addresses, check, count_access, pieces, split_by_space
from .closures import Compiler, unsupported
from .convert import elements, to_bits

Indices = npt.NDArray[np.int64]
_LANE = np.arange(32)[:, None]
_GROUP, _THREAD = _LANE >> 2, _LANE % 4  # groupID and threadID_in_group of the PTX ISA
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8}


def fragment_a(shape: str, type_: str) -> tuple[Indices, Indices]:
    """Return (row, column) of each lane's elements in fragment A (16 x k), each (32, elements).

    9.7.14.5.7 (k8: Figures 71 and 72), 9.7.14.5.8 (k16: Figure 79), 9.7.14.5 for m16n8k32 (8-bit: Figure 88).
    """
    i = np.arange(16 * int(shape.split("k")[1]) // 32)
    per_register = 32 // _BITS[type_]  # elements
    # Registers hold row groupID, then groupID + 8, then both again for the right half of the columns.
    register = i // per_register
    row = _GROUP + 8 * (register % 2)
    column = _THREAD * per_register + i % per_register + 4 * per_register * (register // 2)
    return row, column


def fragment_b(shape: str, type_: str) -> tuple[Indices, Indices]:
    """Return (row, column) of each lane's elements in fragment B (k x 8), (32, elements); PTX ISA as fragment_a."""
    i = np.arange(8 * int(shape.split("k")[1]) // 32)
    per_register = 32 // _BITS[type_]
    return _THREAD * per_register + i % per_register + 4 * per_register * (i // per_register), _GROUP + 0 * i


def fragment_c() -> tuple[Indices, Indices]:
    """Return (row, column) of each lane's elements in the accumulator (16 x 8), each (32, 4); PTX ISA as fragment_a."""
    i = np.arange(4)
    return _GROUP + 8 * (i // 2), _THREAD * 2 + i % 2


def _registers(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _mma(instruction: Instruction, context: Context) -> Step:
    """Compile mma: exact products are summed in float64 and rounded once, as a GPU's order of sums is undocumented."""
    shape, *layout = instruction.modifiers[2:]
    types = layout[2:]
    input_types = {"m16n8k8": ("f16", "bf16", "tf32"), "m16n8k16": ("f16", "bf16"), "m16n8k4": ("tf32",)}
    input_types["m16n8k32"] = ("e4m3", "e5m2")
    if layout[:2] != ["row", "col"] or len(types) != 4 or types[1] not in input_types.get(shape, ()):
        raise unsupported(instruction)
    d_type, a_type, b_type, c_type = types
    if a_type != b_type and a_type not in ("e4m3", "e5m2") or c_type not in ("f16", "f32"):
        raise unsupported(instruction)
    depth = int(shape.split("k")[1])
    a_row, a_column = fragment_a(shape, a_type)
    b_row, b_column = fragment_b(shape, b_type)
    c_row, c_column = fragment_c()
    results = [context.destination(item, "b32", instruction) for item in _registers(instruction.operands[0])]
    a, b, c = (
        [context.source(item, "b32", instruction) for item in _registers(operand)]
        for operand in instruction.operands[1:]
    )
    counts = [len(x) for x in (results, a, b, c)]
    expected = [4 if d_type == "f32" else 2, a_row.shape[1] * _BITS[a_type] // 32, b_row.shape[1] * _BITS[b_type] // 32]
    if counts != [*expected, 4 if c_type == "f32" else 2]:
        raise unsupported(instruction)

    def words(group: Group, sources: list[Any]) -> Array:
        shape = (len(group.rows), 32)
        return np.stack([np.broadcast_to(group.read(source), shape) for source in sources], axis=-1).view(np.uint32)

    def step(group: Group) -> None:
        n = len(group.rows)
        left, right, total = np.zeros((n, 16, depth)), np.zeros((n, depth, 8)), np.zeros((n, 16, 8))
        left[:, a_row, a_column] = elements(words(group, a), a_type)
        right[:, b_row, b_column] = elements(words(group, b), b_type)
        total[:, c_row, c_column] = elements(words(group, c), c_type)
        total += left @ right
        sums = np.ascontiguousarray(total[:, c_row, c_column])
        bits = sums.astype(np.float32).view(np.uint32) if d_type == "f32" else to_bits(sums, "f16").view(np.uint32)
        for i, result in enumerate(results):
            group.write(result, bits[:, :, i])

    return step


# ---- matrices of 8 x 8 16-bit elements between shared memory and registers


def _row_access(instruction: Instruction, context: Context, *, writes: bool) -> Access:
    modifiers = instruction.modifiers
    if "m8n8" not in modifiers or modifiers[-1] != "b16":
        raise unsupported(instruction)
    space = "shared" if any(m.split("::")[0] == "shared" for m in modifiers) else "generic"
    return Access(instruction, context.number_of[id(instruction)], space, 16, 16, writes)


def _rows(instruction: Instruction, context: Context, operand: Operand, count: int) -> Callable[[Group], Any]:
    """Return a function from a group to (lanes, row addresses).

    Lane l addresses row l % 8 of matrix l / 8 (9.7.14.5.15). The addresses of lanes from 8 * count on are unused.
    """
    address_of = addresses(operand, context, instruction)
    used = np.arange(32) < 8 * count

    def read(group: Group) -> tuple[Group, Indices]:
        return (group if count == 4 else group.narrowed(group.lanes() & used)), address_of(group)

    return read


_ROW, _COLUMN = np.arange(32) // 4, np.arange(32) % 4


def _load_matrix(instruction: Instruction, context: Context) -> Step:
    """Compile ldmatrix: lane l gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 (.trans: of column l / 4)."""
    access = _row_access(instruction, context, writes=False)
    items = _registers(instruction.operands[0])
    count = len(items)
    if f"x{count}" not in instruction.modifiers:
        raise unsupported(instruction)
    results = [context.destination(item, "b32", instruction) for item in items]
    read, transposed = _rows(instruction, context, instruction.operands[1], count), "trans" in instruction.modifiers

    def step(group: Group) -> None:
        lanes, address = read(group)
        for space, part, local in split_by_space(access, context, lanes, address):
            count_access(access, space, context, part, local)
            for piece in pieces(access, space, context, part, local):
                check(access, space, context, part, piece, strong=False, reads=True)
                values = piece[0].gather(piece[1], 16).view(np.uint16).reshape(len(group.rows), count, 8, 8)
                if transposed:
                    values = np.ascontiguousarray(values.swapaxes(2, 3))
                words = values.view(np.uint32)
                for i, result in enumerate(results):
                    group.write(result, words[:, i, _ROW, _COLUMN])

    return step


def _store_matrix(instruction: Instruction, context: Context) -> Step:
    """Compile stmatrix, the inverse of ldmatrix."""
    access = _row_access(instruction, context, writes=True)
    items = _registers(instruction.operands[1])
    count = len(items)
    if f"x{count}" not in instruction.modifiers:
        raise unsupported(instruction)
    sources = [context.source(item, "b32", instruction) for item in items]
    read, transposed = _rows(instruction, context, instruction.operands[0], count), "trans" in instruction.modifiers

    def step(group: Group) -> None:
        lanes, address = read(group)
        words = np.empty((len(group.rows), count, 8, 4), np.uint32)
        for i, source in enumerate(sources):
            words[:, i, _ROW, _COLUMN] = group.read(source)
        values = words.view(np.uint16)
        if transposed:
            values = np.ascontiguousarray(values.swapaxes(2, 3))
        for space, part, local in split_by_space(access, context, lanes, address):
            count_access(access, space, context, part, local)
            for piece in pieces(access, space, context, part, local):
                check(access, space, context, part, piece, strong=False, reads=False)
                piece[0].scatter(piece[1], 16, values.view(np.uint64).reshape(-1, 2))

    return step


def _transpose(instruction: Instruction, context: Context) -> Step:
    """Compile movmatrix.sync.aligned.m8n8.trans.b16."""
    result = context.destination(instruction.operands[0], "b32", instruction)
    source = context.source(instruction.operands[1], "b32", instruction)

    def step(group: Group) -> None:
        words = np.empty((len(group.rows), 8, 4), np.uint32)
        words[:, _ROW, _COLUMN] = group.read(source)
        transposed = np.ascontiguousarray(words.view(np.uint16).swapaxes(1, 2)).view(np.uint32)
        group.write(result, transposed[:, _ROW, _COLUMN])

    return step


COMPILERS: dict[str, Compiler] = {
    "mma": _mma,
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "movmatrix": _transpose,
}
