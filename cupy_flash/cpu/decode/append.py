"""Appends rows of k and v to a KV cache in place, rotated and rounded to its dtype."""

from __future__ import annotations

import numpy as np

from ...arrays import Array
from ...problem.kv_cache_contents import Spans, appended_places, positions_of_keys
from ...problem.records import FP8, Operands, Problem

LARGEST_FP8 = 448.0  # largest float8_e4m3fn, to which larger numbers saturate


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
    written_to = [("k_descale", K, operands.k), ("v_descale", V, operands.v)]
    for name, X, array in written_to[:1] if problem.shared_kv else written_to:
        if cache.dtype.name == FP8:
            X = X.astype(np.float32)
            descale = getattr(operands, name)
            if descale is not None:
                of_rows = np.repeat(descale.numpy(), spans.k_rows, axis=0)[:count, :, None]
                X[: len(of_rows)] /= of_rows  # packed rows past the last sequence may have slots, but no descale
            X = np.clip(X, -LARGEST_FP8, LARGEST_FP8)
        written = blocks >= 0
        pool = array.numpy() if cache.layout == "bshd" else array.numpy().transpose(0, 2, 1, 3)
        pool[blocks[written], rows[written]] = X[written].astype(cache.dtype, copy=False)


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
