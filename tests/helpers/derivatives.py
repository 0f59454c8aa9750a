"""JVPs and double backwards of a `cases.Case`: tangents, results of the library, and results of the formula."""

from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from cases import DTYPES, Case
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import device, dispatch, reference
from cupy_flash.arrays import Array
from cupy_flash.cpu import derivatives
from cupy_flash.gpu import run_plan
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options, Saved, Tangents
from cupy_flash.simulator.run import start

ALL = ("tq", "tk", "tv", "tbias", "tsink")


class Derivatives(NamedTuple):
    """The results of a JVP and of a double backward with the same tangents; None for absent inputs."""

    out: np.ndarray
    tout: np.ndarray
    lse: np.ndarray
    tlse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dsink: np.ndarray | None
    ddout: np.ndarray
    ddlse: np.ndarray


JVP = ("out", "tout", "lse", "tlse")


def direction_of(case: Case, call, moving=ALL) -> reference.Tangents:
    """Return the tangents of a case that `moving` names, drawn from a fixed seed; NaN where the inputs are NaN."""
    rng = np.random.default_rng([case.seed, 3])
    bias, sink = call.options.get("bias"), call.options.get("sink")
    inputs = dict(tq=call.q, tk=call.k, tv=call.v, tbias=bias, tsink=sink)
    tangents = {}
    for name, x in inputs.items():
        tangent = None if x is None else rng.normal(size=x.shape)
        if case.scores != "normal" and x is not None:  # integers like q and k, so that sums of products are exact
            tangent = np.rint(2 * tangent)
        if name in moving and x is not None:
            wide = x.astype(np.float64)
            tangents[name] = np.where(np.isnan(wide), np.nan, case.tangent_size * tangent).astype(x.dtype)
    return reference.Tangents(**tangents)


def run(case: Case, backend="cpu", moving=ALL, call=None) -> Derivatives:
    """Return derivatives computed by the public functions."""
    call = call or case.call()
    q, k, v, options, dout, dlse, packed = call
    options, direction = options | dict(backend=backend), direction_of(case, call, moving)._asdict()
    inputs = [direction.pop(name) for name in ("tq", "tk", "tv")]
    if packed is None:
        out, tout, lse, tlse = cupy_flash.attention_jvp(q, k, v, *inputs, **direction, return_lse=True, **options)
        second = cupy_flash.attention_double_backward(
            *inputs, dout, q, k, v, out, lse, dlse=dlse, **direction, **options
        )
    else:
        out, tout, lse, tlse = cupy_flash.attention_varlen_jvp(
            q, k, v, *packed, *inputs, **direction, return_lse=True, **options
        )
        second = cupy_flash.attention_varlen_double_backward(
            *inputs, dout, q, k, v, out, lse, *packed, dlse=dlse, **direction, **options
        )
    dq, dk, dv, dbias, dsink, _, ddout, ddlse = second
    return Derivatives(out, tout, lse, tlse, dq, dk, dv, dbias, dsink, ddout, ddlse)


def run_planned(case: Case, moving=ALL, call=None, **changes) -> Derivatives:
    """Return derivatives by the CPU engine with `changes` of the plans' fields, such as the tile."""

    def planned(problem):
        return dispatch.plan_for(problem)._replace(**changes)

    return run_plans(case, planned, derivatives.jvp, derivatives.double_backward, moving, call)


def run_kernels(
    case, moving=ALL, call=None, arch="sm_80", tile=None, start=start, engine="simt", jvp=None, second=run_plan.backward
):
    """Return derivatives by an engine on the simulator; `jvp` names another engine for the JVP.

    `tile` replaces the planned tile of both; a function receives the plan and returns the tile. Without `second` the
    JVP alone is run, and the other results are None.
    """

    def planned(problem):
        gpu = device.named(arch)
        problem = problem._replace(backend="simulator", engine=engine if problem.backward else jvp or engine)
        return plan(problem, gpu, tile(plan(problem, gpu)) if callable(tile) else tile)

    steps = (step and partial(step, start=start) for step in (run_plan.jvp, second))
    return run_plans(case, planned, *steps, moving, call)


def run_plans(case: Case, planned, jvp, double_backward, moving, call) -> Derivatives:
    """Run the JVP, then the double backward unless it is None; `planned` returns the plan of a problem."""
    call = call or case.call()
    tangents = Tangents(*direction_of(case, call, moving))
    arrays, options = (call.q, call.k, call.v), Options(**call.options)
    problem, operands = pose("case", arrays, options, call.packed, tangents=tangents)
    results = jvp(planned(problem), operands)
    out, lse, tout, tlse = (array.numpy() for array in results)
    if double_backward is None:
        return Derivatives(out, tout, lse, tlse, *[None] * 7)
    saved = Saved(call.dout, out, lse, call.dlse)
    problem, operands = pose("case", arrays, options, call.packed, saved, tangents=tangents)
    operands = operands._replace(tout=results[2], tlse=results[3])
    gradients = double_backward(planned(problem), operands)
    dq, dk, dv, dbias, dsink, _ = gradients.map(Array.numpy)
    return Derivatives(out, tout, lse, tlse, dq, dk, dv, dbias, dsink, tout, tlse)


