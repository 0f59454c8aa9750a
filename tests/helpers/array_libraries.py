"""The array libraries of tests/array_libraries: how each makes an array, and which of them are installed.

A library is imported by the first test that makes an array of it.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")


class ArrayLibrary(NamedTuple):
    """A library: its arrays are made of NumPy's by `make`, and `transposed` swaps the axes 1 and 2 of one."""

    package: str
    make: Callable
    transposed: Callable
    dtypes: tuple[str, ...] = FLOATS
    immutable: bool = False
    least_dimensions: int = 0


@functools.cache
def imported(package):
    """Import a library, whatever it warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(package)


def strict():
    return imported("array_api_strict")


def mlx():
    return imported("mlx.core")


def tensorflow():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return imported("tensorflow")


def paddle():
    return imported("paddle")


def warp():
    imported("warp").config.quiet = True
    return imported("warp")


def of_mlx(x):
    dtype = getattr(mlx(), "bool_" if x.dtype == bool else x.dtype.name)
    return mlx().array(x.astype(np.float32), dtype=dtype) if x.dtype.kind == "V" else mlx().array(x, dtype=dtype)


def of_tensorflow(x):
    return tensorflow().cast(x.astype(np.float32), x.dtype.name) if x.dtype.kind == "V" else tensorflow().constant(x)


def of_paddle(x):
    to_tensor = paddle().to_tensor
    return to_tensor(x.astype(np.float32)).astype(x.dtype.name) if x.dtype.kind == "V" else to_tensor(x)


def of_warp(x):
    dtype = getattr(warp(), "bool" if x.dtype == bool else x.dtype.name)
    return warp().array(x.astype(np.float32) if x.dtype.kind == "V" else x, dtype=dtype)


LIBRARIES = {
    "array-api-strict": ArrayLibrary(
        "array_api_strict",
        lambda x: strict().asarray(x, copy=True),
        lambda x: strict().permute_dims(x, (0, 2, 1, 3)),
        dtypes=("float32", "float64"),
    ),
    "mlx": ArrayLibrary("mlx", of_mlx, lambda x: mlx().swapaxes(x, 1, 2), immutable=True),
    "tensorflow": ArrayLibrary(
        "tensorflow", of_tensorflow, lambda x: tensorflow().transpose(x, (0, 2, 1, 3)), immutable=True
    ),
    "paddle": ArrayLibrary("paddle", of_paddle, lambda x: x.transpose((0, 2, 1, 3))),
    "warp": ArrayLibrary("warp", of_warp, lambda x: x.transpose((0, 2, 1, 3)), least_dimensions=1),
}
INSTALLED = tuple(name for name, library in LIBRARIES.items() if importlib.util.find_spec(library.package))
# diffusers has no arrays of its own; tests/array_libraries/test_diffusers.py runs its models.
MISSING = tuple(
    name
    for name in (*LIBRARIES, "diffusers")
    if name not in INSTALLED and not (name == "diffusers" and importlib.util.find_spec(name))
)
