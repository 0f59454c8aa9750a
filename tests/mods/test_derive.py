"""Derivatives of mods, evaluated by their NumPy code, against torch's autograd and central differences."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.mods import derive
from cupy_flash.mods.derive import derivative
from cupy_flash.mods.ir import parse
from cupy_flash.mods.numpy_code import function_of, score_function, slope_of
from cupy_flash.mods.trace import Mod

torch = pytest.importorskip("torch")
F = torch.nn.functional

POINTS = np.array([-30.0, -2.5, -1.0, -0.3, 0.0, 0.4, 1.0, 2.0, 2.5, 30.0])

# Functions of the score that torch differentiates too; many of them have a kink at 0, 1 or 2.
FUNCTIONS = {
    "polynomial": lambda s: s * s * s - 2 * s + 1.5 - s / 3,
    "division": lambda s: 1 / (s + 3.7) + (s - 1) / (s * s + 2),
    "negation": lambda s: -(2 - s),
    "powers": lambda s: s**3 + s**2 + 2.0**s + (s + 40) ** 1.5 + (s + 40) ** -0.5,
    "power of itself": lambda s: (s + 40) ** (s / 10),
    "exp": lambda s: torch.exp(s / 10) + torch.exp2(s / 10) + torch.expm1(s / 10),
    "log": lambda s: torch.log(s + 40) + torch.log2(s + 40) + torch.log1p(s + 40) + torch.log10(s + 40),
    "sqrt": lambda s: torch.sqrt(s + 40) + torch.rsqrt(s + 40) + torch.reciprocal(s + 40) + torch.square(s),
    "sin": lambda s: torch.sin(s) + torch.cos(s) * torch.tanh(s) + torch.tan(s),
    "erf": lambda s: torch.erf(s),
    "abs": lambda s: torch.abs(s) + torch.sign(s) * s,
    "extrema": lambda s: torch.maximum(s, s * s) + torch.minimum(s, 2 - s),
    "clamp": lambda s: torch.clamp(s, -1, 1) + s.clamp(min=0.4) + torch.clamp(s, max=2.0),
    "roundings": lambda s: torch.floor(s) * s + torch.ceil(s) + torch.trunc(s) + torch.round(s),
    "remainder": lambda s: torch.remainder(s, 0.7) + torch.remainder(torch.full_like(s, 7.5), s + 40.0),
    "floor division": lambda s: s * (s.detach() // 0.7) + torch.div(s, 0.7, rounding_mode="trunc"),
    "where": lambda s: torch.where(s > 0, s * s, torch.where(s < -1, torch.tanh(s), 3 * s)),
    "masked_fill": lambda s: s.masked_fill(s > 1, 2.0) * s,
    "sigmoid": lambda s: torch.sigmoid(s) + F.logsigmoid(s),
    "relu": lambda s: torch.relu(s) + F.relu(s - 1),
    "silu": lambda s: F.silu(s),
    "gelu": lambda s: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "softplus": lambda s: F.softplus(s) + F.softplus(s, beta=2),
    "logaddexp": lambda s: torch.logaddexp(s, -s) + torch.logaddexp(s, s),
    "detach": lambda s: s.detach() * s,
    "conversions": lambda s: s.int().double() * s + (s > 0).double() * s,
    "fmax": lambda s: torch.fmax(s, 1 - s),
}


def evaluate(mod, score, q=0, kv=0, b=0, h=0):
    """Return (score, slope) of a Mod in fp64."""
    indices = (np.int32(b), np.int32(h), np.int32(q), np.int32(kv))
    with np.errstate(all="ignore"):
        modified, slope, _ = slope_of(mod.text, (False,) * len(mod.arrays)).evaluate(
            score, *indices, mod.arrays, mod.numbers, np.float64
        )
    return np.broadcast_to(modified, score.shape), np.broadcast_to(slope, score.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_equal_those_of_torch(name):
    function = FUNCTIONS[name]
    score = torch.tensor(POINTS, requires_grad=True)
    expected = function(score)
    (slope,) = torch.autograd.grad(expected.sum(), score)
    actual = evaluate(Mod(lambda s, b, h, q, kv: function(s)), POINTS)
    np.testing.assert_allclose(actual[0], expected.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(actual[1], slope.numpy(), rtol=1e-10, atol=1e-12)


def test_no_nan_comes_from_a_branch_that_is_not_taken():
    points = np.array([-1.0, 0.0, 2.0])
    guarded = Mod(lambda s, b, h, q, kv: np.where(s > 0, np.log(s), s))
    np.testing.assert_array_equal(evaluate(guarded, points)[1], [1, 1, 0.5])
    guarded = Mod(lambda s, b, h, q, kv: np.where(s > 0, np.sqrt(s), 0.0))
    np.testing.assert_allclose(evaluate(guarded, points)[1], [0, 0, 0.5 / math.sqrt(2)])
    guarded = Mod(lambda s, b, h, q, kv: np.where(s != 0, 1 / s, 7.0) + np.minimum(np.exp(-1000 * s), 1.0))
    np.testing.assert_array_equal(evaluate(guarded, points)[1], [-1, -500, -0.25])
    assert np.isfinite(evaluate(Mod(lambda s, b, h, q, kv: np.maximum(s, 0) ** 0.5 * 0.0 + s), points)[0]).all()


def unguarded(adjoints, adjoint, factor):
    """Return a product in which 0 times an infinite factor is NaN."""
    return adjoints.make("mul", adjoint, factor)


PLANTED = {
    "the derivative of a difference by what it subtracts has the wrong sign": (
        lambda patch: patch.setitem(derive.RULES, "sub", derive._add),
        lambda: test_values_and_slopes_equal_those_of_torch("negation"),
    ),
    "a branch that is not taken has no guard": (
        lambda patch: patch.setattr(derive._Adjoints, "times", unguarded),
        test_no_nan_comes_from_a_branch_that_is_not_taken,
    ),
}


@pytest.mark.parametrize("plant,check", PLANTED.values(), ids=PLANTED)
def test_planted_bug_of_a_derivative_is_found(plant, check, monkeypatch):
    plant(monkeypatch)
    slope_of.cache_clear()  # the cache holds slopes that were derived without the bug
    try:
        with pytest.raises(AssertionError):
            check()
    finally:
        slope_of.cache_clear()


def test_sigmoid_and_softplus_are_exact_for_large_scores():
    points = np.array([-800.0, -40.0, 40.0, 800.0])
    value, slope = evaluate(Mod(lambda s, b, h, q, kv: torch.sigmoid(s)), points)
    np.testing.assert_allclose(value, [0, math.exp(-40), 1, 1], rtol=1e-14)
    np.testing.assert_allclose(slope, [0, math.exp(-40), math.exp(-40), 0], rtol=1e-12)
    value, slope = evaluate(Mod(lambda s, b, h, q, kv: F.softplus(s)), points)
    np.testing.assert_allclose(value, [0, math.exp(-40), 40, 800], rtol=1e-14)
    np.testing.assert_allclose(slope, [0, math.exp(-40), 1, 1], rtol=1e-12)


def test_slopes_of_a_where_are_one_where():
    mod = Mod(lambda s, b, h, q, kv: np.where(q > kv, s * 3, s * 5))
    assert str(derivative(mod.program.score).slope) == "where((kv < q), real(n0), real(n1))"


# ------------------------------------------------------------------------------------------------- random expressions

LENGTH = 24
_rng = np.random.default_rng(0)
VECTOR, PLANE = _rng.normal(size=LENGTH), _rng.normal(size=(4, LENGTH))
PLACES = _rng.integers(0, LENGTH, LENGTH).astype(np.int32)
SEGMENTS = np.sort(_rng.integers(0, 5, LENGTH)).astype(np.int64)


class Expressions:
    """Random mods; the same seed gives the same expression."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def choose(self, *makers):
        return makers[self.rng.integers(len(makers))]()

    def integer(self, depth, q, kv, h):
        if depth == 0:
            return self.choose(lambda: q, lambda: kv, lambda: h, lambda: int(self.rng.integers(-3, 30)))

        def x():
            return self.integer(depth - 1, q, kv, h)

        return self.choose(
            lambda: x() + x(), lambda: x() - x(), lambda: x() * int(self.rng.integers(-3, 4)),
            lambda: x() // int(self.rng.integers(1, 9)), lambda: x() % int(self.rng.integers(1, 9)),
            lambda: abs(x()), lambda: np.minimum(x(), x()), lambda: np.maximum(x(), x()), lambda: PLACES[x() % LENGTH],
            lambda: np.where(self.truth(depth - 1, q, kv, h), x(), x()), lambda: np.clip(x(), 0, 20),
        )  # fmt: skip

    def truth(self, depth, q, kv, h):
        if depth == 0:
            bound = int(self.rng.integers(1, 20))
            return self.choose(lambda: q >= kv, lambda: q - kv < bound, lambda: SEGMENTS[q] == SEGMENTS[kv])

        def x():
            return self.truth(depth - 1, q, kv, h)

        def i():
            return self.integer(depth - 1, q, kv, h)

        return self.choose(
            lambda: x() & x(), lambda: x() | x(), lambda: x() ^ x(), lambda: np.logical_not(x()), lambda: i() < i(),
            lambda: i() == i(), lambda: i() != i(), lambda: i() >= i(),
        )  # fmt: skip

    def real(self, depth, s, q, kv, h):
        if depth == 0:
            return self.choose(
                lambda: s, lambda: s, lambda: VECTOR[q], lambda: VECTOR[kv], lambda: PLANE[h % 4, kv],
                lambda: float(self.rng.normal()), lambda: (q - kv) * 0.1,
            )  # fmt: skip

        def x():
            return self.real(depth - 1, s, q, kv, h)

        return self.choose(
            lambda: x() + x(), lambda: x() - x(), lambda: x() * x(), lambda: np.tanh(x()), lambda: np.sin(x()),
            lambda: np.exp(-abs(x())), lambda: np.where(self.truth(1, q, kv, h), x(), x()),
            lambda: np.where(x() > 0, np.log(np.abs(x()) + 0.5), x()), lambda: x() / (1.5 + np.abs(x())),
            lambda: np.sqrt(1.0 + np.square(x())), lambda: np.maximum(x(), x()), lambda: np.minimum(x(), x()),
            lambda: np.clip(x(), -1.0, 1.0), lambda: VECTOR[PLACES[q]] * x(), lambda: -x(),
        )  # fmt: skip

    def mod(self):
        seed = self.rng.integers(2**31)

        def random_mod(s, b, h, q, kv):
            self.rng = np.random.default_rng(seed)  # so that tracing and evaluation draw the same expression
            return self.real(3, s, q, kv, h) + 0 * s

        return random_mod


