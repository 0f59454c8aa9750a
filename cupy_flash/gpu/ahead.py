"""Ahead-of-time compilation: derives the kernels that later calls may launch from their options, without arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import device
from ..arrays import named_dtype
from ..device import Device
from ..engines import MODULES
from ..engines.launch import Launch
from ..engines.shared import divides
from ..plan.plan import launches_at_any_length
from ..problem.build import pose
from ..problem.features import Feature
from ..problem.mask import Mask
from ..problem.records import ARRAYS, CODES, DTYPES, FP8, SPLIT_UNIT, Cache, Options, Packed, Problem

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

    from ..problem.argument_types import CompileOptions, DType, Presence

CAPACITY = 2**20  # a capacity at which several blocks share a sequence, so that merge is compiled too


def device_for(arch: str | None) -> Device:
    """Return the GPU to compile for, by its architecture; for None this machine's current GPU.

    Raises ValueError for an unknown architecture, RuntimeError without a GPU.
    """
    if arch is not None:
        return device.named(arch, "cuda")
    try:
        import cupy

        return device.gpu(cupy.cuda.runtime.getDevice())
    except (ImportError, OSError, RuntimeError) as error:  # no CuPy; no folder for its cache; no driver or no GPU
        raise RuntimeError(f'there is no GPU to compile for; name one, as in arch="sm_90a" ({error})') from error


def launches(on: Device, **arguments: Any) -> tuple[Launch, ...]:
    """Return one launch per kernel that calls with these arguments (see `problems`) may need on a device."""
    return launches_of(problems(**arguments), on)


def launches_of(problems: Iterable[Problem], on: Device) -> tuple[Launch, ...]:
    """Return one launch per kernel that these problems may need at any length on a device."""
    candidates = [launch for problem in problems for launch in launches_at_any_length(problem, on)]
    return tuple({launch.text_key: launch for launch in candidates}.values())


def example(engine: str, requested: str | None = None) -> Problem:
    """Return a small forward of the kind that an engine serves, of its first dtype and head dimensions.

    `requested` is the argument engine= of the call.
    """
    module = MODULES[engine]
    head_dim, head_dim_v = module.HEAD_DIMS[0]
    sizes: dict[str, Any] = dict(dtype=module.DTYPES[0], head_dim=head_dim, head_dim_v=head_dim_v)
    return problems(**sizes, backward=False, cache=module.OPTIONS is None, engine=requested)[0]


def problems(
    *,
    dtype: DType,
    head_dim: int,
    head_dim_v: int | None = None,
    shared_kv: bool = False,
    group: int = 1,
    backward: bool = True,
    packed: bool = False,
    cache: bool = False,
    kv_dtype: DType | None = None,
    kv_scale: DType | None = None,
    page: int | None = None,
    prefixes: bool = False,
    split_size: int | None = None,
    rotary: Presence = None,
    rotary_dim: int | None = None,
    rotary_interleaved: bool = True,
    **options: Unpack[CompileOptions[Presence]],
) -> list[Problem]:
    """Return the problems (forward, backward without and with dlse) of calls with these options, at the smallest size.

    Takes the arguments of `cupy_flash.compile`; raises TypeError or ValueError as a call would.
    """
    sizes = dict(head_dim=head_dim, head_dim_v=head_dim if head_dim_v is None else head_dim_v, group=group)
    for name, size in sizes.items():
        try:
            if isinstance(size, bool):
                raise TypeError
            in_range = 1 <= operator.index(size) < 2**31
        except Exception as error:  # __index__ of a foreign object may raise anything
            raise TypeError(f"compile: {name} must be a whole number, not {size!r}") from error
        if not in_range:
            raise ValueError(f"compile: {name} must be at least 1 and less than 2**31, not {size}")
    for name, chosen in dict(
        shared_kv=shared_kv, backward=backward, packed=packed, cache=cache, prefixes=prefixes
    ).items():  # fmt: skip
        if not isinstance(chosen, (bool, np.bool_)):
            raise TypeError(f"compile: {name} must be True or False, not {chosen!r}")
    settings = Options.of("compile", options)
    forward = _problem(settings, element_dtype(dtype), *sizes.values(), packed=packed, shared_kv=bool(shared_kv))
    of_cache = dict(kv_dtype=kv_dtype, kv_scale=kv_scale, page=page, prefixes=prefixes or None, split_size=split_size,
                    rotary=rotary, rotary_dim=rotary_dim)  # fmt: skip
    if not cache and any(x is not None for x in of_cache.values()):
        *names, last = of_cache
        raise ValueError(f"compile: {', '.join(names)} and {last} are for a KV cache, with cache=True")
    if cache:
        contiguous = _contiguous_cache(forward, kv_dtype, kv_scale, split_size, rotary, rotary_dim, rotary_interleaved)
        caches = [contiguous] * (not prefixes and not divides(page))
        caches.append(contiguous._replace(page=page if divides(page) else 1, prefix_table=(1, 1) if prefixes else None))
        causal = Mask(left=forward.mask.left, right=0)  # the default of attention_with_kv_cache
        # One number of queries for each number of rows of a tile, and one that exceeds all tiles.
        rows = {rows for module in MODULES.values() for rows in module.GROUP_ROWS}
        return [
            forward._replace(cache=each, batch=batch, q_len=q_len, kv_len=CAPACITY, mask=causal)
            for each in caches
            for batch in ((1, 2, 4) if prefixes else (1,))  # a tile on prefixes has the rows of several sequences
            for q_len in (*sorted({max(each // group, 1) for each in rows}), max(rows) + 1)
        ]
    if not backward:
        return [forward]
    # A call without return_lse has no gradient of lse.
    return [forward] + [
        forward._replace(backward=True, bias_gradient=forward.bias is not None, dlse=dlse)
        for dlse in ((False, True) if settings.return_lse else (False,))
    ]


def _contiguous_cache(
    problem: Problem,
    kv_dtype: DType | None,
    kv_scale: DType | None,
    split_size: int | None,
    rotary: Presence,
    rotary_dim: int | None,
    interleaved: bool,
) -> Cache:
    """Return a contiguous cache to which a row is appended; ValueError or TypeError for options that a call refuses."""
    dtype = problem.dtype if kv_dtype is None else element_dtype(kv_dtype, *CODES)
    scale = None if kv_scale is None else element_dtype(kv_scale).name
    if scale is not None:
        if scale not in ("float16", "float32"):
            raise TypeError(f"compile: kv_scale must be float16 or float32, not {scale}")
        if dtype.name not in CODES:
            raise TypeError(f"compile: kv_scale is for caches of {', '.join(CODES)}, not {dtype.name}")
    elif dtype.name in CODES and dtype.name != FP8:
        raise ValueError(f"compile: caches of {dtype.name} need kv_scale, the dtype of their scales")
    elif dtype != problem.dtype and (dtype.name != FP8 or problem.dtype.itemsize != 2):
        legal = f"{problem.dtype.name}, or {FP8} beside a q of 16 bit"
        raise TypeError(f"compile: kv_dtype must be {legal}, not {dtype.name}")
    if split_size is not None and (split_size <= 0 or split_size % SPLIT_UNIT):
        raise ValueError(f"compile: split_size must be a positive multiple of {SPLIT_UNIT}, not {split_size}")
    cache = Cache("bshd", dtype, blocks=1, page=None, appended=1, slots=False, rotary=None, split_size=split_size,
                  scale_dtype=scale)  # fmt: skip
    if rotary is None or rotary is False:
        if rotary_dim is not None:
            raise ValueError("compile: rotary_dim is that of tables, with rotary=True or their dtype")
        return cache
    dims = problem.head_dim // 2 * 2 if rotary_dim is None else rotary_dim
    if not 0 < dims <= problem.head_dim or dims % 2:
        raise ValueError(f"compile: rotary_dim must be even and in [2, {problem.head_dim}], not {dims}")
    table = problem.dtype.name if rotary is True else element_dtype(rotary).name
    return cache._replace(rotary=(dims, bool(interleaved)), rotary_dtypes=(table, table))


def _problem(
    settings: Options,
    element: np.dtype,
    head_dim: int,
    head_dim_v: int,
    group: int,
    *,
    packed: bool,
    shared_kv: bool,
) -> Problem:
    """Return the forward problem of placeholder arrays, with one key, and Sq = Hq so that layouts have equal shapes."""

    def array(dtype: npt.DTypeLike, *shape: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)  # all elements share the memory of one

    usual = element if element.name in DTYPES else named_dtype("bfloat16")
    sizes = {"b": 1, "h": group, "g": 1, "x": 1, "w": 1}
    rows = settings.selected_rows
    sizes |= {"u": group // rows + 1} if packed else {"B": 1, "l": -(-group // rows)}

    def given(feature: Feature) -> np.ndarray | None:
        """Return a placeholder for an array option, for which the caller passed True (the usual dtype) or a dtype."""
        value = getattr(settings, feature.name)
        if value is None or value is False:
            return None
        dtype = usual if feature.element else np.dtype(feature.dtypes[0])
        shape = (
            [1]
            if feature.broadcast
            else [sizes[axis] for axis in next(x for x in feature.axes if sizes.keys() >= {*x})]
        )
        return array(dtype if value is True else element_dtype(value), *shape)

    batch = () if packed else (1,)
    placeholders: dict[str, Any] = {feature.name: given(feature) for feature in ARRAYS}
    call = replace(settings, seed=0, **placeholders)
    q, k, v = (
        array(element, *batch, rows, rows, dim) for rows, dim in ((group, head_dim), (1, head_dim), (1, head_dim_v))
    )
    if shared_kv:
        call.head_dim_v = head_dim_v
    bounds = array(np.int32, 2)
    problem, _ = pose(
        "compile", (q, k, None if shared_kv else v), call, Packed(bounds, bounds, group, 1) if packed else None
    )
    # Assume 16-byte aligned arrays on a GPU.
    return problem._replace(device="cuda:0", framework="cupy", backend=settings.backend, aligned=True)


def element_dtype(dtype: DType, *others: str) -> np.dtype:
    """Return the NumPy dtype of any library's dtype or of a name, perhaps one of `others`.

    TypeError if no engine supports it.
    """
    if not isinstance(dtype, str) and dtype is not None:  # np.dtype(None) is float64
        try:
            return np.dtype(dtype)
        except Exception:  # a torch dtype, or a foreign object that may raise anything
            dtype = str(dtype).removeprefix("torch.")
    if dtype not in (*DTYPES, FP8, *others):
        raise TypeError(f"compile: a dtype must be one of {', '.join(DTYPES)}, {FP8}, not {dtype!r}")
    return named_dtype(dtype)
