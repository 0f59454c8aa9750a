"""The engines of this GPU, each in its dtype: a forward and backward of each on CuPy's or torch's arrays; streams."""

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
    """What `step` computes of `inputs`."""
    return Case(100, 100, 2, HEADS, HEADS, HEAD_DIM, HEAD_DIM, ENGINES[engine], causal=True, dlse=False, seed=seed)


def inputs(framework: str, engine: str, seed: int = 0) -> list[Any]:
    """q, k, v and dout of a case on the GPU."""
    call = case(engine, seed).call()
    return [on_gpu(framework, x) for x in (call.q, call.k, call.v, call.dout)]


def on_gpu(framework: str, x: np.ndarray) -> Any:
    """A NumPy array as one of CuPy or torch."""
    if framework == "cupy":
        return cupy.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def on_host(x: Any) -> np.ndarray:
    """An array of CuPy or torch as one of NumPy, after what the current stream has been given to do."""
    if isinstance(x, cupy.ndarray):
        return cupy.asnumpy(x)
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return x.cpu().numpy()


def empty(framework: str, engine: str, length: int) -> list[Any]:
    """q, k, v and dout of any contents and another length."""
    shape = 2, length, HEADS, HEAD_DIM
    if framework == "cupy":
        return [cupy.empty(shape, DTYPES[ENGINES[engine]]) for _ in range(4)]
    return [torch.empty(shape, dtype=getattr(torch, ENGINES[engine]), device="cuda") for _ in range(4)]


def bits(x: Any) -> Any:
    """The bytes of a contiguous array, for copies and comparisons of any dtype."""
    return x.view(cupy.uint8 if isinstance(x, cupy.ndarray) else torch.uint8)


def assign(arrays: list[Any], values: list[Any]) -> None:
    """On the current stream."""
    for array, value in zip(arrays, values, strict=True):
        bits(array)[...] = bits(value)


def differ(actual: list[Any], expected: list[Any]) -> Any:
    """How many of the arrays are not the same bit for bit, as an array on the GPU."""
    return sum((bits(a) != bits(b)).any() for a, b in zip(actual, expected, strict=True))


def step(arrays: list[Any], engine: str, **options: Any) -> list[Any]:
    """out, dq, dk and dv of q, k, v and dout; torch's by its autograd."""
    q, k, v, dout = arrays
    options |= dict(causal=True, engine=engine)
    if isinstance(q, cupy.ndarray):
        out, vjp = cupy_flash.attention_vjp(q, k, v, **options)
        return [out, *vjp(dout)[:3]]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cupy_flash.attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_right(results: list[Any], engine: str, seed: int = 0) -> None:
    """Holds what `step` gave for `inputs` against the formula."""
    out, dq, dk, dv = map(on_host, results)
    check(case(engine, seed), Result(out, None, dq, dk, dv, None, None), only=("out", "dq", "dk", "dv"))


def new_stream() -> Any:
    """One that does not wait for the default stream."""
    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """CuPy and torch work on this stream."""
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield


def keep_busy(milliseconds: float) -> None:
    """Torch's current stream, so that what else it is given waits."""
    torch.cuda._sleep(int(2e6 * milliseconds))
