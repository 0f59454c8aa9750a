"""Descriptors of tcgen05: the shape of an mma, and the layout of a matrix in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..errors import BadDescriptor, Misaligned, OutOfBounds
from ..machine.context import Context
from ..machine.ptx import Instruction
from ..memory.store import SHARED_START, swizzled
from .tensor_memory import LANES, PARTS
from .wgmma import Layout, byte_fields, offsets

Indices = npt.NDArray[np.int64]

DEPTH = 16  # K of kind::f16
_TYPES = {0: "f16", 1: "bf16"}
_STEPS = {64: 8, 128: 16}  # N is a multiple of this, by M
_SWIZZLES = {0: 16, 2: 128, 4: 64, 6: 32}  # bytes, by the code of a matrix descriptor
_RESERVED = 1 << 6 | 1 << 23 | 7 << 29  # bits of an instruction descriptor
_SPARSE_OR_SATURATING = 15


@dataclass(frozen=True)
class Shape:
    """The fields of an instruction descriptor of kind::f16 with fp32 accumulators."""

    rows: int  # M
    columns: int  # N
    type: str
    sign: float  # -1 if one of A and B is negated
    transposed: tuple[bool, bool]  # A, B are MN-major


def shape_of(bits: int, instruction: Instruction) -> Shape:
    """Return the fields of an instruction descriptor."""
    d, a, b = bits >> 4 & 3, bits >> 7 & 7, bits >> 10 & 7
    columns, rows = (bits >> 17 & 63) << 3, (bits >> 24 & 31) << 4
    if bits & (_RESERVED | _SPARSE_OR_SATURATING) or d != 1 or a not in _TYPES or b != a:
        raise BadDescriptor(
            f"{bits:#010x} is no instruction descriptor of dense fp16 or bf16 products with fp32 accumulators: "
            f"{instruction.where}"
        )
    step = _STEPS.get(rows)
    if step is None or not step <= columns <= 256 or columns % step:
        raise BadDescriptor(f"tcgen05.mma has no shape of {rows} x {columns} x {DEPTH}: {instruction.where}")
    sign = -1.0 if (bits >> 13 & 1) != (bits >> 14 & 1) else 1.0
    return Shape(rows, columns, _TYPES[a], sign, (bool(bits >> 15 & 1), bool(bits >> 16 & 1)))


def parts_of(shape: Shape, address: int) -> Indices:
    """Return the sets of 16 lanes that hold M rows from an address of tensor memory: M 64 uses 16 of every 32 lanes."""
    return np.arange(PARTS) if shape.rows == LANES else np.arange(address >> 20 & 1, PARTS, 2)


def _layout(descriptor: int, extent: int, transposed: bool, pieces: int) -> tuple[int, Layout]:
    """Return (shared address, layout) of a matrix descriptor."""
    address, leading, stride = byte_fields(descriptor)
    return address, Layout(extent, transposed, _SWIZZLES[descriptor >> 61], leading, stride, pieces)


@lru_cache(maxsize=1024)
def _addresses_of(address: int, layout: Layout) -> Indices:
    """Return the shared addresses of the 16-byte pieces of a matrix."""
    return swizzled(address + offsets(layout), layout.swizzle).reshape(-1)


def pieces_of(
    descriptors: Indices, extent: int, transposed: bool, rows: Indices, instruction: Instruction, context: Context,
    pieces: int = 2,
) -> Indices:  # fmt: skip
    """Return indices, in the shared memory of all blocks, of the pieces of each descriptor's matrix, (n, all pieces).

    `pieces` are those of a row that is K-major.
    """
    result = []
    for descriptor, row in zip((int(x) & (1 << 64) - 1 for x in descriptors), rows, strict=True):
        place = f"\n  {context.thread_name(int(row), 0)}: {instruction.where}"
        code = descriptor >> 61
        fixed = descriptor >> 46 & (0x7FFF if code else 0x7FC7)  # only a swizzled matrix can have a base offset
        if fixed != 1 or code not in _SWIZZLES or descriptor >> 14 & 3 or descriptor >> 30 & 3:
            raise BadDescriptor(f"{descriptor:#018x} is no matrix descriptor of sm_100 without a base offset{place}")
        if not transposed and code and (descriptor >> 16 & 0x3FFF) != 1:
            context.report(
                "kmajor-lbo",
                BadDescriptor,
                f"the descriptor {descriptor:#018x} of a K-major swizzled matrix has a leading dimension byte offset "
                f"of {(descriptor >> 16 & 0x3FFF) << 4}, not 16{place}",
            )
        address, layout = _layout(descriptor, extent, transposed, pieces)
        if address & (layout.swizzle // 16 - 1) << 7:
            raise Misaligned(
                f"the matrix of descriptor {descriptor:#018x} does not start at a repetition of its swizzling pattern"
                f"{place}"
            )
        at = _addresses_of(address, layout)
        if int(at.min()) < SHARED_START or int(at.max()) + 16 > SHARED_START + context.shared_bytes:
            raise OutOfBounds(
                f"the matrix of descriptor {descriptor:#018x} reaches beyond the {context.shared_bytes} bytes of "
                f"shared memory{place}"
            )
        result.append(at)
    return np.array(result) - SHARED_START + context.block_of_row[rows][:, None] * context.shared_stride
