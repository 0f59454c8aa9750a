"""The rules of streams, memory and copies, and the calls that these devices refuse."""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import Any

import cupy
import gpu_in_numpy
import numpy as np
import pytest
from gpu_in_numpy import runtime as replaced
from gpu_in_numpy.errors import ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY

machine = gpu_in_numpy.machine()
runtime = cupy.cuda.runtime
ORDERS = range(20)


def new_stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def results_in_all_orders(work: Any) -> set[object]:
    """Return the set of results of the work in the first orders of execution."""
    results = set()
    for seed in ORDERS:
        machine.reset(seed)
        results.add(work())
    machine.reset(0)
    return results


def written(first: Any, second: Any, between: Any = lambda: None) -> int:
    """Let two streams write a byte, one after the other in program order; return the byte at the end."""
    x = cupy.zeros(1, np.uint8)
    cupy.cuda.Device().synchronize()
    runtime.memsetAsync(x.data.ptr, 1, 1, first)
    between()
    runtime.memsetAsync(x.data.ptr, 2, 1, second)
    machine.streams.finish()
    return int(x.get()[0])


def test_streams_without_a_dependency_have_no_order() -> None:
    first, second = new_stream(), new_stream()
    assert results_in_all_orders(lambda: written(first.ptr, second.ptr)) == {1, 2}
    assert results_in_all_orders(lambda: written(first.ptr, first.ptr)) == {2}
    assert results_in_all_orders(lambda: written(first.ptr, 0)) == {1, 2}  # `first` is a non-blocking stream


def test_an_event_orders_streams() -> None:
    first, second = new_stream(), new_stream()
    assert results_in_all_orders(lambda: written(first.ptr, second.ptr, lambda: second.wait_event(first.record()))) == {
        2
    }
    assert results_in_all_orders(lambda: written(first.ptr, second.ptr, lambda: first.wait_event(second.record()))) == {
        1,
        2,
    }


def test_the_legacy_default_stream_and_blocking_streams_wait_for_each_other() -> None:
    blocking, other = cupy.cuda.Stream(), cupy.cuda.Stream()
    assert results_in_all_orders(lambda: written(blocking.ptr, 0)) == {2}
    assert results_in_all_orders(lambda: written(1, blocking.ptr)) == {2}
    assert results_in_all_orders(lambda: written(2, 1)) == {2}  # the per-thread default stream is a blocking stream
    assert results_in_all_orders(lambda: written(blocking.ptr, other.ptr)) == {1, 2}
    assert results_in_all_orders(lambda: written(blocking.ptr, 2)) == {1, 2}


def test_a_blocking_stream_keeps_its_order_after_it_is_destroyed() -> None:
    def work() -> int:
        handle = runtime.streamCreate()
        return written(handle, 0, lambda: runtime.streamDestroy(handle))

    assert results_in_all_orders(work) == {2}


def test_each_thread_has_a_default_stream_of_its_own() -> None:
    def work() -> int:
        def other_thread() -> None:
            thread = threading.Thread(target=lambda: runtime.memsetAsync(x.data.ptr, 1, 1, 2))
            thread.start()
            thread.join()

        x = cupy.zeros(1, np.uint8)
        cupy.cuda.Device().synchronize()
        other_thread()
        runtime.memsetAsync(x.data.ptr, 2, 1, 2)
        machine.streams.finish()
        return int(x.get()[0])

    assert results_in_all_orders(work) == {1, 2}


def test_pageable_memory_is_read_at_the_call_and_pinned_memory_later() -> None:
    stream, x = new_stream(), cupy.zeros(4, np.uint8)
    cupy.cuda.Device().synchronize()

    def copied(source: np.ndarray) -> int:
        source[...] = 1
        runtime.memcpyAsync(x.data.ptr, source.ctypes.data, 4, runtime.memcpyHostToDevice, stream.ptr)
        source[...] = 2
        machine.streams.finish()
        return int(x.get()[0])

    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.uint8, 4)
    assert results_in_all_orders(lambda: copied(np.zeros(4, np.uint8))) == {1}
    assert results_in_all_orders(lambda: copied(pinned)) == {1, 2}


def test_a_copy_to_pageable_memory_is_done_at_its_return() -> None:
    x, y = cupy.full(4, 7, np.uint8), np.zeros(4, np.uint8)
    stream = cupy.cuda.Stream()
    runtime.memcpyAsync(y.ctypes.data, x.data.ptr, 4, runtime.memcpyDeviceToHost, stream.ptr)
    assert y.tolist() == [7] * 4


def test_a_copy_into_memory_that_is_freed_before_it_runs() -> None:
    """Such a copy is a fault in the orders in which the free runs first, as an access by a kernel would be."""
    first, second, source = new_stream(), new_stream(), cupy.ones(4, np.uint8)

    def work() -> int | None:
        runtime.deviceSynchronize()
        address = runtime.mallocAsync(4, second.ptr)
        runtime.memcpyAsync(address, source.data.ptr, 4, runtime.memcpyDeviceToDevice, first.ptr)
        if machine.streams.pending:
            runtime.freeAsync(address, second.ptr)
        machine.streams.finish()
        return machine.devices.cards[0].lost

    assert results_in_all_orders(work) == {None, ILLEGAL_ADDRESS}


