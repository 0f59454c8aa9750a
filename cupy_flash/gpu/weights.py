"""Runs attention_weights, top_weights and key_importance on a call's operands, for the backends cuda and simulator.

Rows and heads that are an arithmetic progression are numbers of Params; any others are a list on the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Array, contiguous, contiguous_strides, empty, from_host
from ..engines.launch import Launch, Workspace
from ..engines.shared import ELEMENTS, known_constants, nonempty, sequences, shared_constants
from ..plan.plan import Plan
from ..problem.records import Operands, Problem
from ..problem.weights import IMPORTANCE, TOP, WEIGHTS, Asked, WeightsGradients
from .run_plan import Beside, Start, work_of

if TYPE_CHECKING:
    import numpy.typing as npt


def forward(plan: Plan, operands: Operands, asked: Asked, start: Start) -> tuple[Array, ...]:
    """Run the kernel of a call and return its results: the weights, the importance, or values and keys."""
    problem, q = plan.problem, operands.q
    dtype = problem.accumulation if asked.kind == IMPORTANCE else problem.dtype
    results = {"result": empty(asked.shape, dtype, q)}
    members = [Workspace("result", asked.shape, dtype, _strides(problem, asked))]
    inputs: dict[str, Array] = {}
    numbers = {"result_columns": asked.shape[-1], "result_rows": len(asked.rows)}
    if asked.kind == TOP:
        results["result_keys"] = empty(asked.shape, np.dtype(np.int32), q)
        results["best_scores"] = empty(asked.shape, problem.accumulation, q)
        members += [Workspace(name, x.shape, x.dtype, ()) for name, x in results.items() if name != "result"]
    if asked.row_weights is not None:
        inputs["row_weights"] = asked.row_weights
        members.append(_dense("row_weights", asked.row_weights))
    if asked.kind == WEIGHTS:
        for name, chosen in (("row", asked.rows), ("head", np.array(asked.heads or (), np.int64))):
            steps = np.unique(np.diff(chosen))
            if len(steps) > 1:
                inputs[f"asked_{name}s"] = from_host(chosen.astype(np.int32), q)
                members.append(Workspace(f"asked_{name}s", chosen.shape, np.dtype(np.int32), ()))
            numbers[f"{name}_first"], numbers[f"{name}_step"] = int(chosen[:1].sum()), int(steps[:1].sum())
    launches = nonempty([_asked_launch(plan, asked, launch) for launch in plan.launches])
    beside = Beside(inputs, tuple(members), tuple(numbers.items()))
    start(work_of(plan._replace(launches=launches), operands, {**results}, beside=beside))
    return (results["result"], results["result_keys"]) if asked.kind == TOP else (results["result"],)


def _asked_launch(plan: Plan, asked: Asked, launch: Launch) -> Launch:
    """Return a launch with the grid and the constants of what the call asks for; others than that of it as they are."""
    if launch.function != asked.kind:
        return launch
    constants: list[tuple[str, int | float | bool | str]] = []
    if asked.kind == WEIGHTS:
        tiles = -(-len(asked.rows) // plan.block_q) * -(-asked.shape[-1] // plan.block_kv)
        heads = 1 if asked.heads is None else len(asked.heads)
        launch = launch._replace(grid=(tiles, heads, sequences(plan.problem)))
        constants.append(("MEAN", asked.heads is None))
    if asked.row_weights is not None:
        constants.append(("weight_element", ELEMENTS[asked.row_weights.dtype.name]))
    return launch._replace(constants=(*launch.constants, *constants))


def _strides(problem: Problem, asked: Asked) -> tuple[int, ...]:
    """Return the strides of batch, head and row of a result, and its alignment, which kernels do not use."""
    packed = problem.layout == "thd"
    strides = list(contiguous_strides(asked.shape))[:-1]
    if asked.kind == IMPORTANCE:
        return (*strides, 1, 1)
    row = strides.pop()
    head = 0 if asked.kind == WEIGHTS and asked.heads is None else strides.pop()
    return (0 if packed else strides.pop(), head, row, 1)


def _dense(name: str, x: Array) -> Workspace:
    """Return the member of an array that broadcasts to (B, Hq, Sq), with its strides of batch, head, row and column."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True)]
    return Workspace(name, x.shape, x.dtype, (*[0] * (3 - len(strides)), *strides, 0))


