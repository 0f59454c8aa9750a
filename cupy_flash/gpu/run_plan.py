"""Runs the kernels of a plan on a call's operands, for the backends cuda and simulator.

Outputs and workspaces are allocated by the caller's framework. The backend passes a function that starts the launches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..arrays import Allocate, Array, contiguous, empty, has_boxes
from ..engines.launch import GRID_LIMITS, Launch, Workspace
from ..engines.shared import ELEMENTS, fixed_slots, known_constants, shared_constants, with_mods
from ..jit.kernel_cache import compiled
from ..jit.nvrtc import Compiled
from ..jit.source import assemble
from ..plan.plan import Plan
from ..problem.records import SCALES, Gradients, Operands, Problem, Statistics
from .params import (
    IN_PARAMS,
    Address,
    Encode,
    dtypes,
    has_strides,
    pack,
    pack_maps,
    pack_partials,
    switches_of,
    with_lengths,
)

if TYPE_CHECKING:
    from .captured import Captured

Results = dict[str, Array | None]


class Beside(NamedTuple):
    """Inputs, members of Params and numbers of the kernels of attention weights, which no other kernel has."""

    inputs: dict[str, Array]
    members: tuple[Workspace, ...]  # of Params, for inputs and results
    numbers: tuple[tuple[str, int], ...]  # members of Params


NOTHING_BESIDE = Beside({}, (), ())


class Work(NamedTuple):
    """The launches of a call, which a backend starts in order, and the arrays that they access."""

    launches: tuple[Launch, ...]
    arch: str
    inputs: dict[str, Array]
    results: Results
    layout: str
    params: Callable[[Address], np.ndarray]  # the argument of all launches, given the addresses of arrays
    captured: Captured | None = None  # the arrays that mods read, and their gradients
    written: tuple[str, ...] = ()  # the caller's arrays that are outputs: the caches of an append, and a given `out`
    workspaces: tuple[str, ...] = ()  # results that are not returned

    def arguments(self, launch: Launch, params: np.ndarray, address: Address, encode: Encode) -> tuple[np.ndarray, ...]:
        """Return the arguments of one launch: params, and the tensor maps if it uses TMA."""
        if launch.lengths is not None:
            params = with_lengths(params, launch.lengths)
        if self.is_shortened(launch):
            params = np.ndarray((), shortened(launch), params)
        if not launch.boxes:
            return (params,)
        arrays = self.inputs | {name: array for name, array in self.results.items() if array is not None}
        return params, pack_maps(launch.boxes, arrays, self.layout, address, encode)

    def is_shortened(self, launch: Launch) -> bool:
        """Return whether a launch has a shorter Params than those whose kernels have the headers of mods."""
        return self.captured is not None and not launch.headers


def shortened(launch: Launch) -> np.dtype:
    """Return raw bytes, as many as Params has in a launch without mods: without `captured`, the last member."""
    return np.dtype(f"V{dtypes('', switches_of(dict(launch.constants)))['Params'].itemsize}")


Start = Callable[[Work], object]


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile the kernel of a launch for a target, unless the cache has it."""
    text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
    return compiled(text, launch.kernel, target)


def forward(plan: Plan, operands: Operands, start: Start, allocate: Allocate | None = None) -> tuple[Array, ...]:
    """Run the forward and return (out, lse), followed by the statistics of the problem."""
    problem, q, allocate = plan.problem, operands.q, allocate or empty
    out = None if operands.cache is None else operands.cache.out
    if out is None:
        out = allocate((*q.shape[:-1], problem.head_dim_v), problem.out_dtype, q)
    lse = allocate(problem.lse_shape(q), problem.accumulation, q)
    statistics: dict[str, Array] = {
        name: allocate(problem.lse_shape(q), np.dtype(np.int32) if name == "argmax" else problem.accumulation, q)
        for name in problem.statistics
    }
    start(work_of(plan, operands, {"out": out, "lse": lse, **statistics}, allocate))
    return out, lse, *statistics.values()


