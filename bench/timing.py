"""Interleaved timing: a disturbance of the machine affects all implementations alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np

from .implementations import Implementation
from .model import Ceilings

Sample = TypeVar("Sample")
SECONDS = 1.0  # time budget per implementation and case; at least LEAST_REPEATS samples are taken
BESIDE = 0.25  # that of implementations whose ratio to another one is not of interest
LEAST_REPEATS = 3
SLOW = 0.25  # seconds from which on a call no longer gains by the one before it


def interleave(
    calls: Mapping[str, Callable[[], Sample]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    beside: Collection[str] = (),
) -> dict[str, list[Sample]]:
    """Sample every call in up to `repeats` rounds; each round starts with the next call.

    The calls named in `beside` sit out from BESIDE seconds on, others from SECONDS on.

    A call runs twice per sample and the second result counts: the first run meets the caches, pages and spinning
    threads that the previous call left behind. Calls that take SLOW or longer run once, except in their first round.
    """
    names = list(calls)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    spent = dict.fromkeys(names, 0.0)
    latest = dict.fromkeys(names, 0.0)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            if repeat >= LEAST_REPEATS and spent[name] >= (BESIDE if name in beside else SECONDS):
                continue
            if latest[name] < SLOW:
                calls[name]()
            start = clock()
            samples[name].append(calls[name]())
            latest[name] = clock() - start
            spent[name] += latest[name]
    return samples


def timed(implementation: Implementation, training: bool) -> Callable[[], tuple[float, float]]:
    """Return a call that measures the seconds of the forward and, in training, of the backward (else 0)."""

    def call() -> tuple[float, float]:
        start = time.perf_counter()
        saved = implementation.forward()
        middle = time.perf_counter()
        if not training:
            return middle - start, 0.0
        implementation.backward(saved)
        return middle - start, time.perf_counter() - middle

    return call


def measure_ceilings(dtype: str) -> Ceilings:
    """Measure NumPy's matmul in the accumulation dtype of attention, and a copy; the best of 9."""
    size = 1024
    x = np.ones((size, size), "float64" if dtype == "float64" else "float32")
    source, target = np.ones(2**26, np.uint8), np.empty(2**26, np.uint8)
    product = np.empty_like(x)
    samples = interleave(
        {
            "matmul": _seconds(lambda: np.matmul(x, x, out=product)),
            "copy": _seconds(lambda: np.copyto(target, source)),
        },
        repeats=9,
    )
    return Ceilings(2 * size**3 / min(samples["matmul"]), 2 * source.nbytes / min(samples["copy"]))


def _seconds(function: Callable[[], Any]) -> Callable[[], float]:
    def call() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return call
