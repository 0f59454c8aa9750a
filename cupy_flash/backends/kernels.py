"""Runs the kernels of a plan on a call's operands, for the backends cuda and simulator.

Outputs and workspaces are allocated by the caller's framework. The backend passes a function that starts the launches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import Array, contiguous, empty
from ..cache import compiled
from ..engines.shared import ELEMENTS, fixed_slots
from ..features import ARRAYS
from ..launch import Launch
from ..nvrtc import Compiled
from ..params import Address, Encode, dtypes, has_strides, pack, pack_maps, pack_partials
from ..plan import Plan
from ..pose import has_boxes
from ..problem import Gradients, Operands
from ..source import assemble

if TYPE_CHECKING:
    from ..mods.captured import Captured

    pass

Results = dict[str, Array | None]


class Work(NamedTuple):
    """Launches and their arrays, which a backend starts in order."""

    launches: tuple[Launch, ...]
    arch: str
    inputs: dict[str, Array]
    results: Results
    layout: str
    params: Callable[[Address], np.ndarray[Any, Any]]  # the argument of all launches, given the addresses of arrays
    captured: Captured | None = None  # the arrays that mods read, and their gradients
    written: tuple[str, ...] = ()  # the inputs that are also written: the caches of an append

    def arguments(self, launch: Launch, params: Any, address: Address, encode: Encode) -> tuple[Any, ...]:
        """The arguments of one launch: params, and its tensor maps if it uses TMA."""
        if self.captured is not None and not launch.headers:
            # The kernel does not know `captured`, the last member of the struct.
            constants = dict(launch.constants)
            members = {"cache": bool(constants.get("KV_CACHE")), "direction": bool(constants.get("DIRECTION"))}
            size = dtypes(**members)["Params"].itemsize
            params = np.ndarray((), f"V{size}", params)
        if not launch.boxes:
            return (params,)
        arrays = self.inputs | {name: array for name, array in self.results.items() if array is not None}
        return params, pack_maps(launch.boxes, arrays, self.layout, address, encode)


Start = Callable[[Work], object]


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile the kernel of a launch for a target, unless the cache has it."""
    text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
    return compiled(text, launch.kernel, target)


def forward(plan: Plan, operands: Operands, start: Start) -> tuple[Array, Array]:
    """(out, lse) of the call."""
    problem, q = plan.problem, operands.q
    out = None if operands.cache is None else operands.cache.out
    if out is None:
        out = empty((*q.shape[:-1], problem.head_dim_v), problem.out_dtype, q)
    lse = empty(problem.lse_shape(q), problem.accumulation, q)
    start(_work(plan, operands, {"out": out, "lse": lse}))
    return out, lse


def jvp(plan: Plan, operands: Operands, start: Start) -> tuple[Array, Array, Array, Array]:
    """(out, lse, tout, tlse) of the call, the latter two the tangents of the former."""
    problem, q = plan.problem, operands.q
    out, tout = (empty((*q.shape[:-1], problem.head_dim_v), problem.dtype, q) for _ in range(2))
    lse, tlse = (empty(problem.lse_shape(q), problem.accumulation, q) for _ in range(2))
    start(_work(plan, operands, {"out": out, "lse": lse, "tout": tout, "tlse": tlse}))
    return out, lse, tout, tlse


def append(plan: Plan, operands: Operands, start: Start) -> None:
    """Append rows of k and v to a KV cache."""
    launches = tuple(launch for launch in plan.launches if launch.kernel == "rotary_append")
    start(_work(plan._replace(launches=launches), operands, {}, without_workspaces=True))


def backward(plan: Plan, operands: Operands, start: Start) -> Gradients:
    """Gradients of the call, from out, lse and their gradients; in a direction, second gradients."""
    inputs = {name: getattr(operands, name) for name in plan.problem.differentiated}
    gradients: Results = {f"d{name}": empty(x.shape, x.dtype, operands.q) for name, x in inputs.items()}
    work = _work(plan, operands, gradients)
    start(work)
    return Gradients(**gradients, dcaptured=None if work.captured is None else work.captured.gradients)


