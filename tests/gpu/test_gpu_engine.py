"""The engine on a real GPU: the caller's stream, device and array types, nothing on the host, CUDA graphs."""

from __future__ import annotations

import cupy
import numpy as np
import pytest
import torch
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import reference
from cupy_flash.backends import cuda

SHAPE = (2, 100, 4, 64)


@pytest.fixture
def values() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3))


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no kernel had been loaded."""
    monkeypatch.setattr(cuda, "_loaded", {})


def close(actual: np.ndarray, values: tuple[np.ndarray, ...]) -> None:
    exact, _ = reference.attention(*values, causal=True)
    low, _ = reference.attention(*values, causal=True, dtype=np.dtype(np.float32))
    assert_matches_reference(actual, exact, low, np.dtype(np.float32), "out")


def test_cupy_in_cupy_out(values) -> None:
    q, k, v = map(cupy.asarray, values)
    out, vjp = cupy_flash.attention_vjp(q, k, v, causal=True)
    gradients = vjp(out)
    assert all(type(x) is cupy.ndarray and x.device == q.device for x in (out, *gradients[:3]))
    close(cupy.asnumpy(out), values)


def test_torch_in_torch_out(values) -> None:
    tensors = [torch.from_numpy(x).cuda().requires_grad_() for x in values]
    out = cupy_flash.attention(*tensors, causal=True)
    assert type(out) is torch.Tensor and out.device == tensors[0].device
    out.square().sum().backward()
    assert all(x.grad.device == x.device and bool(x.grad.isfinite().all()) for x in tensors)
    close(out.detach().cpu().numpy(), values)


def test_runs_on_the_current_cupy_stream(values) -> None:
    """The stream first waits and then writes q: any other stream would read the zeros."""
    q, k, v = map(cupy.asarray, values)
    late = cupy.zeros_like(q)
    cupy_flash.attention(q, k, v, causal=True)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        busy = cupy.ones((4096, 4096), np.float32)
        for _ in range(20):
            busy = busy @ busy
        late[...] = q
        out = cupy_flash.attention(late, k, v, causal=True)
        stream.synchronize()
    close(cupy.asnumpy(out), values)


def test_runs_on_the_current_torch_stream(values) -> None:
    q, k, v = (torch.from_numpy(x).cuda() for x in values)
    late = torch.zeros_like(q)
    cupy_flash.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        out = cupy_flash.attention(late, k, v, causal=True)
    stream.synchronize()
    close(out.cpu().numpy(), values)


@pytest.mark.parametrize("index", range(cupy.cuda.runtime.getDeviceCount()))
def test_runs_on_the_device_of_its_arrays(index, values) -> None:
    with cupy.cuda.Device(index):
        q, k, v = map(cupy.asarray, values)
    out = cupy_flash.attention(q, k, v, causal=True)
    assert out.device.id == index
    close(cupy.asnumpy(out), values)


def test_graph_of_cupy_after_compile(values, fresh_process) -> None:
    """A capture refuses what waits and what copies to the host, so there is neither in forward and backward."""
    q, k, v = map(cupy.asarray, values)
    cupy_flash.compile(dtype="float32", head_dim=64, causal=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
        gradients = cupy_flash.attention_backward(out, q, k, v, out, lse, causal=True)
        graph = stream.end_capture()
        fresh = tuple(x[::-1].copy() for x in values)
        for array, value in zip((q, k, v), fresh, strict=True):
            array.set(value)
        graph.launch()
        stream.synchronize()
        again = cupy_flash.attention_backward(out, q, k, v, out, lse, causal=True)
        assert all(bool((a == b).all()) for a, b in zip(gradients[:3], again[:3], strict=True))
    close(cupy.asnumpy(out), fresh)


def test_graph_of_torch_after_compile(values, fresh_process) -> None:
    q, k, v = (torch.from_numpy(x).cuda() for x in values)
    cupy_flash.compile(dtype=torch.float32, head_dim=64, causal=True, backward=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cupy_flash.attention(q, k, v, causal=True)
    fresh = tuple(x[::-1].copy() for x in values)
    for tensor, value in zip((q, k, v), fresh, strict=True):
        tensor.copy_(torch.from_numpy(value))
    graph.replay()
    torch.cuda.synchronize()
    close(out.cpu().numpy(), fresh)


def test_capture_without_compile_says_what_to_do(values, fresh_process) -> None:
    q, k, v = map(cupy.asarray, values)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"call cupy_flash.compile\(...\)"):
                cupy_flash.attention(q, k, v, causal=True)
        finally:
            stream.end_capture()
