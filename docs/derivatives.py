"""Draw docs/derivatives.png, the memory of JVP and double backward over the length."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import cupy_flash
from cupy_flash import reference

HEAD_DIM = 64
LENGTHS, DENSE_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384), (512, 1024, 2048)


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


def figure(peaks: dict[str, dict[int, int]]) -> Figure:
    """The peaks {name: {length: bytes}} in MiB over the length, on logarithmic axes."""
    drawn = Figure(figsize=(6, 4), layout="constrained")
    axes = drawn.add_subplot()
    for name, by_length in peaks.items():
        axes.plot(
            list(by_length),
            [size / 2**20 for size in by_length.values()],
            marker="o",
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("queries and keys")
    axes.set_ylabel("peak MiB, results included")
    axes.set_title(f"Causal, 1 head, D {HEAD_DIM}, float32, on the CPU")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return drawn


if __name__ == "__main__":
    peaks = {
        name: {length: peak(call, length) for length in lengths}
        for name, (call, lengths) in CALLS.items()
    }
    for name, by_length in peaks.items():
        print(
            name,
            *(
                f"{length}: {size / 2**20:.1f} MiB"
                for length, size in by_length.items()
            ),
            sep="\n  ",
        )
    figure(peaks).savefig(
        Path(__file__).with_suffix(".png"), dpi=80, pil_kwargs={"optimize": True}
    )