def merge(parts: tuple[Array, Array, Array, Array], layout: str, arch: str, start: Start) -> tuple[Array, Array]:
    """(out, lse) of partial results out_a, lse_a, out_b, lse_b, of which b may be a stack (see partials.merge)."""
    inputs = {
        name: part if _has_contiguous_row(part) else contiguous(part)
        for name, part in zip(("out_a", "lse_a", "out_b", "lse_b"), parts, strict=True)
    }
    out_a, lse_a = inputs["out_a"], inputs["lse_a"]
    results = {"out": empty(out_a.shape, out_a.dtype, out_a), "lse": empty(lse_a.shape, lse_a.dtype, lse_a)}
    launch = _partials_launch(out_a.dtype, inputs["out_b"].dtype, lse_a, out_a.shape[-1])
    params = partial(pack_partials, inputs | results, layout)
    start(Work((launch,) if 0 not in launch.grid else (), arch, inputs, {**results}, layout, params))
    return results["out"], results["lse"]


def _partials_launch(dtype: np.dtype[Any], other: np.dtype[Any], lse: Array, head_dim_v: int) -> Launch:
    """The launch that merges partial results with this lse, (B, H, S) or (H, T), one warp a row."""
    batch, heads, rows = (1, *lse.shape)[-3:]
    constants = (
        ("element", ELEMENTS[dtype.name]),
        ("other_element", ELEMENTS[other.name]),
        ("real", ELEMENTS[lse.dtype.name]),
        ("THREADS", 128),
        ("HEAD_DIM_V", head_dim_v),
    )
    return Launch("partials", constants, (-(-rows // (128 // 32)), heads, batch), 128)


# Arrays for which kernels take a stride per axis; the last dimension of all others must be contiguous.
@lru_cache(maxsize=1)
def _by_any_stride() -> frozenset[str]:
    strided = [feature.name for feature in ARRAYS if has_strides(feature.name)]
    return frozenset(("lse", "dlse", "tlse", "seed", *strided, *(f"t{name}" for name in strided)))


def _work(plan: Plan, operands: Operands, results: Results, *, without_workspaces: bool = False) -> Work:
    """The launches of a plan with these outputs, and with workspaces from the caller's framework.

    Operands whose rows are not contiguous are copied by their own framework, and so is a gradient of out that TMA
    cannot load.
    """
    by_any_stride = _by_any_stride()
    boxed = {box.operand for launch in plan.launches for box in launch.boxes}
    inputs = given(operands)
    rows = {
        name: contiguous(array)
        for name, array in inputs.items()
        if (name not in by_any_stride and not _has_contiguous_row(array)) or (name in boxed and not has_boxes(array))
    }
    if rows:
        operands, inputs = _replaced(operands, rows), inputs | rows
    problem = plan.problem
    tokens = (operands.q.shape[0], operands.k.shape[0])
    lengths = tokens if problem.layout == "thd" else (problem.q_len, problem.kv_len)
    workspaces = () if without_workspaces else plan.workspaces(*lengths)
    results = results | {x.name: empty(x.shape, x.dtype, operands.q) for x in workspaces}
    captured = None
    if any(launch.headers for launch in plan.launches):
        from ..mods.captured import Captured  # imported by the first call that has a mod

        captured = Captured(problem, operands, fixed_slots(problem))
        inputs, results = inputs | captured.arrays, results | captured.workspaces
    params = partial(pack, problem, operands, results, workspaces, captured=captured)
    written = () if operands.cache is None or operands.cache.k is None else ("k", "v")
    return Work(plan.launches, plan.device.arch, inputs, results, problem.layout, params, captured, written)


def given(operands: Operands) -> dict[str, Array]:
    """The arrays among the operands, by name."""
    every = zip(Operands._fields, operands, strict=True)
    arrays = {name: array for name, array in every if isinstance(array, Array)}
    if operands.cache is None:
        return arrays
    from ..cache_params import cache_arrays  # which calls without a cache never need

    return arrays | cache_arrays(operands)


def _replaced(operands: Operands, arrays: dict[str, Array]) -> Operands:
    """The operands with these arrays, by the names of `given`."""
    if operands.cache is None:
        return operands._replace(**arrays)
    from ..cache_params import with_arrays

    return with_arrays(operands, arrays)


def _has_contiguous_row(array: Array) -> bool:
    """Whether the last dimension is contiguous, as kernels read it."""
    return array.strides[-1] == 1 or array.shape[-1] <= 1
