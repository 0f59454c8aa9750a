"""The GPU as a backend of the behaviour tests: NumPy arguments are copied to CuPy, results back to NumPy."""

import os
import sys
from functools import cache, wraps

import numpy as np

import cupy_flash

FUNCTIONS = (
    "attention", "attention_backward", "attention_double_backward", "attention_jvp", "attention_varlen",
    "attention_varlen_backward", "attention_varlen_double_backward", "attention_varlen_jvp", "attention_vjp",
)  # fmt: skip


@cache
def has_gpu():
    """True if CuPy finds a GPU."""
    try:
        import cupy
    except Exception:  # CuPy's import fails with any exception, for example where it cannot make its cache folder
        return False
    return bool(cupy.cuda.is_available())


def in_numpy():
    """True if the GPU is one of tests/gpu_in_numpy, on which tests use small sizes and few repeats."""
    return "gpu_in_numpy" in sys.modules and sys.modules["gpu_in_numpy"].machine() is not None


@cache
def torch_has_gpu():
    """True if torch finds a GPU; it does not see one of tests/gpu_in_numpy."""
    if in_numpy() or not has_gpu():
        return False
    import torch

    return torch.cuda.is_available()


def leave_a_lost_gpu():
    """End this process if its CUDA context is lost.

    After an out-of-bounds access every later CUDA call of a process fails. xdist replaces a worker that has ended, so
    no other test fails; without xdist the error is raised."""
    import cupy

    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise


def route(monkeypatch):
    """Make every public function move its NumPy arrays to the GPU if backend="cuda"; outputs and workspaces there start
    as NaN."""
    import cupy

    empty = cupy.empty

    def poisoned(*args, **kwargs):
        array = empty(*args, **kwargs)
        array.data.memset_async(255, array.nbytes)
        return array

    monkeypatch.setattr(cupy, "empty", poisoned)
    for name in FUNCTIONS:
        monkeypatch.setattr(cupy_flash, name, moving(getattr(cupy_flash, name)))


def moving(function):
    """`function` applied to CuPy copies of its NumPy arrays; CuPy arrays among its results become NumPy's."""
    import cupy

    def to_gpu(x):
        return cupy.asarray(x) if isinstance(x, np.ndarray) else x

    def to_host(x):
        if isinstance(x, tuple):
            return type(x)(*map(to_host, x)) if hasattr(x, "_fields") else tuple(map(to_host, x))
        return moving(x) if callable(x) else cupy.asnumpy(x) if isinstance(x, cupy.ndarray) else x

    @wraps(function)
    def moved(*arguments, **options):
        if options.get("backend", "cuda") != "cuda":
            return function(*arguments, **options)
        options = {name: to_gpu(value) for name, value in options.items()}
        return to_host(function(*map(to_gpu, arguments), **options))

    return moved
