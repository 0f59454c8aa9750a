"""The engines of this GPU, each with a dtype; a forward and backward on CuPy or torch arrays; streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, Case, Result, check
from on_gpu import in_numpy, torch_has_gpu

import cupy_flash
from cupy_flash import device
from cupy_flash.engines import tcgen05

FRAMEWORKS = ["cupy"]
if torch_has_gpu():
    import torch

    FRAMEWORKS.append("torch")

HALF = "float16" if device.gpu(0).arch == "sm_75" else "bfloat16"
ENGINES = {"simt": "float32", "mma": HALF}
if device.gpu(0).arch == "sm_90a":
    ENGINES["wgmma"] = "bfloat16"
if device.gpu(0).arch in (tcgen05.ARCHES or ()):
    ENGINES["tcgen05"] = "bfloat16"

on_every_engine = pytest.mark.parametrize("engine", ENGINES)
on_both_frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)

BATCH, LENGTH, HEADS, HEAD_DIM = (1, 8, 2, 8) if in_numpy() else (2, 100, 4, 64)


def case(engine: str, seed: int = 0) -> Case:
    """Return the case that `inputs` draws and `step` computes."""
    sizes = LENGTH, LENGTH, BATCH, HEADS, HEADS, HEAD_DIM, HEAD_DIM
    return Case(*sizes, ENGINES[engine], causal=True, dlse=False, seed=seed)


def inputs(framework: str, engine: str, seed: int = 0) -> list[Any]:
    """Return q, k, v and dout of a case on the GPU."""
    call = case(engine, seed).call()
    return [on_gpu(framework, x) for x in (call.q, call.k, call.v, call.dout)]


def on_gpu(framework: str, x: np.ndarray) -> Any:
    """Copy a NumPy array to a CuPy or torch array on the GPU."""
    if framework == "cupy":
        return cupy.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def on_host(x: Any) -> np.ndarray:
    """Copy a CuPy or torch array to NumPy, after the work on the current stream."""
    if isinstance(x, cupy.ndarray):
        return cupy.asnumpy(x)
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return x.cpu().numpy()


def empty(framework: str, engine: str, length: int) -> list[Any]:
    """Return uninitialised q, k, v and dout with `length` tokens."""
    shape = BATCH, length, HEADS, HEAD_DIM
    if framework == "cupy":
        return [cupy.empty(shape, DTYPES[ENGINES[engine]]) for _ in range(4)]
    return [torch.empty(shape, dtype=getattr(torch, ENGINES[engine]), device="cuda") for _ in range(4)]


def bits(x: Any) -> Any:
    """View a contiguous array as bytes, so that arrays of any dtype can be copied and compared."""
    return x.view(cupy.uint8 if isinstance(x, cupy.ndarray) else torch.uint8)


def assign(arrays: list[Any], values: list[Any]) -> None:
    """Copy values into existing arrays on the current stream."""
    for array, value in zip(arrays, values, strict=True):
        bits(array)[...] = bits(value)


def differ(actual: list[Any], expected: list[Any]) -> Any:
    """Return the number of arrays whose bits differ, as a scalar array on the GPU."""
    return sum((bits(a) != bits(b)).any() for a, b in zip(actual, expected, strict=True))


def step(arrays: list[Any], engine: str, **options: Any) -> list[Any]:
    """Compute out, dq, dk and dv from q, k, v and dout; torch uses autograd."""
    q, k, v, dout = arrays
    options |= dict(causal=True, engine=engine)
    if isinstance(q, cupy.ndarray):
        out, vjp = cupy_flash.attention_vjp(q, k, v, **options)
        return [out, *vjp(dout)[:3]]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cupy_flash.attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_right(results: list[Any], engine: str, seed: int = 0) -> None:
    """Assert that the results of `step` on `inputs` match the formula."""
    out, dq, dk, dv = map(on_host, results)
    check(case(engine, seed), Result(out, None, dq, dk, dv, None, None), only=("out", "dq", "dk", "dv"))


def new_stream() -> Any:
    """Create a stream that does not synchronise with the default stream."""
    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Make a stream current in CuPy, and in torch if torch has a GPU."""
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)) if torch_has_gpu() else nullcontext():
        yield


SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make a device current in CuPy, and in torch if torch has a GPU."""
    with cupy.cuda.Device(index), torch.cuda.device(index) if torch_has_gpu() else nullcontext():
        yield


def library_of(framework: str) -> Any:
    """Return the module of a framework."""
    return cupy if framework == "cupy" else torch


def keep_busy(milliseconds: float) -> None:
    """Enqueue long work on CuPy's current stream, so that later work on it has to wait."""
    cycles = 1 if in_numpy() else int(2e6 * milliseconds)
    cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(cycles),))


def synchronise() -> None:
    """Wait for all work on the current device."""
    cupy.cuda.Device().synchronize()
