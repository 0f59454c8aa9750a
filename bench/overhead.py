"""Host time of a forward and of a decode step up to their kernel launches, in bf16: on wgmma, with tensor maps.

A call runs from `cupy_flash.attention` to the arguments of its launches but does not launch, so that no GPU is needed.
Without a GPU, the plan is that for a Hopper GPU and tensor maps have the simulator's encoding. A decode step appends a
row to a paged cache; its lengths and its block table are not read, as those on a GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import dispatch, keyed_plan
from cupy_flash.arrays import Array, named_dtype
from cupy_flash.gpu import run_plan, tensor_map
from cupy_flash.gpu.kept_launches import KeptLaunches
from cupy_flash.plan.plan import Plan
from cupy_flash.problem.build import of_cache, pose
from cupy_flash.problem.records import Operands, Options, Problem

from .report import Table

BATCH, LENGTH, HEADS, HEAD_DIM = 1, 128, 8, 64
PAGES, PAGE = 16, 64  # pages of a cache, and keys of a page
CALLS, ROUNDS = 100, 25
LENGTH_ROUNDS = 4  # rounds of calls that each have a new length, so that each needs a new plan
Inputs = tuple[Any, ...]
Section = dict[str, dict[str, float]]


def measure(frameworks: tuple[str, ...]) -> dict[str, Section]:
    """Return the seconds of whole calls and of their steps, by framework of the arrays."""
    calls: Section = {}
    steps: Section = {}
    with _without_launches():
        for framework in frameworks:
            steps[framework] = _steps(framework)
            calls[framework] = _calls(framework, grad=False)
            if framework.startswith("torch"):
                calls[f"{framework}, autograd"] = _calls(framework, grad=True)
            calls[f"{framework}, score_mod"] = _calls(framework, grad=False, score_mod=_distance_bias(framework))
            if framework != "numpy":
                calls[f"{framework}, decode step"] = _decode_steps(framework)
    return {"calls": calls, "steps": steps}


def here() -> tuple[str, ...]:
    """Return the frameworks available on this machine."""
    import torch

    on_gpu = torch.cuda.is_available()
    return ("numpy", "torch", *(("cupy", "torch on the GPU") if on_gpu else ()))


def forward(chosen: Plan, operands: Operands) -> tuple[Array, Array]:
    """Replace the backends' forward: compute outputs and the arguments of all launches, without launching."""
    on_gpu = chosen.device.backend == "cuda"
    encode = tensor_map.encode_for_gpu if on_gpu else tensor_map.encode_for_simulator
    return run_plan.forward(chosen, operands, partial(_pack, encode))


def repeat(kept: KeptLaunches, inputs: Sequence[Any], addresses: list[int]) -> list[Any] | None:
    """Replace the backends' function of this name in the same way."""
    allocated = kept.allocate(inputs[0])
    if allocated is None:
        return None
    outputs, starts = allocated
    on_cpu = kept.device == "cpu"
    kept.arguments(addresses + starts, tensor_map.encode_for_simulator if on_cpu else tensor_map.encode_for_gpu)
    return outputs


def _pack(encode: Any, work: run_plan.Work) -> None:
    params = work.params(_pointer)
    for launch in work.launches:
        work.arguments(launch, params, _pointer, encode)


def _pointer(array: Array) -> int:
    return array.pointer


@contextmanager
def _without_launches() -> Iterator[None]:
    replaced = {backend: dispatch.LAUNCHERS[backend] for backend in ("simulator", "cuda")}
    dispatch.LAUNCHERS.update(dict.fromkeys(replaced, __name__))
    table: Any = of_cache()
    read = table.indices_of, table.check_contents
    table.indices_of, table.check_contents = (lambda _: ()), (lambda *_: None)
    try:
        yield
    finally:
        dispatch.LAUNCHERS.update(replaced)
        table.indices_of, table.check_contents = read
        keyed_plan.forget()


def _options(framework: str) -> dict[str, Any]:
    on_gpu = framework in ("cupy", "torch on the GPU")
    return dict(causal=True, engine="wgmma", backend=None if on_gpu else "simulator:sm_90a")


def _distance_bias(framework: str) -> Callable[..., Any]:
    """Return a score_mod that adds an element of a table that it captures."""
    table = _zeros(framework, (HEADS, 2 * LENGTH), "float32")
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx]