def test_stream_ordered_allocations_end_with_the_memory() -> None:
    for allocate in (runtime.malloc, lambda size: runtime.mallocAsync(size, 0)):
        with pytest.raises(runtime.CUDARuntimeError) as raised:
            allocate(runtime.memGetInfo()[0] + 1)
        assert raised.value.status == OUT_OF_MEMORY


def test_an_interrupt_comes_when_the_operation_is_done() -> None:
    """The kernel of a real card continues after Ctrl-C; the wait raises, and no work is lost or done twice."""
    x, y = cupy.zeros(4, np.float32), np.empty(4, np.float32)
    cupy.cuda.Device().synchronize()
    machine.streams._eagerness = 0.0
    stream = new_stream()
    runtime.launchHostFunc(stream.ptr, lambda number: signal.raise_signal(number), signal.SIGINT)
    with stream:
        x += 1
        with pytest.raises(KeyboardInterrupt):
            x.get(out=y)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert x.get().tolist() == [1] * 4 and not machine.streams.pending and not machine.errors


def test_fresh_and_freed_memory_is_poisoned() -> None:
    assert np.isnan(cupy.empty(8, np.float32).get()).all()
    address = runtime.malloc(8)
    card = machine.devices.cards[0]
    data = card.memory.held[address]
    runtime.memset(address, 0, 8)
    machine.streams.finish()
    assert not data.any()
    runtime.free(address)
    assert (data == 255).all() and card.memory.find(address) is None


def test_freed_on_a_stream_after_its_work() -> None:
    """An asynchronous free waits only for its own stream."""
    first, second = new_stream(), new_stream()

    def work() -> bool:
        address = runtime.mallocAsync(4, first.ptr)
        runtime.memsetAsync(address, 0, 4, second.ptr)
        runtime.freeAsync(address, first.ptr)
        machine.streams.finish()
        was_late = bool(machine.devices.cards[0].memory.find(address))
        return was_late

    assert results_in_all_orders(work) == {False}


@pytest.mark.parametrize(
    ("call", "arguments", "status"),
    [
        ("streamSynchronize", (12345,), INVALID_HANDLE),
        ("eventRecord", (12345, 0), INVALID_HANDLE),
        ("graphLaunch", (12345, 0), INVALID_HANDLE),
        ("setDevice", (9,), 101),
        ("free", (0x70FF_0000_0000,), INVALID_VALUE),
        ("memset", (0x70FF_0000_0000, 0, 8), INVALID_VALUE),
    ],
)
def test_wrong_handles_and_addresses(call: str, arguments: tuple[int, ...], status: int) -> None:
    with pytest.raises(runtime.CUDARuntimeError) as raised:
        getattr(runtime, call)(*arguments)
    assert raised.value.status == status


def test_times_that_no_event_has_and_an_unknown_attribute() -> None:
    untimed, timed, unrecorded = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(), cupy.cuda.Event()
    untimed.record()
    timed.record()
    cupy.cuda.Device().synchronize()
    refused = [
        (INVALID_HANDLE, lambda: runtime.eventElapsedTime(timed.ptr, unrecorded.ptr)),
        (INVALID_HANDLE, lambda: runtime.eventElapsedTime(untimed.ptr, timed.ptr)),
        (INVALID_VALUE, lambda: runtime.deviceGetAttribute(9999, 0)),
    ]
    for status, call in refused:
        with pytest.raises(runtime.CUDARuntimeError) as raised:
            call()
        assert raised.value.status == status
    assert cupy.cuda.get_elapsed_time(timed, timed) == 0


def test_an_error_that_cython_hides_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler a callback cannot raise, so the plugin fails the test instead."""
    monkeypatch.setattr(machine, "trampolines", None)
    cupy.cuda.Stream.from_external(type("Foreign", (), {"__cuda_stream__": lambda self: (0, 12345)})()).synchronize()
    (error,) = machine.errors
    assert error.startswith("streamSynchronize in test_an_error_that_cython_hides_is_kept, ") and "12345" not in error
    machine.errors.clear()


def test_an_unknown_cupy_and_another_signature_are_refused() -> None:
    with pytest.raises(ImportError, match=r"written for CuPy 13\.\*, not 14\."):
        replaced.install(machine, ("13.",))
    capsule = ctypes.pythonapi.PyCapsule_New(1, b"intptr_t (size_t, int, int __pyx_skip_dispatch)", None)
    with pytest.raises(ImportError, match="CuPy's malloc is intptr_t .* and the stand-in's takes 1"):
        replaced._capsule(machine, "malloc", capsule, machine.heap.malloc)
    with pytest.raises(ImportError, match="CuPy is imported already"):
        gpu_in_numpy.install(("sm_80",))
