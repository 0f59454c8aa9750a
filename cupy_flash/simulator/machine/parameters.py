"""Kernel entry points by name, and the buffers of their parameters."""

from __future__ import annotations

import struct

import numpy as np

from ..errors import SimulationError
from .parser import parse
from .ptx import Function, Module

FLOATS = {2: "<e", 4: "<f", 8: "<d"}


def entry_point(module: Module, kernel: str) -> Function:
    """Return a kernel of a module by its name."""
    if kernel not in module.kernels:
        raise SimulationError(f"no kernel {kernel!r} in the PTX, which has {sorted(module.kernels)}")
    return module.kernels[kernel]


def pack(ptx: str | Module, kernel: str, *values: int | float | np.generic | bytes) -> bytes:
    """Return the parameter buffer of a kernel for `launch`, one value per parameter.

    An int, such as an address from `Memory.add`, fills its parameter; a Python float becomes one of the parameter's
    size. NumPy scalars and bytes (of structs and tensor maps) must have that size.
    """
    function = entry_point(parse(ptx) if isinstance(ptx, str) else ptx, kernel)
    sizes = [parameter.size for parameter in function.parameters]
    if len(values) != len(sizes):
        raise SimulationError(f"{kernel} takes {len(sizes)} parameters of {sizes} bytes, {len(values)} were given")
    offsets, size = function.parameter_layout()
    buffer = bytearray(size)
    for number, (parameter, value) in enumerate(zip(function.parameters, values, strict=True)):
        start = offsets[parameter.name]
        try:
            buffer[start : start + parameter.size] = _encoded(value, parameter.size)
        except ValueError as error:
            raise SimulationError(f"parameter {number} of {kernel} has {parameter.size} bytes, {error}") from None
    return bytes(buffer)


def _encoded(value: int | float | np.generic | bytes, size: int) -> bytes:
    """Return a value as `size` bytes; raises ValueError if it has another size."""
    if isinstance(value, bytes | np.generic):
        data = value if isinstance(value, bytes) else value.tobytes()
        if len(data) != size:
            raise ValueError(f"{value!r} has {len(data)}")
        return data
    try:
        if isinstance(value, float):
            return struct.pack(FLOATS[size], value)
        return value.to_bytes(size, "little", signed=value < 0)
    except (KeyError, OverflowError):
        raise ValueError(f"in which {value!r} does not fit") from None
