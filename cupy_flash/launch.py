"""One kernel of a plan: what it is compiled with and how it is started; and what is the same for every engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import Array
from .problem import DTYPES, Problem
from .tensor_map import Box

Constant = int | float | bool | str

ELEMENTS = {"float16": "half16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
GRID_LIMIT = 65535  # blocks in the second and third dimension of a grid


class Launch(NamedTuple):
    """One kernel of a plan: what it is compiled with and how it is started."""

    kernel: str  # "simt/forward": the file below kernels_cu, and its function
    constants: tuple[tuple[str, Constant], ...]  # values for the names of config.cuh
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0
    boxes: tuple[Box, ...] = ()  # a tensor map of each is the second argument

    @property
    def function(self) -> str:
        return self.kernel.rsplit("/")[-1]

    @property
    def tile(self) -> tuple[int, int, int] | None:
        """(queries, keys, threads) of a block; None where a kernel works on rows, without tiles."""
        constants = dict(self.constants)
        if "BLOCK_Q" not in constants:
            return None
        return int(constants["BLOCK_Q"]), int(constants["BLOCK_KV"]), self.threads


def shared_constants(problem: Problem) -> dict[str, Constant]:
    """What kernels of every engine know of a problem. An engine adds THREADS, BLOCK_Q, BLOCK_KV and its own."""
    return {
        "element": ELEMENTS[problem.out_dtype.name],
        "real": ELEMENTS[problem.accumulation.name],
        "bias_element": ELEMENTS[problem.bias_dtype],
        "sink_element": ELEMENTS[problem.sink_dtype],
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "PACKED": problem.layout == "thd",
        "Q_LENGTHS": problem.q_lengths,
        "KV_LENGTHS": problem.kv_lengths,
        "TOP_LEFT": problem.mask.top_left,
        "WINDOW_LEFT": problem.mask.left is not None,
        "WINDOW_RIGHT": problem.mask.right is not None,
        "DENSE_MASK": problem.dense_mask is not None,
        "SOFTCAP": problem.softcap is not None,
        "ALIBI": problem.alibi,
        "BIAS": problem.bias is not None,
        "SINK": problem.sink,
        "DROPOUT": problem.dropout > 0,
        "SHARD": problem.shard,
        "DLSE": problem.dlse,
    }


# A scale in these bounds goes into the exponent in one step with log2(e); any other takes a pass over the scores.
SCALES = 2.0**-60, 2.0**60
RESCALE_ABOVE = 8.0  # softmax2.cuh: P up to 2^8, where fp16 ends at 2^16; a sum over 2^40 keys still fits fp32


def is_modified(problem: Problem) -> bool:
    """Whether something other than a scale comes between q.k and the softmax."""
    return problem.softcap is not None or problem.alibi or problem.bias is not None


def fragment_constants(problem: Problem) -> dict[str, Constant]:
    """`shared_constants`, and what kernels know whose scores live in the fragments of matrix instructions."""
    low, high = SCALES
    return shared_constants(problem) | {
        "LARGEST_LOG2": 0,
        "RESCALE_ABOVE": RESCALE_ABOVE,
        "MODIFIED": is_modified(problem) or not low <= problem.scale <= high,
    }


def fragment_refusals(problem: Problem) -> list[str]:
    """What no kernel whose scores live in fragments serves."""
    if problem.shard and problem.dropout:
        return [
            "dropout of a shard, whose rows may be any positions: one Philox call serves eight scores of a fragment"
        ]
    return []


# What the kernels of rows know of a plan. Tiles, masks and scores are nothing to them, so many plans share one.
SEQUENCE_CONSTANTS = ("element", "real", "THREADS", "PACKED", "Q_LENGTHS", "KV_LENGTHS", "TOP_LEFT", "SHARD")
ROW_CONSTANTS = {
    "delta": (*SEQUENCE_CONSTANTS, "HEAD_DIM", "HEAD_DIM_V", "DLSE", "LSE2", "ADD_DQ", "DQ_IN_ORDER"),
    "dq": (*SEQUENCE_CONSTANTS, "HEAD_DIM", "HEAD_DIM_V"),
    "dsink": (*SEQUENCE_CONSTANTS, "sink_element"),
    "wgmma/vt": (*SEQUENCE_CONSTANTS, "HEAD_DIM_V", "BLOCK_KV"),
}
ROWS = 64  # of a block of these


def known_constants(kernel: str, constants: dict[str, Constant]) -> tuple[tuple[str, Constant], ...]:
    """Those of a plan's constants that are something to a kernel."""
    known = ROW_CONSTANTS.get(kernel)
    # delta alone reads the gradient of lse: the kernels of tiles are the same with and without.
    return tuple((name, x) for name, x in constants.items() if (name != "DLSE" if known is None else name in known))


def sequences(problem: Problem) -> int:
    """Of a grid. A packed batch has one more: the rows past its last sequence, which belong to none."""
    return problem.batch + (problem.layout == "thd")


def dtype_refusals(problem: Problem) -> list[str]:
    """Why an engine that takes every dtype but fp8 does not serve a problem."""
    if problem.dtype.name in DTYPES:
        return []
    return [f"{problem.dtype.name} is not one of {', '.join(DTYPES)}"]


def grid_refusals(problem: Problem) -> list[str]:
    """Why no grid of (tiles, heads, sequences) holds a problem."""
    return [
        f"{count} {name} are more than the {GRID_LIMIT} blocks of a grid's second and third dimension"
        for name, count in (("heads", problem.heads), ("sequences", sequences(problem)))
        if count > GRID_LIMIT
    ]


def of_something(launches: list[Launch]) -> tuple[Launch, ...]:
    """Without those that an empty batch leaves no block: CUDA refuses a grid of none."""
    return tuple(launch for launch in launches if 0 not in launch.grid)


def fragment_backward(
    problem: Problem, launches: list[Launch], *, add_dq: bool, in_order: bool = False
) -> tuple[Launch, ...]:
    """The launches of a backward whose scores live in fragments, with the kernels of rows before and after them."""
    constants = fragment_constants(problem) | {"THREADS": 128, "LSE2": True, "ADD_DQ": add_dq, "DQ_IN_ORDER": in_order}

    def of_rows(kernel: str, grid: tuple[int, int, int]) -> Launch:
        return Launch(kernel, known_constants(kernel, constants), grid, 128)

    grid = max(-(-problem.q_len // ROWS), 1), problem.heads, sequences(problem)
    launches = [of_rows("delta", grid), *launches]
    if add_dq:
        launches.append(of_rows("dq", grid))
    if problem.sink:
        launches.append(of_rows("dsink", (problem.heads, 1, 1)))
    return of_something(launches)


def partials_launch(dtype: np.dtype, other: np.dtype, lse: Array, head_dim_v: int) -> Launch:
    """The launch that merges two partial results with this lse, (B, H, S) or (H, T), one warp a row."""
    batch, heads, rows = (1, *lse.shape)[-3:]
    constants = (
        ("element", ELEMENTS[dtype.name]),
        ("other_element", ELEMENTS[other.name]),
        ("real", ELEMENTS[lse.dtype.name]),
        ("THREADS", 128),
        ("HEAD_DIM_V", head_dim_v),
    )
    return Launch("partials", constants, (-(-rows // (128 // 32)), heads, batch), 128)
