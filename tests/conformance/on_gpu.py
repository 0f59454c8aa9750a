"""Runs every micro-kernel on this machine's GPU, compares what it gives with the simulator, and stores it:
python -m conformance.on_gpu FOLDER.

The stored files then hold the simulator without a GPU (tests/test_simulator_conformance_gpu.py). NVRTC is not asked:
the driver assembles the PTX, the same text that the simulator executes.

A kernel may hang or spoil its process's context for every kernel after it. So kernels run in a process of their own,
which is replaced by a new one after each that fails.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from cupy_flash.tensor_map import encode_for_gpu

from .agreement import difference, simulate
from .every import Array, Kernel, every_kernel

START_SECONDS = 120  # until a process has a context
SECONDS = 10  # until a kernel hangs: none takes a tenth of this, the driver's assembler included


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


def work(connection: Connection) -> None:
    """A process: says the GPU's compute capability, then runs the kernels whose numbers it is told, until one fails."""
    import cupy

    connection.send(int(cupy.cuda.Device().compute_capability))
    kernels = list(every_kernel())
    while True:
        try:
            connection.send((run(kernels[connection.recv()]), ""))
        except EOFError:
            return
        except Exception as error:  # whatever it is, it is told, and the context may be lost
            connection.send((None, f"{type(error).__name__}: {error}"))
            return


class Worker:
    """A process that runs kernels, and is ended with the kernel that does not end."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.capability = self._receive(START_SECONDS)

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no answer in {seconds} s")
        return self._connection.recv()

    def run(self, number: int, seconds: float) -> tuple[Array | None, str]:
        """The output of a kernel, or why there is none."""
        try:
            self._connection.send(number)
            return self._receive(seconds)
        except TimeoutError as error:
            return None, str(error)
        except (EOFError, OSError):
            self._process.join(SECONDS)
            return None, f"its process ended, exit status {self._process.exitcode}"

    def end(self) -> None:
        self._process.kill()
        self._process.join(START_SECONDS)
        self._connection.close()


def main(folder: Path, work: Callable[[Connection], None] = work, seconds: float = SECONDS) -> int:
    """Runs every kernel, prints each that fails or differs, and stores the results of the others; what has been found
    is stored before a process is replaced, which can take the rest of the time that there is."""
    folder.mkdir(parents=True, exist_ok=True)
    worker = Worker(work)
    path = folder / f"sm_{worker.capability}.npz"
    results: dict[str, Array] = {}
    complaints = 0
    for number, kernel in enumerate(every_kernel()):
        if not kernel.runs_on(worker.capability):
            continue
        out, error = worker.run(number, seconds)
        if out is None:
            found: str | None = error
            np.savez_compressed(path, **results)
            worker.end()
            worker = Worker(work)
        else:
            results[kernel.key] = out
            found = difference(out, simulate(kernel), kernel.relative)
        if found is not None:
            complaints += 1
            print(f"{kernel.name}: {found}", flush=True)
    worker.end()
    np.savez_compressed(path, **results)
    print(f"{len(results)} micro-kernels ran: {path}; {complaints} failed or differ from the simulator")
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
