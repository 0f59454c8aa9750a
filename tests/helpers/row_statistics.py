"""The statistics of the rows of a case by the dense formula, and the comparison with those of a call."""

import numpy as np
from cases import DTYPES, furthest
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import Statistics, reference

ALL = Statistics._fields
ORDERS = 3  # low-precision runs, which differ in the order of their sums


def statistics_of(call, names=ALL, **options):
    """Return the Statistics of a call; its out and lse are those of a call without statistics."""
    options = call.options | options
    if call.packed is None:
        return cupy_flash.attention(call.q, call.k, call.v, return_lse=True, statistics=names, **options)[2]
    arrays = (call.q, call.k, call.v, *call.packed)
    return cupy_flash.attention_varlen(*arrays, return_lse=True, statistics=names, **options)[2]


def dense(case, call):
    """Return the scores (B, Hq, Sq, Sk) of the formula, and its max and entropy, in float64 and a low precision."""

    def run(dtype, order):
        options = reference.Options(**call.options | dict(dtype=dtype, order=order, dropout=0.0))
        q, k = (x if case.layout == "bhsd" else x.swapaxes(1, 2) for x in (call.q, call.k))
        forward = reference._forward(options, 0, q, k, k)
        P = np.concatenate([forward.probabilities, forward.sink_probability], axis=-1)
        entropy = -(P * np.log(np.where(P == 0, 1, P))).sum(axis=-1)
        return forward.scored.scores, forward.scored.scores.max(axis=-1), entropy

    with np.errstate(invalid="ignore", over="ignore"):
        scores, *exact = run(None, 0)
        low, *others = (run(DTYPES[case.dtype], order)[1:] for order in range(ORDERS))
    for other in others:
        low = [furthest(*three) for three in zip(exact, low, other, strict=True)]
    return scores, exact, low


def drawn(lse):
    """Return gradients of max and of the entropy; those of rows that see no key are NaN."""
    gradients = np.random.default_rng(3).normal(size=(2, *lse.shape)).astype(lse.dtype)
    return np.where(np.isneginf(lse), np.nan, gradients)


def dense_gradients(case, call, dmax, dentropy):
    """Return the gradients of the formula in float64, and the least accurate of low-precision runs."""
    given = dict(dlse=call.dlse, dmax=dmax, dentropy=dentropy)
    backward, bounds = reference.attention_backward, ()
    if call.packed is not None:
        backward, bounds = reference.attention_varlen_backward, call.packed[:2]

    def run(dtype, order):
        options = call.options | dict(dtype=dtype, order=order)
        return backward(call.dout, call.q, call.k, call.v, *bounds, **given, **options)

    with np.errstate(invalid="ignore", over="ignore"):
        exact, low = run(None, 0), run(DTYPES[case.dtype], 0)
        for order in range(1, ORDERS):
            low = map(furthest, exact, low, run(DTYPES[case.dtype], order))
    return exact, reference.Gradients(*low)


def assert_are_the_gradients(case, call, found, dmax, dentropy):
    """Compare dq, dk, dv, dbias and dsink with the formula."""
    exact, low = dense_gradients(case, call, dmax, dentropy)
    for name, one, other in zip(exact._fields, exact, low, strict=True):
        if one is not None:
            actual = getattr(found, name)
            assert_matches_reference(actual, one, other, actual.dtype, f"{name} of {case}")


def assert_are_of_the_scores(case, call, found):
    """Compare the Statistics of a call with the formula.

    Scores near the largest one may be rounded above it, so argmax is compared by the exact score of its key.
    """
    scores, (top, entropy), (low_top, low_entropy) = dense(case, call)
    dtypes = (found.max.dtype, found.argmax.dtype, found.entropy.dtype)
    assert dtypes == (case.accumulation, np.int32, case.accumulation)
    assert_matches_reference(found.max, top, low_top, case.accumulation, f"max of {case}")
    assert_matches_reference(found.entropy, entropy, low_entropy, case.accumulation, f"entropy of {case}")
    assert not np.signbit(found.entropy).any()
    dead = np.isneginf(top)
    assert ((found.argmax == -1) == dead).all()
    of_key = np.take_along_axis(scores, np.maximum(found.argmax, 0)[..., None], axis=-1)[..., 0]
    at = np.where(dead, -np.inf, of_key)
    assert_matches_reference(at.astype(case.accumulation), top, low_top, case.accumulation, f"argmax of {case}")
