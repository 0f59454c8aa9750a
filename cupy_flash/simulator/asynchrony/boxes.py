"""Source and destination addresses of a bulk copy: a contiguous range, or a swizzled box of a tensor map."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...gpu.tensor_map import ALIGNMENT, BYTES, DATA_TYPES, TensorMap, decode
from ..errors import Misaligned, NoTensorMap, OutOfBounds
from ..instructions.closures import unsupported
from ..machine.context import Context
from ..machine.ptx import Instruction
from ..memory.store import LOCAL, PARAM, SHARED_START, WINDOW_BITS, Allocation, swizzled

Indices = npt.NDArray[np.int64]
_BOX_TYPES = {number: name.removesuffix(".ftz") for name, number in DATA_TYPES.items()}


@dataclass(frozen=True, eq=False)
class Pieces:
    """The bulk copies of n lanes as m pieces of `width` bytes each, with both addresses of every piece."""

    width: int
    shared: Indices  # (n, m) byte offsets in the block's shared memory
    global_: Indices  # (n, m) addresses
    inside: npt.NDArray[np.bool_]  # (n, m): within the tensor's bounds
    allocation: Allocation
    type: str  # type of the elements

    @property
    def bytes(self) -> int:
        """Bytes per lane."""
        return self.width * self.shared.shape[1]


def range_pieces(
    shared: Indices, start: Indices, size: Indices, instruction: Instruction, type_: str, context: Context
) -> Pieces:
    """Return the pieces of a contiguous range of `size` bytes, the same size in all lanes (cp.async.bulk)."""
    if not size[0] or ((start | size | shared) % 16).any():
        raise Misaligned(
            f"cp.async.bulk needs addresses and a size that are multiples of 16 bytes, and a size above 0: "
            f"{instruction.where}"
        )
    offsets = np.arange(0, int(size[0]), 16)
    global_ = start[:, None] + offsets
    inside = np.ones(global_.shape, bool)
    return Pieces(16, shared[:, None] + offsets, global_, inside, _allocation(global_, 16, instruction, context), type_)


def box_pieces(
    shared: Indices, tensor: TensorMap, coordinates: Indices, instruction: Instruction, context: Context
) -> Pieces:
    """Return the pieces of a tensor map's box (cp.async.bulk.tensor), dense in shared memory except for the swizzle.

    Coordinates are (n, dimensions), innermost dimension first.
    """
    item, row_bytes = tensor.item_bytes, tensor.row_bytes
    if (shared % 128).any():
        raise Misaligned(f"the shared address of a box is not a multiple of 128 bytes: {instruction.where}")
    if tensor.swizzle and row_bytes != tensor.swizzle:
        raise unsupported(instruction)
    width = math.gcd(16, tensor.shape[0] * item, *(int(x) * item for x in coordinates[:, 0]))
    start = coordinates[:, :1] * item + np.arange(0, row_bytes, width)  # (n, pieces of a row)
    inside_row = (start >= 0) & (start < tensor.shape[0] * item)
    place = np.zeros((len(shared), 1), np.int64)
    inside = np.ones((len(shared), 1), bool)
    # Enumerate the box's rows in memory order: the second dimension varies fastest.
    for i, (size, stride, box) in enumerate(zip(tensor.shape[1:], tensor.strides, tensor.box[1:], strict=True), 1):
        at = coordinates[:, i : i + 1] + np.arange(box)
        place = (place[:, None, :] + (at * stride)[:, :, None]).reshape(len(shared), -1)
        inside = (inside[:, None, :] & ((at >= 0) & (at < size))[:, :, None]).reshape(len(shared), -1)
    global_ = (tensor.address + place[:, :, None] + start[:, None, :]).reshape(len(shared), -1)
    valid = (inside[:, :, None] & inside_row[:, None, :]).reshape(len(shared), -1)
    dense = shared[:, None] + np.arange(0, global_.shape[1] * width, width)
    places = swizzled(dense + SHARED_START, tensor.swizzle or 16) - SHARED_START
    allocation = _allocation(global_[valid] if valid.any() else np.array([tensor.address]), width, instruction, context)
    return Pieces(width, places, global_, valid, allocation, _BOX_TYPES[tensor.data_type])


def _allocation(addresses: Indices, width: int, instruction: Instruction, context: Context) -> Allocation:
    low, high = int(addresses.min()), int(addresses.max()) + width
    allocation = context.memory.find(low)
    if allocation is None or high > allocation.stop:
        outside = low if allocation is None else allocation.stop
        raise OutOfBounds(f"bulk copy at {outside:#x}: {context.memory.nearest(outside)}\n  {instruction.where}")
    return allocation


def tensor_map_at(address: Indices, instruction: Instruction, context: Context) -> TensorMap:
    """Return the tensor map at a generic address, which is the same in all lanes."""
    generic = int(address[0])
    if generic % ALIGNMENT:
        raise Misaligned(f"tensor map at {generic:#x} is not aligned to {ALIGNMENT} bytes: {instruction.where}")
    if generic >> WINDOW_BITS == LOCAL >> WINDOW_BITS:
        raise NoTensorMap(
            f"tensor map in local memory: the compiler copies a kernel parameter there if its address is taken and it "
            f"is not __grid_constant__: {instruction.where}"
        )
    if generic >> WINDOW_BITS == PARAM >> WINDOW_BITS:
        data, start = context.parameters.data, generic - PARAM
    else:
        allocation = _allocation(np.array([generic, generic + BYTES - 1]), 1, instruction, context)
        data, start = allocation.store.data, generic - allocation.start
    tensor = decode(data[start : start + BYTES].tobytes().ljust(BYTES, b"\0"))
    if tensor is None:
        raise NoTensorMap(f"no tensor map at {generic:#x}: {instruction.where}")
    return tensor
