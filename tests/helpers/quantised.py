"""Quantised caches by hand: codes and scales of rows, the numbers that they stand for, and calls on both."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from cache_cases import CacheCall, CacheCase

KINDS = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("int8", "float8_e4m3fn", "float8_e5m2", "uint8")}
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344, "uint8": 15}


class Codes(NamedTuple):
    """Codes (..., D), or of 4 bits (..., D / 2), and for each row its scale and zero (...), the latter of 4 bits."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None


def quantised(x: np.ndarray, kind: str, scale_dtype: str = "float32") -> Codes:
    """Return rows as an append stores them, one row at a time."""
    dtype, of_scale = KINDS[kind], np.dtype(scale_dtype)
    rows = np.asarray(x).astype(np.float32).reshape(-1, np.shape(x)[-1])
    codes = np.zeros(rows.shape, np.uint8 if kind == "uint8" else dtype)
    scales, zeros = np.empty((2, len(rows)), of_scale)
    with np.errstate(all="ignore"):
        for n, row in enumerate(rows):
            if np.isnan(row).any():
                scales[n] = zeros[n] = np.nan
                continue
            span = row.max() - row.min() if kind == "uint8" else np.abs(row).max()
            scales[n] = of_scale.type(span / np.float32(LARGEST[kind])) or 1
            scale = np.float32(scales[n])
            zeros[n] = of_scale.type(-row.min() / scale)
            if kind == "uint8":
                codes[n] = np.clip(np.rint(row / scale + np.float32(zeros[n])), 0, 15)
            elif kind == "int8":
                codes[n] = np.clip(np.rint(row / scale), -128, 127)
            else:
                codes[n] = np.clip(row / scale, -LARGEST[kind], LARGEST[kind]).astype(dtype)
    if kind == "uint8":
        codes = codes[:, 0::2] + 16 * codes[:, 1::2]
    shape = np.shape(x)[:-1]
    zero = zeros.reshape(shape) + of_scale.type(0) if kind == "uint8" else None
    return Codes(codes.reshape(*shape, -1), scales.reshape(shape), zero)


def stored(of: Codes) -> np.ndarray:
    """Return the numbers of codes, float64."""
    numbers = of.codes.astype(np.float64)
    if of.zero is not None:
        halves = np.stack([of.codes & 15, of.codes >> 4], -1).reshape(*of.codes.shape[:-1], -1)
        numbers = halves - of.zero.astype(np.float64)[..., None]
    return numbers * of.scale.astype(np.float64)[..., None]


def options_of(k: Codes, v: Codes | None) -> dict[str, np.ndarray]:
    """Return the scales and zeros of caches as options of a call."""
    options = {"k_scale": k.scale, "k_zero": k.zero}
    if v is not None:
        options |= {"v_scale": v.scale, "v_zero": v.zero}
    return {name: x for name, x in options.items() if x is not None}


def calls(case: CacheCase, kind: str, scale_dtype: str = "float32") -> tuple[CacheCall, CacheCall]:
    """Return the call of a case on caches that are quantised by hand, and on the numbers that they store.

    Values of each block have another magnitude, and so other scales.
    """
    call = case.call()
    if call.v_cache is not None:
        blocks = np.arange(len(call.v_cache)).reshape(-1, 1, 1, 1)
        call = call._replace(v_cache=call.v_cache.astype(np.float32) * np.exp2(-(blocks % 5)).astype(np.float32))
    k = quantised(call.k_cache, kind, scale_dtype)
    v = None if call.v_cache is None else quantised(call.v_cache, kind, scale_dtype)
    scaled = call.options | options_of(k, v)
    return (
        call._replace(k_cache=k.codes, v_cache=None if v is None else v.codes, options=scaled),
        call._replace(k_cache=stored(k), v_cache=None if v is None else stored(v)),
    )
