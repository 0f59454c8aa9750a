"""Micro-kernels on the simulator against IEEE 754 and the PTX ISA.

Expected results are computed with exact fractions, Python integers and ml_dtypes; approximate instructions stay within
the error bounds of the PTX ISA.
"""

import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from micro import run

from cupy_flash.measure.checks.instructions import BY_NAME, CASES, THREADS, TYPES, WARP_CASES
from cupy_flash.simulator import Memory, launch


def run_micro(case, values):
    """Run a micro-kernel on the simulator; return one result per row."""
    memory = Memory()
    out = np.zeros(len(values[0]), TYPES[case.output][2])
    pointers = [memory.add(column, f"input {i}", writable=False) for i, column in enumerate(values)]
    pointers.append(memory.add(out, "out", initialised=False))
    parameters = struct.pack(f"{len(pointers)}QI", *pointers, len(out))
    launch(case.ptx, "micro", (-(-len(out) // THREADS), 1, 1), (THREADS, 1, 1), parameters, memory=memory)
    return out


# ---- exact arithmetic

PRECISION = {"f32": (24, -126), "f64": (53, -1022), "f16": (11, -14), "bf16": (8, -126), "tf32": (11, -126)}
LARGEST = {"f32": 2.0**128 - 2.0**104, "f64": 1.7976931348623157e308, "f16": 65504.0, "bf16": 3.3895313892515355e38}
LARGEST["tf32"] = 2.0**128 - 2.0**117


def round_exact(x, type_, mode="rn"):
    """Round a Fraction to a format in a rounding mode."""
    precision, smallest = PRECISION[type_]
    if x == 0:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, smallest) - precision + 1)
    n = x / unit
    away = math.copysign(math.floor(abs(n) + Fraction(1, 2)), n)
    n = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil, "rna": lambda _: int(away)}[mode](n)
    result = n * unit
    if abs(result) > Fraction(LARGEST[type_]):
        toward_zero = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
        return math.copysign(LARGEST[type_] if toward_zero else math.inf, 1 if x > 0 else -1)
    return math.copysign(float(result), 1 if x > 0 else -1)


def exactly(operation, type_, mode="rn"):
    """Return a float operation that rounds once.

    It computes with fractions if all operands are finite, and with float64 otherwise; a zero has its sign by IEEE 754.
    """

    def apply(*values):
        values = [float(value) for value in values]
        if not all(map(math.isfinite, values)):
            with np.errstate(all="ignore"):
                return float(operation(*map(np.float64, values)))
        exact = operation(*map(Fraction, values))
        if exact == 0:
            with np.errstate(all="ignore"):
                zero = operation(*[np.copysign(0.0 if value == 0 else 1.0, value) for value in values])
            zero = float(zero) if zero == 0 else 0.0
            # The sum of x and -x is +0, but -0 when rounding down.
            opposite = operation in (ADD, SUB, FMA) and not math.copysign(1, zero) < 0
            return -0.0 if opposite and mode == "rm" and not _all_positive_zero(operation, values) else zero
        return round_exact(exact, type_, mode)

    return apply


def _all_positive_zero(operation, values):
    if operation is SUB:
        values = [values[0], -values[1]]
    if operation is FMA:
        values = [values[0] * values[1] if 0 in values[:2] else math.nan, values[2]]
    return all(value == 0 and math.copysign(1, value) > 0 for value in values)


def ADD(a, b):
    return a + b


def SUB(a, b):
    return a - b


def MUL(a, b):
    return a * b


def FMA(a, b, c):
    return a * b + c


def quotient(type_):
    def apply(a, b):
        a, b = float(a), float(b)
        if b == 0 or not (math.isfinite(a) and math.isfinite(b)):
            with np.errstate(all="ignore"):
                return float(np.float64(a) / np.float64(b))
        if a == 0:
            return math.copysign(0.0, a) * math.copysign(1.0, b)
        return round_exact(Fraction(a) / Fraction(b), type_)

    return apply


