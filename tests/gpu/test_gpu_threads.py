"""Threads that call at the same time, forward and backward, on separate streams or on one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    assert_right,
    inputs,
    new_stream,
    on_both_frameworks,
    on_every_engine,
    on_host,
    on_stream,
    step,
    synchronise,
)
from on_gpu import in_numpy

from cupy_flash.engines.launch import Launch
from cupy_flash.gpu import cuda
from cupy_flash.jit import kernel_cache
from cupy_flash.jit.nvrtc import Compiled

THREADS, REPEATS = (2, 2) if in_numpy() else (8, 10)


def in_threads(framework: str, engine: str, streams: list[Any], repeats: int) -> list[list[list[np.ndarray]]]:
    """Return results by thread and repetition, copied to the host; each thread has inputs of its own."""
    values = [inputs(framework, engine, seed) for seed in range(THREADS)]
    together = threading.Barrier(THREADS)
    synchronise()

    def work(index: int) -> list[list[np.ndarray]]:
        with on_stream(streams[index]):
            together.wait()
            given = [step(values[index], engine, deterministic=True) for _ in range(repeats)]
            return [[on_host(x) for x in results] for results in given]

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(work, range(THREADS)))


@pytest.mark.parametrize("shared", [False, True], ids=["a-stream-each", "one-stream"])
@on_both_frameworks
@on_every_engine
def test_threads_do_not_affect_each_other(engine: str, framework: str, shared: bool) -> None:
    streams = [new_stream()] * THREADS if shared else [new_stream() for _ in range(THREADS)]
    for seed, given in enumerate(in_threads(framework, engine, streams, REPEATS)):
        expected = step(inputs(framework, engine, seed), engine, deterministic=True)
        for results in given:
            for actual, alone in zip(results, expected, strict=True):
                assert actual.tobytes() == on_host(alone).tobytes()
        if seed == 0:
            assert_right(expected, engine)


@on_every_engine
def test_threads_that_start_without_compiled_kernels(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_loaded", {})
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "kernels"))
    kernel_cache.compiled.cache_clear()
    compile_launch, compiled = cuda.compile_launch, []

    def counted(launch: Launch, arch: str) -> Compiled:
        compiled.append(launch)
        return compile_launch(launch, arch)

    monkeypatch.setattr(cuda, "compile_launch", counted)
    streams = [new_stream() for _ in range(THREADS)]
    for seed, (results,) in enumerate(in_threads("cupy", engine, streams, 1)):
        expected = step(inputs("cupy", engine, seed), engine, deterministic=True)
        for actual, alone in zip(results, expected, strict=True):
            assert actual.tobytes() == on_host(alone).tobytes()
    assert len(compiled) == len(cuda._loaded) > 2  # each kernel was compiled once
    kernel_cache.compiled.cache_clear()
