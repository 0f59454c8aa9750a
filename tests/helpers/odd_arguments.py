"""Arguments of types that no option has, or that equal legal ones: what decides about a call may ask for their type.

They are arrays, whose comparison is an array, NaN, numbers and strings of other types, containers, and objects that
raise if they are compared, hashed or tested for truth.
"""

import numpy as np
import torch


class _Meta(type):
    """The class of classes that are not hashable."""

    __hash__ = None


class Text(str):
    """A string of a subclass."""


class OfUnhashableClass(metaclass=_Meta):
    """An object of a class that is not hashable."""


class Refusing:
    """An object that raises if it is compared, hashed or tested for truth."""

    def _refuse(self, *_):
        raise AssertionError("an argument of an unexpected type is asked for more than its type")

    __eq__ = __hash__ = __bool__ = __float__ = __index__ = __iter__ = __len__ = _refuse


ODD = (
    np.zeros(3), np.zeros((2, 0)), torch.zeros(3), torch.zeros(()), float("nan"), float("inf"), True, 1, 1.0, 10**30,
    [], [1, 2], (), (1,), (1, 2), (1, np.zeros(2)), (Text(), None), (1, 2, 3, 4), {}, Text("simulator"),
    np.str_("simulator"), b"simulator", np.float32(1), np.int64(1), np.bool_(True), object(), OfUnhashableClass(),
    Refusing(), len, Refusing,
)  # fmt: skip
