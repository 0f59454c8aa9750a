"""The engines of this GPU with a dtype each; a forward and backward on CuPy or torch arrays; streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
import torch
from cases import DTYPES, Case, Result, check

import cupy_flash
from cupy_flash import device

ENGINES = {"simt": "float32", "mma": "bfloat16"}
if device.gpu(0).arch == "sm_90a":
    ENGINES["wgmma"] = "bfloat16"

on_every_engine = pytest.mark.parametrize("engine", ENGINES)
on_both_frameworks = pytest.mark.parametrize("framework", ["cupy", "torch"])

HEADS, HEAD_DIM = 4, 64


def case(engine: str, seed: int = 0) -> Case:
    """The case that `step` computes from `inputs`."""
    return Case(100, 100, 2, HEADS, HEADS, HEAD_DIM, HEAD_DIM, ENGINES[engine], causal=True, dlse=False, seed=seed)


def inputs(framework: str, engine: str, seed: int = 0) -> list[Any]:
    """q, k, v and dout of a case on the GPU."""
    call = case(engine, seed).call()
    return [on_gpu(framework, x) for x in (call.q, call.k, call.v, call.dout)]


def on_gpu(framework: str, x: np.ndarray) -> Any:
    """A CuPy or torch copy of a NumPy array."""
    if framework == "cupy":
        return cupy.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def on_host(x: Any) -> np.ndarray:
    """A NumPy copy of a CuPy or torch array, ordered after the work on the current stream."""
    if isinstance(x, cupy.ndarray):
        return cupy.asnumpy(x)
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return x.cpu().numpy()


def empty(framework: str, engine: str, length: int) -> list[Any]:
    """Uninitialised q, k, v and dout of the given length."""
    shape = 2, length, HEADS, HEAD_DIM
    if framework == "cupy":
        return [cupy.empty(shape, DTYPES[ENGINES[engine]]) for _ in range(4)]
    return [torch.empty(shape, dtype=getattr(torch, ENGINES[engine]), device="cuda") for _ in range(4)]


def bits(x: Any) -> Any:
    """The bytes of a contiguous array, for copies and comparisons of any dtype."""
    return x.view(cupy.uint8 if isinstance(x, cupy.ndarray) else torch.uint8)


def assign(arrays: list[Any], values: list[Any]) -> None:
    """Copy values into arrays on the current stream."""
    for array, value in zip(arrays, values, strict=True):
        bits(array)[...] = bits(value)


def differ(actual: list[Any], expected: list[Any]) -> Any:
    """Number of arrays that are not bitwise equal, as a scalar array on the GPU."""
    return sum((bits(a) != bits(b)).any() for a, b in zip(actual, expected, strict=True))


def step(arrays: list[Any], engine: str, **options: Any) -> list[Any]:
    """out, dq, dk and dv from q, k, v and dout; for torch by autograd."""
    q, k, v, dout = arrays
    options |= dict(causal=True, engine=engine)
    if isinstance(q, cupy.ndarray):
        out, vjp = cupy_flash.attention_vjp(q, k, v, **options)
        return [out, *vjp(dout)[:3]]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cupy_flash.attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_right(results: list[Any], engine: str, seed: int = 0) -> None:
    """Compare the results of `step` on `inputs` with the formula."""
    out, dq, dk, dv = map(on_host, results)
    check(case(engine, seed), Result(out, None, dq, dk, dv, None, None), only=("out", "dq", "dk", "dv"))


def new_stream() -> Any:
    """A stream that does not wait for the default stream."""
    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Make this stream current for CuPy and torch."""
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield


def keep_busy(milliseconds: float) -> None:
    """Occupy torch's current stream, so that later work on it waits."""
    torch.cuda._sleep(int(2e6 * milliseconds))
