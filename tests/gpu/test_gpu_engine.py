"""Every engine on a real GPU: results right, in the caller's kind of array and on its device; a capture too early."""

from __future__ import annotations

import cupy
import pytest
import torch
from engines import assert_right, inputs, new_stream, on_both_frameworks, on_every_engine, step

import cupy_flash
from cupy_flash.backends import cuda


@on_both_frameworks
@on_every_engine
def test_arrays_come_back_as_they_were_given(engine: str, framework: str) -> None:
    arrays = inputs(framework, engine)
    results = step(arrays, engine)
    for result, array in zip(results, arrays, strict=True):
        assert (type(result), result.device, result.dtype) == (type(array), array.device, array.dtype)
    assert_right(results, engine)


@pytest.mark.parametrize("index", range(cupy.cuda.runtime.getDeviceCount()))
@on_both_frameworks
@on_every_engine
def test_runs_on_the_device_of_its_arrays(engine: str, framework: str, index: int) -> None:
    with cupy.cuda.Device(index), torch.cuda.device(index):
        arrays = inputs(framework, engine)
    results = step(arrays, engine)
    assert [x.device for x in results] == [arrays[0].device] * 4
    with cupy.cuda.Device(index):
        assert_right(results, engine)


@on_every_engine
def test_capture_without_compile_says_what_to_do(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_loaded", {})  # as if no kernel had been loaded
    q, k, v, _ = inputs("cupy", engine)
    cupy.cuda.Device().synchronize()
    stream = new_stream()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"call cupy_flash.compile\(...\)"):
                cupy_flash.attention(q, k, v, causal=True, engine=engine)
        finally:
            stream.end_capture()
