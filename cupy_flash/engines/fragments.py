"""Constants, launches, workspaces and refusals of kernels whose scores live in the fragments of matrix instructions."""

from __future__ import annotations

import numpy as np

from ..features import FEATURES, is_given
from ..launch import Constant, Launch
from ..params import Workspace
from ..problem import Problem
from .shared import known_constants, nonempty, row_workspaces, rows_of_heads, sequences, shared_constants, with_mods

# A scale in these bounds is folded into the exponents with log2(e); any other takes a pass over the scores.
SCALES = 2.0**-60, 2.0**60
RESCALE_ABOVE = 8.0  # softmax2.cuh: P up to 2^8, where fp16 ends at 2^16; a sum over 2^40 keys still fits fp32
ROWS = 64  # rows of a block of the row kernels
SQUARE = 16  # dq_sums.cuh: dQ is summed in squares of 16 x 16

CHANGES_SCORE = tuple(feature for feature in FEATURES if feature.changes_score)
KEEPS_SCORE = tuple(feature for feature in FEATURES if feature.keeps_score)


def is_modified(problem: Problem) -> bool:
    """Whether something other than a scale is applied between q.k and the softmax."""
    return any(is_given(problem, feature) for feature in CHANGES_SCORE)


def keeps_scores(problem: Problem) -> bool:
    """Whether the gradient of a feature needs another number per score beside the probability."""
    return any(is_given(problem, feature) for feature in KEEPS_SCORE)


def fragment_constants(problem: Problem) -> dict[str, Constant]:
    """`shared_constants`, and those of kernels on fragments alone."""
    low, high = SCALES
    return shared_constants(problem) | {
        "LARGEST_LOG2": 0,
        # P is at most 1 in a JVP, whose other weight of V is P (tS - mu).
        "RESCALE_ABOVE": 0.0 if problem.derivative else RESCALE_ABOVE,
        "FAST_MATH": problem.score_mod,
        "MODIFIED": is_modified(problem) or problem.derivative != "" or not low <= problem.scale <= high,
    }


def fragment_refusals(problem: Problem) -> list[str]:
    """Why no kernel on fragments serves a problem."""
    if problem.shard and problem.dropout:
        return [
            "dropout of a shard, whose rows may be any positions: one Philox call serves eight scores of a fragment"
        ]
    return []


def fragment_backward(
    problem: Problem, launches: list[Launch], *, add_dq: bool, in_order: bool = False
) -> tuple[Launch, ...]:
    """The launches of a backward on fragments, with the row kernels before and after them."""
    constants = fragment_constants(problem) | {"THREADS": 128, "LSE2": True, "ADD_DQ": add_dq, "DQ_IN_ORDER": in_order}

    def of_rows(kernel: str, grid: tuple[int, int, int]) -> Launch:
        return Launch(kernel, known_constants(kernel, constants), grid, 128)

    grid = max(-(-problem.q_len // ROWS), 1), problem.heads, sequences(problem)
    launches = [of_rows("delta", grid), *launches]
    if add_dq:
        launches.append(of_rows("dq", grid))
    if problem.sink:
        launches.append(of_rows("dsink", (problem.heads, 1, 1)))
    return nonempty(with_mods(problem, launches))


def backward_workspaces(
    problem: Problem, q_rows: int, *, add_dq: bool, in_order: bool = False
) -> tuple[Workspace, ...]:
    """Workspaces of a backward: delta and lse2; with `add_dq` the sums of dQ; with `in_order` the turns of blocks.

    Of a double backward: delta, eps, and the records of both with lse2 and mu.
    """
    if problem.derivative:
        shape, strides = rows_of_heads(problem, q_rows)
        records = Workspace("row_numbers", (*shape, 4), problem.accumulation, (*strides, 1))
        return (*row_workspaces(problem, q_rows, "delta", "eps"), records)
    workspaces = row_workspaces(problem, q_rows, "delta", "lse2")
    if not add_dq:
        return workspaces
    # Each sequence of a packed batch starts a new row of squares.
    squares = q_rows // SQUARE + problem.batch if problem.layout == "thd" else -(-q_rows // SQUARE)
    columns = -(-problem.head_dim // SQUARE) * SQUARE
    shape, strides = rows_of_heads(problem, SQUARE * squares, columns)
    workspaces += (Workspace("dq_sums", (*shape, columns), problem.accumulation, (*strides, 8)),)
    if in_order:
        shape, strides = rows_of_heads(problem, 2 * squares)
        workspaces += (Workspace("dq_turns", shape, np.dtype(np.int32), (*strides, 1)),)
    return workspaces
