"""Runs every micro-kernel on this machine's GPU and stores what it gives: python -m conformance.on_gpu FOLDER.

The stored files then hold the simulator without a GPU (tests/test_simulator_conformance_gpu.py). NVRTC is not asked:
the driver assembles the PTX, the same text that the simulator executes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cupy_flash.tensor_map import encode_for_gpu

from . import hopper
from .kernels import CASES, MMA_FORMS, THREADS, TYPES, WARP_CASES, mma_body

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


def main(folder: Path) -> int:
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    folder.mkdir(parents=True, exist_ok=True)
    results, failures = {}, []
    for name, arch, ptx, inputs, out, threads in every_kernel():
        if arch > capability:
            continue
        try:
            results[key(name)] = run(ptx, inputs, out, threads, not name.startswith("mma."))
        except Exception as error:  # the others' results are worth having; the exit status tells
            failures.append(f"{name}: {error}")
    for case in hopper.CASES if capability == 90 else ():
        try:
            results[key(case.name)] = run_hopper(case)
        except Exception as error:  # as above
            failures.append(f"{case.name}: {error}")
    path = folder / f"sm_{capability}.npz"
    np.savez_compressed(path, **results)
    print(f"{len(results)} micro-kernels ran: {path}")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
