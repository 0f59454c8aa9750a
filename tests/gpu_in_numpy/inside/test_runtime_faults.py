"""Failures of runtime calls in CuPy's own code, raised by trampolines that need a C compiler."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import gpu_in_numpy
import pytest
from engines import ENGINES, assert_right, inputs, new_stream, step
from gpu_in_numpy.errors import CAPTURE_UNSUPPORTED, INVALID_HANDLE, NOT_SUPPORTED, OUT_OF_MEMORY
from tiers import exhaustive

import cupy_flash

machine = gpu_in_numpy.machine()
runtime = cupy.cuda.runtime


@contextmanager
def fails(call: str, status: int, after: int = 0) -> Iterator[None]:
    """Assert that the block raises CuPy's error of this status if the call fails after `after` successes."""
    machine.fail(call, status, after)
    with pytest.raises(runtime.CUDARuntimeError) as raised:
        yield
    assert raised.value.status == status and not machine.faults


CALLS = {
    "malloc": lambda: cupy.cuda.Memory(16),
    "mallocAsync": lambda: cupy.cuda.malloc_async(16),
    "hostAlloc": lambda: cupy.cuda.PinnedMemory(16),
    "memcpyAsync": lambda: cupy.cuda.alloc(16).copy_from_device_async(cupy.cuda.alloc(16), 16),
    "memsetAsync": lambda: cupy.cuda.alloc(16).memset_async(0, 16),
    "streamSynchronize": lambda: new_stream().synchronize(),
    "streamWaitEvent": lambda: new_stream().wait_event(cupy.cuda.Event()),
    "eventCreateWithFlags": lambda: cupy.cuda.Event(),
    "eventRecord": lambda: cupy.cuda.Event().record(),
    "deviceSynchronize": lambda: cupy.cuda.Device().synchronize(),
    "getDeviceCount": lambda: runtime.getDeviceCount(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_raises(call: str) -> None:
    with fails(call, NOT_SUPPORTED):
        CALLS[call]()
    CALLS[call]()


class Interface:
    """A CUDA array that names the stream on which it is ready."""

    def __init__(self, array: cupy.ndarray, stream: Any) -> None:
        self.owner, self.__cuda_array_interface__ = array, array.__cuda_array_interface__ | {"stream": stream.ptr}


@pytest.mark.parametrize("call", ["eventCreateWithFlags", "eventRecord", "streamWaitEvent"])
def test_a_wait_for_an_inputs_stream_that_fails(call: str) -> None:
    """The call raises before any kernel runs, and frees its memory."""
    producer, pool = new_stream(), cupy.cuda.MemoryPool()
    *given, dout = inputs("cupy", "simt")
    machine.modules.launches.clear()
    with cupy.cuda.using_allocator(pool.malloc):
        with fails(call, INVALID_HANDLE):
            cupy_flash.attention(*(Interface(x, producer) for x in given), causal=True, engine="simt")
        gc.collect()
        assert pool.used_bytes() == 0 and not machine.modules.launches
    assert_right(step([*given, dout], "simt"), "simt")


@pytest.mark.parametrize("engine", ["simt", *(exhaustive(name) for name in ENGINES if name != "simt")])
def test_out_of_memory_at_every_cudamalloc(engine: str) -> None:
    """The pool frees its blocks, collects garbage and retries, twice: one failure raises nothing, three raise an
    error.
    """
    arrays = inputs("cupy", engine)
    step(arrays, engine)
    count = mallocs(lambda: step(arrays, engine))
    assert count > 1
    for after in range(count):
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            machine.fail("malloc", OUT_OF_MEMORY, after)
            assert_right(step(arrays, engine), engine)
            assert not machine.faults
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            machine.fail("malloc", OUT_OF_MEMORY, after, times=3)
            with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Out of memory allocating"):
                step(arrays, engine)
            assert not machine.faults
            gc.collect()
            assert pool.used_bytes() == 0
            assert_right(step(arrays, engine), engine)


def mallocs(work: Any) -> int:
    """Return the number of cudaMalloc calls of the work, with an empty pool."""
    machine.fail("malloc", OUT_OF_MEMORY, 10**6)
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        work()
    return 10**6 - machine.faults.pop("malloc")[0]


def test_a_capture_that_forbids_the_cudamalloc_of_an_empty_pool() -> None:
    arrays, stream = inputs("cupy", "simt"), new_stream()
    step(arrays, "simt")
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        stream.begin_capture(runtime.streamCaptureModeGlobal)
        with pytest.raises(RuntimeError, match="capture in the relaxed mode, CuPy's default, or"):
            step(arrays, "simt")
        with pytest.raises(runtime.CUDARuntimeError):  # the refused call has made the capture invalid
            stream.end_capture()
    assert machine.refusals[0].startswith(f"CUDA_ERROR_CAPTURE_UNSUPPORTED ({CAPTURE_UNSUPPORTED}): cudaMalloc")
