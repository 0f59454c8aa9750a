"""The tolerance rule of every numerical test: the error of an independent run in the same precision is the scale.

    max |actual - reference| <= 2 * max |low precision - reference| + band,   band = eps(dtype) * max |reference| + tiny

where NaN and infinities, signs included, must be in the same places. No test sets a tolerance by hand.
"""

import ml_dtypes
import numpy as np


def assert_matches_reference(actual, reference64, low_precision, dtype, what):
    """Compare `actual`, of `dtype`, with the fp64 (or longdouble) reference; the low-precision run sets the tolerance.

    Arrays are anything np.asarray accepts, all of one shape; `what` names the quantity in the message.
    """
    actual, reference64, low_precision = (np.asarray(x) for x in (actual, reference64, low_precision))
    shapes = (actual.shape, reference64.shape, low_precision.shape)
    assert shapes[0] == shapes[1] == shapes[2], f"{what}: shapes of actual, reference, low precision: {shapes}"
    actual, reference64, low_precision = (x.astype(np.longdouble) for x in (actual, reference64, low_precision))
    assert_special_values_match(actual, reference64, what)
    assert_special_values_match(low_precision, reference64, f"{what}, low-precision run")

    finite = np.isfinite(reference64)
    if not finite.any():
        return
    error, low_error = (
        np.abs(np.where(finite, x, 0) - np.where(finite, reference64, 0)) for x in (actual, low_precision)
    )
    limits = ml_dtypes.finfo(dtype)
    band = float(limits.eps) * np.abs(reference64[finite]).max() + float(limits.smallest_subnormal)
    allowed = 2 * low_error.max() + band
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error.max() <= allowed, (
        f"{what}: error {error.max():.3e} > {allowed:.3e} = 2 * {low_error.max():.3e} (low-precision run) + {band:.3e} "
        f"(band); worst at {tuple(map(int, worst))}: {actual[worst]:.9g}, reference {reference64[worst]:.9g}"
    )


def assert_special_values_match(actual, expected, what):
    """Assert that NaN, +inf and -inf are in the same places."""
    for name, is_special in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(is_special(actual) != is_special(expected))
        assert len(wrong) == 0, (
            f"{what}: {name} in other places than the reference: {len(wrong)} of {actual.size}, first at "
            f"{tuple(map(int, wrong[0]))}: {actual[tuple(wrong[0])]:.9g}, reference {expected[tuple(wrong[0])]:.9g}"
        )
