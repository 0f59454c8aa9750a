"""The option statistics=: its checks, what a backward needs of the forward's, and the results of a call with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..arrays import ArrayT
from .checks import Requirements
from .records import CacheOptions, Options, Saved, Statistics


def check_statistics(requirements: Requirements, given: object, return_lse: object) -> tuple[str, ...]:
    """Return the statistics that a call asks for, in the order of the fields of Statistics; () if they are wrong."""
    if given is None:
        return ()
    names = Statistics._fields
    if not isinstance(given, (tuple, list)) or not all(isinstance(name, str) for name in given):
        requirements.require_type(False, f"statistics must be a tuple of {', '.join(names)}, not {given!r}")
        return ()
    legal = set(given) <= set(names) and len(set(given)) == len(given)
    requirements.require(legal, f"statistics must be some of {', '.join(names)}, each once, not {given!r}")
    with_lse = isinstance(return_lse, (bool, np.bool_)) and bool(return_lse)
    requirements.require(with_lse, "statistics need return_lse=True: they are returned beside lse")
    return tuple(name for name in names if name in given)


def check_asked(requirements: Requirements, options: Options, of_forward: bool, directed: bool) -> None:
    """Require that a call which asks for statistics is a forward of attention; a JVP is not supported."""
    if options.statistics is None:
        return
    function = requirements.function
    requirements.require(of_forward, f"{function} returns no statistics: statistics are results of attention")
    if directed:
        requirements.unsupported.append("statistics have no tangents: ask attention for them")


def differentiated_statistics(arrays: Collection[str]) -> tuple[str, ...]:
    """Return the statistics that have a gradient among the arrays of a backward."""
    return tuple(name for name in Statistics._fields if f"d{name}" in arrays)


def gradients_of_statistics(requirements: Requirements, saved: Saved) -> dict[str, object]:
    """Return the gradients of statistics by name, and what they need of the forward's statistics."""
    forward = Statistics() if saved.statistics is None else saved.statistics
    if not requirements.require_type(
        isinstance(forward, Statistics), f"statistics must be the Statistics of the forward, not {forward!r}"
    ):
        return {}
    given: dict[str, object] = {}
    needed = {"dmax": (saved.dmax, "argmax", forward.argmax), "dentropy": (saved.dentropy, "entropy", forward.entropy)}
    for name, (gradient, statistic, value) in needed.items():
        if gradient is None:
            continue
        given[name] = gradient
        if requirements.require(value is not None, f"{name} needs {statistic} of the forward's statistics"):
            given[statistic] = value
    return given


def selected(
    results: Sequence[ArrayT], options: Options | CacheOptions
) -> ArrayT | tuple[ArrayT, ArrayT] | tuple[ArrayT, ArrayT, Statistics[ArrayT]]:
    """Return what a call returns: out, (out, lse) or (out, lse, Statistics), from out, lse and the statistics."""
    out, lse, *others = results
    if not options.return_lse:
        return out
    if options.statistics is None:
        return out, lse
    asked = (name for name in Statistics._fields if name in options.statistics)
    return out, lse, Statistics(**dict(zip(asked, others, strict=True)))
