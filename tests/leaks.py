"""Finds tensors that outlive a backward: what autograd saved, what hangs on the nodes, what Python still holds.

A node lives as long as anything holds the graph (the loss is enough). Autograd drops what a node has saved once it has
run, but nothing drops what else hangs on it: every layer then keeps its activations.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks


class Box:
    """Holds a saved tensor where a weak reference can watch it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedTensors(saved_tensors_hooks):
    """Context that records all that autograd saves in it, without keeping any of it alive."""

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
        """Of all storages saved, each counted once."""
        return sum(self.storages.values())

    @property
    def alive(self) -> int:
        """How many saved tensors something still holds."""
        return sum(box() is not None for box in self.boxes)


class Kept:
    """Tensors that came into being inside the context and are still held by Python; compared by storage."""

    def __enter__(self) -> Kept:
        gc.collect()
        self.before = [weakref.ref(x) for x in _tensors_of_python()]
        return self

    def __exit__(self, *_: object) -> None:
        self.before = []

    def beyond(self, *allowed: torch.Tensor) -> list[torch.Tensor]:
        """Those that share no storage with `allowed` or with a tensor older than the context."""
        gc.collect()
        older = [tensor for reference in self.before if (tensor := reference()) is not None]
        known = {_address(tensor) for tensor in (*older, *allowed)}
        return [tensor for tensor in _tensors_of_python() if _address(tensor) not in known]


def tensors_on_nodes(root: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(path, tensor) of every tensor that can be reached from the attributes of a node of root's graph."""
    found: list[tuple[str, torch.Tensor]] = []
    for node in _nodes(root):
        seen: set[int] = set()
        for name, value in getattr(node, "__dict__", {}).items():
            _search(value, f"{node.name()}.{name}", seen, found)
        for name in dir(node):
            if name == "saved_tensors" or name.startswith("_saved_"):
                try:
                    value = getattr(node, name)
                except RuntimeError:  # freed, as it should be
                    continue
                _search(value, f"{node.name()}.{name}", seen, found)
    return found


def _nodes(root: torch.Tensor) -> Iterator[Node]:
    waiting, seen = [root.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def _search(value: Any, path: str, seen: set[int], found: list[tuple[str, torch.Tensor]]) -> None:
    """Looks into containers, closures and the attributes of plain objects."""
    if id(value) in seen or isinstance(value, (type, types.ModuleType, torch.nn.Module)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        found.append((path, value))
        return
    parts: dict[Any, Any] = {}
    if isinstance(value, dict):
        parts = {f"[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = {f"[{index}]": part for index, part in enumerate(value)}
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts = {f".{name}": cell.cell_contents for name, cell in cells}
    elif isinstance(value, types.MethodType):
        parts = {".__self__": value.__self__}
    else:
        slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
        parts = {f".{name}": getattr(value, name, None) for name in slots}
        parts |= {f".{name}": part for name, part in getattr(value, "__dict__", {}).items()}
    for name, part in parts.items():
        _search(part, path + name, seen, found)


def _tensors_of_python() -> list[torch.Tensor]:
    """All dense tensors with memory of their own."""
    # type(), not isinstance(): that asks __class__ of every object there is, and lazy modules answer with an import.
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    plain = [x for x in tensors if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__]
    return [x for x in plain if x.layout is torch.strided and not x.is_meta and not x.is_nested]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
