"""The tolerance rule of every numerical test, cupy_flash.checks.tolerance, as assertions. No test sets one by hand."""

from cupy_flash.checks.tolerance import deviation, special_values


def assert_matches_reference(actual, reference64, low_precision, dtype, what):
    """Compare `actual`, of `dtype`, with the fp64 (or longdouble) reference; the low-precision run sets the tolerance.

    Arrays are anything np.asarray accepts, all of one shape; `what` names the quantity in the message.
    """
    wrong = deviation(actual, reference64, low_precision, dtype)
    assert wrong is None, f"{what}: {wrong}"


def assert_special_values_match(actual, expected, what):
    """Assert that NaN, +inf and -inf are in the same places."""
    wrong = special_values(actual, expected)
    assert wrong is None, f"{what}: {wrong}"
