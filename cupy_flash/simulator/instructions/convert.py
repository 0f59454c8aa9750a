"""Bit-exact conversions between number formats: rounding modes, saturation, .ftz (PTX ISA, cvt); fma and sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary float format: bits of the largest finite value, of infinity (None: it has none) and of NaN."""

    exponent_bits: int
    mantissa_bits: int
    largest: int
    infinity: int | None
    nan: int

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))


# The NaN of each format is the canonical one of the PTX ISA's cvt.
FORMATS = {
    "f16": Format(5, 10, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format(8, 7, 0x7F7F, 0x7F80, 0x7FFF),
    "e4m3": Format(4, 3, 0x7E, None, 0x7F),
    "e5m2": Format(5, 2, 0x7B, 0x7C, 0x7F),
}
_SMALLEST_NORMAL, _NO_SUM_IS_SUBNORMAL = np.float32(2.0**-126), np.float32(2.0**-102)
_TF32 = Format(8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF)


def round_integer(values: Float64, mode: str) -> Float64:
    """Round to an integer: rn (ties to even), rna (ties away from zero), rz, rm (down), rp (up)."""
    match mode:
        case "rn":
            return np.rint(values)
        case "rz":
            return np.trunc(values)
        case "rm":
            return np.floor(values)
        case "rp":
            return np.ceil(values)
        case "rna":
            return np.trunc(values + np.copysign(0.5, values))
    raise ValueError(f"unknown rounding mode {mode!r}")


def encode(values: Float64, format_: Format, mode: str = "rn", *, satfinite: bool = False) -> npt.NDArray[np.uint32]:
    """Return the bits of float64 values in a narrower format: sign, exponent, mantissa."""
    magnitude = np.abs(values)
    sign = np.signbit(values)
    finite = np.isfinite(values)
    _, exponent = np.frexp(np.where(finite, magnitude, 0))
    exponent = np.where(magnitude == 0, format_.smallest_exponent, np.maximum(exponent - 1, format_.smallest_exponent))
    # Counted in units of the last place, the mantissa with its implicit one is an integer. The implicit one adds 1 to
    # the exponent field, so the shifted part is 0 for the smallest exponent of normal numbers.
    units = np.ldexp(np.where(finite, values, 0), format_.mantissa_bits - exponent)
    units = np.abs(round_integer(units, mode))
    bits = ((exponent - format_.smallest_exponent).astype(np.int64) << format_.mantissa_bits) + units.astype(np.int64)
    toward_zero = (mode == "rz") | ((mode == "rm") & ~sign) | ((mode == "rp") & sign)
    infinity = format_.nan if format_.infinity is None else format_.infinity
    bits = np.where(finite & (bits > format_.largest), np.where(toward_zero, format_.largest, infinity), bits)
    bits = np.where(np.isinf(values), infinity, bits)
    if satfinite:
        bits = np.where(np.isnan(values), bits, np.minimum(bits, format_.largest))
    bits = bits | (sign.astype(np.int64) << (format_.exponent_bits + format_.mantissa_bits))
    return np.where(np.isnan(values), format_.nan, bits).astype(np.uint32)


def decode(bits: Array, name: str) -> Float64:
    """Return the float64 values of bits in a format of FORMATS."""
    if name == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return _eight_bit_values(name)[bits.astype(np.uint8)]


def _eight_bit_values(name: str) -> Float64:
    format_ = FORMATS[name]
    bits = np.arange(256)
    magnitude, negative = bits & 0x7F, bits >= 0x80
    exponent, mantissa = magnitude >> format_.mantissa_bits, magnitude & ((1 << format_.mantissa_bits) - 1)
    implicit = np.where(exponent > 0, 1 << format_.mantissa_bits, 0)
    scale = format_.smallest_exponent + np.maximum(exponent, 1) - 1 - format_.mantissa_bits
    values = np.ldexp((mantissa + implicit).astype(np.float64), scale)
    values[magnitude > format_.largest] = np.nan
    if format_.infinity is not None:
        values[magnitude == format_.infinity] = np.inf
    return np.where(negative, -values, values)


def to_bits(values: Array, name: str, mode: str = "rn", *, satfinite: bool = False) -> Array:
    """Return the bits of float32 or float64 values in f16, bf16 (uint16), e4m3 or e5m2 (uint8)."""
    if name == "f16" and mode == "rn" and not satfinite:
        bits = values.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FFF), bits)
    if name == "bf16" and mode == "rn" and not satfinite and values.dtype == np.float32:
        word = values.view(np.uint32)
        odd = (word >> np.uint32(16)) & np.uint32(1)
        upper = ((word + odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FFF), upper)
    wide = encode(values.astype(np.float64), FORMATS[name], mode, satfinite=satfinite)
    return wide.astype(np.uint8 if name in ("e4m3", "e5m2") else np.uint16)


