"""The CPU engine that calls torch's flash operators, for torch tensors, and for NumPy arrays once torch is imported.

Its results do not depend on the number of threads. cpu/aten.py keeps the semantics of `attention` over the operators.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ..device import Device
from ..problem.records import Problem
from .cpu import Tile, worth
from .cpu import alike as alike
from .cpu import launches as launches
from .cpu import workspaces as workspaces
from .shared import advantage as advantage
from .shared import dtype_refusals
from .shared import forms as forms

BACKENDS: tuple[str, ...] = ("cpu",)
ARCHES: tuple[str, ...] | None = None
DTYPES: tuple[str, ...] = ("float32", "float64")
OPTIONS: frozenset[str] | None = frozenset({
    "causal", "scale", "bias", "mask", "sink", "q_lengths", "kv_lengths", "layout"
})  # fmt: skip
CACHE_OPTIONS: frozenset[str] | None = None
CACHE_DTYPES: tuple[str, ...] = ()
DERIVATIVES: tuple[str, ...] = ()
STATISTICS: tuple[str, ...] = ()
WEIGHTS: str | None = None
ON_REQUEST = False
MEASURED: str | None = None
HEAD_DIMS: tuple[tuple[int, int], ...] = ()
GROUP_ROWS: tuple[int, ...] = ()
MICRO_KERNELS: tuple[str, ...] = ()
KERNELS = "cpu.aten"

FRAMEWORKS = ("torch", "numpy")  # whose arrays the operators read without a copy
MASK_BYTES = 2**26  # of the largest mask, which the operators read as numbers of q's dtype

# Cost model in nanoseconds on one core, fitted to calls that alternate with those of the engine cpu on one thread (S 16
# to 4096, D 32 to 128, float32) and scaled to the units of that engine. Tuples are (forward, backward).
FLOP = 0.006  # per floating-point operation of a matmul
SCORE = (0.45, 1.0)  # per score between the matmuls
LOAD = 0.35  # per element of K and V, which a call reads once for each head, or packed group of heads
# The same for a single row, which is padded: of the first CACHED elements, and of the others, whose latency it shows.
SINGLE = (0.2, 0.5)
CACHED = 2**19
MASK = 0.5  # per score with a mask: its load and addition
CALL = 8e3  # per call of an operator, one for each sequence of a packed batch
KEYS = 512  # of the operators' key tiles
ROWS = 32  # of their smallest query tiles


def refusals(problem: Problem, device: Device) -> list[str]:
    """Return the reasons why the operators cannot compute a problem; [] if they can."""
    if device.backend != "cpu":
        return []  # the plan refuses the backend
    reasons = [device.torch_flash] if device.torch_flash else []
    if device.torch_flash_on_request and problem.engine is None:
        reasons.append(device.torch_flash_on_request)
    if problem.framework not in FRAMEWORKS:
        reasons.append(f"the arrays are of {problem.framework}, not of {' or '.join(FRAMEWORKS)}")
    if problem.dtype.name not in DTYPES:
        reasons += dtype_refusals(problem) or [
            f"the operators round P to {problem.dtype.name}, with 1.1 to 1.4 times the errors of cpu"
        ]
    if problem.empty or 0 in (problem.batch, problem.heads, problem.q_len, problem.kv_len, problem.head_dim):
        reasons.append("an array has no elements, with which the operators end the process")
    if problem.head_dim != problem.head_dim_v:
        reasons.append(f"Dv {problem.head_dim_v} is not D {problem.head_dim}")
    if problem.shard:
        reasons.append("it takes no shard")
    if _is_one_task(problem):
        reasons.append(
            "the operators leave a single head to their BLAS, whose bits then depend on the number of threads"
        )
    if problem.dlse:
        reasons.append("the operators take no gradient of lse")
    return reasons + _mask_refusals(problem)


def _is_one_task(problem: Problem) -> bool:
    """Return whether a call of an operator has one task, or may have with lengths, and so is divided by its BLAS.

    A task of the backward is a key/value head, and one of the forward a tile of a head, or of a packed group. A single
    row is a product with a vector, which the BLAS does not divide.
    """
    is_packed = problem.backward or packs_groups(problem)
    heads = (problem.kv_heads if is_packed else problem.heads) * (1 if problem.has_lengths else problem.batch)
    if heads != 1 or problem.backward:
        return heads == 1
    is_row = problem.q_len == 1 and problem.group == 1
    return not is_row and (problem.has_lengths or problem.q_len <= ROWS)


def _mask_refusals(problem: Problem) -> list[str]:
    """Return the reasons against the mask, the bias and the scale of a problem."""
    reasons = []
    is_causal, shapes = hides_later_keys(problem), [x for x in (problem.dense_mask, problem.bias) if x is not None]
    if problem.mask.left is not None or problem.mask.right not in (None, 0):
        reasons.append("it takes no window but causal")
    elif is_causal and not (problem.mask.top_left or problem.equal_lengths):
        reasons.append("the operators align a causal mask top-left, and there are not as many keys as queries")
    if is_causal and problem.scale <= 0:
        reasons.append("the operators multiply hidden scores, -inf, by the scale, which must then be positive")
    elif problem.backward and problem.scale == 0:
        reasons.append("the operators read no factor of a product with a scale of 0, so that NaN reaches no gradient")
    if shapes and problem.has_lengths:
        reasons.append("it takes lengths or a mask, not both")
    if prod(np.broadcast_shapes(*shapes)) * problem.dtype.itemsize > MASK_BYTES:
        reasons.append(f"a mask in {problem.dtype.name} takes more than {MASK_BYTES >> 20} MiB")
    if problem.backward and problem.bias is not None and problem.bias_gradient:
        reasons.append("the operators compute no gradient of a bias")
    return reasons


def hides_later_keys(problem: Problem) -> bool:
    """Return whether the mask is causal and hides any key: a single query, aligned with the last key, sees all keys."""
    return problem.mask.right is not None and (problem.mask.top_left or problem.q_len > 1)


def packs_groups(problem: Problem) -> bool:
    """Return whether a forward takes the heads of a group as rows of one head, so that it reads every key once."""
    hidden = hides_later_keys(problem) or problem.dense_mask is not None or problem.bias is not None
    return problem.group > 1 and problem.q_len < ROWS and not hidden and not problem.backward


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the only tile, that of the operators."""
    rows = 256 if problem.q_len >= 768 else 64 if problem.q_len >= 192 else ROWS
    return [Tile(rows, KEYS)]


