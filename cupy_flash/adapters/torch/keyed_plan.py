"""Keyed plans (cupy_flash/keyed_plan.py) of calls on torch tensors: what their key adds, and when they have none.

A call has no key if anything of torch changes, records or observes it: a mode of torch's dispatcher or functions, a
transform of torch.func or a level of dual tensors, torch.compile, a trace, a profiler, autocast, deterministic
algorithms, a gradient. Depths of such stacks are no part of the key, because two modes on one stack differ. Neither has
it one with a tensor of a subclass, one that is lazily negated, one without memory of its own (of zeros, of another
layout, of a finished transform) and one whose shape cannot be read (nested).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from ...arrays import dtype_name
from ...keyed_plan import ALIGNMENT, Call, Output, call_of
from ...problem.features import Options
from ...problem.records import Packed
from .autograd_kernel import PLAIN, is_observed


class OfTorch:
    """Tensors."""

    def facts(self, arrays: Sequence[Any]) -> tuple[list[Hashable], list[int]] | None:
        facts: list[Hashable] = []
        addresses = []
        try:
            for x in arrays:
                if x is None:
                    facts.append(None)
                    continue
                if type(x) not in PLAIN or x.is_neg():
                    return None
                address = x.data_ptr()
                if not address:
                    return None
                facts += (x.shape, x.stride(), x.dtype, x.device, address % ALIGNMENT)
                addresses.append(address)
        except RuntimeError:  # a wrapper of another tensor, or a tensor of another layout
            return None
        return facts, addresses

    def dtype(self, dtype: np.dtype) -> torch.dtype:
        of_torch: torch.dtype = getattr(torch, dtype_name(dtype))
        return of_torch

    def empty(self, outputs: Sequence[Output], like: torch.Tensor) -> tuple[list[Any], list[int]]:
        allocated = [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in outputs]
        return allocated, [x.data_ptr() for x in allocated]


_TORCH = OfTorch()


def call_on_tensors(function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None) -> Call | None:
    """Return the call if it has a key, else None."""
    if is_observed() or torch.are_deterministic_algorithms_enabled() or torch._C._is_any_autocast_enabled():
        return None
    call = call_of(_TORCH, function, arrays, options, packed)
    if call is None or (torch.is_grad_enabled() and torch._C._any_requires_grad(*call.inputs)):
        return None
    return call