def jvp(plan: Plan, operands: Operands, start: Start) -> tuple[Array, Array, Array, Array]:
    """Run the JVP and return (out, lse, tout, tlse)."""
    problem, q = plan.problem, operands.q
    out, tout = (empty((*q.shape[:-1], problem.head_dim_v), problem.dtype, q) for _ in range(2))
    lse, tlse = (empty(problem.lse_shape(q), problem.accumulation, q) for _ in range(2))
    start(work_of(plan, operands, {"out": out, "lse": lse, "tout": tout, "tlse": tlse}))
    return out, lse, tout, tlse


def append(plan: Plan, operands: Operands, start: Start) -> None:
    """Append rows of k and v to a KV cache."""
    launches = tuple(launch for launch in plan.launches if launch.kernel == "rotary_append")
    start(work_of(plan._replace(launches=launches), operands, {}, without_workspaces=True))


def backward(plan: Plan, operands: Operands, start: Start, allocate: Allocate | None = None) -> Gradients:
    """Run the backward, or with tangents the double backward, and return the gradients."""
    allocate = allocate or empty
    inputs = {name: getattr(operands, name) for name in plan.problem.differentiated}
    gradients = {f"d{name}": allocate(x.shape, x.dtype, operands.q) for name, x in inputs.items()}
    work = work_of(plan, operands, {**gradients}, allocate)
    start(work)
    return Gradients(**gradients, dcaptured=None if work.captured is None else work.captured.gradients)


