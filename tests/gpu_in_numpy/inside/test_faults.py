"""Calls that fail: the caller gets one error that states the cause, nothing leaks, and the next call works."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import cupy
import gpu_in_numpy
import pytest
from engines import assert_right, inputs, on_every_engine, step
from gpu_in_numpy.errors import (
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    INVALID_VALUE,
    LAUNCH_OUT_OF_RESOURCES,
    NO_BINARY_FOR_GPU,
    OUT_OF_MEMORY,
)
from tiers import exhaustive

from cupy_flash.gpu import cuda

machine = gpu_in_numpy.machine()
DriverError = cupy.cuda.driver.CUDADriverError
OutOfMemoryError = cupy.cuda.memory.OutOfMemoryError


class Scarce:
    """An allocator of CuPy that fails once, after `after` allocations."""

    def __init__(self, after: int) -> None:
        self.pool, self.left = cupy.cuda.MemoryPool(), after

    def __call__(self, size: int) -> Any:
        self.left -= 1
        if self.left == -1:
            raise OutOfMemoryError(size, self.pool.used_bytes())
        return self.pool.malloc(size)

    def held(self) -> int:
        gc.collect()
        return int(self.pool.used_bytes())


def given(engine: str) -> list[Any]:
    """Return q, k, v and dout; q has to be copied, in the forward and in the backward."""
    q, *others = inputs("cupy", engine)
    return [q.T.copy().T, *others]


def allocations_of_a_step(engine: str, deterministic: bool) -> int:
    scarce, arrays = Scarce(10**6), given(engine)
    with cupy.cuda.using_allocator(scarce):
        step(arrays, engine, deterministic=deterministic)
    return 10**6 - scarce.left


@pytest.mark.parametrize("deterministic", [False, exhaustive(True)])
@on_every_engine
def test_out_of_memory_at_every_allocation(engine: str, deterministic: bool) -> None:
    count, arrays = allocations_of_a_step(engine, deterministic), given(engine)
    assert count > 6  # the step allocates out, lse, dq, dk, dv, two copies and workspaces
    for after in range(count):
        scarce = Scarce(after)
        with cupy.cuda.using_allocator(scarce):
            with pytest.raises(OutOfMemoryError, match="Out of memory allocating"):
                step(arrays, engine, deterministic=deterministic)
            assert scarce.held() == 0
    with cupy.cuda.using_allocator(scarce):
        assert_right(step(arrays, engine, deterministic=deterministic), engine)
    assert scarce.held() == 0


LOADING = {
    "cuModuleLoad": NO_BINARY_FOR_GPU,
    "cuModuleGetFunction": OUT_OF_MEMORY,
    "cuFuncSetAttribute": INVALID_VALUE,
}


@pytest.mark.parametrize("call", LOADING)
def test_a_kernel_that_cannot_be_loaded(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_loaded", {})
    cupy.clear_memo()  # CuPy keeps loaded modules
    arrays = inputs("cupy", "simt")
    fails(lambda: step(arrays, "simt"), call, LOADING[call])
    assert not cuda._loaded and not cuda._loading.locked()
    assert_right(step(arrays, "simt"), "simt")


@pytest.mark.parametrize("after", range(4))
def test_a_launch_that_fails(after: int) -> None:
    arrays = inputs("cupy", "simt")
    step(arrays, "simt")  # loads the kernels
    fails(lambda: step(arrays, "simt"), "cuLaunchKernel", LAUNCH_OUT_OF_RESOURCES, after)
    assert_right(step(arrays, "simt"), "simt")


def fails(work: Callable[[], object], call: str, status: int, after: int = 0) -> None:
    """Assert that the block raises this status, and that nothing but its arguments stays allocated."""
    scarce = Scarce(10**6)
    machine.fail(call, status, after)
    with cupy.cuda.using_allocator(scarce):
        with pytest.raises(DriverError) as raised:
            work()
        assert raised.value.status == status and not machine.faults
        del raised
        assert scarce.held() == 0


def test_after_a_failed_kernel_every_call_raises() -> None:
    """The device is lost to this process, as on a real card."""
    arrays = inputs("cupy", "simt")
    step(arrays, "simt")
    machine.streams.finish()
    machine.devices.cards[0].lost = ILLEGAL_ADDRESS
    for _ in range(2):
        with pytest.raises((DriverError, cupy.cuda.runtime.CUDARuntimeError)) as raised:
            step(arrays, "simt")
        assert raised.value.status == ILLEGAL_ADDRESS
    machine.reset(0)
    assert_right(step(arrays, "simt"), "simt")


def test_a_stream_that_has_been_destroyed() -> None:
    arrays = inputs("cupy", "simt")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.streamDestroy(stream.ptr)
    with stream, pytest.raises((DriverError, cupy.cuda.runtime.CUDARuntimeError)) as raised:
        step(arrays, "simt")
    assert raised.value.status == INVALID_HANDLE
    machine.reset(0)
    stream.ptr = 0  # otherwise the destructor of the stream would destroy it again
    assert_right(step(arrays, "simt"), "simt")
