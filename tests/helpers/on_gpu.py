"""The GPU as one more backend of the behaviour tests: their NumPy arrays go to CuPy, what comes back goes to NumPy."""

import os
from functools import cache, wraps

import numpy as np

import cupy_flash

FUNCTIONS = ("attention", "attention_backward", "attention_varlen", "attention_varlen_backward", "attention_vjp")


@cache
def has_gpu():
    """Whether CuPy finds a GPU."""
    try:
        import cupy
    except Exception:  # CuPy's import fails with any exception, for example where it cannot make its cache folder
        return False
    return bool(cupy.cuda.is_available())


def leave_a_lost_gpu():
    """After an access out of bounds every later call of a process fails. One that shares the tests with others (xdist)
    ends here, and another takes its place: its test has been reported, and no other fails by it."""
    import cupy

    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise


def route(monkeypatch):
    """Every public function that is called with backend="cuda" gets its NumPy arrays on the GPU, where outputs and
    workspaces begin as NaN."""
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
    """`function` on CuPy copies of its NumPy arrays; CuPy arrays among its results as NumPy's."""
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