def square_root(type_):
    def apply(a):
        a = float(a)
        if not math.isfinite(a) or a <= 0:
            with np.errstate(all="ignore"):
                return float(np.sqrt(np.float64(a)))
        scaled = Fraction(a) * Fraction(4) ** 1200
        root = math.isqrt(scaled.numerator // scaled.denominator)
        # If the root is not exact, 2 * root + 1 is strictly between two candidates, which makes rounding to nearest
        # correct.
        inexact = root * root != scaled
        return round_exact((Fraction(2 * root + inexact)) / Fraction(2) ** 1201, type_)

    return apply


def wrapped(value, type_):
    """Return an integer modulo the range of its type."""
    bits = int(type_[1:])
    value %= 1 << bits
    return value - (1 << bits) if type_[0] == "s" and value >> (bits - 1) else value


def to_integer(value, type_, mode, source):
    """Convert to an integer by the PTX ISA's cvt: clamped; NaN gives 0, but 1 << (bits - 1) from .f64 or to 64 bits."""
    bits, value = int(type_[1:]), float(value)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    if math.isnan(value):
        return wrapped(1 << (bits - 1), type_) if source == "f64" or bits == 64 else 0
    if math.isinf(value):
        return high if value > 0 else low
    rounded = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](Fraction(value))
    return min(max(rounded, low), high)


def divided(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def shifted(a, n, type_, left):
    bits = int(type_[1:])
    if left:
        return 0 if n >= bits else a << n
    return a >> min(n, bits) if type_[0] == "s" else (a >> n if n < bits else 0)


def bits_of(type_):
    return int(type_[1:])


def leading_one(a, type_):
    a = ~a if a < 0 else a
    return a.bit_length() - 1


def extracted(a, position, length, type_):
    """Return the result of bfe, by the pseudo code of the PTX ISA."""
    bits, position, length = bits_of(type_), position & 255, length & 255
    a %= 1 << bits
    top = bits - 1
    sign = 0 if type_[0] == "u" or length == 0 else a >> min(position + length - 1, top) & 1
    field = 0
    for i in range(top + 1):
        bit = a >> (position + i) & 1 if i < length and position + i <= top else sign
        field |= bit << i
    return field


def inserted(a, b, position, length, bits):
    """Return the result of bfi, by the pseudo code of the PTX ISA."""
    position, length = position & 255, length & 255
    for i in range(length):
        if position + i < bits:
            b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return b


def permuted(a, b, selectors):
    both, selected = a | b << 32, 0
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = both >> 8 * (selector & 7) & 255
        if selector & 8:
            byte = 255 if byte & 128 else 0
        selected |= byte << 8 * i
    return selected


def funnel(a, b, c, left, clamp):
    n = min(c, 32) if clamp else c & 31
    both = a | b << 32
    return (both << n >> 32 if left else both >> n) & 0xFFFFFFFF


def high_and_low(function, bits=16):
    """Apply a function of 16-bit halves to both halves of packed operands."""
    low = (1 << bits) - 1
    return lambda *v: function(*[int(x) & low for x in v]) | function(*[int(x) >> bits for x in v]) << bits


NARROW = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
CANONICAL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F}


def value_of(bits, type_):
    dtype = np.dtype(NARROW[type_])
    return float(np.array(bits, f"uint{8 * dtype.itemsize}").view(dtype))


def narrow(value, type_, mode="rn", *, satfinite=False, relu=False):
    """Return the bits of a value in a narrow format: ml_dtypes rounds to nearest, Fractions to the other modes."""
    value = float(value)
    if math.isnan(value):
        return CANONICAL_NAN[type_]
    if relu and value < 0:
        value = 0.0
    dtype = np.dtype(NARROW[type_])
    largest = float(ml_dtypes.finfo(dtype).max)
    if mode != "rn" and math.isfinite(value):
        value = round_exact(Fraction(value), type_, mode) if value else value
    with np.errstate(all="ignore"):
        # ml_dtypes rounds a float64 value once.
        rounded = np.float64(value).astype(dtype)
        if satfinite and not abs(float(rounded)) <= largest:
            rounded = np.array(math.copysign(largest, value), dtype)
    return int(rounded.view(f"uint{8 * dtype.itemsize}"))


def half_operation(operation, type_):
    single = type_.removesuffix("x2")

    def apply(*bits):
        result = exactly(operation, single)(*[value_of(int(x), single) for x in bits])
        return narrow(result, single)

    return high_and_low(apply) if type_.endswith("x2") else lambda *bits: apply(*map(int, bits))


def half_maximum(type_, *, packed):
    def apply(a, b):
        x, y = value_of(int(a), type_), value_of(int(b), type_)
        if math.isnan(x) and math.isnan(y):
            return CANONICAL_NAN[type_]
        return narrow(extremum(x, y, smaller=False), type_)

    return high_and_low(apply) if packed else apply


def extremum(a, b, *, smaller, propagate=False):
    """Return min or max by the PTX ISA: a number wins over NaN unless the instruction has .NaN, and -0 < +0."""
    a, b = float(a), float(b)
    if math.isnan(a) or math.isnan(b):
        if propagate:
            return math.nan
        return b if math.isnan(a) else a
    ordered = sorted((a, b), key=lambda x: (x, math.copysign(1, x)))
    return ordered[0] if smaller else ordered[1]


COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def compared(name, type_):
    if type_[0] != "f":
        return lambda a, b: int(COMPARE[name](int(a), int(b)))

    def apply(a, b):
        a, b = float(a), float(b)
        unordered = math.isnan(a) or math.isnan(b)
        if name in ("num", "nan"):
            return int(unordered == (name == "nan"))
        if name.endswith("u"):
            return int(unordered or COMPARE[name[:-1]](a, b))
        return int(not unordered and COMPARE[name](a, b))

    return apply


def flushed(value):
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else float(value)


def expected_function(case):
    """Return a function that computes the expected result of a case for one row."""
    opcode, *modifiers = case.name.split(".")
    type_ = case.output
    mode = next((m for m in modifiers if m in ("rn", "rz", "rm", "rp", "rna")), "rn")
    if opcode == "cvt":
        return expected_conversion(case, modifiers, mode)
    if opcode == "setp":
        if "and" in modifiers:
            return lambda a, b, c: int(float(a) < float(b) and not c)
        return compared(modifiers[0], modifiers[-1])
    if modifiers[-1] in ("f16", "f16x2", "bf16", "bf16x2"):
        single = modifiers[-1].removesuffix("x2")
        if opcode == "max":
            return half_maximum(single, packed=modifiers[-1].endswith("x2"))
        return half_operation({"add": ADD, "mul": MUL, "fma": FMA}[opcode], modifiers[-1])
    if modifiers[-1] in ("f32", "f64"):
        return expected_float(opcode, modifiers, type_, mode)
    return expected_integer(opcode, modifiers, case)


def expected_float(opcode, modifiers, type_, mode):
    if opcode in ("add", "sub", "mul", "fma"):
        function = exactly({"add": ADD, "sub": SUB, "mul": MUL, "fma": FMA}[opcode], type_, mode)
        if "ftz" in modifiers:
            return lambda *v: flushed(function(*map(flushed, map(float, v))))
        if "sat" in modifiers:
            return lambda *v: 0.0 if math.isnan(r := function(*v)) else min(max(r, 0.0), 1.0)
        return function
    return {
        "div": quotient(type_),
        "sqrt": square_root(type_),
        "rcp": lambda a: quotient(type_)(1.0, a),
        "min": lambda a, b: extremum(a, b, smaller=True, propagate="NaN" in modifiers),
        "max": lambda a, b: extremum(a, b, smaller=False, propagate="NaN" in modifiers),
        "abs": lambda a: abs(float(a)),
        "neg": lambda a: -float(a),
        "copysign": lambda a, b: math.copysign(float(b), float(a)),
    }[opcode]


def expected_integer(opcode, modifiers, case):
    type_ = case.inputs[0]
    bits = bits_of(type_)
    table = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul.lo": lambda a, b: a * b,
        "mul.wide": lambda a, b: a * b,
        "mul.hi": lambda a, b: a * b >> bits,
        "mad.lo": lambda a, b, c: a * b + c,
        "mad.wide": lambda a, b, c: a * b + c,
        "mad.hi": lambda a, b, c: (a * b >> bits) + c,
        "sad": lambda a, b, c: abs(a - b) + c,
        "min": min,
        "max": max,
        "abs": abs,
        "neg": lambda a: -a,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a,
        "brev": lambda a: int(f"{a:0{bits}b}"[::-1], 2),
        "shl": lambda a, n: shifted(a, n, type_, True),
        "shr": lambda a, n: shifted(a, n, type_, False),
        "shf.l": lambda a, b, c: funnel(a, b, c, True, "clamp" in modifiers),
        "shf.r": lambda a, b, c: funnel(a, b, c, False, "clamp" in modifiers),
        "clz": lambda a: bits - a.bit_length(),
        "popc": lambda a: a.bit_count(),
        "bfind": lambda a: -1 if (n := leading_one(a, type_)) < 0 else bits - 1 - n if "shiftamt" in modifiers else n,
        "bfe": lambda a, p, n: extracted(a, p, n, type_),
        "bfi": lambda a, p, n: inserted(a, 0x12345678 if bits == 32 else 0x123456789ABCDEF0, p, n, bits),
        "lop3": lambda a, b, c: a & b | ~a & c if case.name.endswith("ca") else a ^ b ^ c,
        "prmt": permuted,
        "selp": lambda a, b, c: a if c else b,
        "slct": lambda a, b, c: a if c >= 0 else b,
        "addc": lambda a, b: a + b >> 64,
        "madc": lambda a, b, c: a * b + c >> 32,
        "subc": lambda a, b: -1 if a < b else 0,
        "div": lambda a, b: divided(a, b | 1),
        "rem": lambda a, b: a - (b | 1) * divided(a, b | 1),
        "dp4a": lambda a, b, c: c + sum(byte(a, i, modifiers[0]) * byte(b, i, modifiers[0]) for i in range(4)),
    }
    if opcode == "addc":
        # add.cc wraps; addc adds the carry to 0 + 0.
        return lambda a, b: wrapped(table["addc"](int(a), int(b)), case.output)
    key = opcode if opcode in table else f"{opcode}.{modifiers[0]}"
    # PTX ISA, bfi: the field comes from operand a, all other bits from b; the micro-kernel passes a constant as b.
    return lambda *v: wrapped(table[key](*map(int, v)), case.output)


