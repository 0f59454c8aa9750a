"""Global memory as simulated 64-bit addresses over NumPy arrays, with guard gaps between allocations.

Generic addresses: shared, local and parameter memory have one window each; global allocations start at GLOBAL.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]

SHARED, LOCAL, PARAM, GLOBAL = 1 << 40, 2 << 40, 3 << 40, 0x70 << 40
WINDOW_BITS = 40
# On Hopper the system reserves the first KiB of shared memory, so address 0 is never a kernel's.
SHARED_START = 1024
POISON = 0xFF  # NaN in every float format
_GAP = 1 << 16
_ALIGNMENT = 256

_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def swizzled(address: Indices, span: int) -> Indices:
    """Swizzle the addresses of 16-byte pieces over `span` bytes (128, 64, 32; 16 is none), as TMA and wgmma do.

    The index of the 128-byte row is XORed into the index of the piece.
    """
    return address ^ ((address >> 7 & (span // 16 - 1)) << 4)


class Store:
    """A byte array with vectorised loads and stores.

    `origin` is the index of the array's first byte: index 0 is 16-byte aligned in the kernel's address space, even if
    the array is not. `defined`, if tracked, is 1 for each initialised byte.
    """

    def __init__(self, data: Bytes, *, origin: int = 0, tracked: bool = False):
        self.data, self.origin = data, origin
        self.defined = np.zeros(len(data), np.uint8) if tracked else None
        self._items: dict[tuple[int, bool], tuple[npt.NDArray[Any], int]] = {}

    def _view(self, data: Bytes, width: int) -> tuple[npt.NDArray[Any], int]:
        """Return (aligned items of `width` bytes, index of the first); 16-byte items are rows of two 64-bit words."""
        skip = -self.origin % width
        usable = max(len(data) - skip, 0) // width * width
        flat = data[skip : skip + usable]
        items = flat.view(np.uint64).reshape(-1, 2) if width == 16 else flat.view(_WORDS[width])
        return items, (self.origin + skip) // width

    def items(self, width: int, of_defined: bool = False) -> tuple[npt.NDArray[Any], int]:
        """Return the result of `_view`, cached."""
        key = (width, of_defined)
        if key not in self._items:
            data = self.defined if of_defined else self.data
            assert data is not None
            self._items[key] = self._view(data, width)
        return self._items[key]

    def gather(self, index: Indices, width: int, of_defined: bool = False) -> npt.NDArray[Any]:
        """Load items of `width` bytes at byte indices; 16-byte items have a last axis of two words."""
        items, first = self.items(width, of_defined)
        position = index >> (width.bit_length() - 1)
        return items.take(position - first if first else position, axis=0)

    def scatter(self, index: Indices, width: int, values: npt.NDArray[Any]) -> None:
        """Store items of `width` bytes; of several at one index, the last is kept."""
        items, first = self.items(width)
        position = index >> (width.bit_length() - 1)
        if first:
            position = position - first
        items[position] = values
        if self.defined is not None:
            defined, _ = self.items(width, of_defined=True)
            defined[position] = np.uint64(0x0101010101010101) & np.uint64((1 << 8 * min(width, 8)) - 1)

    def forget(self, index: Indices, width: int) -> None:
        """Make items of `width` bytes at byte indices uninitialised."""
        defined, first = self.items(width, of_defined=True)
        defined[(index >> (width.bit_length() - 1)) - first] = 0

    def undefined(self, index: Indices, width: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the items that contain an uninitialised byte."""
        defined = self.gather(index, width, of_defined=True)
        complete = defined == defined.dtype.type(0x0101010101010101 & ((1 << 8 * defined.dtype.itemsize) - 1))
        return ~(complete.all(-1) if width == 16 else complete)


class Allocation:
    """One registered array: [start, stop) in the kernel's address space."""

    def __init__(self, name: str, start: int, data: Bytes, *, writable: bool, initialised: bool):
        self.name, self.start, self.stop, self.writable = name, start, start + len(data), writable
        self.base = start - start % 16
        self.store = Store(data, origin=start - self.base, tracked=not initialised)


class Memory:
    """Global memory: the arrays that a kernel may access, in place.

    memory = Memory(); address = memory.add(array, "q", writable=False)
    """

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        # {PTX text or parsed module: addresses of its variables}; another module may have variables of the same names.
        self.variables: dict[object, dict[str, int]] = {}
        self._starts: list[int] = []
        self._next = GLOBAL

    def add(self, array: npt.NDArray[Any], name: str, *, writable: bool = True, initialised: bool = True) -> int:
        """Register `array` and return the address of its first element.

        A strided array is registered with all bytes from its first to its last. An array that NumPy does not let write
        is never writable. `initialised=False` (outputs, workspaces) fills it with NaN and makes every read before a
        write an error. Raises TypeError for anything but a NumPy array of numbers, ValueError for an output that is
        read-only.
        """
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            kind = "objects" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"{name} must be a NumPy array of numbers, not {kind}")
        if not initialised and not array.flags.writeable:
            raise ValueError(f"{name} is a read-only array (array.flags.writeable), but an output is written")
        low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data,) * 2
        first = array.ctypes.data
        data = np.lib.stride_tricks.as_strided(
            _first_byte(array, low - first), (high - low,), (1,), writeable=array.flags.writeable
        )
        if not initialised:
            array[...] = _poison(array.dtype)
        # Align the owning array as a real allocator would, so that an offset view keeps its misalignment.
        offset = (low - _owner(array).ctypes.data) % _ALIGNMENT
        start = self._next + offset
        self._next += -(-(offset + len(data) + _GAP) // _ALIGNMENT) * _ALIGNMENT
        writable = writable and array.flags.writeable
        allocation = Allocation(name, start, data, writable=writable, initialised=initialised)
        self.allocations.append(allocation)
        self._starts.append(start)
        return start + first - low

    def find(self, address: int) -> Allocation | None:
        """Return the allocation that contains this address, or None."""
        i = bisect.bisect_right(self._starts, address) - 1
        if i >= 0 and address < self.allocations[i].stop:
            return self.allocations[i]
        return None

    def nearest(self, address: int) -> str:
        """Return the location of an invalid address for an error message: its distance from the nearest allocation."""
        if address < 1 << WINDOW_BITS:
            return "a null pointer or a 32-bit address, not a generic address"
        if not self.allocations:
            return "there is no allocation"
        i = bisect.bisect_right(self._starts, address) - 1
        before = self.allocations[max(i, 0)]
        following = self.allocations[min(i + 1, len(self.allocations) - 1)]
        past, ahead = address - before.stop, following.start - address
        if ahead > 0 and (ahead < past or past < 0):
            return f"{ahead} bytes before {following.name!r} ({following.stop - following.start} bytes)"
        return f"{past} bytes past the end of {before.name!r} ({before.stop - before.start} bytes)"


def _poison(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.full(dtype.itemsize, POISON, np.uint8).view(dtype)


def _owner(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _first_byte(array: npt.NDArray[Any], offset: int) -> Bytes:
    """Return a byte array that starts `offset` (<= 0) bytes before the array's first element."""
    # NumPy cannot create a view that starts before the first element, except from an address.
    interface = {"shape": (1,), "typestr": "|u1", "version": 3}
    interface["data"] = (array.ctypes.data + offset, not array.flags.writeable)
    return np.asarray(_Span(interface, array))


class _Span:
    """An __array_interface__ that keeps the owning array alive."""

    def __init__(self, interface: dict[str, Any], owner: npt.NDArray[Any]):
        self.__array_interface__, self.owner = interface, owner
