"""The formula for one call in fp64 and in the call's own precision, whose error sets the tolerance of a comparison."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ... import reference
from ...device import blas_controller
from ...problem.recorded_call import Call

Array = np.ndarray
Results = list[Array | None]  # out, lse, dq, dk, dv, dbias, dsink


def references(call: Call, dtype: npt.DTypeLike, gradients: bool = True, orders: int = 8) -> tuple[Results, Results]:
    """Return the formula in fp64 (longdouble for fp64), and in `dtype`, rounded wherever an engine may round.

    Each element of the low-precision results is the worst of several runs, which differ in the order of their sums: a
    single run may be exact by chance in an array of few elements, such as dsink.
    """
    with blas_controller().limit(limits=1):  # several BLAS threads slow small arrays down tenfold on a busy machine
        exact = _run(call, gradients, None)
        worst = _run(call, gradients, dtype)
        for order in range(1, orders):
            other = _run(call, gradients, dtype, order)
            worst = [furthest(*arrays) for arrays in zip(exact, worst, other, strict=True)]
    return exact, worst


def furthest(exact: Array | None, a: Array | None, b: Array | None) -> Array | None:
    """Return, for each element, that of a or b which is further from the exact one."""
    if exact is None or a is None or b is None:
        return None
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(b - exact) > np.abs(a - exact), b.astype(exact.dtype), a.astype(exact.dtype))


def _run(call: Call, with_gradients: bool, dtype: npt.DTypeLike | None, order: int = 0) -> Results:
    q, k, v, options, dout, dlse, packed = call
    options = options | dict(dtype=dtype, order=order)
    forward: Callable[..., tuple[Array, Array]] = reference.attention if packed is None else reference.attention_varlen
    backward: Callable[..., reference.Gradients] = (
        reference.attention_backward if packed is None else reference.attention_varlen_backward
    )
    bounds = () if packed is None else packed[:2]
    with np.errstate(invalid="ignore", over="ignore"):
        out, lse = forward(q, k, v, *bounds, **options)
        if not with_gradients:
            return [out, lse, *[None] * 5]
        return [out, lse, *backward(dout, q, k, v, *bounds, dlse=dlse, **options)]
