"""Measure the memory of JVP and double backward, for docs/pictures/derivatives.svg."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import reference
from cupy_flash.device import blas_threads

# bench is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.results import describe, write

HEAD_DIM = 64
LENGTHS, DENSE_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384), (512, 1024, 2048, 4096)


def _jvp(inputs: Any) -> None:
    cupy_flash.attention_jvp(*inputs[:6], causal=True, backend="cpu")


def _double_backward(inputs: Any) -> None:
    q, k, v, tq, tk, tv, dout = inputs
    out, lse = cupy_flash.attention(
        q, k, v, causal=True, return_lse=True, backend="cpu"
    )
    cupy_flash.attention_double_backward(
        tq, tk, tv, dout, q, k, v, out, lse, causal=True, backend="cpu"
    )


def _dense_jvp(inputs: Any) -> None:
    q, k, v, *tangents = inputs[:6]
    reference.attention_jvp(
        q, k, v, reference.Tangents(*tangents), causal=True, dtype=np.float32
    )


CALLS: dict[str, tuple[Callable[[Any], None], Sequence[int]]] = {
    "attention_jvp": (_jvp, LENGTHS),
    "attention_double_backward": (_double_backward, LENGTHS),
    "JVP with all scores in memory": (_dense_jvp, DENSE_LENGTHS),
}


def peak(call: Callable[[Any], None], length: int) -> int:
    """Peak bytes that NumPy allocates in a call on (1, length, 1, HEAD_DIM) float32."""
    inputs = (
        np.random.default_rng(0)
        .normal(size=(7, 1, length, 1, HEAD_DIM))
        .astype(np.float32)
    )
    call(
        inputs[:, :, :64]
    )  # modules are imported and thread pools started before the measurement
    tracemalloc.start()
    try:
        call(inputs)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    peaks = {
        name: {length: peak(call, length) for length in lengths}
        for name, (call, lengths) in CALLS.items()
    }
    record = describe([], blas_threads()) | {"command": "python docs/derivatives.py"}
    write(record | {"peaks": peaks}, Path(__file__).with_suffix(".json"))
