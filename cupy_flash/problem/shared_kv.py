"""Values inside keys: v is None, and the value of a key is its first head_dim_v numbers.

A call then has views of k, of its tangent and of a cache, in the places of those of v. Engines read these views as any
other v, append rows to the keys alone, and add the gradient of a value to that of its key.
"""

# No `from __future__ import annotations`, as in records.py.
import operator
from collections.abc import Container
from dataclasses import replace
from typing import TypeVar

from ..arrays import Array, columns
from .checks import Requirements
from .records import CacheOptions, Options

VALUES = ("v", "v_cache")  # arguments that may be None
# {factors of keys, one number per key or sequence: those of values}
FACTORS = {"k_descale": "v_descale", "k_scale": "v_scale", "k_zero": "v_zero"}
OptionsT = TypeVar("OptionsT", Options, CacheOptions)


def share(
    requirements: Requirements,
    given: Container[str],
    call: dict[str, Array],
    options: OptionsT,
    views: dict[str, str],
) -> OptionsT:
    """Add the views of a call without v, {array: name of the view of its first head_dim_v numbers}; return the options.

    `given` are the names of the caller's arrays. An append writes whole keys, so that it has no head_dim_v: the options
    that are returned have D instead. The factors of v are those of k.
    """
    of_keys, of_values = next(iter(views.items()))
    keys, size = call.get(of_keys), options.head_dim_v
    if of_values in given or of_keys not in given:
        requirements.require(size is None, "head_dim_v is for v=None, whose values are the first numbers of the keys")
        return options
    if keys is None or not keys.shape:
        return options
    codes = 2 if keys.dtype.name == "uint8" else 1  # numbers of an element of a KV cache
    number = _head_dim_v(requirements, size, codes * keys.shape[-1], codes, attends="q" in given)
    for name, view in (views | FACTORS).items():
        requirements.require(view not in given, f"{view} must be None, as {of_values} is: {name} has it")
        if name in call and call[name].shape:
            last = call[name].shape[-1]
            stop = number // codes if name == of_keys else number
            call[view] = columns(call[name], last if name in FACTORS else min(stop, last))
    return replace(options, head_dim_v=number)


def _head_dim_v(requirements: Requirements, size: int | None, largest: int, codes: int, *, attends: bool) -> int:
    """Return head_dim_v, or `largest` if it is wrong or absent: the views of v let other requirements be checked."""
    if size is None:
        requirements.require_type(not attends, "without v, head_dim_v must say how many numbers of a key are its value")
        return largest
    try:
        number = operator.index(size)
    except Exception:  # a foreign object may raise anything
        requirements.require_type(False, f"head_dim_v must be None or a whole number, not {size!r}")
        return largest
    legal = not isinstance(size, bool) and 1 <= number <= largest
    legal = requirements.require(legal, f"head_dim_v must be in [1, {largest}], the numbers of a key, not {size!r}")
    even = not legal or requirements.require(
        number % codes == 0, f"head_dim_v must be even for caches of uint8, not {size!r}"
    )
    return number if legal and even else largest


def views_of(names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the indices of (an array among the options, the one that it replaces if values are inside keys)."""
    pairs = {"k": "v"} | FACTORS
    return [(names.index(name), names.index(view)) for name, view in pairs.items() if view in names]
