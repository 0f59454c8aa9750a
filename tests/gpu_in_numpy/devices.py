"""Devices: their properties, the current device of each thread, and whether the thread has a context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cupy_flash.device import GPUS

from .errors import INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, CudaError
from .memory import DeviceMemory

DRIVER_VERSION = 13020  # CUDA 13.2
DEVICE_ATTRIBUTES = 150  # the values of cudaDeviceAttr are smaller
SHARED_BYTES = 48 << 10  # per block, unless an attribute allows more
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
THREADS_PER_BLOCK = 1024
BYTES = 8 << 30  # of global memory


class Card:
    """One device; `lost` is the status of a failed kernel, which every later call on the device returns."""

    def __init__(self, index: int, arch: str) -> None:
        shared_kib, self.units = GPUS[arch]
        self.index, self.arch, self.shared_bytes = index, arch, shared_kib << 10
        self.capability = divmod(int(arch.removeprefix("sm_").rstrip("af")), 10)
        self.memory = DeviceMemory(index)
        self.lost: int | None = None

    def attributes(self) -> dict[int, int]:
        """Return values by cudaDeviceAttr. CuPy reads others too, which get 0 because they do not matter here."""
        major, minor = self.capability
        return {
            1: THREADS_PER_BLOCK,
            **dict(zip((2, 3, 4), BLOCK_LIMITS, strict=True)),
            **dict(zip((5, 6, 7), GRID_LIMITS, strict=True)),
            8: SHARED_BYTES,
            10: 32,  # threads of a warp
            12: 65536,  # registers of a block
            16: self.units,
            41: 1,  # unified addressing
            75: major,
            76: minor,
            81: self.shared_bytes
            + 1024,  # shared memory of an SM, of which each block uses 1 KiB more than it requests
            97: self.shared_bytes,
            115: 1,  # stream-ordered memory pools
        }


class Devices:
    """Calls of the runtime and the driver on devices and contexts."""

    def __init__(self, archs: tuple[str, ...]) -> None:
        self.cards = [Card(index, arch) for index, arch in enumerate(archs)]
        self._thread = threading.local()

    @property
    def current(self) -> Card:
        return self.cards[self.getDevice()]

    @property
    def has_context(self) -> bool:
        """Return whether a context is current in this thread; a new thread has none before its first call of the
        runtime.
        """
        return getattr(self._thread, "has_context", False)

    def use(self) -> Card:
        """Return the current device; its context becomes current, as in every runtime call that works on a device."""
        self._thread.has_context = True
        card = self.current
        if card.lost is not None:
            raise CudaError(card.lost, f"a kernel on device {card.index} has failed before")
        return card

    def at(self, index: int) -> Card:
        if not 0 <= index < len(self.cards):
            raise CudaError(INVALID_DEVICE, f"there is no device {index}")
        return self.cards[index]

    @contextmanager
    def on(self, card: Card) -> Iterator[None]:
        """Make a device current without a context, for internal work that callers must not notice."""
        before = self.getDevice()
        self._thread.index = card.index
        try:
            yield
        finally:
            self._thread.index = before

    def revive(self) -> None:
        """Make lost devices usable again; a real driver does so only for a new process."""
        for card in self.cards:
            card.lost = None

    # Runtime

    def getDevice(self) -> int:
        return getattr(self._thread, "index", 0)

    def setDevice(self, device: int) -> None:
        self._thread.index = self.at(device).index
        self._thread.has_context = True

    def getDeviceCount(self) -> int:
        return len(self.cards)

    def driverGetVersion(self) -> int:
        return DRIVER_VERSION

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        if not 1 <= attribute <= DEVICE_ATTRIBUTES:
            raise CudaError(INVALID_VALUE, f"{attribute} is no attribute of a device")
        return self.at(device).attributes().get(attribute, 0)

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return 0

    def _deviceEnsurePeerAccess(self, peer: int) -> None:
        """Do nothing: devices cannot access each other's memory, and copies between them are staged by the driver."""

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{self.at(device).index:02x}:00.0"

    def getDeviceProperties(self, device: int) -> dict[str, object]:
        card = self.at(device)
        return dict(
            name=b"GPU in NumPy",
            major=card.capability[0],
            minor=card.capability[1],
            multiProcessorCount=card.units,
            sharedMemPerBlockOptin=card.shared_bytes,
            totalGlobalMem=BYTES,
            maxThreadsPerBlock=THREADS_PER_BLOCK,
            warpSize=32,
            pciBusID=card.index,
        )

    def getLastError(self) -> int:
        return 0

    def _ensure_context(self) -> None:
        self.use()

    # Driver

    def cuCtxGetCurrent(self, context) -> None:
        context[0] = 1 + self.getDevice() if self.has_context else None

    def cuCtxGetDevice(self, device) -> None:
        if not self.has_context:
            raise CudaError(INVALID_CONTEXT, "no context is current in this thread")
        device[0] = self.getDevice()
