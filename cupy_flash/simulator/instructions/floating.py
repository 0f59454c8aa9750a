"""Floating-point arithmetic, and the opcodes that it shares with integers (add, mul, ...)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine.context import Array, Context, Step, operand_type
from ..machine.ptx import Instruction
from .closures import HALVES, Compiler, Function, computed, registrar, rounding, typed_sources, ufunc, unsupported
from .convert import (
    FORMATS,
    decode,
    encode,
    flush_subnormal_bits,
    flush_subnormals,
    fma32,
    fma64,
    round_to_float32,
    sum_to_odd,
    two_sum,
)
from .integer import integer_division, integer_mad, integer_product, with_carry

COMPILERS: dict[str, Compiler] = {}
compiles = registrar(COMPILERS)


def _flushed(function: Function, instruction: Instruction, type_: str) -> Function:
    """Return the function with the instruction's .ftz and .sat applied."""
    modifiers = instruction.modifiers
    if "ftz" in modifiers and type_ in ("f32", "f32x2"):
        inner = function

        def function(*values: Any) -> Any:
            return flush_subnormals(inner(*[flush_subnormals(value) for value in values]))

    if "sat" in modifiers:
        unclamped = function

        def function(*values: Any) -> Any:
            # PTX ISA: .sat maps NaN to +0.
            result = np.asarray(unclamped(*values))
            return np.where(np.isnan(result), result.dtype.type(0), np.clip(result, 0, 1))

    return _of_pairs(function) if type_ == "f32x2" else function


def _of_pairs(function: Function) -> Function:
    """Lift a function of float32 values to the 64-bit words of .f32x2, which hold the first value in the low half."""

    def on_words(*words: Any) -> Array:
        halves = [
            function(*[(word >> shift).astype(np.uint32).view(np.float32) for word in words]).view(np.uint32)
            for shift in (np.uint64(0), np.uint64(32))
        ]
        return halves[0] | halves[1].astype(np.uint64) << np.uint64(32)

    return on_words


def _by_halves(function: Function, name: str, instruction: Instruction) -> Function:
    """Lift a function of float64 values to f16 or bf16 bits, single or packed (x2).

    The results of the function are exact or rounded to odd, so that rounding them again is correct.
    """
    single = name[:-2] if name.endswith("x2") else name
    flush = "ftz" in instruction.modifiers

    def on_bits(*bits: Array) -> Array:
        values = [np.asarray(value) for value in bits]
        if flush:
            values = [flush_subnormal_bits(value, single) for value in values]
        result = function(*[decode(value, single) for value in values])
        if "relu" in instruction.modifiers:
            result = np.where(result < 0, 0.0, result)
        if "sat" in instruction.modifiers:
            result = np.where(np.isnan(result), 0.0, np.clip(result, 0, 1))
        encoded = encode(result, FORMATS[single])
        return flush_subnormal_bits(encoded, single) if flush else encoded

    if single == name:
        return lambda *bits: on_bits(*bits).astype(np.uint16)

    def on_pairs(*bits: Array) -> Array:
        low = on_bits(*[value & np.uint32(0xFFFF) for value in bits])
        high = on_bits(*[value >> np.uint32(16) for value in bits])
        return low | (high << np.uint32(16))

    return on_pairs


def _directed_sum(mode: str) -> Function:
    def add(a: Any, b: Any) -> Any:
        a, b = np.broadcast_arrays(np.float64(a), np.float64(b))
        s, error = two_sum(a, b)
        if mode == "rm":
            # IEEE 754: rounding down, an exact zero sum is -0 unless both terms are +0.
            s = np.where((s == 0) & (error == 0) & (np.signbit(a) | np.signbit(b)), -0.0, s)
        return round_to_float32(s, np.where(np.isfinite(error), error, 0), mode)

    return add


