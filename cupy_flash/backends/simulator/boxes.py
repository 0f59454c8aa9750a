"""Where the bytes of a bulk copy lie on both sides: a plain range, or a box of a tensor with its swizzle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...tensor_map import ALIGNMENT, BYTES, DATA_TYPES, TensorMap, decode
from .closures import unsupported
from .errors import Misaligned, NoTensorMap, OutOfBounds
from .lanes import Context
from .memory import LOCAL, PARAM, SHARED_START, WINDOW_BITS, Allocation, swizzled
from .ptx import Instruction

Indices = npt.NDArray[np.int64]
_BOX_TYPES = {number: name.removesuffix(".ftz") for name, number in DATA_TYPES.items()}


@dataclass(frozen=True, eq=False)
class Pieces:
    """What copies of n lanes move, in m pieces of `width` bytes: where they lie on both sides."""

    width: int
    shared: Indices  # (n, m), in the block
    global_: Indices  # (n, m)
    inside: npt.NDArray[np.bool_]  # (n, m): not beyond the tensor
    allocation: Allocation
    type: str  # of the elements

    @property
    def bytes(self) -> int:
        """Of one lane."""
        return self.width * self.shared.shape[1]


def range_pieces(
    shared: Indices, start: Indices, size: Indices, instruction: Instruction, type_: str, context: Context
) -> Pieces:
    """A plain range of `size` bytes, the same for all lanes."""
    if not size[0] or ((start | size | shared) % 16).any():
        raise Misaligned(
            f"a bulk copy of addresses and sizes that are no multiples of 16, or none: {instruction.where}"
        )
    offsets = np.arange(0, int(size[0]), 16)
    places = start[:, None] + offsets
    inside = np.ones(places.shape, bool)
    return Pieces(16, shared[:, None] + offsets, places, inside, _allocation(places, 16, instruction, context), type_)


def box_pieces(
    shared: Indices, tensor: TensorMap, coordinates: Indices, instruction: Instruction, context: Context
) -> Pieces:
    """A box of a tensor at coordinates (n, dimensions), innermost first, dense in shared memory but for its swizzle."""
    item, row_bytes = tensor.item_bytes, tensor.row_bytes
    if (shared % 128).any():
        raise Misaligned(f"a box at a shared address that is no multiple of 128: {instruction.where}")
    if tensor.swizzle and row_bytes != tensor.swizzle:
        raise unsupported(instruction)
    width = math.gcd(16, tensor.shape[0] * item, *(int(x) * item for x in coordinates[:, 0]))
    start = coordinates[:, :1] * item + np.arange(0, row_bytes, width)  # (n, pieces of a row)
    inside_row = (start >= 0) & (start < tensor.shape[0] * item)
    place = np.zeros((len(shared), 1), np.int64)
    inside = np.ones((len(shared), 1), bool)
    # Rows in memory order: the second dimension runs fastest.
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


def _allocation(places: Indices, width: int, instruction: Instruction, context: Context) -> Allocation:
    low, high = int(places.min()), int(places.max()) + width
    found = context.memory.find(low)
    if found is None or high > found.stop:
        wrong = low if found is None else found.stop
        raise OutOfBounds(f"a bulk copy at {wrong:#x}: {context.memory.nearest(wrong)}\n  {instruction.where}")
    return found


def tensor_map_at(address: Indices, instruction: Instruction, context: Context) -> TensorMap:
    """The map at a generic address, the same for all lanes."""
    place = int(address[0])
    if place % ALIGNMENT:
        raise Misaligned(f"a tensor map at {place:#x}, no multiple of {ALIGNMENT}: {instruction.where}")
    if place >> WINDOW_BITS == LOCAL >> WINDOW_BITS:
        raise NoTensorMap(
            f"a tensor map in local memory, where the compiler copies a parameter whose address is taken and which is "
            f"not __grid_constant__: {instruction.where}"
        )
    if place >> WINDOW_BITS == PARAM >> WINDOW_BITS:
        data, start = context.parameters.data, place - PARAM
    else:
        allocation = _allocation(np.array([place, place + BYTES - 1]), 1, instruction, context)
        data, start = allocation.store.data, place - allocation.start
    found = decode(data[start : start + BYTES].tobytes().ljust(BYTES, b"\0"))
    if found is None:
        raise NoTensorMap(f"no tensor map at {place:#x}: {instruction.where}")
    return found
