"""A GPU made of NumPy, for the real CuPy: its driver and runtime calls are answered in Python.

    machine = gpu_in_numpy.install(("sm_80", "sm_80"))  # before the first import of CuPy
    import cupy

CuPy finds the driver with ctypes.CDLL, and the runtime, which is linked into it, through the capsules of
cupy_backends.cuda.api.runtime, which have C signatures as names. `install` replaces both. Arrays are then in the
simulator's memory, and the simulator executes every kernel, CuPy's own as well. A cubin is PTX with a header
(modules.py), so that NVRTC compiles only what the simulator reads.

A `Machine` has one part per file: devices, heap (memory.py), streams (streams and events), graphs, modules (modules,
launches, tensor maps). A public method of a part whose name is that of a call answers it; it raises CudaError with the
status of a failed call. A call that no part answers fails: a driver's call with CUDA_ERROR_NOT_SUPPORTED and an entry
in `machine.errors`, a runtime's with the error that CuPy raises where there is no driver.

For tests, a machine has

    reset(seed)            finish all work, revive lost devices, and order the work to come by another seed
    errors                 what has gone wrong in calls that cannot raise, as text; a test that passes leaves none
    fail(call, status, n)  make such a call of the driver or the runtime fail, after n that do not
    streams.pending        operations that wait, streams.executed those that have run
    modules.launches       every launch that the driver has accepted
    devices.cards[i]       memory.held: {address: bytes} of device i

A failed call raises CuPy's own error, and `refusals` says why. CuPy's Cython code calls the runtime through C, where a
ctypes callback cannot raise: trampolines do (raising.py). Without a C compiler there are none, and such a call returns
None or 0 and leaves an entry in `errors`.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading

from .devices import Devices
from .errors import CudaError
from .graphs import Graphs
from .memory import Heap
from .modules import Modules
from .raising import Trampolines
from .streams import Streams

KNOWN_CUPY = ("14.",)  # versions with the signatures that the parts are written for


class Machine:
    """The devices of this process."""

    def __init__(self, archs: tuple[str, ...]) -> None:
        self.lock = threading.RLock()  # of every call
        self.errors: list[str] = []
        self.refusals: list[str] = []
        self.faults: dict[str, list[int]] = {}  # by call: how many succeed before it, its status, and how often
        self.trampolines: Trampolines | None = None  # by which a call of Cython code raises
        self._handles = itertools.count(0x1000)
        self.devices = Devices(archs)
        self.heap = Heap(self)
        self.streams = Streams(self)
        self.graphs = Graphs(self)
        self.modules = Modules(self)

    @property
    def parts(self) -> tuple[object, ...]:
        return self.devices, self.heap, self.streams, self.graphs, self.modules

    def handle(self) -> int:
        """A new handle of anything but memory."""
        return next(self._handles)

    def fail(self, call: str, status: int, after: int = 0, times: int = 1) -> None:
        """Make a call of the driver or the runtime fail so many times, after so many that do not."""
        self.faults[call] = [after, status, times]

    def require_no_fault(self, call: str) -> None:
        """Raise CudaError if the call is to fail."""
        if call in self.faults:
            after, status, times = self.faults[call]
            self.faults[call] = [after - 1, status, times]
            if after <= 0:
                if after - 1 == -times:
                    del self.faults[call]
                raise CudaError(status, f"{call} fails because a test says so")

    def answer(self, call: str):
        """The method that answers a call; None if there is none."""
        return next((getattr(part, call) for part in self.parts if hasattr(part, call)), None)

    def reset(self, seed: int) -> None:
        """Finish all work, revive lost devices, forget errors, faults and records, and choose another order."""
        with self.lock:
            self.graphs.abandon_captures()
            self.streams.finish()
            self.devices.revive()
            for record in (
                self.errors,
                self.refusals,
                self.faults,
                self.streams.executed,
                self.modules.launches,
                self.modules.loads,
            ):
                record.clear()
            self.streams.reseed(seed)


_installed: list[Machine] = []


def machine() -> Machine | None:
    """The machine of this process; None without `install`."""
    return _installed[0] if _installed else None


def install(archs: tuple[str, ...]) -> Machine:
    """Make CuPy find devices of these architectures in this process. ImportError for a CuPy that is imported already
    or that has other signatures."""
    if "cupy" in sys.modules or "cupy_backends" in sys.modules:
        raise ImportError("CuPy is imported already")
    os.environ["CUPY_COMPILE_WITH_PTX"] = "1"
    os.environ["CUPY_ACCELERATORS"] = ""
    from . import compiler, driver, runtime

    built = Machine(tuple(archs))
    driver.install(built)
    runtime.install(built, KNOWN_CUPY)
    compiler.install()
    _installed.append(built)
    return built
