"""as_array of arrays on a real GPU: no copies."""

from __future__ import annotations

import cupy
import numpy as np
import pytest
import torch

from cupy_flash.arrays import as_array, empty, stream_of


class OnlyInterface:
    """A CUDA array of an unknown library."""

    def __init__(self, array: cupy.ndarray) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.owner = array


def test_cupy_array_is_described_in_place() -> None:
    x = cupy.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1]
    array = as_array(x, "x")
    assert (array.pointer, array.shape, array.strides) == (x.data.ptr, (2, 3, 4), (12, -4, 1))
    assert (array.dtype, array.device, array.framework) == (np.float32, f"cuda:{x.device.id}", "cupy")


def test_torch_tensor_is_described_in_place() -> None:
    x = torch.zeros(2, 3, device="cuda", dtype=torch.bfloat16)
    array = as_array(x, "x")
    assert (array.pointer, array.dtype.name, array.device) == (x.data_ptr(), "bfloat16", str(x.device))


def test_cuda_array_interface_names_the_device_of_its_pointer() -> None:
    x = cupy.zeros((3, 2), np.float16)
    array = as_array(OnlyInterface(x), "x")
    assert (array.pointer, array.device, array.framework) == (x.data.ptr, f"cuda:{x.device.id}", "cuda_array_interface")


def test_stream_is_the_callers() -> None:
    cupy_array, torch_tensor = cupy.zeros(3), torch.zeros(3, device="cuda")
    with cupy.cuda.Stream() as stream:
        assert stream_of(as_array(cupy_array, "x")) == stream.ptr
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert stream_of(as_array(torch_tensor, "x")) == torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("make", [cupy.zeros, lambda *a: torch.zeros(a[0], device="cuda")], ids=["cupy", "torch"])
def test_outputs_are_the_callers_type_on_its_device(make) -> None:
    like = as_array(make((2, 2), "float32"), "like")
    output = empty((3, 5), np.dtype(np.float32), like)
    assert type(output.result()) is type(like.owner) and output.device == like.device and output.shape == (3, 5)
