"""The devices on which a call can run, with the properties that planning needs."""

# No `from __future__ import annotations`, as in records.py.
import platform
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


class Device(NamedTuple):
    """The properties of a processor on which planning depends."""

    backend: str  # "cpu", "cuda", "simulator"
    arch: str  # "x86_64", "arm64"; "sm_80"
    units: int  # SMs; on a CPU the threads that BLAS may use (OMP_NUM_THREADS, threadpoolctl)
    shared_bytes: int = 0  # largest shared memory of a block
    card: str = ""  # model name of this machine's GPU; "simulator"; "" if only the architecture is known
    driver: str = ""  # the CUDA version that the GPU's driver supports

    def __str__(self) -> str:
        unit = "thread" if self.backend == "cpu" else "multiprocessor"
        return f"{self.backend} ({self.arch}, {self.units} {unit}{'s' * (self.units != 1)})"


# {architecture: (largest shared memory of a block in KiB, number of SMs of a common GPU)}. The former is from the CUDA
# C++ Programming Guide, "Technical Specifications per Compute Capability".
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
SIMULATED = "sm_80"  # architecture of backend="simulator"; backend="simulator:sm_90a" selects another architecture


def named(arch: str, backend: str = "simulator") -> Device:
    """Return a GPU by its architecture, to plan, compile or simulate for it without one; ValueError if unknown."""
    if not isinstance(arch, str) or arch not in GPUS:
        raise ValueError(f"unknown GPU architecture {arch!r}; known are {', '.join(GPUS)}")
    shared_kib, units = GPUS[arch]
    return Device(backend, arch, units, shared_kib * 1024, "simulator" if backend == "simulator" else "")


def cpu() -> Device:
    """Return this machine's CPU, with the number of threads that NumPy's BLAS may currently use."""
    return Device("cpu", platform.machine(), blas_threads())


@lru_cache
def gpu(index: int) -> Device:
    """Return a GPU of this machine by its CUDA index, queried through CuPy."""
    import cupy

    card = cupy.cuda.Device(index)
    # Hopper needs the target sm_90a for wgmma and setmaxnreg.
    arch = f"sm_{card.compute_capability}".replace("sm_90", "sm_90a")
    attributes = card.attributes
    model = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
    version = cupy.cuda.runtime.driverGetVersion()
    return Device(
        "cuda",
        arch,
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
        model,
        f"{version // 1000}.{version % 1000 // 10}",
    )


@lru_cache(maxsize=1)
def blas_controller() -> "ThreadpoolController":
    """Return the threadpoolctl controller of NumPy's BLAS, cached because finding the libraries takes milliseconds."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def blas() -> str:
    """Return the BLAS libraries that NumPy has loaded and their threads, as threadpoolctl reports them."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError as error:
        return f"unknown: {error}"
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    if not libraries:
        return "none that threadpoolctl knows"
    return ", ".join(
        f"{library['internal_api']} {library['version']}, {library['num_threads']} threads" for library in libraries
    )


def blas_threads() -> int:
    """Return the number of threads that BLAS may currently use; 1 for a BLAS that threadpoolctl does not know."""
    return max((library.num_threads for library in blas_controller().lib_controllers), default=1)
