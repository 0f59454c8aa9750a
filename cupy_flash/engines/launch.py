"""What an engine requests: launches of kernels, with their constants, grids and TMA boxes, and workspaces."""

# No `from __future__ import annotations`, as in records.py.
from typing import NamedTuple

import numpy as np

from ..jit.source import Constant as Constant
from ..problem.records import UnsupportedError

GRID_LIMITS = 2**31 - 1, 65535, 65535  # maximum blocks of a grid in each dimension, on every GPU


class Workspace(NamedTuple):
    """Memory that kernels need besides operands and results, as an engine requests it."""

    name: str  # the member of Params
    shape: tuple[int, ...]  # contiguous
    dtype: np.dtype
    strides: tuple[int, ...]  # (batch, head, row, aligned) if the member is an Operand; () for a pointer


class Box(NamedTuple):
    """A TMA box of an operand: rows x columns of one head of one sequence."""

    operand: str  # name in params.cuh
    rows: int
    columns: int
    layout: str | None = None  # None for the layout of the call


class Launch(NamedTuple):
    """One kernel of a plan."""

    kernel: str  # "simt/forward": the file below kernels_cu, and its function
    constants: tuple[tuple[str, Constant], ...]  # values of constants of config.cuh
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0
    boxes: tuple[Box, ...] = ()  # the kernel's second argument has their tensor maps
    headers: tuple[tuple[str, str], ...] = ()  # (name, text), generated from mods; Params then has `captured`
    lengths: tuple[int, int] | None = None  # q_len and kv_len of its Params; None for the rows of the arrays

    @property
    def function(self) -> str:
        """The name of the kernel's function."""
        return self.kernel.rsplit("/")[-1]

    @property
    def text_key(self) -> tuple[str, tuple[tuple[str, Constant], ...], tuple[tuple[str, str], ...]]:
        """The inputs of the kernel's text; launches with equal keys share one compiled kernel."""
        return self.kernel, self.constants, self.headers

    @property
    def tile(self) -> tuple[int, int, int] | None:
        """(queries, keys, threads) of a block; None for a row kernel, which has no tiles."""
        constants = dict(self.constants)
        if "BLOCK_Q" not in constants:
            return None
        return int(constants["BLOCK_Q"]), int(constants["BLOCK_KV"]), self.threads


def require_grids(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Return the launches; UnsupportedError if a grid has more blocks than CUDA starts."""
    for launch in launches:
        if any(blocks > limit for blocks, limit in zip(launch.grid, GRID_LIMITS, strict=True)):
            grid, limits = (" x ".join(map(str, sizes)) for sizes in (launch.grid, GRID_LIMITS))
            raise UnsupportedError(f"{launch.kernel} needs a grid of {grid} blocks; the limits are {limits}")
    return launches
