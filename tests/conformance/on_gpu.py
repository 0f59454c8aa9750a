"""Runs every micro-kernel on this machine's GPU, compares the results with the simulator's, and stores them.

Usage: python -m conformance.on_gpu FOLDER

The stored files are the reference for tests without a GPU (simulator/test_simulator_conformance_gpu.py). The driver
assembles the same PTX text that the simulator executes; NVRTC is not involved.

A kernel may hang, or corrupt the CUDA context of its process. Kernels therefore run in a worker process, which is
replaced after each failure.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cupy_flash.measure.checks.micro_kernels import Array, difference, kernels, simulate, work
from cupy_flash.measure.worker_process import Lost, Worker, ended_by_signal


def main(folder: Path, work: Any = work) -> int:
    """Run every kernel and store the results, also if interrupted; print kernels that fail or differ.

    Returns the exit status, 1 if a kernel failed or differs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    complaints = 0
    results: dict[str, Array] = {}
    with ended_by_signal(), Worker(work) as worker:
        capability = worker(None, until=math.inf)
        path = folder / f"sm_{capability}.npz"
        try:
            for number, kernel in enumerate(kernels()):
                if not kernel.runs_on(capability):
                    continue
                try:
                    out = worker(number, until=math.inf)
                    problem = difference(out, simulate(kernel), kernel.relative)
                    results[kernel.key] = out
                except Lost as lost:
                    problem = lost.reason
                if problem is not None:
                    complaints += 1
                    print(f"{kernel.name}: {problem}", flush=True)
        finally:
            np.savez_compressed(path, **results)
    print(f"{len(results)} micro-kernels ran: {path}; {complaints} failed or differ from the simulator")
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