def choices(problem: Problem, device: Device) -> list[Tile]:
    """Return `tiles`."""
    return tiles(problem, device)


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted core seconds: matmuls, passes over the scores, operand loads and calls of the operators.

    Copies of arrays whose rows are not contiguous are left out, because the engine cpu makes them too.
    """
    backward, dims = problem.backward, 2 * problem.head_dim
    heads, rows = problem.batch * problem.heads, min(tile.block_q, problem.q_len)
    # Each edge of the mask adds half a tile of masked scores per query tile.
    computed = min(pairs + problem.mask.edges * problem.q_len * rows / 2, problem.q_len * problem.kv_len)
    score = dims * FLOP * (5 if backward else 2) + SCORE[backward]
    if problem.dense_mask is not None or problem.bias is not None:
        score += MASK
    calls = problem.batch if problem.has_lengths else 1
    readers = problem.batch * problem.kv_heads if packs_groups(problem) else heads
    loaded = readers * problem.kv_len * dims
    if heads * problem.q_len == readers:
        load = min(loaded, CACHED) * SINGLE[0] + max(loaded - CACHED, 0) * SINGLE[1]
    else:
        load = loaded * LOAD
    return (heads * computed * score + load + calls * CALL) * 1e-9


def threads(device: Device, tile: Tile, cost: float) -> int:
    """Return as many threads as `cost` core seconds keep busy, at most one per core; torch may use fewer."""
    return worth(cost, device.units)
