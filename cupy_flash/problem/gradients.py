"""The records of gradients, which a backward and a double backward return."""

# No `from __future__ import annotations`, as in records.py.
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ..arrays import AnyArray, Array

AnyGradient = AnyArray | Array  # a caller's array, or inside the package its Array
GradientT = TypeVar("GradientT", bound=AnyGradient)
ReplacedT = TypeVar("ReplacedT", bound=AnyGradient)


def applied(function: Callable[..., object], gradients: object) -> Any:
    """Return a nested tuple of arrays with the function applied to each array; None stays None."""
    if isinstance(gradients, tuple):
        return tuple(applied(function, gradient) for gradient in gradients)
    return None if gradients is None else function(gradients)


class _Gradients(NamedTuple):
    """The fields of Gradients, in a base class: only from Python 3.11 on can a NamedTuple itself be generic."""

    dq: AnyGradient
    dk: AnyGradient
    dv: AnyGradient | None = None
    dbias: AnyGradient | None = None
    dsink: AnyGradient | None = None
    dcaptured: tuple[AnyGradient | None, ...] | None = None


class Gradients(_Gradients, Generic[GradientT]):
    """The gradients of a call, each with its input's shape and dtype; None for an input not given or not requested.

    `dcaptured` has one for each array that score_mod and mask_mod capture, in the order of `Mod.arrays`.
    """

    __slots__ = ()

    dq: GradientT
    dk: GradientT
    dv: GradientT
    dbias: GradientT | None
    dsink: GradientT | None
    dcaptured: tuple[GradientT | None, ...] | None

    def map(self, function: Callable[[GradientT], ReplacedT]) -> "Gradients[ReplacedT]":
        """Return the record with a function applied to each of its arrays; None stays None.

        Args:
            function: returns the replacement of an array.
        """
        return Gradients(*applied(function, self))


class _SecondGradients(NamedTuple):
    """The fields of SecondGradients, in a base class as those of Gradients."""

    dq: AnyGradient | None = None
    dk: AnyGradient | None = None
    dv: AnyGradient | None = None
    dbias: AnyGradient | None = None
    dsink: AnyGradient | None = None
    dcaptured: tuple[AnyGradient | None, ...] | None = None
    ddout: AnyGradient | None = None
    ddlse: AnyGradient | None = None


class SecondGradients(_SecondGradients, Generic[GradientT]):
    """The gradients of sum(tq * dq) + sum(tk * dk) + ... with respect to the inputs of attention, dout and dlse.

    Each has its input's shape and dtype, ddlse those of lse; None for an input not given or not requested.
    """

    __slots__ = ()

    dq: GradientT | None
    dk: GradientT | None
    dv: GradientT | None
    dbias: GradientT | None
    dsink: GradientT | None
    dcaptured: tuple[GradientT | None, ...] | None
    ddout: GradientT | None
    ddlse: GradientT | None

    def map(self, function: Callable[[GradientT], ReplacedT]) -> "SecondGradients[ReplacedT]":
        """Return the record with a function applied to each of its arrays; None stays None.

        Args:
            function: returns the replacement of an array.
        """
        return SecondGradients(*applied(function, self))
