"""The kernels of a plan on their operands: outputs and workspaces from the caller's framework, then every launch.

What starts a kernel is the backend's: a GPU, or the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, contiguous, empty
from ..launch import Launch, partials_launch
from ..params import Address, Encode, pack, pack_maps, pack_partials
from ..plan import Plan
from ..pose import has_boxes
from ..problem import DESCALES, Gradients, Operands

Results = dict[str, Array | None]


class Work(NamedTuple):
    """Launches on arrays, for a backend to start in order."""

    launches: tuple[Launch, ...]
    arch: str
    inputs: dict[str, Array]
    results: Results
    layout: str
    params: Callable[[Address], np.ndarray[Any, Any]]  # the argument of all of them, once arrays have addresses

    def arguments(self, launch: Launch, params: Any, address: Address, encode: Encode) -> tuple[Any, ...]:
        """Those of one launch: params, and its tensor maps where it copies boxes."""
        if not launch.boxes:
            return (params,)
        arrays = self.inputs | {name: array for name, array in self.results.items() if array is not None}
        return params, pack_maps(launch.boxes, arrays, self.layout, address, encode)


Start = Callable[[Work], object]


def forward(plan: Plan, operands: Operands, start: Start) -> tuple[Array, Array]:
    """(out, lse) of the call."""
    problem, q = plan.problem, operands.q
    out = empty((*q.shape[:-1], problem.head_dim_v), problem.out_dtype, q)
    lse = empty(problem.lse_shape(q), problem.accumulation, q)
    results: Results = {"out": out, "lse": lse}
    start(_work(plan, operands, results | _workspaces(plan, operands)))
    return out, lse


def backward(plan: Plan, operands: Operands, start: Start) -> Gradients:
    """Gradients of the call, from its result (out, lse) and the gradients of that."""
    problem, q = plan.problem, operands.q
    results: Results = {"dbias": None, "dsink": None}
    for name in ("q", "k", "v", "bias", "sink"):
        operand = getattr(operands, name)
        if operand is not None and (name != "bias" or problem.bias_gradient):
            results[f"d{name}"] = empty(operand.shape, operand.dtype, q)
    start(_work(plan, operands, results | _workspaces(plan, operands)))
    return Gradients(**results)


# Of workspaces that do not hold numbers as they are accumulated: vt in bytes, as not every library has a dtype of
# 8-bit floats.
_WORKSPACE_DTYPES: dict[str, np.dtype[Any]] = {
    "vt": np.dtype(np.uint8),
    "drawn": np.dtype(np.int32),
    "dq_turns": np.dtype(np.int32),
}


def _workspaces(plan: Plan, operands: Operands) -> Results:
    return {
        name: empty(
            _workspace_shape(name, plan, operands),
            _WORKSPACE_DTYPES.get(name, plan.problem.accumulation),
            operands.q,
        )
        for name in plan.workspaces
    }


def _workspace_shape(name: str, plan: Plan, operands: Operands) -> tuple[int, ...]:
    problem, q = plan.problem, operands.q
    if name == "drawn":
        return (1,)
    if name == "vt":
        # Whole tiles of keys along its rows, one more for each packed sequence: it begins with one of its own (vt.cuh).
        packed = problem.layout == "thd"
        tiles = operands.k.shape[0] // plan.block_kv + problem.batch if packed else -(-problem.kv_len // plan.block_kv)
        return (1 if packed else problem.batch, problem.kv_heads, problem.head_dim_v, tiles * plan.block_kv)
    rows = problem.lse_shape(q)
    if name not in ("dq_sums", "dq_turns"):
        return rows
    # Squares of 16 x 16, one more for each packed sequence: it begins with one of its own (dq_sums.cuh).
    squares = rows[-1] // 16 + problem.batch if problem.layout == "thd" else -(-rows[-1] // 16)
    if name == "dq_turns":
        return (*rows[:-1], 2 * squares)
    return (*rows[:-1], 16 * squares, -(-problem.head_dim // 16) * 16)


def merge(parts: tuple[Array, Array, Array, Array], layout: str, arch: str, start: Start) -> tuple[Array, Array]:
    """(out, lse) of two partial results, out_a, lse_a, out_b, lse_b."""
    inputs = {
        name: part if _has_contiguous_row(part) else contiguous(part)
        for name, part in zip(("out_a", "lse_a", "out_b", "lse_b"), parts, strict=True)
    }
    out_a, lse_a = inputs["out_a"], inputs["lse_a"]
    results = {"out": empty(out_a.shape, out_a.dtype, out_a), "lse": empty(lse_a.shape, lse_a.dtype, lse_a)}
    launch = partials_launch(out_a.dtype, inputs["out_b"].dtype, lse_a, out_a.shape[-1])
    params = partial(pack_partials, inputs | results, layout)
    start(Work((launch,) if 0 not in launch.grid else (), arch, inputs, {**results}, layout, params))
    return results["out"], results["lse"]


def _work(plan: Plan, operands: Operands, results: Results) -> Work:
    """The work of a plan; operands whose rows are not contiguous are copied, by their own framework, and a gradient of
    the result that is to be copied in boxes and cannot."""
    by_any_stride = ("bias", "mask", "lse", "dlse", "seed", *DESCALES)
    boxed = {box.operand for launch in plan.launches for box in launch.boxes}
    inputs = given(operands)
    rows = {
        name: contiguous(array)
        for name, array in inputs.items()
        if (name not in by_any_stride and not _has_contiguous_row(array)) or (name in boxed and not has_boxes(array))
    }
    if rows:
        operands, inputs = operands._replace(**rows), inputs | rows
    params = partial(pack, plan.problem, operands, results)
    return Work(plan.launches, plan.device.arch, inputs, results, plan.problem.layout, params)


def given(operands: Operands) -> dict[str, Array]:
    """The arrays among the operands, by name."""
    every = zip(Operands._fields, operands, strict=True)
    return {name: array for name, array in every if isinstance(array, Array)}


def _has_contiguous_row(array: Array) -> bool:
    """Kernels read the last dimension as contiguous."""
    return array.strides[-1] == 1 or array.shape[-1] <= 1
