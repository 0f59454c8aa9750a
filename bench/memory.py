"""Peak memory beyond inputs and outputs; each measurement runs in a fresh process, as peaks never decrease."""

from __future__ import annotations

import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .implementations import IMPLEMENTATIONS, limit_threads, random_inputs
from .model import Case, result_bytes

NOISE = 2**20  # bytes of allocator noise


@dataclass(frozen=True)
class Peak:
    """Peak bytes beyond inputs and outputs, by two measures, neither of which sees all memory."""

    allocated: int  # allocated by NumPy and Python (tracemalloc): exact, but without torch and BLAS
    # Growth of the resident set: misses memory that was never written. None where the system does not report it.
    resident: int | None

    @property
    def bytes(self) -> int:
        """The larger of the two measures."""
        return max(self.allocated, self.resident or 0)


def measure(name: str, case: Case, threads: int) -> tuple[Peak, Peak]:
    """Return the peaks of a forward that saves for the backward, and of forward + backward, in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, name, case, threads).result()


def growth_exponent(seqlens: npt.ArrayLike, peaks: npt.ArrayLike) -> float:
    """Fit e of peak = c S^e in log space: 1 is linear, 2 quadratic. Peaks are clamped to at least NOISE."""
    exponent = np.polyfit(np.log(seqlens), np.log(np.maximum(peaks, NOISE)), 1)[0]
    return round(float(exponent), 1) + 0.0  # not -0.0


def _measure(name: str, case: Case, threads: int) -> tuple[Peak, Peak]:
    with limit_threads(threads):
        # Warm-up: load libraries and create their memory pools before the measurement.
        small = replace(case, seqlen=64)
        implementation = IMPLEMENTATIONS[name](small, random_inputs(small), True)
        implementation.backward(implementation.forward())

        inputs = random_inputs(case)
        resident = peak_resident()
        tracemalloc.start()
        implementation = IMPLEMENTATIONS[name](case, inputs, True)
        saved = implementation.forward()
        forward = _peak_since(resident, result_bytes(case, gradients=False))
        gradients = implementation.backward(saved)
        both = _peak_since(resident, result_bytes(case, gradients=True))
        del saved, gradients  # keeps the outputs alive until the peak was read
    return forward, both


def _peak_since(resident: int | None, results: int) -> Peak:
    peak = peak_resident()
    growth = None if resident is None or peak is None else max(0, peak - resident - results)
    return Peak(max(0, tracemalloc.get_traced_memory()[1] - results), growth)


def peak_resident() -> int | None:
    """Return the peak resident set of this process in bytes; None where the system does not report it."""
    if sys.platform == "linux":
        # Not ru_maxrss, which inherits the parent's peak across fork and exec.
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    elif sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    else:
        return None