def backward(plan: Plan, operands: Operands, asked: Asked, start: Start) -> WeightsGradients:
    """Run the backward of a call and return the gradients, each in the shape and dtype of its input."""
    problem, q, gradient = plan.problem, operands.q, asked.gradient
    assert gradient is not None and operands.lse is not None
    arrays = {"q": q, "k": operands.k, "lse": operands.lse}
    if operands.bias is not None and problem.bias_gradient:
        arrays["bias"] = operands.bias
    results = {f"d{name}": empty(x.shape, x.dtype, q) for name, x in arrays.items()}
    inputs = {"result": contiguous(gradient)}
    members = [Workspace("result", asked.shape, gradient.dtype, _strides(problem, asked))]
    numbers = {"result_columns": asked.shape[-1], "result_rows": len(asked.rows), "result_heads": 0}
    launches = [_differentiating(asked, launch) for launch in plan.launches]
    if asked.keys is not None:
        inputs["result_keys"] = contiguous(asked.keys)
        members.append(Workspace("result_keys", asked.shape, asked.keys.dtype, ()))
    if asked.row_weights is not None:
        weights, rows = asked.row_weights, problem.lse_shape(q)
        inputs["row_weights"] = weights
        results |= {
            "drow_sums": empty(rows, problem.accumulation, q),
            "drow_weights": empty(weights.shape, weights.dtype, q),
        }
        members += [_dense("row_weights", weights), *(_dense(x, results[x]) for x in ("drow_sums", "drow_weights"))]
        constants = {**shared_constants(problem), "THREADS": 128, "weight_element": ELEMENTS[weights.dtype.name]}
        grid = (math.prod(weights.shape), 1, 1)
        launches.append(Launch("drow_weights", known_constants("drow_weights", constants), grid, 128))
    if asked.kind == WEIGHTS:
        numbers["result_heads"] = len(asked.heads or ())
        counts = {"row": problem.lse_shape(q)[-1], "head": problem.heads}
        for name, chosen in (("row", asked.rows), ("head", np.array(asked.heads or (), np.int64))):
            steps = np.unique(np.diff(chosen))
            if len(steps) > 1 or 0 in steps:
                for which, places in zip(("places", "next"), _places(chosen, counts[name]), strict=True):
                    inputs[f"{name}_{which}"] = from_host(places, q)
                    members.append(Workspace(f"{name}_{which}", places.shape, places.dtype, ()))
            numbers[f"{name}_first"], numbers[f"{name}_step"] = int(chosen[:1].sum()), int(steps[:1].sum() or 1)
    beside = Beside(inputs, tuple(members), tuple(numbers.items()))
    work = work_of(plan._replace(launches=nonempty(launches)), operands, {**results}, beside=beside)
    start(work)
    dcaptured = None if work.captured is None else work.captured.gradients
    return WeightsGradients(
        results["dq"], results["dk"], results["dlse"], results.get("dbias"), dcaptured, results.get("drow_weights")
    )


def _differentiating(asked: Asked, launch: Launch) -> Launch:
    """Return a launch of a backward with the constants of what the call asks for."""
    constants = dict(launch.constants)
    if not constants.get("WEIGHTS"):
        return launch
    constants["MEAN"] = asked.heads is None
    if asked.row_weights is not None:
        constants["weight_element"] = ELEMENTS[asked.row_weights.dtype.name]
    return launch._replace(constants=tuple(constants.items()))


def _places(chosen: npt.NDArray[np.int64], count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the first place of each of `count` numbers among the chosen ones, and the next place of each place's."""
    firsts, nexts = np.full(count, -1, np.int32), np.full(len(chosen), -1, np.int32)
    numbers, first = np.unique(chosen, return_index=True)
    firsts[numbers] = first
    order = np.argsort(chosen, kind="stable")
    repeats = chosen[order[1:]] == chosen[order[:-1]]
    nexts[order[:-1][repeats]] = order[1:][repeats]
    return firsts, nexts