def byte(value, i, type_):
    selected = value >> 8 * i & 255
    return selected - 256 if type_ == "s32" and selected > 127 else selected


def expected_conversion(case, modifiers, mode):
    to, origin = modifiers[-2:]
    satfinite, relu = "satfinite" in modifiers, "relu" in modifiers
    integral = next((m for m in modifiers if m in ("rni", "rzi", "rmi", "rpi")), None)
    if to.endswith("x2"):
        single, bits = to[:-2], 8 if to.startswith("e") else 16
        if origin == "f32":
            return lambda a, b: (
                narrow(a, single, mode, satfinite=satfinite, relu=relu) << bits
                | narrow(b, single, mode, satfinite=satfinite, relu=relu)
            )
        from_single, width = origin[:-2], 8 if origin.startswith("e") else 16
        return repacked(from_single, width, single, bits, satfinite)
    if to == "tf32":
        return lambda a: tf32_bits(float(a), mode)
    if to in NARROW:
        return lambda a: narrow(a, to, mode, satfinite=satfinite, relu=relu)
    if to in ("f32", "f64"):
        if origin in NARROW:
            return lambda a: value_of(int(a), origin)
        if integral:
            return lambda a: integral_float(float(a), integral)
        if "sat" in modifiers:
            return lambda a: 0.0 if math.isnan(a) else min(max(float(a), 0.0), 1.0)
        if origin[0] == "f":
            return lambda a: round_exact(Fraction(float(a)), to, mode) if math.isfinite(a) and a else float(a)
        return lambda a: round_exact(Fraction(int(a)), to, mode)
    if origin[0] == "f":
        return lambda a: to_integer(a, to, integral, origin)
    if "sat" in modifiers:
        limits = np.iinfo(TYPES[to][2])
        return lambda a: min(max(int(a), int(limits.min)), int(limits.max))
    return lambda a: wrapped(int(a), to)


def repacked(from_single, width, single, bits, satfinite):
    def one(x):
        return narrow(value_of(x, from_single), single, satfinite=satfinite)

    return lambda a: one(int(a) >> width) << bits | one(int(a) & ((1 << width) - 1))


def integral_float(value, mode):
    if not math.isfinite(value):
        return value
    rounded = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](Fraction(value))
    return math.copysign(float(rounded), value)


def tf32_bits(value, mode):
    if math.isnan(value):
        return 0x7FFFFFFF
    if math.isfinite(value) and value:
        value = round_exact(Fraction(value), "tf32", mode)
    with np.errstate(all="ignore"):
        return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize("case", [case for case in CASES if case.relative is None], ids=lambda case: case.name)
def test_exact_instruction(case):
    values = case.values()
    actual = run_micro(case, values)
    function = expected_function(case)
    expected = [function(*row) for row in zip(*values, strict=True)]
    if actual.dtype.kind == "f":
        with np.errstate(all="ignore"):
            expected = np.array(expected, np.float64).astype(actual.dtype)
        word = f"uint{8 * actual.dtype.itemsize}"
        same = (actual.view(word) == expected.view(word)) | (np.isnan(actual) & np.isnan(expected))
    else:
        mask = (1 << 8 * actual.dtype.itemsize) - 1
        expected = np.array([value & mask for value in expected], f"uint{8 * actual.dtype.itemsize}")
        actual = actual.view(expected.dtype)
        same = actual == expected
    wrong = np.flatnonzero(~same)
    assert len(wrong) == 0, (
        f"{len(wrong)} of {len(same)} rows differ; first: {[column[wrong[0]] for column in values]} gives "
        f"{actual[wrong[0]]!r}, expected {expected[wrong[0]]!r}"
    )