@cache
def references(case: Case, moving=ALL, orders=8) -> tuple[Derivatives, Derivatives]:
    """Return `compute_references` of the call of a case."""
    return compute_references(case, moving, case.call(), orders)


def compute_references(case: Case, moving, call, orders=8) -> tuple[Derivatives, Derivatives]:
    """Return results of the formula in fp64 (longdouble for fp64), and the least accurate of low-precision runs.

    The runs differ in the order of their sums, and the least accurate value is chosen per element. Derivatives are
    linear in the tangents: these are divided by their size, and the results multiplied by it, so that it changes
    nothing but the rounding of results.
    """
    with device.blas_controller().limit(limits=1):
        exact = _run_reference(case, moving, call, None)
        worst = _run_reference(case, moving, call, DTYPES[case.dtype])
        for order in range(1, orders):
            other = _run_reference(case, moving, call, DTYPES[case.dtype], order)
            worst = Derivatives(*map(_furthest, exact, worst, other))
    return exact, worst


def _furthest(exact, a, b):
    if exact is None:
        return None
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(b - exact) > np.abs(a - exact), b.astype(exact.dtype), a.astype(exact.dtype))


def _run_reference(case, moving, call, dtype, order=0) -> Derivatives:
    q, k, v, options, dout, dlse, packed = call
    options = options | dict(dtype=dtype, order=order)
    size = case.tangent_size
    direction = direction_of(case, call, moving)
    direction = reference.Tangents(*(None if x is None else (x / x.dtype.type(size)) for x in direction))
    with np.errstate(invalid="ignore", over="ignore"):
        if packed is None:
            jvp, double_backward, bounds = reference.attention_jvp, reference.attention_double_backward, ()
        else:
            jvp, double_backward = reference.attention_varlen_jvp, reference.attention_varlen_double_backward
            bounds = packed[:2]
        out, lse, tout, tlse = jvp(q, k, v, *bounds, direction, **options)
        dq, dk, dv, dbias, dsink, ddout, ddlse = double_backward(
            direction, dout, q, k, v, *bounds, dlse=dlse, **options
        )
    results = Derivatives(out, tout, lse, tlse, dq, dk, dv, dbias, dsink, ddout, ddlse)
    linear = {name: x for name, x in results._asdict().items() if name not in ("out", "lse") and x is not None}
    return results._replace(**{name: (x * float(size)).astype(x.dtype) for name, x in linear.items()})


def references_of_seeds(case: Case, moving=ALL) -> tuple[Derivatives, Derivatives]:
    """Return `references` with the largest errors of several seeds: in a small array one run may be exact by chance."""
    exact, low = references(case, moving)
    errors = [_errors_of(exact, low)]
    for seed in range(case.seed + 100, case.seed + 105):
        errors.append(_errors_of(*references(replace(case, seed=seed), moving, orders=1)))
    worst = map(max, zip(*errors, strict=True))
    return exact, Derivatives(*(None if x is None else x + error for x, error in zip(exact, worst, strict=True)))


def _errors_of(exact: Derivatives, low: Derivatives) -> list[float]:
    """Return the largest finite error of each result."""

    def largest(x, y):
        finite = np.isfinite(x)
        return np.abs(y[finite] - x[finite]).max(initial=0)

    return [0 if x is None else largest(x, y) for x, y in zip(exact, low, strict=True)]


def check(
    case: Case, result=None, backend="cpu", moving=ALL, references=references, names=Derivatives._fields, call=None
) -> None:
    """Compare derivatives (by default those of the public functions) with the formula, by the rule of tolerance.py."""
    result = run(case, backend, moving, call) if result is None else result
    exact, low = references(case, moving) if call is None else compute_references(case, moving, call)
    dtypes = dict.fromkeys(Derivatives._fields, DTYPES[case.dtype])
    dtypes |= dict.fromkeys(("lse", "tlse", "ddlse"), case.accumulation)
    dtypes["dbias"] = DTYPES[case.bias_dtype or case.dtype]
    for name in names:
        actual, expected, what = getattr(result, name), getattr(exact, name), f"{name} of {case}, moving {moving}"
        assert (actual is None) == (expected is None), what
        if actual is not None:
            assert (actual.dtype, actual.flags.c_contiguous) == (dtypes[name], True), what
            assert_matches_reference(actual, expected, getattr(low, name), dtypes[name], what)


def check_jvp_first(case: Case, run=run_kernels, names=Derivatives._fields, **how) -> None:
    """Check results as those of `run(case, **how)`; if the JVP is wrong, the double backward is not compiled."""
    check(case, run(case, second=None, **how), names=[name for name in names if name in JVP])
    check(case, run(case, **how), names=names)