def elements(words: Array, type_: str) -> npt.NDArray[np.float64]:
    """Return the values of the elements that lie one after the other along the last axis of words."""
    words = np.ascontiguousarray(words)
    if type_ == "f32":
        return words.view(np.float32).astype(np.float64)
    if type_ == "tf32":
        # The PTX ISA leaves the low 13 bits of a tf32 element undefined; the hardware ignores them.
        return (words.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return decode(words.view(np.uint8 if type_ in ("e4m3", "e5m2") else np.uint16), type_)


def to_tf32(values: npt.NDArray[np.float32], mode: str, *, satfinite: bool = False) -> npt.NDArray[np.uint32]:
    """Return the tf32 bits of float32 values: ten mantissa bits, the low thirteen bits zero; NaN is 0x7FFFFFFF."""
    bits = encode(values.astype(np.float64), _TF32, mode, satfinite=satfinite)
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), bits << np.uint32(13))


def float_to_integer(values: Array, dtype: np.dtype[Any], mode: str, *, source_is_f64: bool) -> Array:
    """Round and clamp to an integer type. NaN gives 0, or 1 << (bits - 1) from .f64 or to 64 bits (PTX ISA, cvt)."""
    rounded = round_integer(values.astype(np.float64), mode)
    limits = np.iinfo(dtype)
    bits = 8 * dtype.itemsize
    wide = source_is_f64 or bits == 64
    nan = np.array(1 << (bits - 1) if wide else 0, np.uint64).astype(f"u{dtype.itemsize}").view(dtype)
    # float64 represents 2**63 and 2**64 but not 2**63 - 1: compare before the cast instead of clamping after it.
    above = rounded >= float(int(limits.max) + 1)
    below = rounded < float(limits.min)
    inside = np.where(above | below | np.isnan(rounded), 0, rounded)
    result = inside.astype(np.uint64).astype(dtype) if limits.min == 0 else inside.astype(np.int64).astype(dtype)
    result = np.where(above, dtype.type(limits.max), np.where(below, dtype.type(limits.min), result))
    return np.where(np.isnan(rounded), nan, result)


def round_to_float32(values: Float64, error: Float64 | float, mode: str) -> npt.NDArray[np.float32]:
    """Return float32 of the exact values + error, rounded by `mode`; `error` is below half a unit in the last place."""
    nearest = (_to_odd(values, error) if mode == "rn" else values).astype(np.float32)
    if mode == "rn":
        return nearest
    residue = values - nearest.astype(np.float64)
    residue = np.where(residue == 0, error, residue)
    down, up = np.float32(-np.inf), np.float32(np.inf)
    too_big, too_small = residue < 0, residue > 0
    if mode == "rz":
        too_big, too_small = too_big & (nearest > 0), too_small & (nearest < 0)
    if mode in ("rz", "rm"):
        nearest = np.where(too_big, np.nextafter(nearest, down), nearest)
    if mode in ("rz", "rp"):
        nearest = np.where(too_small, np.nextafter(nearest, up), nearest)
    return nearest