def _directed_sum64(mode: str) -> Function:
    def add(a: Any, b: Any) -> Any:
        a, b = np.broadcast_arrays(np.float64(a), np.float64(b))
        s, error = two_sum(a, b)
        # An infinite sum of finite terms lies beyond their exact sum.
        overflows = np.isinf(s) & np.isfinite(a) & np.isfinite(b)
        error = np.where(overflows, -s, np.where(np.isfinite(error), error, 0))
        if mode == "rz":
            return np.where(error * np.sign(s) < 0, np.nextafter(s, 0), s)
        if mode == "rm":  # an exact zero sum: see _directed_sum
            s = np.where((s == 0) & (np.signbit(a) | np.signbit(b)), -0.0, s)
            return np.where(error < 0, np.nextafter(s, -np.inf), s)
        return np.where(error > 0, np.nextafter(s, np.inf), s)

    return add


def _directed_fma(mode: str) -> Function:
    add = _directed_sum(mode)
    return lambda a, b, c: add(np.multiply(a, b, dtype=np.float64), c)


def _directed_product(mode: str) -> Function:
    return lambda a, b: round_to_float32(np.multiply(a, b, dtype=np.float64), 0.0, mode)


def _subtract(add: Function) -> Function:
    return lambda a, b: add(a, np.negative(b))


