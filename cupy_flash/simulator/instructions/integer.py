"""Integer arithmetic, logic and bit manipulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine.context import DTYPES, Array, Context, Group, Step, operand_type
from ..machine.ptx import TYPE_BYTES, Instruction
from .closures import Compiler, computed, registrar, typed_sources, ufunc, unsupported

COMPILERS: dict[str, Compiler] = {}
compiles = registrar(COMPILERS)


def _high_product(a: Array, b: Array, type_: str) -> Array:
    """Return the upper half of a * b."""
    if TYPE_BYTES[type_] < 8:
        bits = 8 * TYPE_BYTES[type_]
        wide = DTYPES[f"{type_[0]}{2 * bits}"]
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(DTYPES[type_])
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = np.asarray(a).view(np.uint64), np.asarray(b).view(np.uint64)
    xl, xh, yl, yh = x & mask, x >> shift, y & mask, y >> shift
    middle = xh * yl + ((xl * yl) >> shift)
    upper = xh * yh + (middle >> shift) + ((xl * yh + (middle & mask)) >> shift)
    if type_ == "s64":
        upper = upper - np.where(np.asarray(a) < 0, y, np.uint64(0)) - np.where(np.asarray(b) < 0, x, np.uint64(0))
    return upper.view(DTYPES[type_])


def integer_product(instruction: Instruction, context: Context) -> Step:
    """mul.{lo,hi,wide} of integers."""
    type_, part = operand_type(instruction), instruction.modifiers[0]
    sources = typed_sources(instruction, context, type_)
    if part == "wide":
        wide = f"{type_[0]}{16 * TYPE_BYTES[type_]}"
        result = context.destination(instruction.operands[0], wide, instruction)
        dtype = DTYPES[wide]
        return computed(result, lambda a, b: np.multiply(a, b, dtype=dtype), *sources)
    result = context.destination(instruction.operands[0], type_, instruction)
    if part == "lo":
        return ufunc(result, np.multiply, *sources)
    return computed(result, lambda a, b: _high_product(a, b, type_), *sources)


def integer_mad(instruction: Instruction, context: Context) -> Step:
    """mad.{lo,hi,wide} of integers."""
    type_, part = operand_type(instruction), instruction.modifiers[0]
    if "cc" in instruction.modifiers:
        return with_carry(instruction, context)
    if "sat" in instruction.modifiers:
        raise unsupported(instruction)
    a, b = (context.source(operand, type_, instruction) for operand in instruction.operands[1:3])
    wide = f"{type_[0]}{16 * TYPE_BYTES[type_]}" if part == "wide" else type_
    c = context.source(instruction.operands[3], wide, instruction)
    result = context.destination(instruction.operands[0], wide, instruction)
    dtype = DTYPES[wide]
    if part == "hi":
        return computed(result, lambda a, b, c: _high_product(a, b, type_) + c, a, b, c)
    return computed(result, lambda a, b, c: np.multiply(a, b, dtype=dtype) + c, a, b, c)


@compiles("mul24", "mad24")
def _short_product(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    if instruction.modifiers[0] != "lo":
        raise unsupported(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    shift = DTYPES[type_](8)
    sources = typed_sources(instruction, context, type_)

    def product(a: Any, b: Any, *c: Any) -> Any:
        short = ((a << shift) >> shift) * ((b << shift) >> shift)
        return short + c[0] if c else short

    return computed(result, product, *sources)


@compiles("addc", "subc", "madc")
def with_carry(instruction: Instruction, context: Context) -> Step:
    """Compile add.cc, sub.cc, mad.cc, addc, subc and madc; the carry flag CC.CF is a hidden predicate register."""
    type_ = operand_type(instruction)
    unsigned = f"u{8 * TYPE_BYTES[type_]}"
    result = context.destination(instruction.operands[0], unsigned, instruction)
    *factors, a, b = typed_sources(instruction, context, unsigned)
    carry = context.carry
    reads, writes = instruction.opcode in ("addc", "subc", "madc"), "cc" in instruction.modifiers
    subtracts = instruction.opcode.startswith("sub")
    dtype = DTYPES[unsigned]

    def product(x: Any, y: Any) -> Any:
        return _high_product(x, y, type_).astype(dtype) if "hi" in instruction.modifiers else x * y

    if factors and type_[0] == "s":
        raise unsupported(instruction)

    def step(group: Group) -> None:
        x, y = group.read(a), group.read(b)
        if factors:  # mad: x is factors[0] * a, and y is the addend
            x = product(group.read(factors[0]), x)
        incoming = group.read(carry).astype(dtype) if reads else dtype(0)
        if subtracts:
            total = x - y - incoming
            outgoing = (x < y) | ((x == y) & (incoming != 0))
        else:
            total = x + y + incoming
            outgoing = (total < x) | ((total == x) & (incoming != 0))
        group.write(result, total)
        if writes:
            group.write(carry, outgoing)

    return step


def integer_division(a: Any, b: Any) -> tuple[Any, Any]:
    """Return (quotient rounded toward zero, remainder). Division by zero, which PTX leaves undefined: (all ones, a)."""
    if a.dtype.kind == "u":
        safe = np.where(b == 0, b.dtype.type(1), b)
        quotient = a // safe
        return np.where(b == 0, ~b.dtype.type(0), quotient), np.where(b == 0, a, a - quotient * safe)
    unsigned = a.dtype.str.replace("i", "u")
    size_a, size_b = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    quotient, remainder = integer_division(size_a, size_b)
    quotient, remainder = quotient.view(a.dtype), remainder.view(a.dtype)
    quotient = np.where((a < 0) != (b < 0), -quotient, quotient)
    return np.where(b == 0, a.dtype.type(-1), quotient), np.where(a < 0, -remainder, remainder)


@compiles("rem")
def _remainder(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    return computed(result, lambda a, b: integer_division(a, b)[1], *typed_sources(instruction, context, type_))


@compiles("sad")
def _absolute_difference(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    sources = typed_sources(instruction, context, type_)
    return computed(result, lambda a, b, c: np.where(a < b, b - a, a - b) + c, *sources)


@compiles("and", "or", "xor")
def _bitwise(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[instruction.opcode]
    result = context.destination(instruction.operands[0], type_, instruction)
    return ufunc(result, function, *typed_sources(instruction, context, type_))


@compiles("not")
def _complement(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    return ufunc(result, np.invert, *typed_sources(instruction, context, type_))


@compiles("cnot")
def _logical_not(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    return computed(result, lambda a: a == 0, *typed_sources(instruction, context, type_))


@compiles("shl", "shr")
def _shift(instruction: Instruction, context: Context) -> Step:
    """Compile shl and shr. PTX ISA: counts clamp to the width, which leaves zeros, or copies of the sign for shr.s."""
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    value = context.source(instruction.operands[1], type_, instruction)
    count = context.source(instruction.operands[2], "u32", instruction)
    bits, dtype = 8 * TYPE_BYTES[type_], DTYPES[type_]
    function = np.left_shift if instruction.opcode == "shl" else np.right_shift
    if isinstance(count, np.uint32) and int(count) < bits:
        return ufunc(result, function, value, dtype(count))
    signed = type_[0] == "s" and instruction.opcode == "shr"

    def shifted(a: Any, n: Any) -> Any:
        limited = np.minimum(n, bits - 1).astype(dtype)
        result_bits = function(a, limited)
        return result_bits if signed else np.where(n >= bits, dtype(0), result_bits)

    return computed(result, shifted, value, count)


@compiles("shf")
def _funnel_shift(instruction: Instruction, context: Context) -> Step:
    direction, mode = instruction.modifiers[:2]
    result = context.destination(instruction.operands[0], "b32", instruction)
    low, high, count = typed_sources(instruction, context, "u32")

    def shifted(a: Any, b: Any, c: Any) -> Any:
        n = (np.minimum(c, 32) if mode == "clamp" else c & np.uint32(31)).astype(np.uint64)
        both = (np.uint64(b) << np.uint64(32)) | np.uint64(a)
        if direction == "r":
            return both >> n
        return np.where(n == 32, np.uint64(a), (both << n) >> np.uint64(32))

    return computed(result, lambda a, b, c: shifted(a, b, c).astype(np.uint32), low, high, count)


@compiles("lop3")
def _lookup(instruction: Instruction, context: Context) -> Step:
    if len(instruction.operands) != 5:
        raise unsupported(instruction)
    result = context.destination(instruction.operands[0], "b32", instruction)
    *sources, table = typed_sources(instruction, context, "b32")
    terms = [i for i in range(8) if int(table) >> i & 1]

    def lookup(a: Any, b: Any, c: Any) -> Any:
        result_bits = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), np.uint32)
        for i in terms:
            result_bits |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result_bits

    return computed(result, lookup, *sources)


@compiles("bfe")
def _extract_field(instruction: Instruction, context: Context) -> Step:
    """Compile bfe. PTX ISA: position and length have 8 bits; bit min(pos + len - 1, msb) fills signed fields."""
    type_ = operand_type(instruction)
    bits = 8 * TYPE_BYTES[type_]
    result = context.destination(instruction.operands[0], type_, instruction)
    value = context.source(instruction.operands[1], type_, instruction)
    position, length = (context.source(operand, "u32", instruction) for operand in instruction.operands[2:])

    def extract(a: Any, position: Any, length: Any) -> Any:
        p, n = np.int64(position) & 255, np.int64(length) & 255
        wide = a.astype(np.uint64 if type_[0] == "u" else np.int64)
        kind = wide.dtype.type
        shifted = np.where(p < bits, wide >> np.minimum(p, bits - 1).astype(kind), kind(0))
        keep = np.minimum(n, np.maximum(bits - p, 0))
        if type_[0] == "s":
            sign_at = np.minimum(p + n - 1, bits - 1)
            sign = np.where(n == 0, 0, (wide >> np.maximum(sign_at, 0)) & 1)
            fill = np.where(sign == 1, np.int64(-1), np.int64(0))
        else:
            fill = np.zeros_like(shifted)
        mask = np.where(keep >= 64, ~np.uint64(0), (np.uint64(1) << (keep % 64).astype(np.uint64)) - np.uint64(1))
        mask = mask.view(kind) if kind is np.int64 else mask
        return ((shifted & mask) | (fill & ~mask)).astype(DTYPES[type_])

    return computed(result, extract, value, position, length)


@compiles("bfi")
def _insert_field(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    bits, dtype = 8 * TYPE_BYTES[type_], DTYPES[type_]
    result = context.destination(instruction.operands[0], type_, instruction)
    field, base = (context.source(operand, type_, instruction) for operand in instruction.operands[1:3])
    position, length = (context.source(operand, "u32", instruction) for operand in instruction.operands[3:])

    def insert(a: Any, b: Any, position: Any, length: Any) -> Any:
        p, n = np.uint64(position) & np.uint64(255), np.uint64(length) & np.uint64(255)
        ones = np.where(n >= 64, ~np.uint64(0), (np.uint64(1) << (n % np.uint64(64))) - np.uint64(1))
        inside = p < bits
        shift = np.where(inside, p, np.uint64(0))
        mask = np.where(inside, ones << shift, np.uint64(0)).astype(dtype)
        return (b & ~mask) | ((np.uint64(a) << shift).astype(dtype) & mask)

    return computed(result, insert, field, base, position, length)


def _bit_length(values: Array) -> Array:
    """Return one plus the position of the highest set bit; 0 for zero."""
    x = values.astype(np.uint64)
    length = np.zeros(np.shape(x), np.uint32)
    for shift in (32, 16, 8, 4, 2, 1):
        upper = x >> np.uint64(shift)
        length = np.where(upper != 0, length + np.uint32(shift), length)
        x = np.where(upper != 0, upper, x)
    return length + (x != 0)


@compiles("clz")
def _leading_zeros(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], "u32", instruction)
    bits = np.uint32(8 * TYPE_BYTES[type_])
    return computed(result, lambda a: bits - _bit_length(a), *typed_sources(instruction, context, type_))


@compiles("popc")
def _count_ones(instruction: Instruction, context: Context) -> Step:
    result = context.destination(instruction.operands[0], "u32", instruction)
    return computed(result, np.bitwise_count, *typed_sources(instruction, context, operand_type(instruction)))


@compiles("bfind")
def _find_leading_one(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], "u32", instruction)
    bits, amount = 8 * TYPE_BYTES[type_], "shiftamt" in instruction.modifiers

    def find(a: Any) -> Any:
        magnitude = np.where(a < 0, ~a, a) if type_[0] == "s" else a
        length = _bit_length(np.asarray(magnitude).view(DTYPES[f"u{bits}"]))
        position = np.uint32(bits) - length if amount else length - np.uint32(1)
        return np.where(length == 0, np.uint32(0xFFFFFFFF), position)

    return computed(result, find, *typed_sources(instruction, context, type_))


@compiles("brev")
def _reverse_bits(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    bits, dtype = 8 * TYPE_BYTES[type_], DTYPES[type_]
    result = context.destination(instruction.operands[0], type_, instruction)

    def reverse(a: Any) -> Any:
        shift = 1
        while shift < bits:
            mask = dtype(sum(((1 << shift) - 1) << i for i in range(0, bits, 2 * shift)))
            a = ((a & mask) << dtype(shift)) | ((a >> dtype(shift)) & mask)
            shift *= 2
        return a

    return computed(result, reverse, *typed_sources(instruction, context, type_))


@compiles("prmt")
def _permute_bytes(instruction: Instruction, context: Context) -> Step:
    """Compile prmt in its default mode. PTX ISA: four 4-bit selectors, whose top bit replicates the byte's sign."""
    if instruction.modifiers != ("b32",):
        raise unsupported(instruction)
    result = context.destination(instruction.operands[0], "b32", instruction)

    def permute(a: Any, b: Any, selectors: Any) -> Any:
        both = (np.uint64(b) << np.uint64(32)) | np.uint64(a)
        result_bits: Any = np.uint64(0)
        for i in range(4):
            selector = (np.uint64(selectors) >> np.uint64(4 * i)) & np.uint64(15)
            byte = (both >> ((selector & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            result_bits = result_bits | (np.where(selector & np.uint64(8), sign, byte) << np.uint64(8 * i))
        return result_bits.astype(np.uint32)

    return computed(result, permute, *typed_sources(instruction, context, "b32"))


@compiles("dp4a")
def _dot_of_bytes(instruction: Instruction, context: Context) -> Step:
    a_type, b_type = instruction.modifiers
    a, b = (context.source(operand, "u32", instruction) for operand in instruction.operands[1:3])
    c = context.source(instruction.operands[3], "u32", instruction)
    result = context.destination(instruction.operands[0], "u32", instruction)

    def byte(value: Any, i: int, type_: str) -> Any:
        bits = ((value >> np.uint32(8 * i)) & np.uint32(255)).astype(np.int64)
        return np.where(bits > 127, bits - 256, bits) if type_ == "s32" else bits

    def dot(a: Any, b: Any, c: Any) -> Any:
        total = sum(byte(a, i, a_type) * byte(b, i, b_type) for i in range(4)) + c.astype(np.int64)
        return total.astype(np.uint32)

    return computed(result, dot, a, b, c)