def evaluate_tile(mod, score, arrays):
    """Return (score, slope, {slot: gradient of the sum of scores}) over LENGTH queries and keys."""
    q, kv = np.arange(LENGTH, dtype=np.int32)[:, None], np.arange(LENGTH, dtype=np.int32)[None, :]
    gradients = {slot: np.zeros(array.shape) for slot, array in enumerate(arrays) if array.dtype == np.float64}
    with np.errstate(all="ignore"):
        modified, slope, reads = slope_of(mod.text, (True,) * len(arrays)).evaluate(
            score, np.int32(0), np.int32(1), q, kv, arrays, mod.numbers, np.float64
        )
    for slot, factor, indices in reads:
        places = [
            np.broadcast_to(np.clip(i, 0, n - 1), score.shape) for i, n in zip(indices, arrays[slot].shape, strict=True)
        ]
        np.add.at(gradients[slot], tuple(places), np.broadcast_to(factor, score.shape))
    return np.broadcast_to(modified, score.shape), np.broadcast_to(slope, score.shape), gradients


@given(seed=st.integers(0, 2**31))
def test_random_expressions_against_central_differences(seed):
    function = Expressions(seed).mod()
    mod = Mod(function)
    rng = np.random.default_rng(seed)
    score = rng.normal(size=(LENGTH, LENGTH))
    value, slope, gradients = evaluate_tile(mod, score, mod.arrays)
    # The expected result is the function itself, applied to arrays.
    q, kv = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    with np.errstate(all="ignore"):
        truth = np.broadcast_to(function(score, 0, np.int64(1), q, kv), score.shape)
    np.testing.assert_allclose(value, truth, rtol=1e-9, atol=1e-12)

    step = 1e-6
    (up, slope_up, _), (down, slope_down, _) = (evaluate_tile(mod, score + sign * step, mod.arrays) for sign in (1, -1))
    smooth = np.abs(slope_up - slope_down) < 1e-3 * (1 + np.abs(slope))  # points without a kink nearby
    error = np.abs((up - down) / (2 * step) - slope) / (1 + np.abs(slope))
    assert error[smooth].max(initial=0) < 1e-6
    assert smooth.mean() > 0.9

    for slot, gradient in gradients.items():
        direction = rng.normal(size=gradient.shape)
        moved = [
            [x + sign * step * direction if n == slot else x for n, x in enumerate(mod.arrays)] for sign in (1, -1)
        ]
        (up, _, by_up), (down, _, by_down) = (evaluate_tile(mod, score, arrays) for arrays in moved)
        if np.abs(by_up[slot] - by_down[slot]).max() < 1e-2:
            along = ((up - down) / (2 * step)).sum()
            assert along == pytest.approx((gradient * direction).sum(), rel=1e-5, abs=1e-5)


