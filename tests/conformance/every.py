"""Every micro-kernel in one form (PTX, arrays, launch) for a GPU and for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash.tensor_map import TensorMap

from . import hopper
from .kernels import CASES, MMA_FORMS, THREADS, TYPES, WARP_CASES, Case, mma_body

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Kernel:
    """The kernel `micro` of a PTX text. Arguments: pointers to the inputs and the output, then the number of rows if it
    takes it, and tensor maps (array, function from its address to the map)."""

    name: str
    text: str
    inputs: tuple[Array, ...]
    out: Array  # initial value
    blocks: int
    threads: int
    rows: int | None = None
    maps: tuple[tuple[int, Callable[[int], TensorMap]], ...] = ()
    dynamic: int = 0  # bytes of dynamic shared memory
    relative: float | None = None  # relative error bound of an approximation

    @property
    def key(self) -> str:
        """The key in a file of arrays."""
        return self.name.replace(".", "_")

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU of this compute capability (90 for 9.0) supports the kernel."""
        target = self.text.split(".target sm_")[1].split()[0]
        return capability == int(target[:-1]) if target.endswith("a") else capability >= int(target)


def every_kernel() -> Iterator[Kernel]:
    """All kernels; Hopper's first, as they are the least tested."""
    yield from map(_of_hopper, hopper.CASES)
    for case in (*CASES, *WARP_CASES):
        yield _of_instruction(case)
    for form in MMA_FORMS:
        yield _of_mma(form)


def _of_hopper(case: hopper.HopperCase) -> Kernel:
    from micro import source

    text = source(case.body, [*case.inputs, case.out], maps=len(case.maps), **case.options)
    return Kernel(
        case.name, text, case.inputs, case.out, case.blocks, case.threads, maps=case.maps, dynamic=case.dynamic
    )


def _of_instruction(case: Case) -> Kernel:
    values = tuple(case.values())
    rows = len(values[0])
    out = np.zeros(rows, TYPES[case.output][2])
    return Kernel(case.name, case.ptx, values, out, -(-rows // THREADS), THREADS, rows, relative=case.relative)


def _of_mma(form: str) -> Kernel:
    from micro import source

    _, type_, a_words, b_words = MMA_FORMS[form]
    operands = mma_operands(type_, a_words, b_words)
    out = np.zeros((32, 4), np.float32)
    target = "sm_90" if type_.startswith("e") else "sm_80"
    text = source(mma_body(form), [*operands, out], target=target)
    # PTX leaves the order and the rounding of mma's sums undefined.
    return Kernel(f"mma.{form}", text, operands, out, 1, 32, relative=2.0**-10)


def mma_operands(type_: str, a_words: int, b_words: int) -> tuple[Array, Array, Array]:
    """Random fragments of A, B and C, of a magnitude that needs rounding and does not overflow."""
    dtypes = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32}
    dtypes |= {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    dtype = np.dtype(dtypes[type_])
    rng = np.random.default_rng(a_words)
    a, b = (
        rng.standard_normal((32, words * (4 // dtype.itemsize))).astype(dtype).view(np.uint32)
        for words in (a_words, b_words)
    )
    return a, b, rng.standard_normal((32, 4)).astype(np.float32)
