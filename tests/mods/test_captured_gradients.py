"""Gradients of captured arrays in kernels: summed by the block that owns an element, added atomically, or
deterministic.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from cases import Case, run_kernels, start
from mods import arrays_of, mods_of
from planting import before, change, planted
from tiers import in_tiers
from tolerance import assert_matches_reference

import cupy_flash

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ENGINES = {"simt": "float32", "mma": "float16"}
CASES = {
    "heads": Case(score_mod="alibi", causal=True),
    "dense": Case(score_mod="dense", mask_mod="document"),
    "number-and-rows": Case(score_mod="row-bias", mask_mod="rows"),
    "several-tiles-of-keys": Case(score_mod="key-bias", q_len=9, kv_len=70, batch=1),
    "many-tiles": Case(score_mod="row-bias", q_len=70, kv_len=41, batch=1),
    "dropout-softcap-bias": Case(score_mod="row-bias", dropout=0.3, softcap=4.0, bias="bhqk", bias_hides=True),
    "infinite-factor": Case(score_mod="hides-by-sum", sink=True),
    "lengths": Case(score_mod="dense", q_lengths=(7, 19), kv_lengths=(23, 5)),
    "packed": Case(score_mod="row-bias", packed=True, q_lengths=(7, 19), kv_lengths=(23, 5)),
}


def gradients(case, how, cast=lambda x: x, moved=None):
    """Return gradients of the arrays that a case's score_mod captures; None for arrays without a gradient.

    `moved`, a seed, perturbs every element of q, k, v and dout by up to one rounding.
    """
    call = case.call()
    if moved is not None:
        rng = np.random.default_rng(moved)
        eps = np.finfo(call.q.dtype).eps
        names = ("q", "k", "v", "dout")
        inputs = {name: getattr(call, name) for name in names}
        call = call._replace(
            **{name: x * (1 + eps * rng.uniform(-1, 1, x.shape)).astype(x.dtype) for name, x in inputs.items()}
        )
    mods = mods_of(case, arrays={name: x if x.dtype.kind != "f" else cast(x) for name, x in arrays_of(case).items()})
    options = call.options | mods | how
    if call.packed is None:
        out, lse = cupy_flash.attention(call.q, call.k, call.v, return_lse=True, **options)
        return cupy_flash.attention_backward(
            call.dout, call.q, call.k, call.v, out, lse, dlse=call.dlse, **options
        ).dcaptured
    arguments = (call.q, call.k, call.v)
    out, lse = cupy_flash.attention_varlen(*arguments, *call.packed, return_lse=True, **options)
    return cupy_flash.attention_varlen_backward(
        call.dout, *arguments, out, lse, *call.packed, dlse=call.dlse, **options
    ).dcaptured


DEFAULT_ROWS = ["dropout-softcap-bias-simt", "packed-simt", "several-tiles-of-keys-simt", "number-and-rows-mma"]
ROWS = {f"{name}-{engine}": (case, engine) for name, case in CASES.items() for engine in ENGINES}


@pytest.mark.parametrize("row", in_tiers(ROWS, DEFAULT_ROWS))
def test_gradients_equal_the_cpu(row):
    """The CPU engine in fp64 is exact. A gradient may be a single number, so several perturbed runs set the
    tolerance.
    """
    case, engine = row
    check_gradients(replace(case, dtype=ENGINES[engine]), dict(engine=engine))


def check_gradients(case, how):
    actual = gradients(case, dict(backend="simulator", **how))
    exact = gradients(replace(case, dtype="float64"), {}, lambda x: x.astype(np.float64))
    low = [gradients(case, {}, moved=seed) for seed in range(8)]
    assert any(x is not None for x in actual)
    for slot, (x, y, z) in enumerate(zip(actual, exact, zip(*low, strict=True), strict=True)):
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.dtype, x.shape) == (z[0].dtype, z[0].shape)
            runs = len(z)
            assert_matches_reference([x] * runs, [y] * runs, z, x.dtype, f"gradient of array{slot} of {case}")


# Any score may add to the gradients of these arrays: they are read at computed indices, read twice, or have only one
# number, or one per head.
ADDED = {
    "table": Case(score_mod="relative", mask_mod="document"),
    "read-twice": Case(score_mod="learned-twice", causal=True, head_dim=16),
    "heads": Case(score_mod="alibi", causal=True),
    "packed-number": Case(score_mod="row-bias", packed=True, q_lengths=(7, 19), kv_lengths=(23, 5)),
    "infinite-factor": Case(score_mod="hides-by-sum", sink=True),
}
ADDED_ROWS = {f"{name}-{engine}": (case, engine) for name, case in ADDED.items() for engine in ENGINES}


@pytest.mark.parametrize("row", in_tiers(ADDED_ROWS, ["table-mma"]))
def test_deterministic_gradients_equal_the_cpu(row):
    """Deterministic sums in fixed point are as exact as sums in double."""
    case, engine = row
    check_gradients(replace(case, dtype=ENGINES[engine]), dict(engine=engine, deterministic=True))


# Every head adds to the same elements. Arrays are float64, because rounding to float32 would hide the order of a sum.
SHARED = Case(score_mod="learned-twice", q_len=20, kv_len=9, batch=1, dtype="float64")
ORDERS = (dict(order="early"), dict(order="late"), dict(order="random", seed=1))


def bits_in_each_order():
    """Return the distinct bytes of deterministic gradients, over several orders of blocks and warps."""
    arrays = {name: x if x.dtype.kind != "f" else x.astype(np.float64) for name, x in arrays_of(SHARED).items()}
    call = SHARED.call()
    call = call._replace(options=call.options | mods_of(SHARED, arrays=arrays))
    starts = (functools.partial(start, **order) for order in ORDERS)
    results = (run_kernels(SHARED, call=call, engine="simt", start=each, deterministic=True) for each in starts)
    return {tuple(x.tobytes() for x in result.dcaptured if x is not None) for result in results}


def test_deterministic_gradients_are_bitwise_equal_in_any_order():
    assert len(bits_in_each_order()) == 1


FLOATING_SUMS = change(
    "add-units",
    "(unsigned long long*)sums + place, (unsigned long long)units",
    "(double*)sums + place, (double)x * power_of_two(exponent)",
) + change("value-of-units", "(double)sum", "__longlong_as_double(sum)")


@pytest.mark.exhaustive
def test_a_planted_sum_in_floating_point_is_found(monkeypatch):
    """With sums in double, results are as exact, but their bits depend on the order."""
    with planted(monkeypatch, FLOATING_SUMS):
        check_gradients(ADDED["table"], dict(engine="simt", deterministic=True))
        assert len(bits_in_each_order()) > 1


FIXED_PLANTS = {
    "units of the wrong size": change("fixed-point-unit", "61", "20"),
    "a row that is not measured": before("measure-row", "if (x > 1e30)"),
}


@pytest.mark.parametrize("plant", in_tiers({name: name for name in FIXED_PLANTS}, []))
def test_planted_scales_are_found(plant, monkeypatch):
    with planted(monkeypatch, FIXED_PLANTS[plant]), pytest.raises(AssertionError):
        check_gradients(ADDED["table"], dict(engine="simt", deterministic=True))


@pytest.mark.exhaustive
def test_a_deterministic_gradient_of_nan_is_nan():
    """If a contribution is NaN or infinite, there is no scale for fixed point."""
    case = ADDED["table"]
    call = case.call()
    call.dout[0, 0, 0] = np.nan
    (gradient, _) = run_kernels(case, call=call, engine="simt", deterministic=True).dcaptured
    assert np.isnan(gradient).all()
