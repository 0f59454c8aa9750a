"""Appends rows of k and v to a KV cache in place, rotated and rounded to its dtype."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...arrays import Array
from ...problem.kv_cache_contents import Spans, appended_places, positions_of_keys
from ...problem.records import CODES, FP8, Cache, CacheOperands, Operands, Problem
from .keys import Scales


def append(problem: Problem, operands: Operands, spans: Spans) -> None:
    """Write the rows of k and v of a call to its caches. Rows of negative slots are dropped."""
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    if given.k_new is None or given.v_new is None or not spans.k_rows.sum():
        return
    blocks, rows = appended_places(problem, operands, spans)
    count = len(blocks)
    K, V = (_rows_of(array, problem)[:count] for array in (given.k_new, given.v_new))
    if cache.rotary is not None:
        # Packed rows after the last sequence may have slots, but they have no position.
        positions = np.zeros(count, np.int64)
        known = positions_of_keys(problem, operands, spans)
        positions[: len(known)] = known
        K = rotated(K.astype(problem.accumulation), positions, problem, operands)
    written, pools = blocks >= 0, None if cache.scale_dtype is None else scale_pools(cache, given)
    places = blocks[written], rows[written]
    written_to = [("k_descale", K, operands.k), ("v_descale", V, operands.v)]
    for n, (name, X, array) in enumerate(written_to[:1] if problem.shared_kv else written_to):
        pool = in_rows(array.numpy(), cache)
        if pools is not None:
            scale, zero = (pools.v, pools.v_zero) if n else (pools.k, pools.k_zero)
            quantised = quantise(X[written].astype(np.float32), cache.dtype, scale.dtype)
            pool[places], scale[places] = quantised.codes, quantised.scale
            if zero is not None:
                zero[places] = quantised.zero
            continue
        if cache.dtype.name == FP8:
            X = X.astype(np.float32)
            descale = getattr(operands, name)
            if descale is not None:
                of_rows = np.repeat(descale.numpy(), spans.k_rows, axis=0)[:count, :, None]
                X[: len(of_rows)] /= of_rows  # packed rows past the last sequence may have slots, but no descale
            X = np.clip(X, -CODES[FP8], CODES[FP8])
        pool[places] = X[written].astype(cache.dtype, copy=False)


class Quantised(NamedTuple):
    """Rows as a quantised cache stores them; `zero` is None but for codes of 4 bits."""

    codes: np.ndarray  # (..., D), or of 4 bits (..., D / 2)
    scale: np.ndarray  # (...)
    zero: np.ndarray | None


def quantise(X: np.ndarray, dtype: np.dtype, scale_dtype: np.dtype) -> Quantised:
    """Return float32 rows X (..., D) as codes of `dtype`, with scales of `scale_dtype`.

    Every operation is one of IEEE arithmetic, so that kernels write the same bits. A row with a NaN has codes 0 and the
    scale NaN; so has a code whose quotient is NaN, as in a row with an infinity.
    """
    largest, zero = np.float32(CODES[dtype.name]), None
    low, high = X.min(axis=-1), X.max(axis=-1)
    span = high - low if dtype == np.uint8 else np.maximum(np.abs(low), np.abs(high))
    scale = _canonical((span / largest).astype(scale_dtype))
    scale[scale == 0] = 1
    Y = X / scale.astype(np.float32)[..., None]
    if dtype == np.uint8:
        zero = _canonical(((0 - low) / scale.astype(np.float32)).astype(scale_dtype))
        Y += zero.astype(np.float32)[..., None]
    Y[np.isnan(Y)] = 0
    if dtype == np.uint8:
        numbers = np.clip(np.rint(Y), 0, largest).astype(dtype)
        return Quantised(numbers[..., ::2] | numbers[..., 1::2] << 4, scale, zero)
    if dtype == np.int8:
        return Quantised(np.clip(np.rint(Y), -largest - 1, largest).astype(dtype), scale, zero)
    return Quantised(np.clip(Y, -largest, largest).astype(dtype), scale, zero)


def _canonical(x: np.ndarray) -> np.ndarray:
    """Return the array with the one quiet NaN that all engines write."""
    x[np.isnan(x)] = np.nan
    return x


def in_rows(array: np.ndarray, cache: Cache) -> np.ndarray:
    """View a cache, or its scales, as (blocks, rows, Hk, ...)."""
    return array if cache.layout == "bshd" else array.swapaxes(1, 2)


def scale_pools(cache: Cache, given: CacheOperands) -> Scales:
    """Return the scales and zeros of a quantised cache as (blocks, rows, Hk); weights read those of keys alone."""
    k, v, *zeros = (
        None if x is None else in_rows(x.numpy(), cache)
        for x in (given.k_scale, given.v_scale or given.k_scale, given.k_zero, given.v_zero)
    )
    assert k is not None and v is not None
    return Scales(k, v, *zeros)


def _rows_of(array: Array, problem: Problem) -> np.ndarray:
    """Return k or v as (tokens, Hk, D), with all sequences concatenated."""
    rows = array.numpy()
    if rows.ndim == 3:
        return rows
    assert problem.cache is not None
    if problem.cache.layout == "bhsd":
        rows = rows.transpose(0, 2, 1, 3)
    return rows.reshape(-1, *rows.shape[2:])


def rotated(X: np.ndarray, positions: np.ndarray, problem: Problem, operands: Operands) -> np.ndarray:
    """Apply rotary position embedding (Su et al., RoFormer, 2021) to rows (tokens, H, D) in the accumulation dtype.

    A pair (x, y) at position p becomes (x cos - y sin, x sin + y cos), with row p of the tables. Pairs are the
    dimensions (2i, 2i + 1) if interleaved, else (i, i + rd / 2); dimensions from rd on are unchanged.
    """
    cache, given = problem.cache, operands.cache
    assert cache is not None and cache.rotary is not None and given is not None
    assert given.rotary_cos is not None and given.rotary_sin is not None
    dims, interleaved = cache.rotary
    cos, sin = (
        table.numpy()[positions].astype(problem.accumulation)[:, None] for table in (given.rotary_cos, given.rotary_sin)
    )
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (slice(dims // 2), slice(dims // 2, dims))
    )
    x, y = X[..., first].copy(), X[..., second]
    X[..., first] = x * cos - y * sin
    X[..., second] = x * sin + y * cos
    return X
