"""Measures the tensors that autograd saves in a forward, by module, and finds those that a graph retains afterwards."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle


def measure(model: Any, batch: Any) -> dict[str, int]:
    """Compute `cupy_flash.memory.measure`."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"measure: model must be a torch.nn.Module, not {type(model)}")
    saved = _Saved(model)
    with saved, torch.enable_grad():
        if isinstance(batch, dict):
            model(**batch)
        elif isinstance(batch, (tuple, list)):
            model(*batch)
        else:
            model(batch)
    return saved.bytes()


class _Saved(saved_tensors_hooks):
    """Context that attributes the storage of every saved tensor to the innermost running module."""

    def __init__(self, model: Any) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.model = model
        self.running = [""]
        self.owners: dict[Any, str] = {}  # storage: module; keeps storages alive so that addresses are not reused
        self.constants: set[Any] = set()  # storages of parameters and buffers
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> _Saved:
        for name, module in self.model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._entering(name)))
            self.handles.append(module.register_forward_hook(self._leave))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for storage, module in self.owners.items():
            if storage not in self.constants:
                total[module] = total.get(module, 0) + storage.nbytes()
        return total

    def _entering(self, name: str) -> Any:
        def enter(module: Any, _: Any) -> None:
            self.running.append(name)
            # Read the parameters in the pre-hook: FSDP has only just replaced them by gathered ones.
            constants = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            self.constants.update(x.untyped_storage() for x in constants)

        return enter

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    def _pack(self, tensor: Any) -> Any:
        self.owners.setdefault(tensor.untyped_storage(), self.running[-1])
        return tensor.detach()  # the tensor itself would form a reference cycle with its node


class Retained(NamedTuple):
    """A tensor that an autograd graph keeps alive; see `cupy_flash.memory.find_retained`."""

    module: str
    path: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "scalar"
        return f"{self.module or '(no module)'}: {self.path}: {shape} {self.dtype}, {self.bytes:,} bytes"


def find_retained(loss: Any) -> list[Retained]:
    """Compute `cupy_flash.memory.find_retained`."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"find_retained: loss must be a torch.Tensor, not {type(loss)}")
    nodes = list(_nodes(loss.grad_fn))
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    expected = [loss, *leaves, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    known = {x.untyped_storage() for x in expected}
    names: dict[int, str] | None = None
    retained = []
    for node in nodes:
        for path, tensor in _tensors_on(node):
            storage = tensor.untyped_storage()
            if storage in known or isinstance(tensor, torch.nn.Parameter):
                continue
            names = _modules_of_parameters() if names is None else names  # slow: scans every object of the process
            module = next((names[id(x)] for x in _variables_before(node) if id(x) in names), "")
            retained.append(Retained(module, path, tuple(tensor.shape), tensor.dtype, storage.nbytes()))
    return retained


def _nodes(root: Any) -> Iterator[Any]:
    """Yield root and the nodes on which it depends, breadth first."""
    frontier, seen = [root], set()
    while frontier:
        level, frontier = frontier, []
        for node in level:
            if node is not None and node not in seen:
                seen.add(node)
                yield node
                frontier += [following for following, _ in node.next_functions]


def _variables_before(node: Any) -> Iterator[Any]:
    """Yield the leaves on which a node depends, the nearest first."""
    return (ancestor.variable for ancestor in _nodes(node) if hasattr(ancestor, "variable"))


def _tensors_on(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor) for every tensor reachable from the attributes of a node."""
    seen: dict[int, Any] = {}  # id: object, kept alive so that ids are not reused
    for name, value in getattr(node, "__dict__", {}).items():
        yield from _search(value, f"{node.name()}.{name}", seen)
    for name in dir(node):
        if name == "saved_tensors" or name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # already freed by the backward
                continue
            yield from _search(value, f"{node.name()}.{name}", seen)


def _search(value: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Recurse into containers, closures and object attributes."""
    # Skip modules, which hold parameters, and objects that torch.distributed attaches to nodes, which hold shards.
    if isinstance(value, (type, types.ModuleType, torch.nn.Module)) or type(value).__module__.startswith(
        "torch.distributed."
    ):
        return
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield path, value
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
        yield from _search(part, path + name, seen)


def _modules_of_parameters() -> dict[int, str]:
    """Return {id of a parameter: name of its module in the outermost module} for all existing modules."""
    # type(x), because isinstance() also reads x.__class__, at which a lazy module imports its library.
    objects = gc.get_objects()
    modules = [x for x in objects if issubclass(type(x), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    names: dict[int, str] = {}
    parameters: dict[int, str] = {}
    for root in modules:
        if id(root) in inner:
            continue
        for name, module in root.named_modules():
            names[id(module)] = name or type(root).__name__
            parameters |= {id(x): names[id(module)] for x in module.parameters(recurse=False)}
    # FSDP2's gathered parameters are in the graph but no longer in the modules; torch has no public mapping.
    for x in objects:
        if type(x).__name__ == "FSDPParam" and hasattr(x, "_unsharded_param"):
            parameters[id(x._unsharded_param)] = names.get(id(x._module_info.module), "")
    return parameters
