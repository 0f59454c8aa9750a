"""Runs attention_weights, top_weights and key_importance on a call's operands, for the backends cuda and simulator.

Rows and heads that are an arithmetic progression are numbers of Params; any others are a list on the device.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array, contiguous_strides, empty, from_host
from ..engines.launch import Launch, Workspace
from ..engines.shared import ELEMENTS, nonempty, sequences
from ..plan.plan import Plan
from ..problem.records import Operands, Problem
from ..problem.weights import IMPORTANCE, TOP, WEIGHTS, Asked
from .run_plan import Beside, Start, work_of


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
        members.append(Workspace("row_weights", asked.shape, asked.row_weights.dtype, _dense(problem, asked)))
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


def _dense(problem: Problem, asked: Asked) -> tuple[int, ...]:
    """Return the strides of batch, head, row and column with which row weights broadcast to (B, Hq, Sq)."""
    weights = asked.row_weights
    assert weights is not None
    strides = [0 if size == 1 else stride for size, stride in zip(weights.shape, weights.strides, strict=True)]
    return (*[0] * (3 - len(strides)), *strides, 0)
