"""Captures and graphs: the library's errors during a capture, and the rules that a driver enforces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import gpu_in_numpy
import numpy as np
import pytest
from engines import assert_right, assign, inputs, step
from gpu_in_numpy.errors import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
)

machine = gpu_in_numpy.machine()
runtime = cupy.cuda.runtime
ADD = cupy.RawKernel('extern "C" __global__ void add(float* x, float y) { *x += y; }', "add")


def new_stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def fails(status: int) -> Iterator[None]:
    with pytest.raises(runtime.CUDARuntimeError) as raised:
        yield
    assert raised.value.status == status


# The library


def test_an_allocation_that_a_capture_forbids_is_explained() -> None:
    """On a real card cudaMalloc fails like this allocator during a capture that is not relaxed."""
    arrays, stream = inputs("cupy", "simt"), new_stream()
    step(arrays, "simt")

    def forbidden(size: int) -> Any:
        raise runtime.CUDARuntimeError(CAPTURE_UNSUPPORTED)

    with stream:
        stream.begin_capture(runtime.streamCaptureModeGlobal)
        with (
            cupy.cuda.using_allocator(forbidden),
            pytest.raises(RuntimeError, match="capture in the relaxed mode, CuPy's default, or call the function once"),
        ):
            step(arrays, "simt")
        stream.end_capture()


def test_cudamalloc_during_a_capture_that_is_not_relaxed() -> None:
    stream = new_stream()
    for mode in (runtime.streamCaptureModeGlobal, runtime.streamCaptureModeThreadLocal):
        runtime.streamBeginCapture(stream.ptr, mode)
        with fails(CAPTURE_UNSUPPORTED):
            runtime.malloc(16)
        with fails(CAPTURE_INVALIDATED):
            runtime.streamEndCapture(stream.ptr)
    runtime.streamBeginCapture(stream.ptr, runtime.streamCaptureModeRelaxed)
    runtime.free(runtime.malloc(16))
    runtime.streamEndCapture(stream.ptr)


def test_a_graph_with_the_memory_of_a_warm_pool() -> None:
    """After a warm-up call, a capture of the same call allocates nothing from the driver, in any mode."""
    arrays, stream, pool = inputs("cupy", "simt"), new_stream(), cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        step(arrays, "simt")
        stream.begin_capture(runtime.streamCaptureModeGlobal)
        results = step(arrays, "simt")
        graph = stream.end_capture()
        for seed in (1, 2):
            assign(arrays, inputs("cupy", "simt", seed))
            graph.launch()
            stream.synchronize()
            assert_right(results, "simt", seed)


# The rules


def test_a_capture_of_two_streams_replays_in_order() -> None:
    first, second, x = new_stream(), new_stream(), cupy.zeros(2, np.float32)
    cupy.cuda.Device().synchronize()
    first.begin_capture()
    second.wait_event(first.record())
    ADD((1,), (1,), (x, np.float32(1)), stream=first)
    ADD((1,), (1,), (x[1:], np.float32(2)), stream=second)
    first.wait_event(second.record())
    ADD((1,), (1,), (x[1:], np.float32(4)), stream=first)
    graph = first.end_capture()
    assert x.get().tolist() == [0, 0]  # a capture runs nothing
    for _ in range(3):
        graph.launch(first)
    first.synchronize()
    assert x.get().tolist() == [3, 18]


def test_a_launch_waits_for_the_earlier_one_of_its_graph() -> None:
    first, second, results = new_stream(), new_stream(), set()
    x = cupy.zeros(1, np.float32)
    cupy.cuda.Device().synchronize()
    with first:
        first.begin_capture()
        x += 1
        x *= 2
        graph = first.end_capture()
    for seed in range(20):
        machine.reset(seed)
        x.fill(0)
        cupy.cuda.Device().synchronize()
        graph.launch(first)
        graph.launch(second)
        cupy.cuda.Device().synchronize()
        results.add(float(x.get()[0]))
    assert results == {6}


def test_a_stream_that_is_not_joined_again() -> None:
    first, second, x = new_stream(), new_stream(), cupy.zeros(1, np.float32)
    first.begin_capture()
    second.wait_event(first.record())
    ADD((1,), (1,), (x, np.float32(2)), stream=second)
    with fails(CAPTURE_UNJOINED):
        runtime.streamEndCapture(first.ptr)


def test_a_synchronisation_makes_a_capture_invalid() -> None:
    for call in (runtime.streamSynchronize, runtime.streamQuery):
        stream = new_stream()
        stream.begin_capture()
        with fails(CAPTURE_UNSUPPORTED):
            call(stream.ptr)
        with fails(CAPTURE_INVALIDATED):
            runtime.streamEndCapture(stream.ptr)


def test_an_event_from_outside_and_one_from_inside() -> None:
    stream, outside = new_stream(), new_stream()
    event = outside.record()
    stream.begin_capture()
    with fails(CAPTURE_ISOLATION):
        runtime.streamWaitEvent(stream.ptr, event.ptr)
    with fails(CAPTURE_INVALIDATED):
        runtime.streamEndCapture(stream.ptr)
    for call in (runtime.eventSynchronize, runtime.eventQuery):
        stream.begin_capture()
        inside = stream.record()
        with fails(CAPTURED_EVENT):
            call(inside.ptr)
        with fails(CAPTURE_INVALIDATED):
            runtime.streamEndCapture(stream.ptr)


def test_the_legacy_default_stream_takes_part_in_no_capture() -> None:
    stream = new_stream()
    stream.begin_capture()
    inside = stream.record()
    with fails(CAPTURE_IMPLICIT):
        runtime.streamWaitEvent(1, inside.ptr)
    with fails(CAPTURE_INVALIDATED):
        runtime.streamEndCapture(stream.ptr)


def test_what_a_thread_local_capture_forbids_is_allowed_in_another_thread() -> None:
    stream, freed = new_stream(), []

    def other_thread() -> None:
        runtime.free(runtime.malloc(16))
        freed.append(True)

    for mode in (runtime.streamCaptureModeThreadLocal, runtime.streamCaptureModeGlobal):
        runtime.streamBeginCapture(stream.ptr, mode)
        for call in (lambda: runtime.free(1 << 47), lambda: runtime.hostAlloc(16, 0)):
            with fails(CAPTURE_UNSUPPORTED):
                call()
        with fails(CAPTURE_INVALIDATED):
            runtime.streamEndCapture(stream.ptr)
    runtime.streamBeginCapture(stream.ptr, runtime.streamCaptureModeThreadLocal)
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    runtime.streamEndCapture(stream.ptr)
    assert freed == [True]


def test_the_legacy_default_stream_and_a_blocking_stream_that_captures() -> None:
    stream, memory = cupy.cuda.Stream(), cupy.cuda.alloc(16)
    stream.begin_capture()
    with fails(CAPTURE_IMPLICIT):
        runtime.memsetAsync(memory.ptr, 0, 16, 0)
    with fails(CAPTURE_INVALIDATED):
        runtime.streamEndCapture(stream.ptr)


def test_an_end_without_a_beginning() -> None:
    stream = new_stream()
    with fails(CAPTURE_UNMATCHED):
        runtime.streamEndCapture(stream.ptr)