def block_classes(problem: Problem, operands: Operands, block: int, arch: str, start: Start) -> Array:
    """Return the exact classes of a mask_mod's blocks, uint8 (B, query blocks, H, key blocks).

    The elements of q, k and v are not read.
    """
    from .captured import Captured

    rows, columns = (-(-length // block) for length in (problem.q_len, problem.kv_len))
    classes = empty((problem.batch, rows, problem.heads, columns), np.dtype(np.uint8), operands.q)
    operands = operands._replace(q=classes, k=classes, v=classes)
    constants = shared_constants(problem) | {"THREADS": 128, "BLOCK_Q": block, "BLOCK_KV": block}
    kernel = "block_classes"  # it loops over the blocks of queries and the heads that exceed the grid
    grid = columns, min(rows, GRID_LIMITS[1]), min(problem.batch * problem.heads, GRID_LIMITS[2])
    launches = tuple(with_mods(problem, [Launch(kernel, known_constants(kernel, constants), grid, 128)]))
    captured = Captured(problem, operands, ())
    results = {"out": classes} | captured.workspaces
    params = partial(pack, problem, operands, results, (), captured=captured)
    start(Work(launches, arch, captured.arrays, results, problem.layout, params, captured))
    return classes


NO_STATISTICS: tuple[Statistics[Array], Statistics[Array]] = (Statistics(), Statistics())


def merge(
    parts: tuple[Array, Array, Array, Array],
    layout: str,
    arch: str,
    start: Start,
    statistics: tuple[Statistics[Array], Statistics[Array]] = NO_STATISTICS,
    key_offset_b: int = 0,
) -> tuple[Array, ...]:
    """Merge partial results out_a, lse_a, out_b, lse_b into (out, lse), followed by the statistics that the parts have.

    Without statistics b may be a stack (see partials.merge); `key_offset_b` is added to its argmax.
    """
    inputs = {
        name: part if has_contiguous_row(part) else contiguous(part)
        for name, part in zip(("out_a", "lse_a", "out_b", "lse_b"), parts, strict=True)
    }
    out_a, lse_a = inputs["out_a"], inputs["lse_a"]
    results = {"out": empty(out_a.shape, out_a.dtype, out_a), "lse": empty(lse_a.shape, lse_a.dtype, lse_a)}
    for name in Statistics._fields:
        of_parts: list[Array | None] = [getattr(part, name) for part in statistics]
        if of_parts[0] is None or of_parts[1] is None:
            continue
        inputs |= {f"{name}_a": of_parts[0], f"{name}_b": of_parts[1]}
        results[name] = empty(lse_a.shape, of_parts[0].dtype, lse_a)
    launch = _partials_launch(out_a.dtype, inputs["out_b"].dtype, lse_a, out_a.shape[-1], len(results) > 2)
    params = partial(pack_partials, inputs | results, layout, key_offset_b=key_offset_b)
    start(Work((launch,) if 0 not in launch.grid else (), arch, inputs, {**results}, layout, params))
    return tuple(results.values())


def _partials_launch(dtype: np.dtype, other: np.dtype, lse: Array, head_dim_v: int, with_statistics: bool) -> Launch:
    """Return the launch that merges partial results, with one warp per row of lse, (B, H, S) or (H, T).

    The kernel loops over the heads and sequences that exceed the grid.
    """
    batch, heads, rows = (1, *lse.shape)[-3:]
    constants = (
        ("element", ELEMENTS[dtype.name]),
        ("other_element", ELEMENTS[other.name]),
        ("real", ELEMENTS[lse.dtype.name]),
        ("THREADS", 128),
        ("HEAD_DIM_V", head_dim_v),
        ("STATISTICS", with_statistics),
    )
    grid = -(-rows // (128 // 32)), min(heads, GRID_LIMITS[1]), min(batch, GRID_LIMITS[2])
    return Launch("partials", constants, grid, 128)


# Arrays for which kernels take a stride per axis; the last dimension of all others must be contiguous.
@lru_cache(maxsize=1)
def _by_any_stride() -> frozenset[str]:
    strided = [feature.name for feature in IN_PARAMS if has_strides(feature.name)]
    return frozenset(("lse", "dlse", "tlse", "seed", "selected", *SCALES, *strided, *(f"t{name}" for name in strided)))


def copied(plan: Plan, operands: Operands) -> dict[str, Array]:
    """Return the operands of which the launches of a plan read a contiguous copy.

    They are those whose rows are not contiguous, and a gradient of out that TMA cannot load.
    """
    by_any_stride = _by_any_stride()
    boxed = {box.operand for launch in plan.launches for box in launch.boxes}
    return {
        name: array
        for name, array in operands.arrays().items()
        if (name not in by_any_stride and not has_contiguous_row(array)) or (name in boxed and not has_boxes(array))
    }


def work_of(
    plan: Plan,
    operands: Operands,
    results: Results,
    allocate: Allocate | None = None,
    *,
    without_workspaces: bool = False,
    beside: Beside = NOTHING_BESIDE,
) -> Work:
    """Return the launches of a plan with these outputs, and with workspaces and copies by the caller's framework."""
    allocate = allocate or empty
    inputs = operands.arrays() | beside.inputs
    rows = {name: contiguous(array) for name, array in copied(plan, operands).items()}
    if rows:
        operands, inputs = operands.with_arrays(rows), inputs | rows
    problem = plan.problem
    tokens = (operands.q.shape[0], operands.k.shape[0])
    lengths = tokens if problem.layout == "thd" else (problem.q_len, problem.kv_len)
    workspaces = () if without_workspaces else plan.workspaces(*lengths)
    results = results | {x.name: allocate(x.shape, x.dtype, operands.q) for x in workspaces}
    captured = None
    if any(launch.headers for launch in plan.launches):
        from .captured import Captured  # imported by the first call that has a mod

        captured = Captured(problem, operands, fixed_slots(problem), allocate)
        inputs, results = inputs | captured.arrays, results | captured.workspaces
    params = partial(
        pack, problem, operands, {**results, **beside.inputs}, (*workspaces, *beside.members), captured=captured,
        numbers_beside=beside.numbers,
    )  # fmt: skip
    written = () if operands.cache is None or operands.cache.k_new is None else ("k", "v", *SCALES)
    if operands.cache is not None and operands.cache.out is not None:
        written = (*written, "out")
    names = (*[x.name for x in workspaces], *(() if captured is None else captured.temporaries))
    return Work(plan.launches, plan.device.arch, inputs, results, problem.layout, params, captured, written, names)


def has_contiguous_row(array: Array) -> bool:
    """Return whether the last dimension is contiguous, as kernels read it."""
    return array.strides[-1] == 1 or array.shape[-1] <= 1
