"""What the mods of one call read, as kernels get it: the member `captured` of Params and the tables of extremes."""

from __future__ import annotations

from collections.abc import Callable

from ..arrays import Array, empty
from ..problem import Operands
from .cuda_code import captured_numbers, captured_struct, chunked, table_of
from .ir import parse


class Captured:
    """The arrays and numbers that the mods of a call read, and the tables of extremes that their kernel fills."""

    def __init__(self, mods: str, operands: Operands) -> None:
        self.program, self.numbers = parse(mods), operands.numbers
        self.arrays = {f"captured{slot}": array for slot, array in enumerate(operands.captured)}
        self.tables: dict[str, Array | None] = {
            f"chunks{slot}": empty(*table_of(self.program, slot, operands.captured[slot].shape), operands.q)
            for slot in chunked(self.program)
        }

    @property
    def text(self) -> str:
        """The declaration of `struct Captured`."""
        return captured_struct(self.program)

    def members(self, address: Callable[[Array], int]) -> tuple[float, ...]:
        """Its members. Strides take 32 bits: ValueError for an array with a larger one."""
        for name, array in self.arrays.items():
            if any(abs(stride) >= 2**31 for stride in array.strides):
                raise ValueError(f"{name} of a mod has strides {array.strides}, which kernels index with 32 bits")
        arrays = [(address(array), array.shape, array.strides) for array in self.arrays.values()]
        tables = {int(name.removeprefix("chunks")): address(table) for name, table in self.tables.items() if table}
        return captured_numbers(self.program, arrays, tables, self.numbers)
