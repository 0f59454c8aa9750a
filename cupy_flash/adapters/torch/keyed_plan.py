"""Keyed plans (cupy_flash/keyed_plan.py) of calls on torch tensors: what has no key.

A call has no key if anything of torch changes or observes it: a mode of torch's dispatcher or functions, a transform
of torch.func, a level of dual tensors, torch.compile, a trace, a profiler, autocast, deterministic algorithms. The
depth of such a stack is no part of a key, because two modes at one depth differ. Neither has a call a key with a tensor
of a subclass, a lazily negated one, one without memory (of zeros), or one whose shape, strides or address torch does
not give (nested, of another layout, a wrapper of another tensor).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from ...arrays import dtype_name
from ...keyed_plan import ALIGNMENT, Call, call_of
from ...problem.records import CacheOptions, Options, Packed
from .autograd_kernel import PLAIN, is_observed

if TYPE_CHECKING:
    from ...gpu.kept_launches import Allocate, Outputs


def call_on_tensors(
    arrays: tuple[Any, Any, Any], options: Options | CacheOptions, packed: Packed | None = None
) -> Call | None:
    """Return the call if it has a key, else None."""
    if is_changed():
        return None
    return call_of(arrays, options, packed, read)


def is_changed() -> bool:
    """Return whether anything of torch changes or observes a call."""
    return bool(is_observed() or torch._C._get_deterministic_algorithms() or torch._C._is_any_autocast_enabled())


def read(arrays: list[Any]) -> tuple[list[Hashable], list[Any], list[int]] | None:
    """Return the facts of the key, the tensors that are given, and their addresses; None without a key."""
    facts: list[Hashable] = []
    inputs: list[Any] = []
    addresses: list[int] = []
    try:
        for x in arrays:
            if x is None:
                facts.append(None)
                continue
            if type(x) not in PLAIN or x.is_neg() or not (address := x.data_ptr()):
                return None
            facts.append((x.shape, x.stride(), x.dtype, x.device, address % ALIGNMENT))
            inputs.append(x)
            addresses.append(address)
    except RuntimeError:
        return None
    return facts, inputs, addresses


def allocator(outputs: Outputs) -> Allocate:
    """Return the function that allocates outputs."""
    of_torch = [(shape, strides, getattr(torch, dtype_name(dtype))) for shape, strides, dtype in outputs]

    def allocate(like: torch.Tensor) -> tuple[list[Any], list[int]] | None:
        tensors: list[Any] = []
        addresses: list[int] = []
        bits = 0
        for shape, strides, dtype in of_torch:
            tensor = like.new_empty_strided(shape, strides, dtype=dtype)
            tensors.append(tensor)
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
        return None if bits % ALIGNMENT else (tensors, addresses)

    return allocate
