"""The tolerance rule of every numerical test: what an independent run in the same precision gets wrong decides it.

    max |actual - reference| <= 2 * max |low precision - reference| + band,   band = eps(dtype) * max |reference| + tiny

after NaN and the infinities, signs included, have been found in the same places. No test sets a tolerance by hand.
"""

import ml_dtypes
import numpy as np


def assert_matches_reference(actual, reference64, low_precision, dtype, what):
    """Hold `actual`, of `dtype`, against the fp64 (or longdouble) reference by means of its run in low precision.

    Arrays are anything np.asarray takes, all of one shape; `what` names the quantity in the message.
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
    """NaN, +inf and -inf stand in the same places."""
    for name, is_special in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(is_special(actual) != is_special(expected))
        assert len(wrong) == 0, (
            f"{what}: {name} in other places than the reference: {len(wrong)} of {actual.size}, first at "
            f"{tuple(map(int, wrong[0]))}: {actual[tuple(wrong[0])]:.9g}, reference {expected[tuple(wrong[0])]:.9g}"
        )
