"""Tensor maps of wgmma as the driver gets them: addresses, one encoding per map, and a driver that refuses."""

from __future__ import annotations

import ctypes
import threading

import cupy
import gpu_in_numpy
import pytest
from engines import assert_right, inputs, step

import cupy_flash
from cupy_flash.gpu import cuda, tensor_map
from cupy_flash.gpu.tensor_map import ALIGNMENT, BYTES, decode

machine = gpu_in_numpy.machine()


def test_maps_are_the_second_argument_and_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded maps are cached by address, among other fields."""
    q, k, v, _ = inputs("cupy", "wgmma")
    other, encoded, encode = v.copy(), [], cuda.encode_for_gpu
    monkeypatch.setattr(cuda, "encode_for_gpu", lambda tensor_map: (encoded.append(tensor_map), encode(tensor_map))[1])
    machine.modules.launches.clear()
    results = [cupy_flash.attention(q, k, each, engine="wgmma") for each in (v, v, other)]
    for launch, values, out in zip(machine.modules.launches, (v, v, other), results, strict=True):
        maps = launch.parameters[-4 * BYTES :]
        assert (len(launch.parameters) - 4 * BYTES) % ALIGNMENT == 0
        addresses = [decode(maps[at : at + BYTES]).address for at in range(0, 4 * BYTES, BYTES)]
        assert addresses == [array.data.ptr for array in (q, k, values, out)]
    assert {x.address for x in encoded} == {array.data.ptr for array in (q, k, v, other, *results)}
    assert len(encoded) == 4 + len(results)


def test_a_new_thread_encodes_maps_in_a_context() -> None:
    """Kernels are loaded and the pool has memory, so only choosing the device makes a context current in the new
    thread.
    """
    q, k, v, _ = inputs("cupy", "wgmma", 3)
    results = []

    def call() -> None:
        results.append(cupy_flash.attention(q, k, v, engine="wgmma"))

    call()
    thread = threading.Thread(target=call)  # allocates a new `out`, whose map is not cached
    thread.start()
    thread.join()
    first, second = (x.get().tobytes() for x in results)
    assert first == second


def test_a_driver_that_refuses_a_map() -> None:
    arrays = inputs("cupy", "wgmma")
    step(arrays, "wgmma")
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        given = inputs("cupy", "wgmma", 1)  # at other addresses
        held = pool.used_bytes()
        machine.fail("cuTensorMapEncodeTiled", 1)
        with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled refuses TensorMap.*CUDA error 1"):
            step(given, "wgmma")
        assert pool.used_bytes() == held
        assert_right(step(given, "wgmma"), "wgmma", 1)


def test_an_unaligned_buffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver needs maps aligned to 64 bytes, which the encoder has to provide."""
    x = cupy.zeros((64, 64), "float16")
    given = tensor_map.TensorMap(tensor_map.DATA_TYPES["f16"], x.data.ptr, (64, 64), (128,), (64, 8), 128)
    tensor_map.encode_for_gpu(given)
    monkeypatch.setattr(tensor_map, "ALIGNMENT", 1)
    kept = []  # each buffer gets another address, because one may be aligned by chance
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        for _ in range(100):
            kept.append(ctypes.create_string_buffer(BYTES + 1))
            tensor_map.encode_for_gpu(given)
