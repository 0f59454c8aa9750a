"""Keyed plans (cupy_flash/keyed_plan.py) of calls on torch tensors: what has no key.

A call has no key if anything of torch changes or observes it: a mode of torch's dispatcher or functions, a transform
of torch.func, a level of dual tensors, torch.compile, a trace, a profiler, autocast, deterministic algorithms. The
depth of such a stack is no part of a key, because two modes at one depth differ. Neither has a call a key with a tensor
of a subclass, a lazily negated one, one without memory (of zeros), or one whose shape, strides or address torch does
not give (nested, of another layout, a wrapper of another tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda

from ...arrays import dtype_name
from ...keyed_plan import ALIGNMENT, Call, Library, call_of
from ...problem.records import CacheOptions, Options, Packed
from .autograd_kernel import PLAIN, is_observed

if TYPE_CHECKING:
    from ...gpu.kept_launches import Allocate, Outputs

_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def call_on_tensors(
    arrays: tuple[Any, Any, Any], options: Options | CacheOptions, packed: Packed | None = None
) -> Call | None:
    """Return the call if it has a key, else None."""
    return None if is_changed() else call_of(arrays, options, packed, TORCH)


def is_changed() -> bool:
    """Return whether anything of torch changes or observes a call."""
    return is_observed() or _is_deterministic() or _is_autocast()


def read(tensors: Sequence[Any]) -> tuple[list[Hashable], list[int]] | None:
    """Return what the key has of tensors, and their addresses; None without a key."""
    facts: list[Hashable] = []
    addresses: list[int] = []
    try:
        for x in tensors:
            address = x.data_ptr()
            if not address or x.is_neg():
                return None
            facts += x.shape, x.stride(), x.dtype, x.device, address % ALIGNMENT
            addresses.append(address)
    except RuntimeError:
        return None
    return facts, addresses


TORCH = Library(frozenset(PLAIN), read)


def allocator(outputs: Outputs) -> Allocate:
    """Return the function that allocates outputs, without torch's dispatcher, which takes half of the time."""
    of_torch = [(shape, strides, getattr(torch, dtype_name(dtype))) for shape, strides, dtype in outputs]

    def allocate(like: torch.Tensor) -> tuple[list[Any], list[int]] | None:
        empty = _empty_strided_cuda if like.is_cuda else _empty_strided_cpu
        tensors: list[Any] = []
        addresses: list[int] = []
        bits = 0
        for shape, strides, dtype in of_torch:
            tensor = empty(shape, strides, dtype)
            tensors.append(tensor)
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
        return None if bits % ALIGNMENT else (tensors, addresses)

    return allocate
