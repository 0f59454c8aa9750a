"""A GPU made of NumPy for the real CuPy: Python code answers its calls of the driver and the runtime.

    machine = gpu_in_numpy.install(("sm_80", "sm_80"))  # before the first import of CuPy
    import cupy

CuPy finds the driver with ctypes.CDLL. It links the runtime, and calls it through the capsules of
cupy_backends.cuda.api.runtime, whose names are C signatures. `install` replaces both. Arrays are then in the
simulator's memory, and the simulator executes every kernel, CuPy's own kernels too. A cubin is PTX with a header
(modules.py), so that NVRTC compiles only PTX, which the simulator can read.

A `Machine` has one part per file: devices, heap (memory.py), streams (streams and events), graphs, modules (modules,
launches, tensor maps). A call is answered by the public method of a part with the same name, which raises CudaError
with the status of a failed call. A call without such a method fails: a driver call with CUDA_ERROR_NOT_SUPPORTED and an
entry in `machine.errors`, a runtime call with the error that CuPy raises if there is no driver.

Tests use these members of a machine:

    reset(seed)            finishes all work, revives lost devices, and chooses another order of execution
    errors                 texts of errors in calls that cannot raise; a test that passes leaves none
    fail(call, status, n)  makes a driver or runtime call fail, after n successful ones
    streams.pending        operations that wait; streams.executed has those that have run
    modules.launches       every launch that the driver has accepted
    devices.cards[i]       memory.held: {address: bytes} of device i

A failed call raises CuPy's own error, and `refusals` has the reason. CuPy's Cython code calls the runtime through C,
where a ctypes callback cannot raise, so trampolines in C raise (raising.py). They need a C compiler: without one, such
a call returns None or 0 and adds an entry to `errors`.
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
    """The devices of this process, and the state that they share."""

    def __init__(self, archs: tuple[str, ...]) -> None:
        self.lock = threading.RLock()  # held during every call
        self.errors: list[str] = []
        self.refusals: list[str] = []
        self.faults: dict[str, list[int]] = {}  # {function: [successes left before it fails, status, failures left]}
        self.trampolines: Trampolines | None = None  # None without a C compiler (raising.py)
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
        """Return a new handle for anything but memory."""
        return next(self._handles)

    def fail(self, call: str, status: int, after: int = 0, times: int = 1) -> None:
        """Make the next `times` calls of a driver or runtime function fail with this status, after `after` successful
        ones.
        """
        self.faults[call] = [after, status, times]

    def require_no_fault(self, call: str) -> None:
        """Raise CudaError if `fail` has requested it for this call."""
        if call in self.faults:
            after, status, times = self.faults[call]
            self.faults[call] = [after - 1, status, times]
            if after <= 0:
                if after - 1 == -times:
                    del self.faults[call]
                raise CudaError(status, f"{call} fails because a test says so")

    def answer(self, call: str):
        """Return the method that answers a call; None if no part has one."""
        return next((getattr(part, call) for part in self.parts if hasattr(part, call)), None)

    def reset(self, seed: int) -> None:
        """Finish all work, revive lost devices, forget errors, faults and records, and choose another order of
        execution.
        """
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
    """Return the machine of this process; None if `install` has not been called."""
    return _installed[0] if _installed else None


def install(archs: tuple[str, ...]) -> Machine:
    """Make CuPy find devices of these architectures in this process.

    Raises ImportError if CuPy is imported already or has other signatures.
    """
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
