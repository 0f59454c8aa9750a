"""Asserts the tolerance rule of every numerical test, cupy_flash.measure.checks.tolerance. No test chooses a tolerance
by hand.
"""

from cupy_flash.measure.checks.tolerance import deviation, special_values


def assert_matches_reference(actual, reference64, low_precision, dtype, what):
    """Compare `actual` with the fp64 (or longdouble) reference; the error of low-precision runs sets the tolerance.

    Arrays are anything that np.asarray accepts, all of one shape. `dtype` is the dtype of `actual`; `what` names the
    quantity in the message.
    """
    wrong = deviation(actual, reference64, low_precision, dtype)
    assert wrong is None, f"{what}: {wrong}"


def assert_special_values_match(actual, expected, what):
    """Assert that NaN, +inf and -inf are in the same places."""
    wrong = special_values(actual, expected)
    assert wrong is None, f"{what}: {wrong}"
