"""Run every micro-kernel on this machine's GPU, compare the results with the simulator's, and store them:
python -m conformance.on_gpu FOLDER.

The stored files are the reference for tests without a GPU (simulator/test_simulator_conformance_gpu.py). NVRTC is not
involved: the driver assembles the same PTX text that the simulator executes.

A kernel may hang or corrupt its process's CUDA context. Kernels therefore run in a worker process, which is replaced
after each failure.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cupy_flash.isolated import Announce, Lost, Worker, ended_by_signal
from cupy_flash.tensor_map import encode_for_gpu

from .agreement import difference, simulate
from .every import Array, Kernel, every_kernel

SECONDS = 10  # time-out of a kernel; none takes a tenth of it, including the driver's assembler


def run(kernel: Kernel) -> Any:
    """The output of a kernel on the GPU."""
    import cupy

    module = cupy.cuda.Module()
    module.load(kernel.text.encode() + b"\0")
    function = module.get_function("micro")
    driver = cupy.cuda.driver
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.dynamic)
    arrays = [cupy.asarray(x) for x in (*kernel.inputs, kernel.out)]
    maps = [encode_for_gpu(tensor_map(arrays[i].data.ptr)) for i, tensor_map in kernel.maps]
    # CuPy passes a NumPy array of one element by value.
    by_value = [np.frombuffer(encoded, f"V{len(encoded)}").reshape(()) for encoded in maps]
    rows = [] if kernel.rows is None else [np.uint32(kernel.rows)]
    arguments = (*(np.uint64(x.data.ptr) for x in arrays), *rows, *by_value)
    function((kernel.blocks, 1, 1), (kernel.threads, 1, 1), arguments, shared_mem=kernel.dynamic)
    return cupy.asnumpy(arrays[-1])


@cache
def kernels() -> list[Kernel]:
    return list(every_kernel())


def work(number: int | None, announce: Announce) -> Any:
    """In a worker process: the output of the kernel with this number, or with None the GPU's compute capability."""
    import cupy

    if number is None:
        return int(cupy.cuda.Device().compute_capability)
    kernel = kernels()[number]
    announce(kernel.name, SECONDS)
    return run(kernel)


def main(folder: Path, work: Any = work) -> int:
    """Run every kernel, print each that fails or differs, and store the results of the others, even if interrupted."""
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
                    found = difference(out, simulate(kernel), kernel.relative)
                    results[kernel.key] = out
                except Lost as lost:
                    found = lost.reason
                if found is not None:
                    complaints += 1
                    print(f"{kernel.name}: {found}", flush=True)
        finally:
            np.savez_compressed(path, **results)
    print(f"{len(results)} micro-kernels ran: {path}; {complaints} failed or differ from the simulator")
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
