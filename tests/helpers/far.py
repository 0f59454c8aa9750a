"""Arrays in virtual memory whose elements are more than 2**31 apart, for tests of offsets of 64 bits.

An offset that a kernel cuts to 32 bits is outside of such an array or is that of another element.
"""

import mmap
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from cupy_flash.arrays import Array, as_array
from cupy_flash.engines.launch import Workspace
from cupy_flash.gpu import run_plan
from cupy_flash.plan.plan import Plan
from cupy_flash.simulator import Memory, run

FAR = 2**31 + 64  # in elements


def empty(shape: tuple[int, ...], dtype: Any, axes: Iterable[int]) -> np.ndarray:
    """Return an array of zeros in which neighbours along these axes are at least FAR elements apart."""
    dtype = np.dtype(dtype)
    near = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    strides = [stride + FAR * (axis in axes) for axis, stride in enumerate(near)]
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    with tempfile.TemporaryFile() as file:  # sparse: only the pages that are written take memory
        file.truncate(elements * dtype.itemsize)
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(memory, shape, [dtype.itemsize * stride for stride in strides])


def spread(array: np.ndarray, axes: Iterable[int]) -> np.ndarray:
    """Return a copy of an array in which neighbours along these axes are at least FAR elements apart."""
    far = empty(array.shape, array.dtype, axes)
    far[...] = array
    return far


def spread_rows(array: np.ndarray) -> np.ndarray:
    """Return a copy that is far in all axes but the last, which kernels require to be contiguous."""
    return spread(array, range(array.ndim - 1))


class FarMemory(Memory):
    """Memory whose arrays are so far apart that a wrong offset from one of them lies in no other.

    It does not record which bytes are initialised: the record would be as large as the data.
    """

    def add(self, array: np.ndarray, name: str, *, writable: bool = True, initialised: bool = True) -> int:
        """Register an array as Memory does, more than 2**36 bytes after the previous one."""
        self._next += 2**32 * 16
        return super().add(array, name, writable=writable)


def spread_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread the kernels' results as `spread_rows` does, and their workspaces along sequences and heads."""
    workspaces = Plan.workspaces

    def far_workspaces(plan: Plan, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
        return tuple(_far(workspace) for workspace in workspaces(plan, q_rows, kv_rows))

    def far_empty(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
        return as_array(empty(shape, dtype, range(len(shape) - 1)), "a result")

    monkeypatch.setattr(Plan, "workspaces", far_workspaces)
    monkeypatch.setattr(run_plan, "empty", far_empty)
    monkeypatch.setattr(run, "Memory", FarMemory)


def _far(workspace: Workspace) -> Workspace:
    """Return the workspace with the strides of `far_empty` for its heads and, if it is not packed, its sequences.

    Kernels compute the addresses of rows and columns by themselves.
    """
    if not workspace.strides:
        return workspace
    batch, head, *others = workspace.strides
    return workspace._replace(strides=(batch + FAR * (batch > 0), head + FAR, *others))
