"""TMA tensor maps (CUtensorMap): 128-byte kernel arguments that describe a tensor's layout to Hopper's TMA.

TensorMap has the arguments of the driver's cuTensorMapEncodeTiled. The driver encodes them for a GPU;
`encode_for_simulator` encodes them for the simulator, with the same errors but in a format of its own.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass
from functools import lru_cache

BYTES, ALIGNMENT = 128, 64
# CUtensorMapDataType
DATA_TYPES = {
    **{"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5},
    **{"f16": 6, "f32": 7, "f64": 8, "bf16": 9, "f32.ftz": 10, "tf32": 11, "tf32.ftz": 12},
}
_ITEM_BYTES = dict(zip(DATA_TYPES.values(), (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4), strict=True))
# {bytes: CUtensorMapSwizzle}, {bytes: CUtensorMapL2promotion}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}

_FORMAT = struct.Struct("<4s4B Q 5Q 4Q 5H 5B")
_MAGIC = b"cfTM"


@dataclass(frozen=True)
class TensorMap:
    """Arguments of cuTensorMapEncodeTiled, dimensions innermost first; no interleave, out-of-bounds elements read as 0.

    data_type: a CUtensorMapDataType. address: byte address of the first element. shape: elements. strides: bytes, for
    every dimension but the first. box: elements. swizzle: bytes, 0 for none. l2_promotion: bytes, 0 for none.
    Raises ValueError with every reason for which the driver would refuse them.
    """

    data_type: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2_promotion: int = 256

    def __post_init__(self) -> None:
        reasons = self._reasons()
        if reasons:
            raise ValueError(f"{self} is not a valid tensor map: {'; '.join(reasons)}")

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return _ITEM_BYTES[self.data_type]

    @property
    def row_bytes(self) -> int:
        """Bytes of a box's innermost dimension."""
        return self.box[0] * self.item_bytes

    def _reasons(self) -> list[str]:
        rank = len(self.shape)
        if self.data_type not in _ITEM_BYTES:
            return [f"data_type {self.data_type} is unknown"]
        if not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != rank:
            return ["a map has 1 to 5 dimensions, the box as many, and strides one fewer"]
        reasons = []
        if self.address % 16:
            reasons.append("the address must be a multiple of 16")
        if not all(1 <= size <= 1 << 32 for size in self.shape):
            reasons.append("dimensions must be 1 to 2**32")
        if not all(stride % 16 == 0 and 0 <= stride < 1 << 40 for stride in self.strides):
            reasons.append("strides must be multiples of 16 below 2**40")
        if not all(1 <= size <= 256 for size in self.box):
            reasons.append("the box must be 1 to 256 elements in each dimension")
        if self.row_bytes % 16:
            reasons.append("the box's rows must be multiples of 16 bytes")
        if self.swizzle not in SWIZZLES:
            reasons.append("swizzle must be 0, 32, 64 or 128 bytes")
        elif self.swizzle and self.row_bytes > self.swizzle:
            reasons.append(f"the box's rows must not be longer than the {self.swizzle} bytes of the swizzle")
        if self.l2_promotion not in L2_PROMOTIONS:
            reasons.append("l2_promotion must be 0, 64, 128 or 256 bytes")
        return reasons


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """Return the CUDA driver library; OSError if there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def encode_for_gpu(tensor_map: TensorMap) -> bytes:
    """Return the 128-byte CUtensorMap, encoded by the driver; RuntimeError with the driver's code if it refuses."""
    rank = len(tensor_map.shape)
    buffer = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    start = -ctypes.addressof(buffer) % ALIGNMENT
    wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(buffer) + start),
        ctypes.c_int(tensor_map.data_type),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(tensor_map.address),
        wide(*tensor_map.shape),
        wide(*tensor_map.strides),
        narrow(*tensor_map.box),
        narrow(*[1] * rank),
        ctypes.c_int(0),  # no interleave
        ctypes.c_int(SWIZZLES[tensor_map.swizzle]),
        ctypes.c_int(L2_PROMOTIONS[tensor_map.l2_promotion]),
        ctypes.c_int(0),  # zeros out of bounds
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled refuses {tensor_map}: CUDA error {status}")
    return buffer.raw[start : start + BYTES]


def encode_for_simulator(tensor_map: TensorMap) -> bytes:
    """Return the 128-byte encoding that the simulator reads."""
    rank = len(tensor_map.shape)
    numbers = [tensor_map.data_type, rank, SWIZZLES[tensor_map.swizzle], L2_PROMOTIONS[tensor_map.l2_promotion]]
    shape = (*tensor_map.shape, *[1] * (5 - rank))
    strides = (*tensor_map.strides, *[0] * (5 - rank))[:4]
    box = (*tensor_map.box, *[1] * (5 - rank))
    packed = _FORMAT.pack(_MAGIC, *numbers, tensor_map.address, *shape, *strides, *box, *[1] * 5)
    return packed.ljust(BYTES, b"\0")


@lru_cache(maxsize=64)
def decode(encoded: bytes) -> TensorMap | None:
    """Return the TensorMap of bytes from `encode_for_simulator`; None for other bytes."""
    magic, *fields = _FORMAT.unpack_from(encoded)
    if magic != _MAGIC:
        return None
    data_type, rank, swizzle, promotion, address = fields[:5]
    shape, strides, box = tuple(fields[5:10]), tuple(fields[10:14]), tuple(fields[14:19])
    return TensorMap(
        data_type, address, shape[:rank], strides[: rank - 1], box[:rank],
        list(SWIZZLES)[swizzle], list(L2_PROMOTIONS)[promotion],
    )  # fmt: skip
