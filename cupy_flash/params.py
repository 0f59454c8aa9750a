"""The one argument of every kernel: its NumPy dtype, derived from params.cuh, and the filling of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np

from . import dropout
from .arrays import Array
from .problem import Operands, Problem
from .source import kernel_folder

SCALARS = {
    "int": np.int32,
    "unsigned int": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "double": np.float64,
}

Address = Callable[[Array], int]  # where an array lies in the eyes of the kernel


@lru_cache(maxsize=1)
def dtypes() -> dict[str, np.dtype[Any]]:
    """Every struct of params.cuh as a NumPy dtype with the compiler's layout."""
    text = re.sub(r"//.*", "", (kernel_folder() / "params.cuh").read_text())
    structs: dict[str, np.dtype[Any]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        members: list[tuple[str, Any]] = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            kind, member = declaration.rsplit(maxsplit=1)
            if kind.endswith("*"):
                members.append((member, np.uint64))
            else:
                members.append((member, structs[kind] if kind in structs else SCALARS[kind]))
        structs[name] = np.dtype(members, align=True)
    return structs


def pack(
    problem: Problem, operands: Operands, results: dict[str, Array | None], address: Address
) -> np.ndarray[Any, Any]:
    """One `Params`, in an array without dimensions; `results` holds outputs and workspaces by the struct's names."""
    params = np.zeros((), dtypes()["Params"])
    arrays: dict[str, Array | None] = {
        field.name: getattr(operands, field.name) for field in fields(operands)
    } | results
    for name, array in arrays.items():
        if not isinstance(array, Array) or name == "seed":
            continue
        if name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
            params[name] = _tensor(array, problem.layout, address)
        elif name in ("lse", "dlse", "delta"):
            params[name] = _rows(array, address)
        elif name in ("bias", "mask", "dbias"):
            params[name] = (address(array), *_broadcast_strides(array))
        else:
            params[name] = address(array)
    if operands.alibi_slopes is not None and len(operands.alibi_slopes.shape) == 2:
        params["alibi_batch"] = operands.alibi_slopes.strides[0]
    if isinstance(operands.seed, Array):
        params["seed_array"] = address(operands.seed)
    else:
        params["seed"] = operands.seed or 0
    params["scale"] = problem.scale
    params["softcap"] = problem.softcap or 0
    params["keep_scale"] = dropout.keep_scale(problem.dropout)
    params["drop_below"] = dropout.threshold(problem.dropout)
    params["batch"], params["heads"], params["group"] = problem.batch, problem.heads, problem.group
    packed = problem.layout == "thd"
    params["q_len"] = operands.q.shape[0] if packed else problem.q_len
    params["kv_len"] = operands.k.shape[0] if packed else problem.kv_len
    for side in ("left", "right"):
        bound = getattr(problem.mask, side)
        params[f"window_{side}"] = -1 if bound is None else min(bound, 2**31 - 1)
    return params


def pack_partials(arrays: dict[str, Array], layout: str, address: Address) -> np.ndarray[Any, Any]:
    """One `Partials`: out_a, out_b, out in `layout`, lse_a, lse_b, lse."""
    params = np.zeros((), dtypes()["Partials"])
    for name, array in arrays.items():
        params[name] = _rows(array, address) if name.startswith("lse") else _tensor(array, layout, address)
    params["rows"] = arrays["lse"].shape[-1]
    return params


def _tensor(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """An Operand with a contiguous last dimension: pointer, strides of (batch, head, row), whether rows are aligned."""
    axes = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "thd": (None, 1, 0)}[layout]
    strides = tuple(0 if axis is None else array.strides[axis] for axis in axes)
    aligned = array.pointer % (4 * array.dtype.itemsize) == 0 and all(stride % 4 == 0 for stride in strides)
    return (address(array), *strides, int(aligned))


def _rows(array: Array, address: Address) -> tuple[int, ...]:
    """An Operand of one column: (B, H, S), or (H, T) of a packed batch."""
    return (address(array), *(0, *array.strides)[-3:], 0)


def _broadcast_strides(dense: Array) -> tuple[int, ...]:
    """Strides over (B, Hq, Sq, Sk); 0 where a dimension is missing or of size 1."""
    strides = [0 if size == 1 else stride for size, stride in zip(dense.shape, dense.strides, strict=True)]
    return tuple([0] * (4 - len(strides)) + strides)
