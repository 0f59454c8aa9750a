"""vmap of attention: one call in which vmap's axis is a part of the batch or of the heads, not a loop.

The batch takes it unless a sink or packed sequences are shared by all sequences; then the heads do. Dropout and mods
depend on the numbers of sequence and head, and a few combinations fit neither axis: these run instance by instance.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .axes import BROADCAST, LAYOUTS, axes_of, sizes_of
from .calls import BOUNDS, NUMBERS, SAVED, Call

PER_INSTANCE = ("seed", "first", "array0", *NUMBERS)  # operands of calls that are not folded
PER_SEQUENCE = ("q_lengths", "kv_lengths", "starts", *BOUNDS)  # operands without an axis of heads


def batched(bind: Any, arrays: Any, mapped: list[bool], count: int, call: Call) -> Any:
    """The results of `count` instances by calls of `bind`, instances first; `mapped` arrays have them first, too."""
    names = {name for name, is_mapped in zip(call.names, mapped, strict=True) if is_mapped}
    if count == 0:
        instance = zip(call.names, mapped, arrays, strict=True)
        like = {name: jax.ShapeDtypeStruct(x.shape[is_mapped:], x.dtype) for name, is_mapped, x in instance}
        return tuple(jnp.zeros((0, *shape), dtype) for shape, dtype in call.results(like).values())
    letter = _axis(call, names)
    if letter is None:
        return _one_by_one(bind, arrays, mapped)
    shapes = {name: x.shape[1:] if name in names else x.shape for name, x in zip(call.names, arrays, strict=True)}
    sizes = sizes_of(shapes, call.static.layout_of_arrays)
    fold = [
        _fold(name, x, name in names, count, letter, sizes, call) for name, x in zip(call.names, arrays, strict=True)
    ]
    named = zip(call.result_names, bind(*fold), strict=True)
    return tuple(_unfold(name, x, count, letter, shapes.get(name[1:]), call) for name, x in named)


def _axis(call: Call, mapped: set[str]) -> str | None:
    """The axis that takes vmap's, "b" or "h"; None where there is none."""
    if any(name in call.names for name in PER_INSTANCE) or call.static.dropout or call.static.score_mod:
        return None
    if "sink" not in call.names and call.static.layout_of_arrays != "thd":
        return "b"
    return None if mapped & set(PER_SEQUENCE) else "h"


def _one_by_one(bind: Any, arrays: Any, mapped: list[bool]) -> Any:
    def run(instance: Any) -> Any:
        rest = iter(instance)
        return bind(*(next(rest) if is_mapped else x for x, is_mapped in zip(arrays, mapped, strict=True)))

    return jax.lax.map(run, [x for x, is_mapped in zip(arrays, mapped, strict=True) if is_mapped])


def _fold(name: str, x: Any, mapped: bool, count: int, letter: str, sizes: dict[str, int], call: Call) -> Any:
    """An operand with `count` instances in the axis `letter`; unchanged where all instances share it."""
    rank = x.ndim - mapped
    if name in BROADCAST:
        x, rank = x.reshape(*x.shape[:mapped], *(1,) * (4 - rank), *x.shape[mapped:]), 4
    axes = axes_of(name, rank, call.static.layout_of_arrays)
    letter = "g" if letter == "h" and "g" in axes else letter
    optional = name not in LAYOUTS["thd"] and name not in SAVED and f"d{name}" not in call.result_names
    if not mapped and optional and (letter not in axes or x.shape[axes.index(letter)] == 1):
        return x
    x = x if mapped else jnp.broadcast_to(x, (count, *x.shape))
    if letter not in axes:
        x, axes = x[:, None], letter + axes
    place = axes.index(letter)
    shape = list(x.shape[1:])
    shape[place] = sizes[letter]
    x = jnp.moveaxis(jnp.broadcast_to(x, (count, *shape)), 0, place)
    shape[place] *= count
    return x.reshape(shape)


def _unfold(name: str, x: Any, count: int, letter: str, shape: Any, call: Call) -> Any:
    """A result with its instances first; `shape`, of the operand for a gradient, may have axes that broadcast."""
    axes = axes_of(name, x.ndim, call.static.layout_of_arrays)
    place = axes.index("g" if letter == "h" and "g" in axes else letter)
    x = x.reshape(*x.shape[:place], count, x.shape[place] // count, *x.shape[place + 1 :])
    x = jnp.moveaxis(x, place, 0)
    if shape is None or x.shape[1:] == tuple(shape):
        return x
    padded = (1,) * (x.ndim - 1 - len(shape)) + tuple(shape)
    summed = [axis + 1 for axis, size in enumerate(padded) if size == 1 < x.shape[axis + 1]]
    return x.sum(tuple(summed)).reshape(count, *shape)
