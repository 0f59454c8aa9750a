"""Two devices that cannot access each other's memory, and kernels loaded for one of them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import cupy
import gpu_in_numpy
import numpy as np
import pytest
from engines import assert_right, inputs, on_every_engine, step
from gpu_in_numpy.errors import ILLEGAL_ADDRESS, INVALID_HANDLE, CudaError

import cupy_flash
from cupy_flash.gpu import cuda

machine = gpu_in_numpy.machine()
ADD = cupy.RawKernel('extern "C" __global__ void add(float* x) { x[threadIdx.x] += 1; }', "add")


def test_arrays_on_two_devices_are_refused() -> None:
    q, k, v, _ = inputs("cupy", "simt")
    with cupy.cuda.Device(1):
        other = cupy.asarray(cupy.asnumpy(k))
    with pytest.raises(ValueError, match="cuda:1"):
        cupy_flash.attention(q, other, v)


@on_every_engine
def test_a_call_leaves_the_current_device_and_uses_that_of_its_arrays(engine: str) -> None:
    with cupy.cuda.Device(1):
        arrays = inputs("cupy", engine)
    machine.modules.launches.clear()
    results = step(arrays, engine)
    assert cupy.cuda.runtime.getDevice() == 0
    assert {launch.card.index for launch in machine.modules.launches} == {1}
    with cupy.cuda.Device(1):
        assert_right(results, engine)


class Dlpack:
    """Device memory of a library that has only DLPack."""

    def __init__(self, array: cupy.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **words: object) -> object:
        with self.array.device:
            return self.array.__dlpack__(**words)


def test_a_copy_is_made_on_the_device_of_its_array() -> None:
    """q is not contiguous, so it is copied; device 0 is current, and the array is on device 1."""
    with cupy.cuda.Device(1):
        q, k, v, dout = inputs("cupy", "simt")
        q = q.T.copy().T
    machine.modules.launches.clear()
    out, vjp = cupy_flash.attention_vjp(*map(Dlpack, (q, k, v)), causal=True)
    results = [out, *vjp(dout)[:3]]
    assert {launch.card.index for launch in machine.modules.launches} == {1}
    with cupy.cuda.Device(1):
        assert_right(results, "simt")


def test_a_new_thread_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver loads kernels and encodes maps only after a runtime call has made a context current."""
    arrays, results = inputs("cupy", "simt"), []
    monkeypatch.setattr(cuda, "_loaded", {})

    def work() -> None:
        assert not machine.devices.has_context
        results.extend(step(arrays, "simt"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_right(results, "simt")


def test_an_access_to_the_other_devices_memory_faults() -> None:
    with cupy.cuda.Device(1):
        remote = cupy.zeros(4, np.float32)
        machine.streams.finish()
    ADD((1,), (4,), (remote,))
    machine.streams.finish()
    (error,) = machine.errors
    assert error.startswith("add on device 0: OutOfBounds") and machine.devices.cards[0].lost == ILLEGAL_ADDRESS
    machine.reset(0)


def test_an_access_to_freed_memory_faults() -> None:
    x = cupy.zeros(4, np.float32)
    machine.streams.finish()
    address = cupy.cuda.runtime.malloc(16)
    freed = cupy.ndarray(4, np.float32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, 16, None), 0))
    cupy.cuda.runtime.free(address)
    ADD((1,), (4,), (freed,))
    with pytest.raises(CudaError, match="OutOfBounds"):
        machine.streams.streamSynchronize(0)
    assert x is not None and machine.errors
    machine.reset(0)


def test_a_kernel_and_a_stream_of_another_device_are_refused() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Device(1):
        x = cupy.zeros(4, np.float32)
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALID_HANDLE"):
            ADD((1,), (4,), (x,), stream=SimpleNamespace(ptr=stream.ptr))
    assert machine.refusals[-1].startswith(f"CUDA_ERROR_INVALID_HANDLE ({INVALID_HANDLE}): add of device 1")


def test_an_event_is_recorded_on_its_own_device() -> None:
    event = cupy.cuda.Event()
    with cupy.cuda.Device(1):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError) as raised:
            event.record(cupy.cuda.Stream())
        cupy.cuda.Stream().wait_event(event)
    assert raised.value.status == INVALID_HANDLE


def test_a_kernel_of_an_unloaded_module_is_not_launched() -> None:
    kernel = cupy.RawModule(code='extern "C" __global__ void idle() { }').get_function("idle")
    kernel((1,), (1,), ())
    owner = machine.modules._kernels[kernel.kernel.ptr].owner
    loaded = machine.modules._modules[owner]
    machine.modules.cuModuleUnload(owner)
    with pytest.raises(cupy.cuda.driver.CUDADriverError) as raised:
        kernel((1,), (1,), ())
    assert raised.value.status == INVALID_HANDLE
    machine.modules._modules[owner] = loaded  # CuPy unloads the module when it frees its own object


def test_an_empty_array_of_an_exporter_is_on_the_device_of_the_others() -> None:
    """The pointer of an empty array is 0, which does not identify a device."""

    class Exporter:
        def __init__(self, array: cupy.ndarray) -> None:
            self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__

    with cupy.cuda.Device(1):
        q, empty = cupy.ones((1, 4, 2, 16), np.float32), cupy.zeros((1, 0, 2, 16), np.float32)
        out = cupy_flash.attention(Exporter(q), Exporter(empty), Exporter(empty))
        assert out.device.id == 1 and not cupy.asnumpy(out).any()
