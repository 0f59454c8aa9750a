"""mov, cvt, cvta, isspacep and instructions without effect here."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine.context import DTYPES, Array, Context, Group, Step, operand_type
from ..machine.ptx import TYPE_BYTES, Instruction, Special, Vector
from ..memory.store import LOCAL, PARAM, SHARED
from .closures import Compiler, Function, computed, registrar, rounding, typed_sources, ufunc, unsupported
from .convert import FORMATS, decode, float_to_integer, flush_subnormals, round_to_float32, to_bits, to_tf32

COMPILERS: dict[str, Compiler] = {}
compiles = registrar(COMPILERS)


@compiles("mov")
def _move(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    target, value = instruction.operands
    if isinstance(target, Vector):
        return _unpack(instruction, context, target, type_)
    result = context.destination(target, type_, instruction)
    if isinstance(value, Vector):
        return _pack(instruction, context, result, value, type_)
    if isinstance(value, Special) and value.name in ("clock", "clock64", "clock_hi", "globaltimer"):
        return _read_clock(context, result)
    if type_ == "pred":
        condition = context.predicate(value, instruction)
        return lambda group: group.write(result, condition(group))
    return computed(result, lambda a: a, context.source(value, type_, instruction))


def _read_clock(context: Context, result: Array) -> Step:
    def step(group: Group) -> None:
        context.clock += 1
        group.write(result, result.dtype.type(context.clock))

    return step


def _pack(instruction: Instruction, context: Context, result: Array, value: Vector, type_: str) -> Step:
    part = f"b{8 * TYPE_BYTES[type_] // len(value.items)}"
    sources = [context.source(item, part, instruction) for item in value.items]
    bits, dtype = np.dtype(DTYPES[part]).itemsize * 8, result.dtype.type
    result = result.view(f"u{result.itemsize}")
    kind = result.dtype.type
    assert dtype is not np.bool_

    def pack(*parts: Any) -> Any:
        packed = parts[0].astype(kind)
        for i, one in enumerate(parts[1:], 1):
            packed = packed | (one.astype(kind) << kind(i * bits))
        return packed

    return computed(result, pack, *sources)


def _unpack(instruction: Instruction, context: Context, target: Vector, type_: str) -> Step:
    part = f"b{8 * TYPE_BYTES[type_] // len(target.items)}"
    bits = 8 * TYPE_BYTES[part]
    whole = f"b{8 * TYPE_BYTES[type_]}"
    source = context.source(instruction.operands[1], whole, instruction)
    kind, narrow = DTYPES[whole], DTYPES[part]
    parts = [
        (i, context.destination(item, part, instruction)) for i, item in enumerate(target.items) if item is not None
    ]

    def step(group: Group) -> None:
        value = group.read(source)
        for i, result in parts:
            group.write(result, (value >> kind(i * bits)).astype(narrow))

    return step


@compiles("cvta")
def _convert_address(instruction: Instruction, context: Context) -> Step:
    """Compile cvta{.to}: addresses of a state space to or from generic ones, which are equal for global memory."""
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    source = context.source(instruction.operands[1], type_, instruction)
    to_space = instruction.modifiers[0] == "to"
    space = instruction.modifiers[1 if to_space else 0].split("::")[0]
    window = {"shared": SHARED, "local": LOCAL, "param": PARAM}.get(space, 0)
    return ufunc(result, np.subtract if to_space else np.add, source, DTYPES[type_](window))


@compiles("isspacep")
def _is_in_space(instruction: Instruction, context: Context) -> Step:
    space = instruction.modifiers[0].split("::")[0]
    result = context.destination(instruction.operands[0], "pred", instruction)
    source = context.source(instruction.operands[1], "u64", instruction)
    window = {"shared": SHARED, "local": LOCAL, "param": PARAM}.get(space)
    if window is None:
        return computed(result, lambda a: a >= np.uint64(PARAM + (1 << 40)), source)
    return computed(result, lambda a: (a >= np.uint64(window)) & (a < np.uint64(window + (1 << 40))), source)


_INTEGER_ROUNDING = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


@compiles("cvt")
def _convert(instruction: Instruction, context: Context) -> Step:
    modifiers = instruction.modifiers
    if modifiers[0] == "pack":
        raise unsupported(instruction)
    to, origin = modifiers[-2:]
    result = context.destination(instruction.operands[0], to, instruction)
    if to.endswith("x2"):
        return _convert_pair(instruction, context, result, to, origin)
    source = context.source(instruction.operands[1], origin, instruction)
    if to == "tf32":
        mode, satfinite = rounding(instruction), "satfinite" in modifiers
        return computed(result, lambda a: to_tf32(a, mode, satfinite=satfinite), source)
    float_to, float_from = to[0] in "fbe" and to not in ("b8", "b16", "b32", "b64"), origin[0] in "fbe"
    if not float_from and not float_to:
        return computed(result, _integer_to_integer(to, "sat" in modifiers), source)
    if not float_to:
        return computed(result, _to_integer(instruction, to, origin), source)
    return computed(result, _to_float(instruction, to, origin), source)


def _integer_to_integer(to: str, saturate: bool) -> Function:
    dtype = np.dtype(DTYPES[to])
    if not saturate:
        return lambda a: a.astype(dtype)
    limits = np.iinfo(dtype)

    def clamp(a: Any) -> Any:
        limit = np.iinfo(a.dtype)
        return np.clip(a, max(int(limit.min), int(limits.min)), min(int(limit.max), int(limits.max))).astype(dtype)

    return clamp


def _values(origin: str, flush: bool) -> Function:
    """Return a function from float register bits to float32 or float64 values."""
    if origin in FORMATS:
        return lambda a: decode(np.asarray(a), origin)
    return flush_subnormals if flush and origin == "f32" else lambda a: a


def _to_integer(instruction: Instruction, to: str, origin: str) -> Function:
    mode = next((_INTEGER_ROUNDING[m] for m in instruction.modifiers if m in _INTEGER_ROUNDING), None)
    if mode is None:
        raise unsupported(instruction)
    values, dtype = _values(origin, "ftz" in instruction.modifiers), np.dtype(DTYPES[to])
    return lambda a: float_to_integer(np.asarray(values(a)), dtype, mode, source_is_f64=origin == "f64")


def _to_float(instruction: Instruction, to: str, origin: str) -> Function:
    modifiers = instruction.modifiers
    values = _values(origin, "ftz" in modifiers) if origin[0] in "fbe" else (lambda a: a)
    integral = next((_INTEGER_ROUNDING[m] for m in modifiers if m in _INTEGER_ROUNDING), None)
    mode, satfinite = rounding(instruction), "satfinite" in modifiers

    def convert(a: Any) -> Any:
        value = np.asarray(values(a))
        if integral is not None:
            value = _rounded_keeping_sign(value, integral)
        if "relu" in modifiers:
            value = np.where(value < 0, value.dtype.type(0), value)
        if "sat" in modifiers:
            value = np.where(np.isnan(value), value.dtype.type(0), np.clip(value, 0, 1))
        if to in FORMATS:
            return to_bits(
                value if value.dtype.kind == "f" else value.astype(np.float64), to, mode, satfinite=satfinite
            )
        if to == "f64":
            if mode != "rn" and origin in ("s64", "u64"):
                raise unsupported(instruction)
            return value.astype(np.float64)
        if mode == "rn" or value.dtype == np.float32:
            converted = value.astype(np.float32)
        else:
            exact = value.astype(np.float64)
            error: Any = 0.0
            if value.dtype.itemsize == 8 and value.dtype.kind in "iu":
                error = (value.astype(np.longdouble) - exact.astype(np.longdouble)).astype(np.float64)
            converted = round_to_float32(exact, error, mode)
        return flush_subnormals(converted) if "ftz" in modifiers else converted

    return convert


def _rounded_keeping_sign(value: Array, mode: str) -> Array:
    function = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}[mode]
    return np.copysign(function(value), value)


def _convert_pair(instruction: Instruction, context: Context, result: Array, to: str, origin: str) -> Step:
    """Compile cvt to a packed type (x2): the first source operand goes to the upper half."""
    modifiers = instruction.modifiers
    single, mode, satfinite = to[:-2], rounding(instruction), "satfinite" in modifiers
    kind = result.dtype.type
    bits = kind(4 * result.itemsize)

    def pack(high: Array, low: Array) -> Array:
        if "relu" in modifiers:
            high, low = (np.where(value < 0, value.dtype.type(0), value) for value in (high, low))
        upper, lower = (to_bits(np.asarray(v), single, mode, satfinite=satfinite).astype(kind) for v in (high, low))
        return (upper << bits) | lower

    if origin == "f32":
        sources = typed_sources(instruction, context, "f32")
        return computed(result, pack, *sources)
    from_single = origin[:-2]
    source = context.source(instruction.operands[1], origin, instruction)
    half = 8 * TYPE_BYTES[origin] // 2

    def repack(a: Any) -> Any:
        width = a.dtype.type
        low, high = a & width((1 << half) - 1), a >> width(half)
        return pack(decode(np.asarray(high), from_single), decode(np.asarray(low), from_single))

    return computed(result, repack, source)


@compiles("activemask")
def _active_mask(instruction: Instruction, context: Context) -> Step:
    result = context.destination(instruction.operands[0], "b32", instruction)
    weights = np.uint32(1) << np.arange(32, dtype=np.uint32)

    def step(group: Group) -> None:
        mask = (group.lanes() * weights).sum(1, dtype=np.uint32)
        group.write(result, mask[:, None])

    return step


@compiles("nanosleep", "pmevent", "prefetch", "prefetchu", "griddepcontrol")
def _nothing(instruction: Instruction, context: Context) -> Step:
    """Compile hints, and ordering that the simulator provides anyway, to a step without effect."""
    return lambda group: None
