"""Peak memory beyond inputs and outputs, each point in a process of its own, so that none inherits another's peak."""

from __future__ import annotations

import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .model import Case, result_bytes
from .peers import PEERS, limit_threads, random_inputs

NOISE = 2**20  # bytes that come and go with the allocator


@dataclass(frozen=True)
class Peak:
    """Bytes beyond inputs and outputs at the highest point, counted in two ways that each miss something."""

    allocated: int  # what NumPy and Python asked for: exact, but blind to torch and BLAS
    resident: (
        int | None
    )  # by how much the process grew: blind to memory not yet written; None where the system is silent

    @property
    def bytes(self) -> int:
        return max(self.allocated, self.resident or 0)


def measure(name: str, case: Case, threads: int) -> tuple[Peak, Peak]:
    """The peak of a forward that keeps what its backward needs, and of both together, in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, name, case, threads).result()


def growth_exponent(seqlens: npt.ArrayLike, peaks: npt.ArrayLike) -> float:
    """e of peak = c S^e, fitted to the logarithms: 1 is linear, 2 quadratic. Peaks below NOISE count as NOISE."""
    exponent = np.polyfit(np.log(seqlens), np.log(np.maximum(peaks, NOISE)), 1)[0]
    return round(float(exponent), 1) + 0.0  # not -0.0


def _measure(name: str, case: Case, threads: int) -> tuple[Peak, Peak]:
    with limit_threads(threads):
        # Libraries are loaded and their pools made before the measurement begins.
        small = replace(case, seqlen=64)
        peer = PEERS[name](small, random_inputs(small), True)
        peer.backward(peer.forward())

        inputs = random_inputs(case)
        resident = peak_resident()
        tracemalloc.start()
        peer = PEERS[name](case, inputs, True)
        saved = peer.forward()
        forward = _peak_since(resident, result_bytes(case, gradients=False))
        gradients = peer.backward(saved)
        both = _peak_since(resident, result_bytes(case, gradients=True))
        del saved, gradients  # the outputs, alive until here
    return forward, both


def _peak_since(resident: int | None, results: int) -> Peak:
    peak = peak_resident()
    grown = None if resident is None or peak is None else max(0, peak - resident - results)
    return Peak(max(0, tracemalloc.get_traced_memory()[1] - results), grown)


def peak_resident() -> int | None:
    """The most memory that this process has had."""
    if sys.platform == "linux":
        # Not ru_maxrss: across fork and exec it keeps the peak of the parent.
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    elif sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    else:
        return None