def _to_odd(rounded: Float64, error: Float64 | float) -> Float64:
    """Turn values rounded to nearest, with this error, into values rounded to odd: a second rounding is then exact."""
    even = (np.asarray(rounded).view(np.uint64) & np.uint64(1)) == 0
    neighbour = np.nextafter(rounded, np.where(np.asarray(error) > 0, np.inf, -np.inf))
    return np.where((np.asarray(error) != 0) & even & np.isfinite(rounded), neighbour, rounded)


def two_sum(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    """Return (s, e) with s = fl(a + b), s + e = a + b exactly."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def sum_to_odd(a: Float64, b: Float64) -> Float64:
    """Return a + b rounded to odd; infinities and NaN as in a + b."""
    s, error = two_sum(a, b)
    return _to_odd(s, np.where(np.isfinite(error), error, 0))


def fma32(a: Any, b: Any, c: Any) -> npt.NDArray[np.float32]:
    """Return fma.rn.f32, correctly rounded: the product is exact in float64; ties created by float64 are corrected."""
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(product + c)
    result = total.astype(np.float32)
    # Double rounding differs from single rounding only if the float64 sum is halfway between two float32 numbers.
    middle = (total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    if middle.any() or not np.abs(result).min() >= _SMALLEST_NORMAL:
        middle |= (np.abs(total) < _SMALLEST_NORMAL) & (total != 0)
        ties = np.flatnonzero(middle)
        if len(ties):
            terms = (np.broadcast_to(np.float64(x), total.shape).reshape(-1)[ties] for x in (product, c))
            result.reshape(-1)[ties] = sum_to_odd(*terms).astype(np.float32)
    return result


def fma64(a: Any, b: Any, c: Any) -> Float64:
    """Return fma.rn.f64, correctly rounded: error-free product and sum, one rounding (Boldo and Melquiond 2008)."""
    a, b, c = np.broadcast_arrays(np.float64(a), np.float64(b), np.float64(c))
    product = a * b
    rough = product + c
    high, low = _two_product(a, b, product)
    sum_high, sum_low = two_sum(high, c)
    error_high, error_low = two_sum(sum_low, low)
    result = sum_high + _to_odd(error_high, error_low)
    # Outside these bounds the error-free transformations overflow or underflow.
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.abs(c))
    safe = (size < 2.0**990) & (
        (np.abs(product) > 2.0**-900) & (np.abs(product) < 2.0**990) | (product == 0) & ((a == 0) | (b == 0))
    )
    result = np.where(safe & (result != 0), result, rough)
    unsafe = ~safe & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    if unsafe.any():
        result[unsafe] = [_fma_by_fractions(*values) for values in zip(a[unsafe], b[unsafe], c[unsafe], strict=True)]
    return result


def _two_product(a: Float64, b: Float64, product: Float64) -> tuple[Float64, Float64]:
    splitter = 134217729.0  # 2**27 + 1 (Veltkamp)
    big_a, big_b = a * splitter, b * splitter
    a_high, b_high = big_a - (big_a - a), big_b - (big_b - b)
    a_low, b_low = a - a_high, b - b_high
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _fma_by_fractions(a: float, b: float, c: float) -> float:
    from fractions import Fraction

    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return float(a * b + c)
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def flush_subnormals(values: Array) -> Array:
    """Apply .ftz: replace float32 subnormals by zero of the same sign."""
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def flush_subnormal_bits(bits: Array, name: str) -> Array:
    """Apply .ftz to the bits of a 16-bit format."""
    exponent, sign = FORMATS[name].infinity, 0x8000
    assert exponent is not None
    return np.where(bits & exponent, bits, bits & sign)


def add_flushed(a: Array, b: Array) -> Array:
    """Return a + b in float32 with subnormal terms and sums flushed to zero."""
    return flush_subnormals(flush_subnormals(a) + flush_subnormals(b))


def may_flush(*values: Array) -> bool:
    """Return whether add_flushed may differ from a plain sum of these float32 numbers.

    It cannot if all are 0 or at least 2**-102: they are then multiples of 2**-125, and so are their sums, so that none
    is subnormal.
    """
    return any(((value != 0) & (np.abs(value) < _NO_SUM_IS_SUBNORMAL)).any() for value in values)
