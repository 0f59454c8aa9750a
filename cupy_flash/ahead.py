"""What later calls will need, without their arrays: every kernel that their plans may launch."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import numpy as np

from . import device
from .arrays import named_dtype
from .device import Device
from .features import ARRAYS, Feature
from .launch import Launch
from .plan import launches_at_any_length
from .pose import pose
from .problem import DTYPES, FP8, Options, Packed, Problem


def device_for(arch: str | None) -> Device:
    """The GPU to compile for: one by its architecture, or for None the current one of this machine.

    RuntimeError where there is none.
    """
    if arch is not None:
        return device.named(arch, "cuda")
    try:
        import cupy

        return device.gpu(cupy.cuda.runtime.getDevice())
    except (ImportError, OSError, RuntimeError) as error:  # no CuPy; no folder for its cache; no driver or no GPU
        raise RuntimeError(f'there is no GPU to compile for; name one, as in arch="sm_90a" ({error})') from error


def launches(on: Device, **words: Any) -> tuple[Launch, ...]:
    """A launch of every kernel that calls with these words (`problems`) may need, each kernel once."""
    every = [launch for problem in problems(**words) for launch in launches_at_any_length(problem, on)]
    return tuple({(launch.kernel, launch.constants): launch for launch in every}.values())


def problems(
    *,
    dtype: Any,
    head_dim: Any,
    head_dim_v: Any = None,
    group: Any = 1,
    backward: bool = True,
    packed: bool = False,
    **options: Any,
) -> list[Problem]:
    """The kinds of problems of calls with these words, at the smallest size.

    The words are those of `cupy_flash.compile`; what is wrong with them is found as in a call.
    """
    sizes = dict(head_dim=head_dim, head_dim_v=head_dim if head_dim_v is None else head_dim_v, group=group)
    for name, size in sizes.items():
        try:
            if isinstance(size, bool):
                raise TypeError
            in_range = 1 <= operator.index(size) < 2**31
        except Exception as error:  # objects of others raise what they like
            raise TypeError(f"compile: {name} must be a whole number, not {size!r}") from error
        if not in_range:
            raise ValueError(f"compile: {name} must be at least 1 and less than 2**31, not {size}")
    for name, chosen in dict(backward=backward, packed=packed).items():
        if not isinstance(chosen, (bool, np.bool_)):
            raise TypeError(f"compile: {name} must be True or False, not {chosen!r}")
    asked = Options.of("compile", options)
    forward = _problem(asked, element_dtype(dtype), *sizes.values(), packed=packed)
    if not backward:
        return [forward]
    # Only who takes lse can give back its gradient.
    return [forward] + [
        forward._replace(backward=True, bias_gradient=forward.bias is not None, dlse=dlse)
        for dlse in ((False, True) if asked.return_lse else (False,))
    ]


def _problem(
    asked: Options, element: np.dtype[Any], head_dim: int, head_dim_v: int, group: int, *, packed: bool
) -> Problem:
    """The forward of a call with these words: one key, and as many queries as heads, so that layouts have one shape."""

    def array(dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
        return np.broadcast_to(np.zeros((), dtype), shape)  # one element, whatever the shape

    usual = element if element.name in DTYPES else named_dtype("bfloat16")
    sizes = {"b": 1, "h": group, "g": 1}

    def given(feature: Feature) -> np.ndarray[Any, Any] | None:
        """The array that an option stands for: True is one of its usual dtype, else its dtype is named."""
        value = getattr(asked, feature.name)
        if value is None or value is False:
            return None
        dtype = usual if feature.element else np.dtype(feature.dtypes[0])
        shape = [1] if feature.broadcast else [sizes[axis] for axis in feature.axes[0]]
        return array(dtype if value is True else element_dtype(value), *shape)

    batch = () if packed else (1,)
    call = replace(asked, seed=0, **{feature.name: given(feature) for feature in ARRAYS})
    q, k, v = (
        array(element, *batch, rows, rows, dim) for rows, dim in ((group, head_dim), (1, head_dim), (1, head_dim_v))
    )
    bounds = array(np.int32, 2)
    problem, _ = pose("compile", (q, k, v), call, Packed(bounds, bounds, group, 1) if packed else None)
    # Of arrays as they usually are.
    return problem._replace(device="cuda:0", framework="cupy", backend=asked.backend, aligned=True)


def element_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of any library's, or of its name."""
    if not isinstance(dtype, str) and dtype is not None:  # NumPy takes None for float64
        try:
            return np.dtype(dtype)
        except Exception:  # torch's; objects of others raise what they like
            dtype = str(dtype).removeprefix("torch.")
    if dtype not in (*DTYPES, FP8):
        raise TypeError(f"compile: a dtype must be one of {', '.join(DTYPES)}, {FP8}, not {dtype!r}")
    return named_dtype(dtype)
