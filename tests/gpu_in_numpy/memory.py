"""Device memory in the simulator's address space, pinned host memory, copies, stream-ordered allocations.

Every byte that is allocated or freed becomes POISON, which is NaN in every floating-point format. Addresses are never
reused, so that an access to freed memory faults.
"""

from __future__ import annotations

import bisect
import ctypes
from typing import TYPE_CHECKING

import numpy as np

from cupy_flash.simulator import Memory
from cupy_flash.simulator.memory.store import GLOBAL, POISON

from .errors import CAPTURE_UNSUPPORTED, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, CudaError

if TYPE_CHECKING:
    from . import Machine

_WINDOW = 1 << 40  # addresses per device
_UNREGISTERED, _HOST, _DEVICE = 0, 1, 2  # cudaMemoryType
_RELEASE_THRESHOLD = 4  # cudaMemPoolAttr
LEGACY = 1  # cudaStreamLegacy


class DeviceMemory(Memory):
    """The memory of one device: the simulator's, with a `free`."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._next = self._first = GLOBAL + index * _WINDOW
        self.held: dict[int, np.ndarray] = {}  # arrays by address

    def allocate(self, size: int) -> int:
        """Allocate `size` poisoned bytes; return their address."""
        data = np.full(max(size, 1), POISON, np.uint8)
        address = self.add(data, f"allocation of {size} bytes")
        self.held[address] = data
        return address

    def free(self, address: int) -> None:
        if address not in self.held:
            raise CudaError(INVALID_VALUE, f"{address:#x} is not the address of an allocation")
        self.held.pop(address)[...] = POISON
        place = bisect.bisect_left(self._starts, address)
        del self._starts[place], self.allocations[place]

    def contains(self, address: int) -> bool:
        """Return whether the address belongs to this device, allocated or not."""
        return self._first <= address < self._first + _WINDOW

    def view(self, address: int, size: int) -> np.ndarray:
        allocation = self.find(address)
        if allocation is None or address + size > allocation.stop:
            raise CudaError(INVALID_VALUE, f"{size} bytes at {address:#x}: {self.nearest(address)}")
        return allocation.store.data[address - allocation.start :][:size]

    @property
    def used(self) -> int:
        return sum(len(data) for data in self.held.values())


class Heap:
    """Calls of the runtime on memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pinned: dict[int, ctypes.Array] = {}
        self._pool_attributes: dict[tuple[int, int], int] = {}

    def card_of(self, address: int):
        """Return the device of an address; None for host memory."""
        return next((card for card in self.machine.devices.cards if card.memory.contains(address)), None)

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < start + len(buffer) for start, buffer in self.pinned.items())

    def _bytes(self, address: int, size: int) -> np.ndarray:
        """Return the bytes at an address of a device or of the host."""
        if card := self.card_of(address):
            return card.memory.view(address, size)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    # Allocations

    def malloc(self, size: int) -> int:
        self.machine.graphs.require_safe("cudaMalloc")
        return self._allocate(size)

    def _allocate(self, size: int) -> int:
        card = self.machine.devices.use()
        if card.memory.used + size > self.memGetInfo()[1]:
            self.machine.streams.finish(card)  # queued frees may make memory available
        free, _ = self.memGetInfo()
        if size > free:
            raise CudaError(OUT_OF_MEMORY, f"{size} bytes, {free} are free")
        return card.memory.allocate(size)

    def free(self, address: int) -> None:
        """Free after all work of the device, because cudaFree synchronises."""
        if address:
            self.machine.graphs.require_safe("cudaFree")
        if address and (card := self.card_of(address)) is not None:
            if card.lost is None:
                self.machine.streams.finish(card)
            card.memory.free(address)

    def mallocAsync(self, size: int, stream: int) -> int:
        if self.machine.streams.at(stream).capture:
            raise CudaError(NOT_SUPPORTED, "a graph with nodes for memory is not in this stand-in")
        return self._allocate(size)

    def mallocFromPoolAsync(self, size: int, pool: int, stream: int) -> int:
        return self.mallocAsync(size, stream)

    def freeAsync(self, address: int, stream: int) -> None:
        card = self.card_of(address)
        if card is None or address not in card.memory.held:
            raise CudaError(INVALID_VALUE, f"{address:#x} is not the address of an allocation")
        self.machine.streams.enqueue(stream, "free", lambda: card.memory.free(address))

    def deviceGetDefaultMemPool(self, device: int) -> int:
        return 1 + self.machine.devices.at(device).index

    deviceGetMemPool = deviceGetDefaultMemPool

    def deviceSetMemPool(self, device: int, pool: int) -> None:
        """Do nothing: each device has one pool here."""
        self.machine.devices.at(device)

    def memPoolTrimTo(self, pool: int, size: int) -> None:
        """Do nothing: pools keep no memory here."""

    def memPoolSetAttribute(self, pool: int, attribute: int, value: object) -> None:
        """Store the attribute; the release threshold, which CuPy sets for a limited pool, has no effect here."""
        self._pool_attributes[pool, attribute] = int(value)  # type: ignore[call-overload]

    def memPoolGetAttribute(self, pool: int, attribute: int) -> int:
        used = self.machine.devices.cards[pool - 1].memory.used
        return self._pool_attributes.get((pool, attribute), 0 if attribute == _RELEASE_THRESHOLD else used)

    def hostAlloc(self, size: int, flags: int) -> int:
        self.machine.graphs.require_safe("cudaHostAlloc")
        buffer = ctypes.create_string_buffer(max(size, 1))
        self.pinned[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def freeHost(self, address: int) -> None:
        self.machine.streams.finish()
        del self.pinned[address]

    def memGetInfo(self) -> tuple[int, int]:
        from .devices import BYTES

        return BYTES - self.machine.devices.use().memory.used, BYTES

    def pointerGetMemoryType(self, address: int) -> int:
        if self.card_of(address) is not None:
            return _DEVICE
        return _HOST if self.is_pinned(address) else _UNREGISTERED

    def pointerGetAttributes(self, address: int):
        from cupy_backends.cuda.api.runtime import PointerAttributes

        card, kind = self.card_of(address), self.pointerGetMemoryType(address)
        if card is None:
            return PointerAttributes(-2 if kind == _UNREGISTERED else 0, 0, address, kind)
        card.memory.view(address, 1)
        return PointerAttributes(card.index, address, 0, kind)

    # Copies

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        """Copy in stream order, but read pageable host memory at the call, or write it before the call returns."""
        if size == 0:
            return
        if self.card_of(source) is None and not self.is_pinned(source):
            data = self._bytes(source, size).copy()
        else:
            data = None
            self._bytes(source, size)
        self._bytes(target, size)

        def run() -> None:  # either array may have been freed since the call, which is a fault
            np.copyto(self._bytes(target, size), self._bytes(source, size) if data is None else data)

        operation = self.machine.streams.enqueue(stream, f"copy of {size} bytes", run)
        if self.card_of(target) is None and not self.is_pinned(target):
            if self.machine.streams.at(stream).capture:
                raise CudaError(CAPTURE_UNSUPPORTED, "a copy to pageable memory synchronises, which a capture forbids")
            try:
                self.machine.streams.finish_operation(operation)
            except BaseException:  # cancel the copy, because the caller may now free the host memory
                operation.run = lambda: None
                raise

    def memcpy(self, target: int, source: int, size: int, kind: int) -> None:
        self.memcpyAsync(target, source, size, kind, LEGACY)
        if self.card_of(source) is None or self.card_of(target) is None:
            self.machine.streams.streamSynchronize(LEGACY)

    def memcpyPeerAsync(self, target: int, to: int, source: int, device: int, size: int, stream: int) -> None:
        self.memcpyAsync(target, source, size, 4, stream)

    def memcpyPeer(self, target: int, to: int, source: int, device: int, size: int) -> None:
        self.memcpyAsync(target, source, size, 4, LEGACY)

    def memsetAsync(self, target: int, value: int, size: int, stream: int) -> None:
        self._bytes(target, size)
        self.machine.streams.enqueue(stream, "memset", lambda: self._bytes(target, size).fill(value & 0xFF))

    def poison(self, address: int, size: int, stream: int, *, is_new: bool) -> None:
        """Enqueue POISON for a block of a pool on its stream, if the stream accepts work.

        A new block waits for no other stream: on the legacy default stream a wait would order streams, which an
        allocation does not.
        """
        card, view, streams = self.card_of(address), self._bytes(address, size), self.machine.streams
        if card.lost is not None or not streams.has(stream):  # a stream may be destroyed before its memory
            return
        with self.machine.lock, self.machine.devices.on(card):
            if not self.machine.graphs.awaited(streams.at(stream)):
                streams.enqueue(stream, "poison", lambda: view.fill(POISON), waits_for_others=not is_new)

    def memset(self, target: int, value: int, size: int) -> None:
        self.memsetAsync(target, value, size, LEGACY)
