"""What a call runs on: asked of the machine once, and frozen."""

from __future__ import annotations

import platform
from functools import lru_cache
from typing import Any, NamedTuple


class Device(NamedTuple):
    """A processor as the plan sees it."""

    backend: str  # "cpu", "cuda", "simulator"
    arch: str  # "x86_64", "arm64"; "sm_80"
    units: int  # multiprocessors; on a CPU the threads that BLAS may use (OMP_NUM_THREADS, threadpoolctl)
    shared_bytes: int = 0  # shared memory that one block may have

    def __str__(self) -> str:
        unit = "thread" if self.backend == "cpu" else "multiprocessor"
        return f"{self.backend} ({self.arch}, {self.units} {unit}{'s' * (self.units != 1)})"


# Shared memory that one block may have, in KiB, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"), and multiprocessors of a common card of that capability.
GPUS = {
    "sm_75": (64, 40),
    "sm_80": (163, 108),
    "sm_86": (99, 84),
    "sm_87": (163, 16),
    "sm_89": (99, 128),
    "sm_90": (227, 132),
    "sm_90a": (227, 132),
    "sm_100": (227, 148),
    "sm_120": (99, 170),
    "sm_121": (99, 48),
}


def named(arch: str, backend: str = "simulator") -> Device:
    """A GPU by its compute capability, for planning, compiling and simulating without one."""
    if not isinstance(arch, str) or arch not in GPUS:
        raise ValueError(f"unknown GPU architecture {arch!r}; known are {', '.join(GPUS)}")
    shared_kib, units = GPUS[arch]
    return Device(backend, arch, units, shared_kib * 1024)


def cpu() -> Device:
    """This machine's processor, with the number of threads that NumPy's BLAS may use at this moment."""
    return Device("cpu", platform.machine(), blas_threads())


@lru_cache
def gpu(index: int) -> Device:
    """A GPU of this machine, asked through CuPy."""
    import cupy

    card = cupy.cuda.Device(index)
    # A Hopper card runs what is compiled for sm_90a, the only target with all of its instructions.
    arch = f"sm_{card.compute_capability}".replace("sm_90", "sm_90a")
    attributes = card.attributes
    return Device("cuda", arch, attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"])


@lru_cache(maxsize=1)
def blas_controller() -> Any:
    """threadpoolctl's handle on NumPy's BLAS. Finding the libraries takes milliseconds, so it is done once."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def blas_threads() -> int:
    """Threads that BLAS may use now; 1 where it cannot be asked (a BLAS that threadpoolctl does not know)."""
    return max((library.num_threads for library in blas_controller().lib_controllers), default=1)
