"""Kernel entry points by name, and the buffers of their parameters."""

from __future__ import annotations

import struct

import numpy as np

from ..errors import SimulationError
from .parser import parse
from .ptx import Function, Module, Variable

FLOATS = {2: "<e", 4: "<f", 8: "<d"}
_FLOATING = {"f16", "f32", "f64"}


def entry_point(module: Module, kernel: str) -> Function:
    """Return a kernel of a module by its name."""
    if kernel not in module.kernels:
        raise SimulationError(f"no kernel {kernel!r} in the PTX, which has {sorted(module.kernels)}")
    return module.kernels[kernel]


def pack(ptx: str | Module, kernel: str, *values: int | float | np.generic | bytes) -> bytes:
    """Return the parameter buffer of a kernel for `launch`, one value per parameter.

    An int, such as an address from `Memory.add`, fills its parameter; a Python float becomes one of the parameter's
    size, as does an int for a parameter of a floating-point type. NumPy scalars and bytes (of structs and tensor maps)
    must have that size. Raises SimulationError for values that do not fit, TypeError for other objects.
    """
    function = entry_point(ptx if isinstance(ptx, Module) else parse(ptx), kernel)
    sizes = [parameter.size for parameter in function.parameters]
    if len(values) != len(sizes):
        raise SimulationError(f"{kernel} takes {len(sizes)} parameters of {sizes} bytes, {len(values)} were given")
    offsets, size = function.parameter_layout()
    buffer = bytearray(size)
    for number, (parameter, value) in enumerate(zip(function.parameters, values, strict=True)):
        start = offsets[parameter.name]
        if not isinstance(value, bytes | np.generic | int | float):
            raise TypeError(
                f"parameter {number} of {kernel} must be an int, a float, a NumPy scalar or bytes, not "
                f"{type(value).__name__}; the parameter of an array is the address that Memory.add returns"
            )
        try:
            buffer[start : start + parameter.size] = _encoded(value, parameter)
        except ValueError as error:
            raise SimulationError(f"parameter {number} of {kernel} has {parameter.size} bytes, {error}") from None
    return bytes(buffer)


def _encoded(value: int | float | np.generic | bytes, parameter: Variable) -> bytes:
    """Return a value as the bytes of a parameter; raises ValueError if it has another size or type."""
    size, type_ = parameter.size, parameter.type
    if isinstance(value, bytes | np.generic):
        data = value if isinstance(value, bytes) else value.tobytes()
        if len(data) != size:
            raise ValueError(f"{value!r} has {len(data)}")
        return data
    if isinstance(value, float) and type_[0] in "us" and size in FLOATS:
        raise ValueError(f"an integer of type .{type_}, but {value!r} is a float")
    try:
        if isinstance(value, float) or type_ in _FLOATING:
            return struct.pack(FLOATS[size], value)
        return value.to_bytes(size, "little", signed=value < 0)
    except (KeyError, OverflowError):
        raise ValueError(f"in which {value!r} does not fit") from None