@given(seed=st.integers(0, 2**31))
def test_the_second_derivative(seed):
    mod = Mod(Expressions(seed).mod())
    slope = derivative(parse(mod.text).score).slope
    second = function_of((slope, derivative(slope).slope))
    score = np.random.default_rng(seed).normal(size=(LENGTH, LENGTH))
    q, kv = np.arange(LENGTH, dtype=np.int32)[:, None], np.arange(LENGTH, dtype=np.int32)[None, :]

    def at(score):
        results = second(score, np.int32(0), np.int32(1), q, kv, mod.arrays, mod.numbers, np.float64)
        return [np.broadcast_to(result, score.shape) for result in results]

    step = 1e-6
    with np.errstate(all="ignore"):
        _, expected = at(score)
        (up, second_up), (down, second_down) = at(score + step), at(score - step)
    smooth = (np.abs(second_up - second_down) < 1e-3 * (1 + np.abs(expected))) & (np.abs(up - down) < 1e-2)
    error = np.abs((up - down) / (2 * step) - expected) / (1 + np.abs(expected))
    assert error[smooth].max(initial=0) < 1e-5


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool", "float16", "float32"]
)
def test_arrays_of_every_dtype_are_read(dtype):
    table = (np.arange(6) % 2 * 3).astype(dtype)
    mod = Mod(lambda s, b, h, q, kv: s + table[kv] * 1.5 + table[q - 3])
    kv = np.arange(6, dtype=np.int32)[None, :]
    (value,) = score_function(mod.text)(
        np.zeros((1, 6)),
        np.int32(0),
        np.int32(0),
        np.full((1, 1), 8, np.int32),
        kv,
        mod.arrays,
        mod.numbers,
        np.float64,
    )
    np.testing.assert_array_equal(value[0], table * 1.5 + float(table[5]))


