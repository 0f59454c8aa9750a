"""Matrix products of the CPU engines that keep NaN and infinities of hidden values out of the result."""

from __future__ import annotations

import math

import numpy as np


def product(W: np.ndarray, X: np.ndarray) -> np.ndarray:
    """Return W @ X with 0 * NaN = 0 * inf = 0, so that NaN and infinities of X reach only rows with a nonzero weight.

    W is (..., rows, n) and X (..., n, columns). No infinity has a negative weight: W is P, or dS, which is 0 or NaN for
    infinite K and Q.
    """
    result: np.ndarray = W @ X
    if math.isfinite(square_sum(result)):
        return result
    finite = np.isfinite(X)
    if finite.all():
        return result
    rows = np.flatnonzero(~finite.all(axis=-1).reshape(-1, X.shape[-2]).all(axis=0))
    weighted = (W[..., rows] != 0).astype(W.dtype)
    special = np.where(finite, 0, X)[..., rows, :]
    positive, negative, undefined = (
        weighted @ kind.astype(W.dtype) > 0 for kind in (special == np.inf, special == -np.inf, np.isnan(special))
    )
    result = W @ np.where(finite, X, 0)
    result += np.where(positive, np.inf, 0) - np.where(negative, np.inf, 0) + np.where(undefined, np.nan, 0)
    return result


def square_sum(tile: np.ndarray) -> float:
    """Return the sum of squares, which is finite only if every number is, by one BLAS dot, the fastest such test."""
    return float(np.vdot(tile, tile))
