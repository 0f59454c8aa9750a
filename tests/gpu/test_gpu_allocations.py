"""GPU memory of calls: only results and stated workspaces are allocated, nothing grows as S^2, training does not
leak.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import pytest
from cases import DTYPES
from engines import BATCH, ENGINES, HEAD_DIM, HEADS, empty, on_both_frameworks, on_every_engine, step
from on_gpu import in_numpy
from pools import MEMORY, nbytes

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options, Saved

LENGTH = 64 if in_numpy() else 512  # array sizes are multiples of 512 bytes, to which allocators round up
LENGTHS = (32, 64) if in_numpy() else (2048, 4096)


@on_every_engine
def test_cupy_holds_results_alone(engine: str) -> None:
    arrays, memory = empty("cupy", engine, LENGTH), MEMORY["cupy"]
    q, k, v, dout = arrays
    step(arrays, engine)  # warm-up, with one-time allocations
    before = memory.held()
    out, lse = cupy_flash.attention(q, k, v, causal=True, engine=engine, return_lse=True)
    assert memory.held() - before == nbytes(out, lse) == nbytes(q) + 4 * BATCH * HEADS * LENGTH
    gradients = cupy_flash.attention_backward(dout, q, k, v, out, lse, causal=True, engine=engine)[:3]
    assert memory.held() - before == nbytes(out, lse, *gradients) == nbytes(out, lse, q, k, v)
    del gradients
    assert memory.held() - before == nbytes(out, lse)
    del out, lse
    assert memory.held() == before


def workspace_bytes(arrays: tuple[Any, Any, Any], saved: Saved | None, options: dict[str, Any]) -> list[int]:
    """Return the bytes of each workspace, in order, in the plan of a forward or, with `saved`, of its backward."""
    problem, _ = pose("attention", arrays, Options(**options), None, saved)
    workspaces = dispatch.plan_for(problem).workspaces(problem.q_len, problem.kv_len)
    return [math.prod(x.shape) * x.dtype.itemsize for x in workspaces]


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@on_every_engine
def test_a_call_allocates_its_results_and_the_workspaces_of_its_plan(engine: str, deterministic: bool) -> None:
    """A call allocates nothing else: no copies, and no array whose size depends on values."""
    q, k, v, dout = empty("cupy", engine, LENGTHS[0])
    options = dict(causal=True, engine=engine, deterministic=deterministic)
    memory, results = MEMORY["cupy"], []
    memory.peak(lambda: results.extend(cupy_flash.attention(q, k, v, return_lse=True, **options)))
    out, lse = results
    assert memory.allocated == [out.nbytes, lse.nbytes, *workspace_bytes((q, k, v), None, options)]
    memory.peak(lambda: cupy_flash.attention_backward(dout, q, k, v, out, lse, **options))
    saved = Saved(dout, out, lse, None)
    assert memory.allocated == [q.nbytes, k.nbytes, v.nbytes, *workspace_bytes((q, k, v), saved, options)]


def allocated_by_packed(arrays: list[Any], lengths: tuple[int, int], engine: str) -> list[int]:
    """Return sizes that a forward and a backward allocate, in order, for two packed sequences of these lengths."""
    q, k, v, dout = (x.reshape(-1, *x.shape[2:]) for x in arrays)
    bounds = cupy.asarray([0, lengths[0], sum(lengths)], "int32")
    options = dict(causal=True, engine=engine)
    packed, memory, results = (bounds, bounds, len(q), len(q)), MEMORY["cupy"], []
    memory.peak(lambda: results.extend(cupy_flash.attention_varlen(q, k, v, *packed, return_lse=True, **options)))
    forward = memory.allocated.copy()
    memory.peak(lambda: cupy_flash.attention_varlen_backward(dout, q, k, v, *results, *packed, **options))
    assert forward[:2] == [x.nbytes for x in results]
    assert memory.allocated[:3] == [x.nbytes for x in (q, k, v)]
    return forward + memory.allocated


@on_every_engine
def test_the_lengths_of_packed_sequences_change_no_allocation(engine: str) -> None:
    """The lengths of packed sequences are values on the GPU, on which no allocation may depend."""
    arrays = empty("cupy", engine, LENGTHS[0])
    tokens = BATCH * LENGTHS[0]
    allocated = [
        allocated_by_packed(arrays, lengths, engine)
        for lengths in ((tokens // 2, tokens // 2), (1, tokens - 1), (0, 0))
    ]
    assert allocated[0] == allocated[1] == allocated[2]


@on_every_engine
def test_twenty_steps_of_training_allocate_what_one_does(engine: str) -> None:
    memory, arrays = MEMORY["cupy"], empty("cupy", engine, 8 if in_numpy() else LENGTH)
    for array in arrays:
        array.data.memset(0, array.nbytes)

    def train() -> None:
        _, *gradients = step(arrays, engine)
        for array, gradient in zip(arrays[:3], gradients, strict=True):
            cupy.subtract(array, gradient, out=array)

    train()
    seen = [(memory.peak(train), memory.held()) for _ in range(20)]
    assert len(set(seen)) == 1, seen


@on_both_frameworks
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@on_every_engine
def test_peak_is_linear_in_the_length(engine: str, framework: str, deterministic: bool) -> None:
    peaks = []
    for length in LENGTHS:
        arrays = empty(framework, engine, length)
        options = dict(engine=engine, deterministic=deterministic)
        step(arrays, **options)
        peaks.append(MEMORY[framework].peak(lambda arrays=arrays, options=options: step(arrays, **options)))
    assert peaks[1] <= 2 * peaks[0]
    # Results and a few numbers per row; the scores would take ten times as much.
    rows = BATCH * LENGTHS[1] * HEADS
    assert peaks[1] <= rows * (4 * HEAD_DIM * DTYPES[ENGINES[engine]].itemsize + 4 * (HEAD_DIM + 16))