@pytest.mark.parametrize(
    "name", ["add", "add.rm.ftz", "sub.rn", "sub.rz", "mul.rn.ftz", "mul.rp", "fma.rn", "fma.rn.ftz", "fma.rm"]
)
def test_two_packed_float32(name):
    """PTX ISA, add, sub, mul and fma: .f32x2 operates on bits 0 to 31 and on bits 32 to 63 of 64-bit registers."""
    opcode, *modifiers = name.split(".")
    columns = BY_NAME["fma.rn.f32"].values()[: 3 if opcode == "fma" else 2]
    mode = next((m for m in modifiers if m != "ftz"), "rn")
    function = expected_float(opcode, modifiers, "f32", mode)
    with np.errstate(all="ignore"):
        expected = np.array([function(*row) for row in zip(*columns, strict=True)]).astype(np.float32)
    columns = [column[: len(expected) // 2 * 2] for column in columns]
    out = np.zeros_like(columns[0])
    loads = [f"mad.wide.u32 %d0, %t, 8, %p{i}; ld.global.b64 %d{i + 1}, [%d0];" for i in range(len(columns))]
    operands = ", ".join(f"%d{i + 1}" for i in range(len(columns)))
    store = f"mad.wide.u32 %d0, %t, 8, %p{len(columns)}; st.global.b64 [%d0], %d4;"
    row = f"mad.lo.u32 %t, %block, 128, %t; setp.ge.u32 %q0, %t, {len(out) // 2}; @%q0 exit;"
    body = f"{row} {' '.join(loads)} {name}.f32x2 %d4, {operands}; {store}"
    run(body, *columns, out, threads=128, blocks=-(-len(out) // 256), target="sm_100a")
    same = (out.view(np.uint32) == expected[: len(out)].view(np.uint32)) | np.isnan(out) & np.isnan(
        expected[: len(out)]
    )
    assert same.all(), ([column[~same] for column in columns], out[~same], expected[: len(out)][~same])


APPROXIMATE = {"ex2": np.exp2, "lg2": np.log2, "rcp": lambda a: 1 / a, "rsqrt": lambda a: 1 / np.sqrt(a)}
APPROXIMATE |= {"sqrt": np.sqrt, "tanh": np.tanh}


@pytest.mark.parametrize("case", [case for case in CASES if case.relative is not None], ids=lambda case: case.name)
def test_approximate_instruction(case):
    (values,) = case.values()
    actual = run_micro(case, [values]).astype(np.float64)
    if case.inputs == ("bf16",):
        values = values.view(ml_dtypes.bfloat16).astype(np.float32)
    flush = "ftz" in case.name
    with np.errstate(all="ignore"):
        argument = np.where(flush & (np.abs(values) < 2.0**-126), np.copysign(0, values), values).astype(np.float64)
        expected = APPROXIMATE[case.name.split(".")[0]](argument)
        expected = np.where(flush & (np.abs(expected) < 2.0**-126), np.copysign(0, expected), expected)
        expected = expected.astype(np.float32).astype(np.float64)
        assert np.array_equal(np.isnan(actual), np.isnan(expected))
        close = (
            (actual == expected) | np.isnan(expected) | (np.abs(actual - expected) <= case.relative * np.abs(expected))
        )
    assert close.all(), (values[~close], actual[~close], expected[~close])


REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum}
REDUCE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def warp_result(case, warps):
    """Return the expected result of each lane, (warps, 32), for inputs (warps, 32)."""
    opcode, *rest = case.name.split(".")
    bits = (1 << np.arange(32)).astype(np.uint32)
    if opcode == "redux":
        return np.repeat(REDUCE[rest[0]].reduce(warps, axis=1, dtype=warps.dtype)[:, None], 32, axis=1)
    if opcode == "vote":
        return np.repeat(((warps != 0) * bits).sum(1, dtype=np.uint32)[:, None], 32, axis=1)
    if opcode == "match":
        return ((warps[:, :, None] == warps[:, None, :]) * bits).sum(2, dtype=np.uint32)
    # Shuffle by 3 within segments of `width` lanes; a lane whose source is outside its segment keeps its own value.
    width, lane = int(rest[1]), np.arange(32)
    start = lane // width * width
    source = {"up": lane - 3, "down": lane + 3, "bfly": lane ^ 3, "idx": start + 3}[rest[0]]
    return warps[:, np.where((source >= start) & (source < start + width), source, lane)]


@pytest.mark.parametrize("case", WARP_CASES, ids=lambda case: case.name)
def test_warp_instruction(case):
    (values,) = case.values()
    actual = run_micro(case, [values])
    assert np.array_equal(actual.reshape(-1, 32), warp_result(case, values.reshape(-1, 32)))


def test_names_of_cases_are_unique():
    assert len(BY_NAME) == len(CASES)