@compiles("add", "sub", "mul")
def _sum_or_product(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if type_[0] in "us":
        if opcode == "mul":
            return integer_product(instruction, context)
        if "cc" in modifiers:
            return with_carry(instruction, context)
        if "sat" in modifiers:
            raise unsupported(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    sources = typed_sources(instruction, context, type_)
    if type_ in HALVES:
        to_odd: dict[str, Function] = {"add": sum_to_odd, "sub": _subtract(sum_to_odd), "mul": np.multiply}
        exact = to_odd[opcode]
        return computed(result, _by_halves(exact, type_, instruction), *sources)
    mode = rounding(instruction)
    plain = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[opcode]
    if mode == "rn" and type_ != "f32x2" and not {"ftz", "sat"} & set(modifiers):
        return ufunc(result, plain, *sources)
    if mode == "rn":
        return computed(result, _flushed(plain, instruction, type_), *sources)
    if type_ == "f64" and opcode == "mul":
        raise unsupported(instruction)
    add = _directed_sum64(mode) if type_ == "f64" else _directed_sum(mode)
    directed = {"add": add, "sub": _subtract(add), "mul": _directed_product(mode)}[opcode]
    return computed(result, _flushed(directed, instruction, type_), *sources)


def _fma_half(a: Array, b: Array, c: Array) -> Array:
    return sum_to_odd(a * b, c)


@compiles("fma", "mad")
def _fused(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    if type_[0] in "us":
        return integer_mad(instruction, context)
    result = context.destination(instruction.operands[0], type_, instruction)
    sources = typed_sources(instruction, context, type_)
    if type_ in HALVES:
        return computed(result, _by_halves(_fma_half, type_, instruction), *sources)
    mode = rounding(instruction)
    if mode != "rn" and type_ == "f64":
        raise unsupported(instruction)
    function = fma64 if type_ == "f64" else fma32 if mode == "rn" else _directed_fma(mode)
    return computed(result, _flushed(function, instruction, type_), *sources)


def _truncate_mantissa(function: Function) -> Function:
    """PTX ISA: rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 flush subnormals; the lower 32 bits of a result are 0."""

    def flushed(a: Any) -> Any:
        return np.where(np.abs(a) < np.finfo(np.float64).smallest_normal, np.copysign(0.0, a), a)

    return lambda a: (flushed(function(flushed(a))).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _in_double(function: Function) -> Function:
    """Return an .approx float32 function, computed in float64; a GPU's may differ within the ISA's error bounds."""
    return lambda a: function(np.float64(a)).astype(np.float32)


_UNARY: dict[str, Function] = {
    "sqrt": np.sqrt,
    "rcp": lambda a: a.dtype.type(1) / a,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "neg": np.negative,
}


@compiles("sqrt", "rcp", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos")
def _special_function(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    function = _UNARY[instruction.opcode]
    result = context.destination(instruction.operands[0], type_, instruction)
    sources = typed_sources(instruction, context, type_)
    if type_ in HALVES:
        return computed(result, _by_halves(function, type_, instruction), *sources)
    exact = instruction.opcode in ("sqrt", "rcp") and "approx" not in instruction.modifiers
    if exact and rounding(instruction) != "rn":
        raise unsupported(instruction)
    if type_ == "f64":
        # Without .ftz, rsqrt.approx.f64 is accurate to double precision: only .ftz is the gross approximation.
        if "approx" in instruction.modifiers and "ftz" in instruction.modifiers:
            function = _truncate_mantissa(function)
    elif not exact:
        function = _in_double(function)
    return computed(result, _flushed(function, instruction, type_), *sources)


@compiles("div")
def _quotient(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    sources = typed_sources(instruction, context, type_)
    if type_[0] in "us":
        return computed(result, lambda a, b: integer_division(a, b)[0], *sources)
    if rounding(instruction) != "rn":
        raise unsupported(instruction)
    return computed(result, _flushed(np.divide, instruction, type_), *sources)


@compiles("min", "max")
def _extremum(instruction: Instruction, context: Context) -> Step:
    type_, modifiers = operand_type(instruction), instruction.modifiers
    smaller = instruction.opcode == "min"
    result = context.destination(instruction.operands[0], type_, instruction)
    sources = typed_sources(instruction, context, type_)
    if type_[0] in "us":
        integers = np.minimum if smaller else np.maximum
        if "relu" in modifiers:
            return computed(result, lambda a, b: np.maximum(integers(a, b), 0), *sources)
        return ufunc(result, integers, *sources)
    if "xorsign" in modifiers:
        raise unsupported(instruction)
    propagate = "NaN" in modifiers
    compare: Function = {
        (True, True): np.minimum,
        (True, False): np.fmin,
        (False, True): np.maximum,
        (False, False): np.fmax,
    }[smaller, propagate]

    def signed(a: Any, b: Any) -> Any:
        # The zeros compare equal in NumPy; in PTX +0.0 > -0.0, so min returns -0 and max returns +0.
        extremum = compare(a, b)
        zero = (a == 0) & (b == 0)
        if zero.any():
            negative = np.signbit(a) | np.signbit(b) if smaller else np.signbit(a) & np.signbit(b)
            extremum = np.where(zero, np.where(negative, extremum.dtype.type(-0.0), extremum.dtype.type(0)), extremum)
        return extremum

    def of_all(*values: Any) -> Any:
        extremum = signed(values[0], values[1])
        for value in values[2:]:
            extremum = signed(extremum, value)
        return np.abs(extremum) if "abs" in modifiers else extremum

    if "abs" in modifiers:
        raise unsupported(instruction)
    if type_ in HALVES:
        return computed(result, _by_halves(of_all, type_, instruction), *sources)
    return computed(result, _flushed(of_all, instruction, type_), *sources)


@compiles("abs", "neg")
def _sign(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    sources = typed_sources(instruction, context, type_)
    if type_ in HALVES:
        bit = np.uint32(0x80008000) if type_.endswith("x2") else np.uint16(0x8000)
        return ufunc(result, np.bitwise_xor if instruction.opcode == "neg" else np.bitwise_and,
                     *sources, bit if instruction.opcode == "neg" else ~bit)  # fmt: skip
    function = _UNARY[instruction.opcode]
    if "ftz" in instruction.modifiers:
        return computed(result, _flushed(function, instruction, type_), *sources)
    return ufunc(result, function, *sources)


@compiles("copysign")
def _copysign(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    sign, magnitude = typed_sources(instruction, context, type_)
    return ufunc(context.destination(instruction.operands[0], type_, instruction), np.copysign, magnitude, sign)


@compiles("testp")
def _test_property(instruction: Instruction, context: Context) -> Step:
    kind, type_ = instruction.modifiers[0], operand_type(instruction)
    tiny = np.finfo(np.float32 if type_ == "f32" else np.float64).tiny
    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }
    result = context.destination(instruction.operands[0], "pred", instruction)
    return computed(result, tests[kind], *typed_sources(instruction, context, type_))
