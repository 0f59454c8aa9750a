"""Stand-ins for objects, classes and modules that a mod captures."""

from __future__ import annotations

import functools
import keyword
import types
from collections.abc import Callable, Iterator
from typing import Any

from .ir import Untraceable
from .values import BINARY, Captured, Delegate, Number, Traced, call


class Held(Delegate):
    """An object, class or module that a mod captures.

    Its attributes become stand-ins when they are read, and its own operators (`__lt__`, `__float__`, ...) are followed.
    Without an instance dictionary, so that vars() reads that of the object.
    """

    __slots__ = ("_held", "_set")

    def __init__(self, rebuilder: Any, owner: Any, local: str) -> None:
        object.__setattr__(self, "_held", (rebuilder, owner, local))
        object.__setattr__(self, "_set", {})  # attributes that the mod sets, for the rest of its only call

    @property  # type: ignore[misc]  # mypy takes __class__ for a read-only attribute of object
    def __class__(self) -> type:  # so that isinstance(x, its class) holds
        return type(original(self))

    def __getattr__(self, name: str) -> Any:
        rebuilder, owner, local = object.__getattribute__(self, "_held")
        own = object.__getattribute__(self, "_set")
        if name in own:
            return own[name]
        try:
            value = getattr(owner, name)
        except AttributeError:  # hasattr or a default: nothing would notice that a later call has the attribute
            rebuilder.sources.reproducible = False
            raise
        plain = name.isidentifier() and not keyword.iskeyword(name)
        source = f"{local}.{name}" if plain else f"getattr({local}, {name!r})"
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            function = rebuilder.rebuild(value.__func__, f"{source}.__func__")
            return functools.partial(function, self)
        return rebuilder.rebuild(value, source)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_set")[name] = value

    def __dir__(self) -> list[str]:
        return [*map(str, self._state(dir))]

    def __repr__(self) -> str:
        return str(self._state(repr))

    def __str__(self) -> str:
        return str(self._state(str))

    def _state(self, function: Callable[[Any], Any]) -> Any:
        """function(the object), which may depend on anything in it: every call is traced."""
        rebuilder, owner, _ = object.__getattribute__(self, "_held")
        rebuilder.sources.reproducible = False
        return function(owner)

    def _defines(self, name: str) -> bool:
        """Whether the object's class has the special method, other than as `object` has it."""
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

    def __contains__(self, item: Any) -> bool:
        if self._defines("__contains__"):
            return bool(self.__getattr__("__contains__")(item))
        return any(item is x or item == x for x in self)

    def __iter__(self) -> Iterator[Any]:
        if self._defines("__iter__"):
            return iter(self.__getattr__("__iter__")())
        self._require("__getitem__")
        return self._items()

    def _items(self) -> Iterator[Any]:
        """The items 0, 1, 2, ... up to an IndexError, as Python's iteration without __iter__."""
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The object's result, computed with stand-ins; a class makes an instance with them."""
        rebuilder, owner, _ = object.__getattribute__(self, "_held")
        if isinstance(owner, type):
            rebuilder.sources.reproducible = False
            return owner(*args, **kwargs)
        is_torch_module = (type(owner).__call__.__module__ or "").partition(".")[0] == "torch"
        return self.__getattr__("forward" if is_torch_module else "__call__")(*args, **kwargs)


def _followed(name: str, result: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """The special method of Held that follows the object's; `result` converts what Python takes one type of."""

    def method(self: Held, *args: Any) -> Any:
        if args and not self._defines(name) and isinstance(args[0], Held):
            return NotImplemented
        self._require(name)
        value = self.__getattr__(name)(*args)
        return value if result is None else result(value)

    return method


def _install_operators() -> None:
    ordered = ("lt", "le", "gt", "ge")
    for name in (*BINARY, *(f"r{name}" for name in BINARY), *ordered, "neg", "pos", "abs", "invert", "getitem"):
        setattr(Held, f"__{name}__", _followed(f"__{name}__"))
    for name, kind in {"float": float, "int": int, "index": int}.items():
        setattr(Held, f"__{name}__", _followed(f"__{name}__", kind))


_install_operators()


def original(x: Any) -> Any:
    """The captured value that a stand-in replaces; anything else as it is."""
    if type(x) is Number:
        return x.value
    if type(x) is Captured:
        return x if x.indices else x.array
    return object.__getattribute__(x, "_held")[1] if type(x) is Held else x
