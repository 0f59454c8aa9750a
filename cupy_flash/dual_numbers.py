"""Numbers with first and second derivatives, with which the reference differentiates a score_mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray


class Dual(np.lib.mixins.NDArrayOperatorsMixin):
    """Values of a score_mod of NumPy functions, with their first and second derivatives by the score."""

    def __init__(self, value: Any, slope: Array | float, curve: Array | float = 0.0) -> None:
        self.value, self.slope, self.curve = value, slope, curve

    @staticmethod
    def of(x: object) -> Dual:
        """Return x, or a constant of this value."""
        return x if isinstance(x, Dual) else Dual(x, 0.0)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> Dual | Array:
        x, y = (*map(Dual.of, inputs), Dual(0.0, 0.0))[:2]
        value = ufunc(*(Dual.of(operand).value for operand in inputs))
        if value.dtype == np.bool_:
            return value
        with np.errstate(all="ignore"):
            partials = PARTIALS[ufunc](x.value, y.value, value)
            # 0 times an infinite partial derivative is 0: that operand does not depend on the score.
            slope = sum(times(s, p) for s, p in zip((x.slope, y.slope), partials, strict=False))
            curve = sum(times(c, p) for c, p in zip((x.curve, y.curve), partials, strict=False))
            if ufunc in SECOND:
                xx, xy, yy = SECOND[ufunc](x.value, y.value, value)
                curve = curve + times(x.slope**2, xx) + times(2 * x.slope * y.slope, xy) + times(y.slope**2, yy)
        return Dual(value, slope, curve)

    def __array_function__(
        self, function: Callable[..., object], types: object, args: tuple[Any, ...], kwargs: object
    ) -> Dual:
        if function is np.clip:
            x, low, high = (Dual.of(arg) for arg in args)
            inside = (x.value >= low.value) & (x.value <= high.value)
            clipped = np.clip(x.value, low.value, high.value)
            return Dual(clipped, np.where(inside, x.slope, 0), np.where(inside, x.curve, 0))
        if function is not np.where:
            raise TypeError(f"the reference does not differentiate {function.__name__}")
        condition, x, y = args[0], Dual.of(args[1]), Dual.of(args[2])
        pairs = ((x.value, y.value), (x.slope, y.slope), (x.curve, y.curve))
        return Dual(*(np.where(condition, a, b) for a, b in pairs))


def times(factor: Array | float, partial: Array | float) -> Array:
    """Return factor * partial, but 0 where the factor is 0, even if `partial` is infinite."""
    return np.where(factor == 0, 0, factor * partial)


# Partial derivatives of f = ufunc(x, y) by x and y.
PARTIALS: dict[np.ufunc, Callable[..., tuple[Array | float, ...]]] = {
    np.add: lambda x, y, f: (1, 1),
    np.subtract: lambda x, y, f: (1, -1),
    np.multiply: lambda x, y, f: (y, x),
    np.divide: lambda x, y, f: (1 / y, -f / y),
    np.power: lambda x, y, f: (y * x ** (y - 1),),
    np.maximum: lambda x, y, f: ((np.sign(x - y) + 1) / 2, (np.sign(y - x) + 1) / 2),
    np.minimum: lambda x, y, f: ((np.sign(y - x) + 1) / 2, (np.sign(x - y) + 1) / 2),
    np.negative: lambda x, y, f: (-1,),
    np.absolute: lambda x, y, f: (np.sign(x),),
    np.square: lambda x, y, f: (2 * x,),
    np.sqrt: lambda x, y, f: (0.5 / f,),
    np.exp: lambda x, y, f: (f,),
    np.exp2: lambda x, y, f: (f * np.log(2),),
    np.log: lambda x, y, f: (1 / x,),
    np.log1p: lambda x, y, f: (1 / (1 + x),),
    np.sin: lambda x, y, f: (np.cos(x),),
    np.cos: lambda x, y, f: (-np.sin(x),),
    np.tanh: lambda x, y, f: (1 - f * f,),
}

# Second partial derivatives: by x twice, by x and y, and by y twice. For functions that are not listed they are 0.
SECOND: dict[np.ufunc, Callable[..., tuple[Array | float, ...]]] = {
    np.multiply: lambda x, y, f: (0, 1, 0),
    np.divide: lambda x, y, f: (0, -1 / y**2, 2 * f / y**2),
    np.power: lambda x, y, f: (y * (y - 1) * x ** (y - 2), 0, 0),
    np.square: lambda x, y, f: (2, 0, 0),
    np.sqrt: lambda x, y, f: (-0.25 / f**3, 0, 0),
    np.exp: lambda x, y, f: (f, 0, 0),
    np.exp2: lambda x, y, f: (f * np.log(2) ** 2, 0, 0),
    np.log: lambda x, y, f: (-1 / x**2, 0, 0),
    np.log1p: lambda x, y, f: (-1 / (1 + x) ** 2, 0, 0),
    np.sin: lambda x, y, f: (-f, 0, 0),
    np.cos: lambda x, y, f: (-f, 0, 0),
    np.tanh: lambda x, y, f: (-2 * f * (1 - f * f), 0, 0),
}
