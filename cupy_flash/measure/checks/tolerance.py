"""The tolerance rule of numerical comparisons: the error of independent runs in the same precision sets the scale.

    max |actual - reference| <= factor * max |low precision - reference| + band
    factor = 2 + 2 / sqrt(n),   band = eps(dtype) * max |reference| + tiny

where NaN and infinities, signs included, must be in the same places. The low-precision result has, for each element,
the least accurate value of several runs whose sums have other orders: the error of one run depends on its order by
chance, and the order differs between BLAS libraries. The largest error of few elements, such as those of dsink, still
depends on chance, so the factor depends on the number n of finite elements: 2 for many, 3 for 4, and 4 for a single
one.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = np.ndarray


def deviation(
    actual: npt.ArrayLike, reference64: npt.ArrayLike, low_precision: npt.ArrayLike, dtype: npt.DTypeLike
) -> str | None:
    """Describe the error of `actual`, of `dtype`; return None if it agrees with the fp64 (or longdouble) reference.

    The arguments are anything that np.asarray accepts, all of one shape; the low-precision runs set the tolerance.
    """
    actual, reference64, low_precision = (np.asarray(x) for x in (actual, reference64, low_precision))
    shapes = (actual.shape, reference64.shape, low_precision.shape)
    if not shapes[0] == shapes[1] == shapes[2]:
        return f"shapes of actual, reference, low precision: {shapes}"
    actual, reference64, low_precision = (x.astype(np.longdouble) for x in (actual, reference64, low_precision))
    misplaced = special_values(actual, reference64)
    if misplaced is not None:
        return misplaced
    misplaced = special_values(low_precision, reference64)
    if misplaced is not None:
        return f"low-precision runs: {misplaced}"
    finite = np.isfinite(reference64)
    if not finite.any():
        return None
    error, low_error = (
        np.abs(np.where(finite, x, 0) - np.where(finite, reference64, 0)) for x in (actual, low_precision)
    )
    limits = ml_dtypes.finfo(dtype)
    band = float(limits.eps) * np.abs(reference64[finite]).max() + float(limits.smallest_subnormal)
    factor = 2 + 2 / np.sqrt(np.count_nonzero(finite))
    allowed = factor * low_error.max() + band
    if error.max() <= allowed:
        return None
    worst = np.unravel_index(error.argmax(), error.shape)
    return (
        f"error {error.max():.3e} > {allowed:.3e} = {factor:.2f} * {low_error.max():.3e} (low-precision runs) + "
        f"{band:.3e} (band); worst at {tuple(map(int, worst))}: {actual[worst]:.9g}, reference {reference64[worst]:.9g}"
    )


def special_values(actual: Array, expected: Array) -> str | None:
    """Describe the first special value (NaN, +inf, -inf) with wrong positions; return None if all positions agree."""
    for name, is_special in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(is_special(actual) != is_special(expected))
        if len(wrong):
            first = tuple(map(int, wrong[0]))
            return (
                f"{name} in other places than the reference: {len(wrong)} of {actual.size}, first at "
                f"{first}: {actual[first]:.9g}, reference {expected[first]:.9g}"
            )
    return None