def _calls(framework: str, grad: bool, **more: Any) -> dict[str, float]:
    """Return the seconds of a call with the same arrays as before, with other arrays, and with more keys."""
    options = _options(framework) | more

    def call(inputs: Inputs) -> None:
        cupy_flash.attention(*inputs, **options)

    steady = _inputs(framework, grad, 0, 0)
    moved = [_inputs(framework, grad, row, 0) for row in range(1, CALLS * ROUNDS + 1)]
    longer = [_inputs(framework, grad, 0, next(_more)) for _ in range(CALLS * LENGTH_ROUNDS)]
    return {
        "hot": _seconds(call, [steady] * len(moved)),
        "new pointers": _seconds(call, moved),
        "new length": _seconds(call, longer),
    }


def _decode_steps(framework: str) -> dict[str, float]:
    """Return the same of steps on a paged cache; a new length is one more column of its block table."""
    options = {"backend": _options(framework)["backend"]}
    caches = tuple(_zeros(framework, (PAGES, PAGE, HEADS, HEAD_DIM)) for _ in "kv")
    lengths = _zeros(framework, (BATCH,), "int32")
    tables = _zeros(framework, (BATCH, PAGES + CALLS * LENGTH_ROUNDS), "int32")

    def call(inputs: Inputs) -> None:
        q, k, v, table = inputs
        cupy_flash.attention_with_kv_cache(
            q, *caches, k=k, v=v, cache_seqlens=lengths, block_table=table, **options
        )  # fmt: skip

    def inputs(row: int, more: int) -> Inputs:
        rows = [_buffer(framework, name)[:, row : row + 1] for name in "qkv"]
        return *rows, tables[:, : PAGES + more]

    steady = inputs(0, 0)
    return {
        "hot": _seconds(call, [steady] * (CALLS * ROUNDS)),
        "new pointers": _seconds(call, [inputs(row, 0) for row in range(1, CALLS * ROUNDS + 1)]),
        "new length": _seconds(call, [inputs(0, more + 1) for more in range(CALLS * LENGTH_ROUNDS)]),
    }


def _steps(framework: str) -> dict[str, float]:
    inputs, options = _inputs(framework, False, 0, 0), Options(**_options(framework))
    problem, operands = _posed(inputs, options)
    chosen = dispatch.plan_for(problem)
    every = [inputs] * (CALLS * ROUNDS)
    return {
        "pose": _seconds(lambda inputs: _posed(inputs, options), every),
        "plan": _seconds(lambda _: dispatch.plan_for(problem), every),
        "outputs, params and maps": _seconds(lambda _: forward(chosen, operands), every),
    }


def _posed(inputs: Inputs, options: Options) -> tuple[Problem, Operands]:
    q, k, v = inputs
    return pose("attention", (q, k, v), options)


def _inputs(framework: str, grad: bool, row: int, more: int) -> Inputs:
    """Return views of q, k and v that start at `row` of a buffer; k and v have `more` additional keys."""
    q, k, v = (_buffer(framework, name) for name in "qkv")
    views = [x[:, row : row + length] for x, length in ((q, LENGTH), (k, LENGTH + more), (v, LENGTH + more))]
    return tuple(view.requires_grad_() for view in views) if grad else tuple(views)


_more = itertools.count(1)  # lengths never repeat, because plans are cached
_buffers: dict[tuple[str, str], Any] = {}


def _buffer(framework: str, name: str) -> Any:
    key = framework, name
    if key not in _buffers:
        _buffers[key] = _zeros(framework, (BATCH, LENGTH + CALLS * ROUNDS, HEADS, HEAD_DIM))
    return _buffers[key]


def _zeros(framework: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    if framework == "numpy":
        return np.zeros(shape, named_dtype(dtype))
    if framework == "cupy":
        import cupy

        return cupy.zeros(shape, named_dtype(dtype))
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu" if framework == "torch" else "cuda")


def _seconds(call: Callable[[Inputs], object], inputs: Iterable[Inputs]) -> float:
    """Return the mean CPU seconds of this thread for a call, the smallest of all groups of CALLS calls."""
    every = list(inputs)
    rounds = []
    for start in range(0, len(every), CALLS):
        part = every[start : start + CALLS]
        begin = time.thread_time()
        for each in part:
            call(each)
        rounds.append((time.thread_time() - begin) / len(part))
    return min(rounds)


def tables(section: dict[str, Section]) -> list[Table]:
    """Return a table with the microseconds of whole calls, and one with those of their steps."""
    calls = "Host time of a forward or decode step up to its launches (bf16), microseconds of CPU time"
    return [
        _table(calls, section["calls"]),
        _table("Its steps, without autograd and torch's operator", section["steps"]),
    ]


def _table(title: str, rows: Section) -> Table:
    columns = list(next(iter(rows.values())))
    cells = [[name, *(f"{1e6 * row[column]:.1f}" for column in columns)] for name, row in rows.items()]
    return Table(title, ["arrays", *columns], cells)
