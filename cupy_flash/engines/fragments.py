"""Constants, launches, workspaces and refusals of the tensor-core kernels, whose scores are mma or wgmma fragments."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType

import numpy as np

from ..problem.records import FEATURES, Problem, is_given
from .launch import Constant, Launch, Workspace
from .shared import known_constants, nonempty, row_workspaces, rows_of_heads, sequences, shared_constants, with_mods

# A scale within these bounds is folded into the exponents with log2(e); any other needs a pass over the scores.
SCALES = 2.0**-60, 2.0**60
RESCALE_ABOVE = 8.0  # P may reach 2^8: fp16 holds 2^16, and an fp32 row sum 2^40 keys (softmax2.cuh)
ROWS = 64  # rows per block of the row kernels
SQUARE = 16  # dq_sums.cuh: dQ is summed in squares of 16 x 16

KEEPS_SCORE = tuple(feature for feature in FEATURES if feature.keeps_score)


def keeps_scores(problem: Problem) -> bool:
    """Return whether the backward must keep a second value per score, besides P, for the gradient of a feature."""
    return any(is_given(problem, feature) for feature in KEEPS_SCORE)


@lru_cache(maxsize=64)
def fragment_constants(problem: Problem) -> MappingProxyType[str, Constant]:
    """Return `shared_constants` and the constants that only tensor-core kernels have."""
    low, high = SCALES
    constants = shared_constants(problem) | {
        "LARGEST_LOG2": 0,
        "KEY_BYTES": 0,
        # A JVP keeps P <= 1, because in fp16 it multiplies P by up to 2^15 (factor_scale.cuh).
        "RESCALE_ABOVE": 0.0 if problem.derivative else RESCALE_ABOVE,
        "FAST_MATH": problem.score_mod,
        "MODIFIED": problem.is_modified or problem.derivative != "" or not low <= problem.scale <= high,
    }
    return MappingProxyType(constants)


def fragment_refusals(problem: Problem) -> list[str]:
    """Return the reasons why no tensor-core kernel serves a problem."""
    if problem.shard and problem.dropout:
        return [
            "dropout of a shard, whose rows may be any positions: one Philox call serves eight scores of a fragment"
        ]
    return []


def fragment_backward(
    problem: Problem, launches: list[Launch], *, add_dq: bool, in_order: bool = False
) -> tuple[Launch, ...]:
    """Return the launches of a tensor-core backward, with the row kernels before and after them."""
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
    """Return delta and lse2; with `add_dq` also dq_sums; with `in_order` also dq_semaphore and tile_counter.

    A double backward has delta, delta_tangent, and row_numbers: for each row these two, lse2 and lse_tangent.
    """
    if problem.derivative:
        shape, strides = rows_of_heads(problem, q_rows)
        records = Workspace("row_numbers", (*shape, 4), problem.accumulation, (*strides, 1))
        return (*row_workspaces(problem, q_rows, "delta", "delta_tangent"), records)
    workspaces = row_workspaces(problem, q_rows, "delta", "lse2")
    if not add_dq:
        return workspaces
    # Each sequence of a packed batch starts at a new row of 16 x 16 squares.
    squares = q_rows // SQUARE + problem.batch if problem.layout == "thd" else -(-q_rows // SQUARE)
    columns = -(-problem.head_dim // SQUARE) * SQUARE
    shape, strides = rows_of_heads(problem, SQUARE * squares, columns)
    workspaces += (Workspace("dq_sums", (*shape, columns), problem.accumulation, (*strides, 8)),)
    if in_order:
        shape, strides = rows_of_heads(problem, squares)
        workspaces += (
            Workspace("dq_semaphore", shape, np.dtype(np.int32), (*strides, 1)),
            Workspace("tile_counter", (1,), np.dtype(np.int32), ()),
        )
    return workspaces
