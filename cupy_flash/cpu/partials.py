"""Merges partial results (out, lse) over disjoint sets of keys, as split-KV and ring attention need.

Attention over the union of the keys is the average of the outputs, weighted by exp(lse).
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from ..arrays import Array, empty
from ..problem.records import Statistics
from .statistics import RowStatistics, merged


def merge(parts: tuple[Array, Array, Array, Array], layout: str) -> tuple[Array, Array]:
    """Merge CPU arrays parts = (out_a, lse_a, out_b, lse_b) into (out, lse) with the shapes and dtypes of a.

    b is one result with the shapes of a, or a stack of results along an additional first axis. Sums run over the stack
    in order, and a is added last. layout is "bshd", "bhsd", or "thd" for packed batches. Computed in lse's dtype.
    """
    out_a, lse_a, out_b, lse_b = parts
    out, lse = empty(out_a.shape, out_a.dtype, out_a), empty(lse_a.shape, lse_a.dtype, lse_a)
    stack = slice(None) if len(out_b.shape) > len(out_a.shape) else None
    outs, lses = [*out_b.numpy()[stack], out_a.numpy()], [*lse_b.numpy()[stack], lse_a.numpy()]
    with np.errstate(invalid="ignore", divide="ignore"):
        total, weights = merge_weights(lses)
        products = (
            part.astype(lse.dtype) * (weight if layout == "bhsd" else weight.swapaxes(-1, -2))[..., None]
            for part, weight in zip(outs, weights, strict=True)
        )
        merged = reduce(np.add, products)
    out.numpy()[...] = merged
    lse.numpy()[...] = total
    return out, lse


def merge_statistics(
    lses: tuple[Array, Array], parts: tuple[Statistics[Array], Statistics[Array]], key_offset_b: int
) -> list[Array]:
    """Merge the statistics of two parts, which have the same fields, by the lse of each; keys of b are shifted."""
    if parts[0] == Statistics():
        return []
    rows = []
    for lse, part, offset in zip(lses, parts, (0, key_offset_b), strict=True):
        rows.append(RowStatistics(lse.shape, lse.dtype))
        for name in Statistics._fields:
            given: Array | None = getattr(part, name)
            if given is not None:
                getattr(rows[-1], name)[...] = given.numpy()
        np.add(rows[-1].argmax, offset, out=rows[-1].argmax, where=rows[-1].argmax >= 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        total = merged(rows, merge_weights([lse.numpy() for lse in lses])[1])
    results: list[Array] = []
    for name in Statistics._fields:
        like: Array | None = getattr(parts[0], name)
        if like is not None:
            results.append(empty(like.shape, like.dtype, like))
            results[-1].numpy()[...] = getattr(total, name)
    return results


def merge_weights(lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the lse over all parts, and an array with the weights of each part, which are 0 for an lse of -inf.

    All have the shape of a part's lse. If all parts have lse -inf, so has the result. Weights are normalised by their
    sum, because exp(lse of a part - lse) has the rounding error of lse, which is 1e-3 for scores of 1e4.
    """
    of_parts = np.array(lses)  # as np.stack, in less time
    largest = np.maximum.reduce(of_parts)
    reference = np.where(largest == -np.inf, 0, largest)
    weights = np.exp(of_parts - reference)
    total = np.add.reduce(weights)  # in [1, number of parts], or 0 if all parts are -inf
    weights /= np.where(total == 0, 1, total)
    return reference + np.log(total), weights
