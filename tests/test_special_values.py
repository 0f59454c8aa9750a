"""The ends of the range of what is finite, on the CPU."""

import numpy as np
import pytest
from cases import Case

import cupy_flash


@pytest.mark.parametrize("score, value", [(19, 1e31), (-19, 1e-37), (-19, 0), (19.5, 3e38), (-19.5, 1e-30)])
def test_values_at_the_ends_of_the_range(score, value):
    """Scores of one sign, near the bound of those that need no maximum: an average of equal values is the value."""
    q, k, v = (np.full((1, 40, 1, 4), x, np.float32) for x in (1, score / 4, value))
    k[0, 1:] -= np.linspace(0, 0.1, 39, dtype=np.float32)[:, None, None]
    out = cupy_flash.attention(q, k, v / 40, scale=1.0)
    np.testing.assert_allclose(out, v / 40, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_softcap_beyond_the_range_is_none(dtype):
    case = Case(dtype=dtype)
    q, k, v, options, *_ = case.call()
    expected = cupy_flash.attention(q, k, v, **options)
    np.testing.assert_array_equal(cupy_flash.attention(q, k, v, **options | dict(softcap=1e39)), expected)
    assert "softcap" not in cupy_flash.explain(q, k, v, **options | dict(softcap=1e39))


def test_float64_has_a_range_of_its_own():
    q, k, v, options, *_ = Case(dtype="float64").call()
    large = options | dict(scale=1e39, softcap=1e39)
    assert "softcap" in cupy_flash.explain(q, k, v, **large)
    expected = cupy_flash.attention(q, k, v, **options | dict(scale=1.0))
    np.testing.assert_allclose(cupy_flash.attention(1e-39 * q, k, v, **large), expected, rtol=1e-12)
