"""as_array of arrays on a real GPU makes no copies."""

from __future__ import annotations

import cupy
import numpy as np
from engines import on_both_frameworks, on_gpu

from cupy_flash.arrays import as_array, empty, stream_of


class OnlyInterface:
    """A CUDA array of an unknown library, with __cuda_array_interface__ only."""

    def __init__(self, array: cupy.ndarray) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.owner = array


def test_cupy_array_is_described_in_place() -> None:
    x = cupy.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1]
    array = as_array(x, "x")
    assert (array.pointer, array.shape, array.strides) == (x.data.ptr, (2, 3, 4), (12, -4, 1))
    assert (array.dtype, array.device, array.framework) == (np.float32, f"cuda:{x.device.id}", "cupy")


def test_cuda_array_interface_names_the_device_of_its_pointer() -> None:
    x = cupy.zeros((3, 2), np.float16)
    array = as_array(OnlyInterface(x), "x")
    assert (array.pointer, array.device, array.framework) == (x.data.ptr, f"cuda:{x.device.id}", "cuda_array_interface")


def test_stream_is_the_current_one() -> None:
    x = cupy.zeros(3)
    with cupy.cuda.Stream() as stream:
        assert stream_of(as_array(x, "x")) == stream.ptr


@on_both_frameworks
def test_outputs_are_the_callers_type_on_its_device(framework: str) -> None:
    like = as_array(on_gpu(framework, np.zeros((2, 2), np.float32)), "like")
    output = empty((3, 5), np.dtype(np.float32), like)
    assert type(output.result()) is type(like.owner) and output.device == like.device and output.shape == (3, 5)
