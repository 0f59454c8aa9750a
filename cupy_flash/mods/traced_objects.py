"""Proxies for objects, classes and modules that a mod captures."""

from __future__ import annotations

import functools
import keyword
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .ir import Untraceable
from .values import BINARY, Captured, Delegate, Number, Traced, call

if TYPE_CHECKING:
    from .trace_guards import Sources

T = TypeVar("T")


class Rebuilder(Protocol):
    """A trace, which replaces the captured values of a mod by stand-ins."""

    sources: Sources

    def rebuild(self, x: object, source: str) -> Any:
        """Return x with stand-ins; `source` is an expression for x."""


class Held(Delegate):
    """A proxy for an object, class or module that a mod captures.

    Attributes are replaced by stand-ins when they are read, and the object's own operators (`__lt__`, `__float__`, ...)
    are traced. The class has no instance dictionary, so that vars() reads the object's.
    """

    __slots__ = ("_held", "_set")

    def __init__(self, rebuilder: Rebuilder, owner: object, local: str) -> None:
        object.__setattr__(self, "_held", (rebuilder, owner, local))
        object.__setattr__(self, "_set", {})  # attributes that the mod sets, until the end of the trace

    @property  # type: ignore[misc]  # mypy takes __class__ for a read-only attribute of object
    def __class__(self) -> type:  # for isinstance(x, <class of the object>)
        return type(original(self))

    def __getattr__(self, name: str) -> Any:
        rebuilder, owner, local = object.__getattribute__(self, "_held")
        own = object.__getattribute__(self, "_set")
        if name in own:
            return own[name]
        try:
            value = getattr(owner, name)
        except AttributeError:
            # The mod may call hasattr(), and no condition can check whether a later call has the attribute.
            rebuilder.sources.reproducible = False
            raise
        plain = name.isidentifier() and not keyword.iskeyword(name)
        source = f"{local}.{name}" if plain else f"getattr({local}, {name!r})"
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            function = rebuilder.rebuild(value.__func__, f"{source}.__func__")
            return functools.partial(function, self)
        return rebuilder.rebuild(value, source)

    def __setattr__(self, name: str, value: object) -> None:
        object.__getattribute__(self, "_set")[name] = value

    def __dir__(self) -> list[str]:
        return [*map(str, self._state(dir))]

    def __repr__(self) -> str:
        return str(self._state(repr))

    def __str__(self) -> str:
        return str(self._state(str))

    def _state(self, function: Callable[[object], T]) -> T:
        """Return function(object); its result may depend on any state, so every call must be traced."""
        rebuilder, owner, _ = object.__getattribute__(self, "_held")
        rebuilder.sources.reproducible = False
        return function(owner)

    def _defines(self, name: str) -> bool:
        """Return whether the object's class defines the special method, rather than inheriting it from `object`."""
        return getattr(type(original(self)), name, None) is not getattr(object, name, None)

    def _require(self, name: str) -> None:
        if not self._defines(name):
            kind = type(original(self)).__name__
            raise Untraceable(
                f"a mod computes with numbers and arrays, not with {kind}, which has no {name}: read an attribute"
            )

    def __eq__(self, other: object) -> Any:
        return self.__getattr__("__eq__")(other) if self._defines("__eq__") else self is other

    def __ne__(self, other: object) -> Any:
        if self._defines("__ne__"):
            return self.__getattr__("__ne__")(other)
        equal = self == other
        return call("logical_not", (equal,)) if isinstance(equal, Traced) else not equal

    def __hash__(self) -> int:
        return hash(original(self))

    def __bool__(self) -> bool:
        if self._defines("__bool__"):
            return bool(self.__getattr__("__bool__")())
        return not self._defines("__len__") or len(self) > 0

    def __contains__(self, item: object) -> bool:
        if self._defines("__contains__"):
            return bool(self.__getattr__("__contains__")(item))
        return any(item is x or item == x for x in self)

    def __iter__(self) -> Iterator[object]:
        if self._defines("__iter__"):
            return iter(self.__getattr__("__iter__")())
        self._require("__getitem__")
        return self._items()

    def _items(self) -> Iterator[object]:
        """Yield the items 0, 1, 2, ... until an IndexError, as Python iterates without __iter__."""
        index = 0
        while True:
            try:
                item = self.__getattr__("__getitem__")(index)
            except IndexError:
                return
            yield item
            index += 1

    def __len__(self) -> int:
        self._require("__len__")
        return int(self.__getattr__("__len__")())

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the object with stand-ins; for a class, make an instance with them."""
        rebuilder, owner, _ = object.__getattribute__(self, "_held")
        if isinstance(owner, type):
            rebuilder.sources.reproducible = False
            return owner(*args, **kwargs)
        is_torch_module = (type(owner).__call__.__module__ or "").partition(".")[0] == "torch"
        return self.__getattr__("forward" if is_torch_module else "__call__")(*args, **kwargs)


def _followed(name: str, result: Callable[[Any], object] | None = None) -> Callable[..., object]:
    """Return a special method for Held that traces the held object's method; `result` converts what it returns."""

    def method(self: Held, *args: object) -> object:
        if args and not self._defines(name) and isinstance(args[0], Held):
            return NotImplemented
        self._require(name)
        value = self.__getattr__(name)(*args)
        if value is NotImplemented and isinstance(args[0], Traced):
            raise Untraceable(f"a mod computes with numbers and arrays, not with {type(original(self)).__name__}")
        return value if result is None else result(value)

    return method


def _install_operators() -> None:
    ordered = ("lt", "le", "gt", "ge")
    for name in (*BINARY, *(f"r{name}" for name in BINARY), *ordered, "neg", "pos", "abs", "invert", "getitem"):
        setattr(Held, f"__{name}__", _followed(f"__{name}__"))
    for name, kind in {"float": float, "int": int, "index": int}.items():
        setattr(Held, f"__{name}__", _followed(f"__{name}__", kind))


_install_operators()


def original(x: object) -> Any:
    """Return the captured value that a stand-in replaces, and anything else as it is."""
    if type(x) is Number:
        return x.value
    if type(x) is Captured:
        return x if x.indices else x.array
    return object.__getattribute__(x, "_held")[1] if type(x) is Held else x
