"""vmap of attention as a single call: vmap's axis is folded into the batch or the heads.

It is folded into the batch, but into the heads for a sink, which has no batch axis, and for packed sequences. Mods are
rewritten so that each instance sees its own batch and head indices and its own captured arrays. The instances run one
by one with dropout, whose random bits depend on these indices, with mapped numbers such as scale, with lists
of selected keys, and where an operand has neither axis.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ...mods.vmapped import side_by_side
from ..axes import BROADCAST, LAYOUTS, TANGENTS
from .static_call import SAVED


def batch(bind: Any, arrays: Any, places: Any, call: Any) -> Any:
    """Return the results of all instances, stacked along axis 0.

    Args:
        bind: makes the call.
        arrays: the operands.
        places: for each operand the axis that vmap maps, or None.
        call: the call of one instance.
    """
    mapped = [place is not None for place in places]
    arrays = [x if place is None else jnp.moveaxis(x, place, 0) for x, place in zip(arrays, places, strict=True)]
    count = next(len(x) for x, is_mapped in zip(arrays, mapped, strict=True) if is_mapped)
    names = {name for name, is_mapped in zip(call.names, mapped, strict=True) if is_mapped}
    if count == 0:
        instance = zip(call.names, mapped, arrays, strict=True)
        like = {name: jax.ShapeDtypeStruct(x.shape[is_mapped:], x.dtype) for name, is_mapped, x in instance}
        return tuple(jnp.zeros((0, *shape), dtype) for shape, dtype in call.results(like).values())
    letter = call.fold_axis(names)
    if letter is None:
        return _one_by_one(functools.partial(bind, call=call.text), arrays, mapped)
    shapes = {name: x.shape[1:] if name in names else x.shape for name, x in zip(call.names, arrays, strict=True)}
    sizes = call.sizes(shapes)
    fold = [
        _fold(name, x, name in names, count, letter, sizes, call) for name, x in zip(call.names, arrays, strict=True)
    ]
    folded = call._replace(static=_with_instances(call, names, letter, sizes))
    named = zip(call.result_names, bind(*fold, call=folded.text), strict=True)
    return tuple(_unfold(name, x, count, letter, shapes.get(name[1:]), call) for name, x in named)


def _with_instances(call: Any, mapped: set[str], letter: str, sizes: dict[str, int]) -> Any:
    """Return the static options of the folded call, with mods that compute each instance's own indices."""
    static = call.static
    if getattr(static, "score_mod", None) is None:
        return static
    slots = frozenset(
        int(name.removeprefix("array"))
        for name in call.names
        if name.startswith("array") and (name in mapped or not _may_broadcast(name, call))
    )
    text, _, numbers = static.score_mod.rpartition("\n")
    return static._replace(score_mod=f"{side_by_side(text, letter, sizes[letter], slots)}\n{numbers}")


def _one_by_one(bind: Any, arrays: Any, mapped: list[bool]) -> Any:
    def run(instance: Any) -> Any:
        rest = iter(instance)
        return bind(*(next(rest) if is_mapped else x for x, is_mapped in zip(arrays, mapped, strict=True)))

    return jax.lax.map(run, [x for x, is_mapped in zip(arrays, mapped, strict=True) if is_mapped])


def _fold(name: str, x: Any, mapped: bool, count: int, letter: str, sizes: dict[str, int], call: Any) -> Any:
    """Return an operand with `count` instances folded into the axis `letter`; unchanged if all instances share it."""
    if _moves(name).startswith("array"):
        return x if mapped or _may_broadcast(name, call) else jnp.broadcast_to(x, (count, *x.shape))
    rank = x.ndim - mapped
    if _moves(name) in BROADCAST:
        x, rank = x.reshape(*x.shape[:mapped], *(1,) * (4 - rank), *x.shape[mapped:]), 4
    axes = call.axes(name, rank)
    letter = "g" if letter == "h" and "g" in axes else letter
    broadcast = letter not in axes or (_moves(name) in BROADCAST and x.shape[mapped:][axes.index(letter)] == 1)
    if not mapped and broadcast and _may_broadcast(name, call):
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


def _moves(name: str) -> str:
    """Return the operand that a tangent belongs to (q for tq); any other name is returned unchanged."""
    return name[1:] if name[:1] in TANGENTS else name


def _may_broadcast(name: str, call: Any) -> bool:
    """Return whether an operand may lack an axis or have size 1 there.

    q, k, v, the tensors that the forward saved, and operands with a gradient or a tangent must be full: each instance
    has results of its own for them.
    """
    moves = _moves(name)
    derived = {f"d{moves}"} & {*call.result_names} | {f"{letter}{moves}" for letter in TANGENTS} & {*call.names}
    return moves not in LAYOUTS["thd"] and moves not in SAVED and not derived


def _unfold(name: str, x: Any, count: int, letter: str, shape: Any, call: Any) -> Any:
    """Return a result with its instances along axis 0.

    A gradient is summed over the axes in which `shape`, that of its operand, has size 1. For other results `shape` is
    None.
    """
    if name.startswith("darray"):
        return x
    axes = call.axes(name, x.ndim)
    place = axes.index("g" if letter == "h" and "g" in axes else letter)
    x = x.reshape(*x.shape[:place], count, x.shape[place] // count, *x.shape[place + 1 :])
    x = jnp.moveaxis(x, place, 0)
    if shape is None or x.shape[1:] == tuple(shape):
        return x
    padded = (1,) * (x.ndim - 1 - len(shape)) + tuple(shape)
    summed = [axis + 1 for axis, size in enumerate(padded) if size == 1 < x.shape[axis + 1]]
    return x.sum(tuple(summed)).reshape(count, *shape)
