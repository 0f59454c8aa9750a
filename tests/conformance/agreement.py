"""A micro-kernel's result on the simulator, and its comparison with a GPU's."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from cupy_flash.backends.simulator import Memory, launch
from cupy_flash.tensor_map import encode_for_simulator

from .every import Array, Kernel, every_kernel


def simulate(kernel: Kernel) -> Array:
    """The output of a micro-kernel on the simulator."""
    memory, out = Memory(), kernel.out.copy()
    arrays = [*(x.copy() for x in kernel.inputs), out]
    pointers = [memory.add(x, f"array {i}") for i, x in enumerate(arrays)]
    parameters = struct.pack(f"{len(pointers)}Q", *pointers)
    if kernel.rows is not None:
        parameters += struct.pack("I", kernel.rows)
    for i, tensor_map in kernel.maps:
        parameters = parameters.ljust(-(-len(parameters) // 64) * 64, b"\0")
        parameters += encode_for_simulator(tensor_map(pointers[i]))
    grid, block = (kernel.blocks, 1, 1), (kernel.threads, 1, 1)
    launch(kernel.text, "micro", grid, block, parameters, memory=memory, dynamic_shared=kernel.dynamic)
    return out


def difference(actual: Array, expected: Array, relative: float | None = None) -> str | None:
    """How many numbers differ and where the first does; None if all agree: bitwise (any NaN equals any NaN), or with
    `relative` to within this fraction of the larger."""
    same = actual == expected
    if actual.dtype.kind == "f":
        same &= np.signbit(actual) == np.signbit(expected)
        same |= np.isnan(actual) & np.isnan(expected)
        if relative is not None:
            with np.errstate(all="ignore"):
                apart, scale = np.abs(actual - expected), np.maximum(np.abs(actual), np.abs(expected))
            same |= apart <= 2 * relative * np.maximum(scale, 1e-30)
    if same.all():
        return None
    first = tuple(int(i) for i in np.argwhere(~same)[0])
    wrong = int((~same).sum())
    return f"{wrong} of {same.size} differ, the first at {first}: {actual[first]}, simulator {expected[first]}"


def disagreements(path: Path) -> list[str]:
    """The kernels whose stored results differ from the simulator's."""
    with np.load(path) as stored:
        return [
            kernel.name
            for kernel in every_kernel()
            if kernel.key in stored and difference(stored[kernel.key], simulate(kernel), kernel.relative)
        ]
