"""Finds tensors that outlive a backward: tensors saved by autograd, held by Python, or allocated by anything.

cupy_flash.memory.find_retained finds tensors that are held by a graph.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Box:
    """Wraps a saved tensor in an object that a weak reference can watch."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedTensors(saved_tensors_hooks):
    """Context manager that records every tensor saved by autograd, without keeping it alive."""

    def __init__(self) -> None:
        self.boxes: list[weakref.ref[Box]] = []
        self.storages: dict[int, int] = {}  # address -> bytes
        super().__init__(self.pack, lambda box: box.tensor)

    def __enter__(self) -> SavedTensors:
        super().__enter__()
        return self

    def pack(self, tensor: torch.Tensor) -> Box:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        box = Box(tensor)
        self.boxes.append(weakref.ref(box))
        return box

    @property
    def bytes(self) -> int:
        """Total size of the saved storages, each counted once."""
        return sum(self.storages.values())

    @property
    def alive(self) -> int:
        """Number of saved tensors that are still alive."""
        return sum(box() is not None for box in self.boxes)


class Kept:
    """Context manager that finds tensors which were made inside it and whose storage Python still holds."""

    def __enter__(self) -> Kept:
        gc.collect()
        self.before = [weakref.ref(x) for x in _tensors_of_python()]
        return self

    def __exit__(self, *_: object) -> None:
        self.before = []

    def beyond(self, *allowed: torch.Tensor) -> list[torch.Tensor]:
        """Return tensors that share no storage with `allowed` or with a tensor older than the context."""
        gc.collect()
        older = [tensor for reference in self.before if (tensor := reference()) is not None]
        known = {_address(tensor) for tensor in (*older, *allowed)}
        return [tensor for tensor in _tensors_of_python() if _address(tensor) not in known]


class Allocated(TorchDispatchMode):
    """Context manager that counts the memory of all tensors made inside it, held by Python, a graph or C++."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch then dispatches the operation again, on the shards
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if type(tensor) is torch.Tensor:
                self.storages.add(tensor.untyped_storage())
        return results

    @property
    def bytes(self) -> int:
        gc.collect()
        return sum(storage.nbytes() for storage in self.storages)


def _tensors_of_python() -> list[torch.Tensor]:
    """Return all dense tensors that have a storage."""
    # type() instead of isinstance(): the latter reads __class__ of every object, which makes lazy modules import.
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    plain = [x for x in tensors if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__]
    return [x for x in plain if x.layout is torch.strided and not x.is_meta and not x.is_nested]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
