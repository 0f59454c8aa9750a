"""Launches compiled kernels in the simulator as Triton's launcher does on a card."""

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tolerance import assert_matches_reference

from cupy_flash.gpu.tensor_map import DATA_TYPES, SWIZZLES, TensorMap, encode_for_simulator
from cupy_flash.simulator import UNENFORCED, Memory, launch

from .compiling import compile_kernel

TYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "uint8": "u8",
}
MAP_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "int32": "s32"}
ORDERS = {"early": {"order": "early"}, "late": {"order": "late"}, "random": {"order": "random", "seed": 1}}


class Expected(NamedTuple):
    """An array that a kernel writes: the expected values in float64, and the initial values.

    low_precision: what low-precision runs write, or None if the kernel writes the bits of the reference.
    """

    reference: Any
    low_precision: Any
    dtype: Any
    initial: Any = None


@dataclass(frozen=True)
class Case:
    """A launch of a kernel.

    arguments: by parameter; an array is passed by its address. results: the arrays that the kernel writes. tiles: the
    block of each array that is passed as a tensor descriptor; in Gluon, a pair with its layout in shared memory.
    """

    kernel: Any
    capability: int
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    results: dict[str, Expected]
    tiles: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def run(case, **order):
    """Run a case under an order, with all checks that hardware enforces; raises AssertionError for a wrong result."""
    outputs = _outputs(case)
    arrays = _inputs(case) | outputs
    compiled = compiled_kernel(case)
    memory = Memory()
    addresses = {
        name: memory.add(
            array,
            name,
            writable=name in outputs,
            initialised=name not in outputs or case.results[name].initial is not None,
        )
        for name, array in arrays.items()
    }
    tiles = iter(compiled.tiles)
    parameters = b""
    for parameter in case.kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            continue
        for alignment, data in _fields(case, name, arrays.get(name), addresses.get(name), tiles):
            parameters = parameters.ljust(-(-len(parameters) // alignment) * alignment, b"\0") + data
    # The last two parameters of every kernel are scratch memory, which none of these kernels has.
    parameters = parameters.ljust(-(-len(parameters) // 8) * 8, b"\0") + bytes(16)
    clusters = case.options.get("num_ctas", 1)
    grid = (case.grid[0] * clusters, *case.grid[1:])
    launch(
        compiled.ptx, compiled.name, grid, (compiled.threads, 1, 1), parameters,
        memory=memory, dynamic_shared=compiled.shared, unchecked=UNENFORCED, **order,
    )  # fmt: skip
    for name, result in case.results.items():
        if result.low_precision is None:
            assert outputs[name].tobytes() == np.ascontiguousarray(result.reference).tobytes(), name
        else:
            assert_matches_reference(outputs[name], result.reference, result.low_precision, result.dtype, name)


def _inputs(case):
    return {name: value for name, value in case.arguments.items() if isinstance(value, np.ndarray)}


def _outputs(case):
    outputs = {}
    for name, result in case.results.items():
        outputs[name] = np.empty(np.shape(result.reference), result.dtype)
        if result.initial is not None:
            outputs[name][...] = result.initial
    return outputs


def compiled_kernel(case):
    arrays, signature, constants = _inputs(case) | _outputs(case), {}, {}
    for parameter in case.kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", case.arguments[name]
        elif name in case.tiles:
            signature[name] = _descriptor(case, arrays[name], case.tiles[name])
        elif name in arrays:
            signature[name] = "*" + TYPES[arrays[name].dtype.name]
        else:
            signature[name] = "i32" if isinstance(case.arguments[name], int) else "fp32"
    return compile_kernel(case.kernel, signature, constants, case.capability, **case.options)


def _descriptor(case, array, tile):
    block, *layout = tile if case.kernel.is_gluon() else (tile,)
    inside = ",".join([f"{TYPES[array.dtype.name]}[{','.join(map(str, block))}]", *map(repr, layout)])
    return f"tensordesc<{inside}>"


def _fields(case, name, array, address, tiles):
    """Return the (alignment, bytes) of the fields of an argument; a descriptor has a tensor map, shape and strides."""
    if array is None:
        value = case.arguments[name]
        return [(4, struct.pack("<i" if isinstance(value, int) else "<f", value))]
    if name not in case.tiles:
        return [(8, struct.pack("<Q", address))]
    tile = next(tiles)
    shape, strides = array.shape[::-1], array.strides[::-1]
    type_ = MAP_TYPES.get(array.dtype.name, "u8")
    swizzle = {number: size for size, number in SWIZZLES.items()}[tile["swizzle"]]
    box = tuple(tile["block_size"][::-1])
    tensor_map = TensorMap(DATA_TYPES[type_], address, shape, strides[1:], box, swizzle, 128)
    return [
        (64, encode_for_simulator(tensor_map)),
        *((4, struct.pack("<i", size)) for size in array.shape),
        *((8, struct.pack("<q", stride // array.itemsize)) for stride in array.strides),
    ]