def test_bfloat16_is_read():
    import ml_dtypes

    table = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)
    mod = Mod(lambda s, b, h, q, kv: s + table[kv] * table[h])
    (value,) = score_function(mod.text)(
        np.zeros((1, 6), np.float32), np.int32(0), np.int32(2), np.int32(0), np.arange(6, dtype=np.int32), mod.arrays,
        mod.numbers, np.float32,
    )  # fmt: skip
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value[0], 2 * np.arange(6))


def test_indices_are_clamped_to_their_dimension():
    table = np.arange(4.0)
    mod = Mod(lambda s, b, h, q, kv: s + table[q - kv])
    indices = (np.int32(0), np.int32(0), np.int32(0), np.array([-9, -2, 0, 1], np.int32))
    (value,) = score_function(mod.text)(np.zeros(4), *indices, mod.arrays, mod.numbers, np.float64)
    np.testing.assert_array_equal(value, [3, 2, 0, 0])


def test_integers_divide_and_wrap_as_the_expressions_say():
    mod = Mod(lambda s, b, h, q, kv: s + (q // kv) + 10 * (q % kv) + (q - 2_147_483_647) // 1_000_000)
    indices = (np.int32(0), np.int32(0), np.int32(-7), np.array([2, 0], np.int32))
    with np.errstate(all="ignore"):
        (value,) = score_function(mod.text)(np.zeros(2), *indices, mod.arrays, mod.numbers, np.float64)
    np.testing.assert_array_equal(value, [-4 + 10 + 2147, 0 + 0 + 2147])
