"""Kernel arguments of a call's mods: the member `captured` of Params and the workspaces that it points to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Allocate, Array, empty
from ..mods.cuda_code import (
    captured_numbers,
    captured_struct,
    chunked,
    computed_axes,
    sum_type,
    table_of,
    with_tangents,
)
from ..mods.ir import parse
from ..problem.records import Operands, Problem


class Captured:
    """The arrays and numbers that the mods of a call read, and the workspaces and gradients that their kernels write.

    In a JVP or double backward the arrays are followed by their tangents. `fixed` are the slots whose gradients are
    summed in fixed point. `workspaces` are the tables of extremes, the sums of gradients, the largest contribution to
    each fixed-point sum, and the gradients themselves.
    """

    def __init__(
        self, problem: Problem, operands: Operands, fixed: tuple[int, ...], allocate: Allocate = empty
    ) -> None:
        self.program, self.numbers, self.wanted = parse(problem.mods), operands.numbers, problem.captured_gradient
        self.fixed, self.count = fixed, len(operands.captured)
        arrays: tuple[Array | None, ...] = operands.captured
        if problem.derivative:
            self.program, self.wanted = with_tangents(self.program), (*self.wanted, *(False for _ in arrays))
            arrays += operands.tcaptured or (None,) * len(arrays)
        self.captured = arrays
        self.arrays = {f"captured{slot}": array for slot, array in enumerate(arrays) if array is not None}
        self.workspaces: dict[str, Array | None] = {}
        for slot in chunked(self.program):
            shape, dtype = table_of(self.program, slot, operands.captured[slot].shape)
            self.workspaces[f"chunks{slot}"] = allocate(shape, dtype, operands.q)
        for slot, array in enumerate(operands.captured):
            if self.wanted[slot]:
                dtypes = {"real": problem.accumulation, "double": np.dtype(np.float64), "long long": np.dtype(np.int64)}
                dtype = dtypes[sum_type(self.program, slot, self.fixed)]
                self.workspaces[f"sums{slot}"] = allocate(array.shape, dtype, operands.q)
                self.workspaces[f"gradient{slot}"] = allocate(array.shape, array.dtype, operands.q)
        for slot in self.fixed:
            self.workspaces[f"largest{slot}"] = allocate((1,), np.dtype(np.float64), operands.q)

    @property
    def text(self) -> str:
        """Return the declaration of `struct Captured`."""
        return captured_struct(self.program, self.wanted, self.fixed)

    @property
    def temporaries(self) -> tuple[str, ...]:
        """Return the names of the workspaces that are no gradients."""
        return tuple([name for name in self.workspaces if not name.startswith("gradient")])

    @property
    def gradients(self) -> tuple[Array | None, ...] | None:
        """Return the gradient of each array by slot, or None for an array without one; None without a score_mod."""
        if self.program.score is None:
            return None
        return tuple(self.workspaces.get(f"gradient{slot}") for slot in range(self.count))

    def members(self, address: Callable[[Array], int]) -> tuple[float, ...]:
        """Return the values of the members of `struct Captured`; ValueError for a stride of more than 32 bits."""
        by_bytes = computed_axes(self.program)
        for slot, array in enumerate(self.captured):
            if array is None:
                continue
            for axis, stride in enumerate(array.strides):
                unit = array.dtype.itemsize if (slot % self.count, axis) in by_bytes else 1
                if abs(stride) * unit >= 2**31:
                    strides = f"strides {array.strides}"
                    raise ValueError(f"captured{slot} of a mod has {strides}, which kernels index with 32 bits")
        ranks = [(0,) * element.rank for element in self.program.arrays]
        arrays = [
            (0, zeros, zeros) if array is None else (address(array), array.shape, array.strides)
            for array, zeros in zip(self.captured, ranks, strict=True)
        ]
        workspaces = {name: address(array) for name, array in self.workspaces.items() if array is not None}
        return captured_numbers(self.program, arrays, workspaces, self.numbers)
