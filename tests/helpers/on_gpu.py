"""Runs behaviour tests on the GPU: copies NumPy arguments to CuPy, and results back to NumPy."""

import os
import sys
from functools import cache, wraps

import numpy as np

import cupy_flash

FUNCTIONS = (
    "attention", "attention_backward", "attention_double_backward", "attention_jvp", "attention_varlen",
    "attention_varlen_backward", "attention_varlen_double_backward", "attention_varlen_jvp", "attention_vjp",
    "attention_weights", "attention_weights_vjp", "key_importance", "key_importance_vjp", "merge", "top_weights",
    "select_keys", "selection_loss", "selection_loss_vjp",
)  # fmt: skip


@cache
def has_gpu():
    """Return whether CuPy finds a GPU."""
    try:
        import cupy
    except Exception:  # CuPy's import can fail with any exception, for example if it cannot create its cache folder
        return False
    return bool(cupy.cuda.is_available())


def in_numpy():
    """Return whether the GPU is one of tests/gpu_in_numpy, on which tests use small sizes and few repeats."""
    return "gpu_in_numpy" in sys.modules and sys.modules["gpu_in_numpy"].machine() is not None


@cache
def torch_has_gpu():
    """Return whether torch finds a GPU; torch does not see one of tests/gpu_in_numpy."""
    if in_numpy() or not has_gpu():
        return False
    import torch

    return torch.cuda.is_available()


def leave_a_lost_gpu():
    """End this process if its CUDA context is lost.

    After an out-of-bounds access every later CUDA call of the process fails. xdist replaces a worker that ends, so no
    other test fails; without xdist the error is raised.
    """
    import cupy

    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise


def route(monkeypatch):
    """Make every public function copy NumPy arrays to the GPU if backend="cuda", with outputs and workspaces full of
    NaN.
    """
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
    """Wrap `function`: it gets CuPy copies of NumPy arrays, and CuPy arrays among its results become NumPy arrays."""
    import cupy

    def to_gpu(x):
        if hasattr(x, "_fields"):  # a record, such as the statistics of a forward
            return type(x)(*map(to_gpu, x))
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
