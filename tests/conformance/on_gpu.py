"""Runs every micro-kernel on this machine's GPU and stores what it gives: python -m conformance.on_gpu FOLDER.

The stored files then hold the simulator without a GPU (tests/test_simulator_conformance_gpu.py). NVRTC is not asked:
the driver assembles the PTX, the same text that the simulator executes. A kernel that never ends, or that breaks the
CUDA context, costs its process alone: the next one goes on behind it. What is stored is not run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupy_flash.tensor_map import encode_for_gpu

from . import hopper
from .kernels import CASES, MMA_FORMS, THREADS, TYPES, WARP_CASES, mma_body

LIMIT = 20  # seconds, of a kernel that takes microseconds
MMA_SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


def key(name: str) -> str:
    """The name of a case in a file of arrays."""
    return name.replace(".", "_")


def every_kernel() -> Iterator[tuple[str, int, str, list[np.ndarray[Any, Any]], np.ndarray[Any, Any], int]]:
    """(name, architecture, PTX, inputs, output to fill, threads in all) of each micro-kernel."""
    for case in (*CASES, *WARP_CASES):
        values = case.values()
        yield case.name, case.arch, case.ptx, values, np.zeros(len(values[0]), TYPES[case.output][2]), len(values[0])
    for form, (_, type_, a_words, b_words) in MMA_FORMS.items():
        from micro import source

        operands = mma_operands(type_, a_words, b_words)
        out = np.zeros((32, 4), np.float32)
        text = source(mma_body(form), [*operands, out])
        yield f"mma.{form}", 90 if type_.startswith("e") else 80, text, operands, out, 32


def mma_operands(type_: str, a_words: int, b_words: int) -> list[np.ndarray[Any, Any]]:
    """Random fragments of A, B and C, of ordinary size: the sum's rounding shows, no infinity."""
    import ml_dtypes

    dtypes = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32}
    dtypes |= {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    rng = np.random.default_rng(a_words)
    per_word = 4 // MMA_SIZES[type_]
    a, b = (
        rng.standard_normal((32, words * per_word)).astype(dtypes[type_]).view(np.uint32)
        for words in (a_words, b_words)
    )
    return [a, b, rng.standard_normal((32, 4)).astype(np.float32)]


def run(ptx: str, inputs: list[np.ndarray[Any, Any]], out: np.ndarray[Any, Any], threads: int, counted: bool) -> Any:
    """The output of the kernel `micro` on the GPU."""
    import cupy

    module = cupy.cuda.Module()
    module.load(ptx.encode() + b"\0")
    arrays = [cupy.asarray(x) for x in inputs] + [cupy.asarray(out)]
    arguments = [np.uint64(x.data.ptr) for x in arrays] + ([np.uint32(threads)] if counted else [])
    block = THREADS if counted else 32
    module.get_function("micro")((-(-threads // block), 1, 1), (block, 1, 1), tuple(arguments))
    return cupy.asnumpy(arrays[-1])


def run_hopper(case: hopper.HopperCase) -> Any:
    """The output of one of Hopper's micro-kernels on the GPU."""
    import cupy
    from micro import source

    module = cupy.cuda.Module()
    text = source(case.body, [*case.inputs, case.out], maps=len(case.maps), **case.options)
    module.load(text.encode() + b"\0")
    arrays = [cupy.asarray(x) for x in (*case.inputs, case.out)]
    maps = [encode_for_gpu(tensor_map(arrays[i].data.ptr)) for i, tensor_map in case.maps]
    # CuPy passes a NumPy array of one element by value.
    by_value = [np.frombuffer(encoded, f"V{len(encoded)}").reshape(()) for encoded in maps]
    arguments = (*(np.uint64(x.data.ptr) for x in arrays), *by_value)
    module.get_function("micro")((case.blocks, 1, 1), (case.threads, 1, 1), arguments)
    return cupy.asnumpy(arrays[-1])


def works(capability: int) -> dict[str, Callable[[], Any]]:
    """What runs each micro-kernel that this GPU has the instructions for, by its name."""
    found: dict[str, Callable[[], Any]] = {}
    for name, arch, ptx, inputs, out, threads in every_kernel():
        if arch <= capability:
            found[name] = partial(run, ptx, inputs, out, threads, not name.startswith("mma."))
    if capability == 90:
        found |= {case.name: partial(run_hopper, case) for case in hopper.CASES}
    return found


def capability() -> int:
    import cupy

    return int(cupy.cuda.Device().compute_capability)


def run_rest(folder: Path) -> int:
    """Runs what has neither a result in the folder nor a complaint; this process may end with any of them."""
    import cupy

    for name, work in works(capability()).items():
        if (folder / f"{key(name)}.npy").exists() or (folder / f"{key(name)}.txt").exists():
            continue
        complaint = folder / f"{key(name)}.txt"
        complaint.write_text(f"{name}: its process ended, or had to after {LIMIT} s")
        alarm = threading.Timer(LIMIT, os._exit, [1])
        alarm.start()
        try:
            np.save(folder / f"{key(name)}.npy", work())
            complaint.unlink()
        except Exception as error:  # the others' results are worth having; the exit status tells
            complaint.write_text(f"{name}: {error}")
            cupy.cuda.runtime.deviceSynchronize()  # fails where nothing more can be run
        finally:
            alarm.cancel()
    return 0


REST = (sys.executable, "-m", "conformance.on_gpu", "--rest")


def main(folder: Path, rest: tuple[str, ...] = REST) -> int:
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    for complaint in results.glob("*.txt"):
        complaint.unlink()
    before = -1
    while before < (before := len(list(results.iterdir()))):
        if subprocess.run([*rest, str(results)]).returncode == 0:
            break
    arrays = {path.stem: np.load(path) for path in sorted(results.glob("*.npy"))}
    complaints = [path.read_text() for path in sorted(results.glob("*.txt"))]
    path = folder / f"sm_{capability()}.npz"
    np.savez_compressed(path, **arrays)
    print(f"{len(arrays)} micro-kernels ran: {path}", *complaints, sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    *mode, place = sys.argv[1:]
    raise SystemExit(run_rest(Path(place)) if mode == ["--rest"] else main(Path(place)))
