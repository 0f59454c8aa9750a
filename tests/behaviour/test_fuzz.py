"""Random shapes, strides, dtypes and options, forward and backward, against the formula in float64."""

from dataclasses import replace

import derivatives
import hypothesis.strategies as st
import numpy as np
import pytest
from cases import DTYPES, Call, Case, Result, compare, compute_references, run, run_planned
from hypothesis import HealthCheck, given, settings

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The fixture patches np.empty once for all examples, which is intended.
SHARED_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def maybe(strategy):
    return st.none() | strategy


def broadcast_shapes(draw):
    return "".join(draw(st.sampled_from((letter, "1"))) for letter in "bhqk")[draw(st.integers(0, 4)) :]


@st.composite
def cases(draw):
    """Draw a case. Its inputs are integers times powers of two, so that q.k is exact in any order of summation."""
    kv_heads, packed = draw(st.integers(1, 3)), draw(st.booleans())
    batch, q_len, kv_len = draw(st.integers(0, 3)), draw(st.integers(0, 40)), draw(st.integers(0, 40))
    side = maybe(st.integers(-1, 45))
    fields = dict(
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 20)),
        head_dim_v=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        scores="integers",
        causal=draw(st.sampled_from((False, True, "top_left"))),
        window=draw(maybe(st.tuples(side, side))),
        scale=draw(st.sampled_from((0.0, 0.25, -0.125, 0.5, 4.0))),
        softcap=draw(maybe(st.sampled_from((0.5, 20.0)))),
        alibi=draw(maybe(st.sampled_from(("h", "bh")))),
        sink=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.9))),
        dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        packed=packed,
    )
    for name, longest in (("q_lengths", q_len), ("kv_lengths", kv_len)):
        if packed or draw(st.booleans()):
            fields[name] = tuple(draw(st.integers(0, longest)) for _ in range(batch))
    if not packed:
        fields["layout"] = draw(st.sampled_from(("bshd", "bhsd")))
        if draw(st.booleans()):
            fields |= dict(bias=broadcast_shapes(draw), bias_hides=draw(st.booleans()))
            fields["bias_dtype"] = draw(maybe(st.sampled_from(sorted(DTYPES))))
        if draw(st.booleans()):
            fields["mask"] = broadcast_shapes(draw)
    return Case(**fields)


@st.composite
def strided(draw, x):
    """Return the values of x with random strides: axes permuted or reversed, and gaps that hold NaN."""
    order = draw(st.permutations(range(x.ndim)))
    steps = [draw(st.sampled_from((1, -1, 2, -2))) for _ in order]
    memory = np.full([x.shape[axis] * abs(step) for axis, step in zip(order, steps, strict=True)], np.nan, x.dtype)
    view = memory[tuple(slice(None, None, step) for step in steps)].transpose(np.argsort(order))
    view[...] = x
    return view


@st.composite
def calls(draw):
    """Return a case and its arrays with random strides, some of them 0."""
    case = draw(cases())
    q, k, v, options, dout, dlse, packed = case.call()
    arrays = []
    for x in (q, k, v, dout):
        if packed is None and draw(st.integers(0, 9)) == 0 and not np.isnan(x.astype(np.float32)).any() and x.size:
            axes = tuple(slice(1) if draw(st.booleans()) else slice(None) for _ in range(x.ndim))
            arrays.append(np.broadcast_to(x[axes], x.shape))
        else:
            arrays.append(draw(strided(x)))
    q, k, v, dout = arrays
    return case, Call(q, k, v, options, dout, dlse, packed)


def check_with_several_runs(case, call, result):
    """Compare by the rule of tolerance.py, with the largest error of several low-precision runs.

    In a small array one low-precision run may be exact by chance, so the error is also taken from five cases that
    differ only in their random numbers.
    """
    exact, low = compute_references(case, call)
    errors = [errors_of(exact, low)]
    for seed in range(case.seed + 100, case.seed + 105):
        alike = replace(case, seed=seed)
        errors.append(errors_of(*compute_references(alike, alike.call(), orders=1)))
    worst = map(max, zip(*errors, strict=True))
    low = Result(*(None if x is None else x + error for x, error in zip(exact, worst, strict=True)))
    compare(case, result, exact, low)


def errors_of(exact, low):
    """Return the largest finite error of each result."""

    def largest(x, y):
        finite = np.isfinite(x)
        return np.abs(y[finite] - x[finite]).max(initial=0)

    return [0 if x is None else largest(x, y) for x, y in zip(exact, low, strict=True)]


@SHARED_FIXTURE
@given(calls())
def test_strides_and_options(call):
    case, call = call
    check_with_several_runs(case, call, run(case, "cpu", call))


# fewer examples, because each one compiles its own kernels
@settings(SHARED_FIXTURE, max_examples=settings().max_examples // 16)
@given(calls())
def test_strides_and_options_on_the_simulator(call):
    case, call = call
    check_with_several_runs(case, call, run(case, "simulator", call))


@pytest.mark.exhaustive
@settings(SHARED_FIXTURE, max_examples=settings().max_examples // 16)
@given(cases(), st.sets(st.sampled_from(derivatives.ALL)).map(sorted).map(tuple))
def test_derivatives_on_the_simulator(case, moving):
    """The engine simt computes any dtype."""
    derivatives.check(
        case, derivatives.run_kernels(case, moving), moving=moving, references=derivatives.references_of_seeds
    )


@SHARED_FIXTURE
@given(cases(), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
def test_tiles_and_threads(case, block_q, block_kv, threads):
    check_with_several_runs(case, case.call(), run_planned(case, block_q=block_q, block_kv=block_kv, threads=threads))
