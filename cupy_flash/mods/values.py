"""Stand-ins with which a mod computes while it is traced, for scores, indices, captured arrays and captured numbers.

They record operators and the functions of NumPy, torch and jax as nodes, by each library's protocol.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from types import MethodDescriptorType
from typing import Any, ClassVar, NoReturn, TypeGuard

import numpy as np

from ..arrays import as_array, library_of
from . import functions
from .functions import FUNCTIONS, IN_TEXT, canonical, conversion
from .ir import ARGUMENTS, BOOL, INT, LOADED, LONG, REAL, Element, Graph, Node, TooLarge, Untraceable, kind_of
from .trace_guards import CapturedArray, Sources

LONGEST_ROW = 1024  # maximum elements of a captured row, which is computed element by element
MOST_ARRAYS = 32
SMALL = (-1, 0, 1, 2)  # numbers that stay in the text, where expressions with them are simplified

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
REVERSED = {f"r{name}": name for name in (*BINARY, "div")}


class Trace:
    """The record of one trace: the graph, the captured arrays, the run-time numbers, and their sources."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.sources = Sources()
        self.arrays: list[CapturedArray] = []
        self.elements: list[Element] = []
        self.array_sources: list[str] = []
        self.captured: list[Captured] = []  # one stand-in per array, so that `is` works for two names of it
        # For each function, {id: (the original, referenced so that its id is not reused, stand-in, local)}.
        self.rebuilt: dict[str, dict[int, tuple[object, Any, str]]] = {}
        self.numbers: list[int | float] = []
        self.number_sources: list[str] = []
        self.kinds: list[str] = []
        self.uses_torch = False  # whether the mod reads the module torch; its numbers then have torch's dtypes

    def capture(self, array: CapturedArray, source: str | None = None) -> Captured:
        """Return the stand-in of an array; one without a source was made by the mod itself, so every call is traced."""
        if source is None:
            self.sources.reproducible = False
        slot = next((slot for slot, other in enumerate(self.arrays) if other is array), None)
        if slot is None:
            slot = len(self.arrays)
            if slot == MOST_ARRAYS:
                raise TooLarge(f"a mod reads at most {MOST_ARRAYS} arrays")
            element = element_of(array)
            name = self.sources.reach(source) if source else self.sources.constant(array)
            for other, other_name in zip(self.elements, self.array_sources, strict=True):
                if other == element:
                    self.sources.require(f"{name} is not {other_name}")
            self.arrays.append(array)
            self.elements.append(element)
            self.array_sources.append(name)
            if source:
                self._require_alike(name, array, element)
        elif source:
            self.sources.require(f"{self.sources.reach(source)} is {self.array_sources[slot]}")
        if slot == len(self.captured):
            self.captured.append(Captured(self, slot))
        return self.captured[slot]

    def _require_alike(self, name: str, array: CapturedArray, element: Element) -> None:
        self.sources.require(f"type({name}) is {self.sources.constant(type(array))}")
        self.sources.require(f"{name}.dtype == {self.sources.constant(array.dtype)}")
        self.sources.require(f"len({name}.shape) == {element.rank}")

    def release(self) -> None:
        """Release the caller's arrays and objects, which reference cycles of the stand-ins would keep alive."""
        self.arrays.clear()
        self.captured.clear()
        for stand_ins in self.rebuilt.values():
            stand_ins.clear()
        self.sources.release()

    def number(self, value: int | float, source: str | None = None, in_text: bool = False) -> Node:
        """Return the node of a Python number: a constant of the text, or a run-time argument."""
        kind = kind_of(value)
        if kind == LONG and not -(2**63) <= value < 2**63:
            raise Untraceable(f"{value} does not fit 64 bits")
        is_far = kind == INT and value not in ARGUMENTS
        if kind == BOOL or in_text or value in SMALL or is_far or not math.isfinite(value):
            if source is not None:
                self._require_value(value, source)
            return self.graph.const(value)
        source = self.sources.constant(value) if source is None else source
        for index, (other, other_kind) in enumerate(zip(self.number_sources, self.kinds, strict=True)):
            if (other, other_kind) == (source, kind):
                return self.graph.argument(index, kind)
        if "v" in source:
            self.sources.require(self._kind_condition(source, kind))
        self.numbers.append(value)
        self.number_sources.append(source)
        self.kinds.append(kind)
        return self.graph.argument(len(self.kinds) - 1, kind)

    def _require_value(self, value: object, source: str) -> None:
        constant = self.sources.constant(value)
        # The type is compared too, because 1 == 1.0 == True. A NaN differs from itself, so it is traced at every call.
        self.sources.require(f"type({source}) is {self.sources.constant(type(value))} and {source} == {constant}")

    def _kind_condition(self, source: str, kind: str) -> str:
        if kind == REAL:
            return f"type({source}) is {self.sources.constant(float)}"
        condition = f"{source} in ARGUMENTS" if kind == INT else f"{source} not in INT32"
        return f"type({source}) is {self.sources.constant(int)} and {condition}"


def element_of(array: CapturedArray) -> Element:
    """Return the dtype and rank of a captured array; Untraceable for a dtype that mods cannot read."""
    dtype = array.dtype
    if isinstance(dtype, np.dtype):
        name = dtype.name
    elif type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    elif library_of(type(array)) == "tensorflow":  # inside a tf.function a tensor exports nothing
        name = str(getattr(dtype, "name", dtype))
    else:  # a dtype of another library: export the array to NumPy or CuPy and read the dtype there
        try:
            name = as_array(array, "a captured array").dtype.name
        except (TypeError, ValueError) as error:
            raise Untraceable(str(error)) from None
    if name not in LOADED:
        raise Untraceable(f"a captured array cannot be {name}: a mod reads {', '.join(LOADED)}")
    return Element(name, len(array.shape))


def is_array(x: object) -> TypeGuard[CapturedArray]:
    """Return whether x is an array of some library."""
    if isinstance(x, (Traced, np.generic, type)) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    exports = hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")
    return isinstance(x, np.ndarray) or exports or library_of(type(x)) == "tensorflow"  # as its variables


AS_IT_IS = (
    "functions such as np.where or torch.where and operators take it as it is, an array is indexed as it is, and other "
    "arrays are made before the mod"
)


class Delegate:
    """The base of stand-ins for the user's objects. In a binary operation their own operators take precedence."""

    __slots__ = ()


class UnknownMethod(Untraceable, AttributeError):
    """The error for an unknown method. It is also an AttributeError, so that hasattr() returns False."""


class Traced:
    """A stand-in for a value during a trace; its operators and methods look up their function by name (`call`)."""

    described = "a traced number"
    __array_priority__ = 1e6
    __hash__ = object.__hash__
    trace: Trace

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ == "where" and isinstance(function, MethodDescriptorType):
            x, condition, *others = args  # the condition is second in Tensor.where, but first in torch.where
            args = (condition, x, *others)
        return call(function.__name__, args, kwargs, function)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> Any:
        if method != "__call__" or kwargs.get("out") is not None:
            raise Untraceable(f"np.{ufunc.__name__}.{method} is not elementwise")
        # A NumPy scalar on the left of a comparison comes as an array without dimensions.
        inputs = tuple(x[()] if type(x) is np.ndarray and not x.ndim else x for x in inputs)
        return call(ufunc.__name__, inputs, kwargs, ufunc)

    def __array_function__(self, function: Any, types: object, args: Any, kwargs: Any) -> Any:
        return call(function.__name__, args, kwargs, function)

    def __divmod__(self, other: object) -> tuple[object, object]:
        return operator.floordiv(self, other), operator.mod(self, other)

    def __rdivmod__(self, other: object) -> tuple[object, object]:
        return operator.floordiv(other, self), operator.mod(other, self)

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise Untraceable(f"{self.described} cannot be made an array: {AS_IT_IS}")

    def __iter__(self) -> Iterator[Traced]:
        raise Untraceable("iteration over a traced number: it is one number, different for every score")

    def __len__(self) -> int:
        raise Untraceable(f"a traced number has no length, and cannot be made a tensor: {AS_IT_IS}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_") or (canonical(name) not in FUNCTIONS and name not in STRUCTURAL):
            raise UnknownMethod(f"{self.described} has no {name!r} in a mod")
        return lambda *args, **kwargs: call(name, (self, *args), kwargs)

    def where(self, condition: object, other: object) -> Traced:
        """Return self where the condition is true, else other, as torch's method."""
        return call("where", (condition, self, other))

    def _refuse_value(self, what: str, instead: str) -> NoReturn:
        raise Untraceable(
            f"{what} asks for the value of a traced number, which is different for every score: {instead}"
        )

    def __bool__(self) -> bool:
        self._refuse_value(
            "bool()",
            "write where(condition, a, b) instead of if, `&` instead of `and`, `|` instead of `or`, `~` instead of "
            "`not`, minimum and maximum of NumPy or torch instead of min() and max()",
        )

    def __index__(self) -> int:
        self._refuse_value(
            "indexing a list or tuple, or range(),",
            "make the list an array before the mod, as in table = np.array([1, 2, 3]), and write table[index]",
        )

    def __int__(self) -> int:
        self._refuse_value("int()", "write x.int() or x.long()")

    def __float__(self) -> float:
        self._refuse_value(
            "float()", "write x.float(), and functions of NumPy, torch or jax instead of those of math, as np.exp(x)"
        )

    def __format__(self, specification: str) -> str:
        if specification:
            self._refuse_value(f"format {specification!r}", "print it without a format")
        return repr(self)

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise Untraceable("a mod changes no array: use where(condition, value, x)")

    def __floor__(self) -> Traced | int:
        return call("int", (call("floor", (self,)),))

    def __ceil__(self) -> Traced | int:
        return call("int", (call("ceil", (self,)),))

    def __trunc__(self) -> Traced | int:
        return call("int", (self,))

    def __round__(self, digits: int | None = None) -> Traced | int | float:
        return call("round", (self,) if digits is None else (self, digits))


def _install_operators() -> None:
    def binary(name: str, swapped: bool = False) -> Callable[[Traced, object], Any]:
        def operate(x: Traced, y: object) -> Any:
            return NotImplemented if isinstance(y, Delegate) else call(name, (y, x) if swapped else (x, y))

        return operate

    def unary(name: str) -> Callable[[Traced], Any]:
        return lambda x: call(name, (x,))

    for name in (*BINARY, *COMPARE, "matmul"):
        setattr(Traced, f"__{name}__", binary(name))
    for name in (*BINARY, "matmul"):
        setattr(Traced, f"__r{name}__", binary(name, swapped=True))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Traced, f"__{name}__", unary(name))


_install_operators()


class Value(Traced):
    """A traced number: a node of the graph."""

    shape: ClassVar[tuple[int, ...]] = ()
    ndim = 0

    def __init__(self, trace: Trace, node: Node) -> None:
        self.trace, self.node = trace, node

    def __hash__(self) -> int:
        raise Untraceable(
            "a traced number cannot be a key of a dict or a member of a set: make the values an array, and index it"
        )

    def __repr__(self) -> str:
        return f"<traced {self.node!r}>"

    @property
    def dtype(self) -> object:
        """The dtype of the value's kind, torch's if the mod uses torch, else NumPy's."""
        dtype = {BOOL: np.bool_, INT: np.int32, LONG: np.int64, REAL: np.float32}[self.node.kind]
        return getattr(sys.modules["torch"], np.dtype(dtype).name) if self.trace.uses_torch else dtype

    @property
    def device(self) -> None:
        """None: a traced value is on no device."""
        return None

    def dim(self) -> int:
        """Return 0, as torch does for a scalar."""
        return 0

    def size(self) -> tuple[int, ...]:
        """Return (), as torch does for a scalar."""
        return ()

    def __getitem__(self, index: object) -> Value:
        index = index if isinstance(index, tuple) else (index,)
        if all(i is None or i is Ellipsis for i in index):
            return self
        raise Untraceable("a traced number has no elements")


class Number(Traced):
    """A Python number that a mod captures; in an operation with traced numbers it becomes a run-time argument.

    Python does arithmetic among such numbers, now and in every later call. If something needs the value itself (an
    `if`, range(), a library), the trace holds only for that value.
    """

    def __init__(self, trace: Trace, value: int | float, source: str) -> None:
        self.trace, self.value, self.source = trace, value, source

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance(x, int)
        return type(self.value)

    def fixed(self) -> Any:
        """Return the value, and restrict the trace to it."""
        self.trace._require_value(self.value, self.source)
        return self.value

    def __bool__(self) -> bool:
        truth = bool(self.value)
        self.trace.sources.require(self.source if truth else f"not {self.source}")
        return truth

    def __int__(self) -> int:
        return int(self.fixed())

    def __float__(self) -> float:
        return float(self.fixed())

    def __index__(self) -> int:
        return operator.index(self.fixed())

    def __hash__(self) -> int:
        return hash(self.fixed())

    def __repr__(self) -> str:
        return repr(self.fixed())

    def __format__(self, specification: str) -> str:
        return format(self.fixed(), specification)

    def __floor__(self) -> int:
        return math.floor(self.fixed())

    def __ceil__(self) -> int:
        return math.ceil(self.fixed())

    def __trunc__(self) -> int:
        return math.trunc(self.fixed())

    def __round__(self, digits: int | None = None) -> int | float:
        return round(self.fixed(), digits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fixed(), name)


def _arithmetic_of_numbers() -> None:
    """Define the operators of Number: Python computes the value, and the result's source is the same expression."""
    symbols = dict(
        add="+", sub="-", mul="*", truediv="/", floordiv="//", mod="%", pow="**", lshift="<<", rshift=">>",
        lt="<", le="<=", gt=">", ge=">=", eq="==", ne="!=",
    )  # fmt: skip
    symbols |= {"and": "&", "or": "|", "xor": "^"}

    def binary(name: str, symbol: str, swapped: bool) -> Callable[[Number, object], Any]:
        compute = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        recorded = getattr(Traced, f"__r{name}__" if swapped else f"__{name}__")

        def operate(self: Number, other: Any) -> Any:
            if not is_number(other):
                return recorded(self, other)
            sources = [self.source, source_of(self.trace, other)]
            values = [self.value, value_of(other)]
            if swapped:
                sources, values = sources[::-1], values[::-1]
            return Number(self.trace, compute(*values), f"({sources[0]} {symbol} {sources[1]})")

        return operate

    def unary(compute: Callable[[int | float], int | float], form: str) -> Callable[[Number], Number]:
        return lambda self: Number(self.trace, compute(self.value), form.format(self.source))

    for name, symbol in symbols.items():
        setattr(Number, f"__{name}__", binary(name, symbol, swapped=False))
        if name in BINARY:
            setattr(Number, f"__r{name}__", binary(name, symbol, swapped=True))
    for name, form in dict(neg="(-{})", pos="(+{})", abs="({0} if {0} >= 0 else -{0})", invert="(~{})").items():
        setattr(Number, f"__{name}__", unary(getattr(operator, name), form))


_arithmetic_of_numbers()


def is_number(x: object) -> bool:
    """Return whether x is a Python number, or the stand-in of a captured one."""
    return type(x) is Number or (
        not isinstance(x, Traced) and isinstance(x, (bool, int, float, np.bool_, np.integer, np.floating))
    )


def value_of(number: Any) -> int | float:
    """Return the bool, int or float of a number, which may be a stand-in, a NumPy scalar or a member of an IntEnum."""
    if type(number) is Number:
        return number.value
    if isinstance(number, (bool, np.bool_)):
        return bool(number)
    return int(number) if isinstance(number, (int, np.integer)) else float(number)


def source_of(trace: Trace, number: Any) -> str:
    """Return the expression that fetches a number in a later call."""
    return number.source if type(number) is Number else trace.sources.constant(value_of(number))


class Row(Traced):
    """Several numbers, such as a row of a captured array, to each of which operations are applied."""

    def __init__(self, trace: Trace, items: list[Value]) -> None:
        self.trace, self.items = trace, items

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of elements,)."""
        return (len(self.items),)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Value]:
        return iter(self.items)

    def __getitem__(self, index: Any) -> Row | Value:
        if index is Ellipsis:
            return self
        chosen = self.items[index]
        return Row(self.trace, chosen) if isinstance(chosen, list) else chosen


class Captured(Traced):
    """A captured array with the indices applied so far."""

    described = "a captured array"

    def __init__(self, trace: Trace, slot: int, indices: tuple[Node, ...] = ()) -> None:
        self.trace, self.slot, self.indices = trace, slot, indices

    @property
    def array(self) -> CapturedArray:
        """The caller's array."""
        return self.trace.arrays[self.slot]

    @property
    def shape(self) -> tuple[Number, ...]:
        """The dimensions that have no index yet, as numbers with which a mod may compute."""
        return tuple(self._extent(axis) for axis in range(len(self.indices), len(self.array.shape)))

    def _extent(self, axis: int) -> Number:
        source = f"{self.trace.array_sources[self.slot]}.shape[{axis}]"
        return Number(self.trace, int(self.array.shape[axis]), source)

    @property
    def ndim(self) -> int:
        """The number of dimensions that have no index yet."""
        return len(self.array.shape) - len(self.indices)

    @property
    def dtype(self) -> object:
        """The dtype of the caller's array."""
        return self.array.dtype

    @property
    def device(self) -> object:
        """The device of the caller's array; None if its library has no devices."""
        return getattr(self.array, "device", None)

    def dim(self) -> int:
        """Return `ndim`, as torch's `Tensor.dim` does."""
        return self.ndim

    @property
    def size(self) -> Number | int | Callable[..., tuple[Number, ...] | Number]:
        """The number of elements; for torch a method that returns the shape or one of its dimensions."""
        is_method = callable(getattr(self.array, "size", None))
        return (lambda axis=None: self.shape if axis is None else self.shape[axis]) if is_method else self.numel()

    def numel(self) -> Number | int:
        """Return the number of elements, as torch."""
        return functools.reduce(operator.mul, self.shape, 1)

    def __len__(self) -> int:
        if not self.shape:
            raise Untraceable("a captured number has no length")
        return operator.index(self.shape[0])

    def __iter__(self) -> Iterator[Value | Captured]:
        return (self[n] for n in range(len(self)))

    def __getitem__(self, index: object) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        while index and (index[-1] is Ellipsis or (type(index[-1]) is slice and index[-1] == slice(None))):
            index = index[:-1]
        if len(index) > self.ndim:
            shape = tuple(self.array.shape)
            raise Untraceable(f"{len(self.indices) + len(index)} indices of a captured array of shape {shape}")
        first = len(self.indices)
        nodes = tuple(self._index(first + n, i) for n, i in enumerate(index))
        return Captured(self.trace, self.slot, (*self.indices, *nodes)).finished()

    def _index(self, axis: int, index: Any) -> Node:
        if isinstance(index, slice) or index is None or index is Ellipsis:
            raise Untraceable("a slice of a captured array: take it before the mod, as in row = table[:, 3]")
        if is_number(index):
            if kind_of(value_of(index)) not in (INT, LONG):
                raise Untraceable("an index must be an integer")
            return self.trace.number(*_known(self._extent(axis) - -index if index < 0 else index))
        node = node_of(self.trace, index)
        if node.kind not in (INT, LONG):
            raise Untraceable(f"an index must be an integer, not {'a bool' if node.kind == BOOL else 'floating'}")
        return node

    def finished(self) -> Any:
        """Return the element if every dimension has an index, else self."""
        if self.ndim:
            return self
        kind = LOADED[self.trace.elements[self.slot].dtype]
        return Value(self.trace, self.trace.graph.load(self.slot, self.indices, kind))

    def numbers(self) -> Value | Row:
        """Return the number or the row of numbers that remains; Untraceable for more dimensions."""
        if self.ndim == 0:
            return self.finished()
        left = tuple(self.array.shape)[len(self.indices) :]
        if len(left) > 1 or left[0] > LONGEST_ROW:
            raise Untraceable(f"a mod computes with numbers: index the captured array further, {left} is left of it")
        return Row(self.trace, [self[n] for n in range(len(self))])


def _known(number: Any) -> tuple[int | float, str | None]:
    """Return the value and the source of a Python number."""
    return value_of(number), number.source if type(number) is Number else None


def lift(trace: Trace, x: Any, in_text: bool = False) -> Value | Row:
    """Convert a value with which a mod may compute to a number or a row of numbers."""
    if isinstance(x, Captured):
        return x.numbers()
    if is_number(x):
        return Value(trace, trace.number(*_known(x), in_text))
    if isinstance(x, (Value, Row)):
        return x
    if is_array(x):
        return trace.capture(x).numbers()
    raise Untraceable(f"a mod computes with numbers and arrays, not with {x.__class__.__name__}")


def node_of(trace: Trace, x: object) -> Node:
    """Return the node of a single number."""
    value = lift(trace, x)
    if isinstance(value, Row):
        raise Untraceable(
            f"a row of {len(value)} numbers where one is needed: index it, or reduce it by sum, any or all"
        )
    return value.node


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, original: Any = None) -> Any:
    """Apply the function that libraries call `name`; `original` is the library's own, for Python numbers only."""
    kwargs = kwargs or {}
    if name.endswith("_") and not name.endswith("__"):
        raise Untraceable(f"{name} works in place: a mod returns a new number")
    name = name.strip("_")
    if name in REVERSED:
        name, args = REVERSED[name], args[::-1]
    name = canonical(name)
    operands = [*_flat(args), *_flat(tuple(kwargs.values()))]
    traced = [operand for operand in operands if isinstance(operand, Traced)]
    if original is not None and all(type(operand) is Number for operand in traced):
        fixed = [arg.fixed() if type(arg) is Number else arg for arg in args]
        return original(*fixed, **{key: x.fixed() if type(x) is Number else x for key, x in kwargs.items()})
    trace = traced[0].trace
    if name == "getitem":
        array, index = args
        array = array if isinstance(array, (Captured, Row, Value)) else trace.capture(array)
        return array[index]
    if name in STRUCTURAL:
        return STRUCTURAL[name](trace, *args, **kwargs)
    function = FUNCTIONS.get(name)
    if function is None:
        raise functions.unknown(name)
    return _elementwise(trace, name, function, args, kwargs)


IGNORED = ("dtype", "casting", "order", "subok", "inplace", "memory_format")
OPTIONS = ("approximate", "rounding_mode")  # keyword arguments that functions.py takes as Python values


def _elementwise(
    trace: Trace, name: str, function: Callable[..., Node], args: tuple[object, ...], kwargs: dict[str, object]
) -> Value | Row:
    in_text = IN_TEXT.get(name, ())
    inputs = [
        None if arg is None and name == "clip" else lift(trace, arg, position in in_text)
        for position, arg in enumerate(args)
    ]
    kwargs = {key: x for key, x in kwargs.items() if x is not None and key not in IGNORED}
    named = {key: x if key in OPTIONS else lift(trace, x) for key, x in kwargs.items()}
    lengths = {len(x) for x in (*inputs, *named.values()) if isinstance(x, Row)}
    if len(lengths) > 1:
        raise Untraceable(f"{name} of rows of different lengths, {' and '.join(map(str, sorted(lengths)))}")

    def apply(n: int) -> Value:
        nodes = [_nth(x, n) for x in inputs]
        try:
            return Value(trace, function(trace.graph, *nodes, **{key: _nth(x, n) for key, x in named.items()}))
        except Untraceable:
            raise
        except TypeError as error:  # the call has an operand that the function does not take
            raise Untraceable(f"{name}: {error}") from None

    return Row(trace, [apply(n) for n in range(lengths.pop())]) if lengths else apply(0)


def _nth(x: object, n: int) -> object:
    if isinstance(x, Row):
        return x.items[n].node
    return x.node if isinstance(x, Value) else x


def _flat(items: tuple[object, ...]) -> Iterator[object]:
    for item in items:
        if isinstance(item, (tuple, list)) and not isinstance(item, Traced):
            yield from _flat(tuple(item))
        else:
            yield item


# ------------------------------------------------------------------------ functions of shapes, rows and dtypes, by name


def _same(trace: Trace, x: object, *args: object, **kwargs: object) -> Value | Row:
    """Return x: a function that changes only the shape has no effect on one number."""
    return lift(trace, x)


def _constant(value: int) -> Callable[..., Value | Row]:
    def of_dtype(trace: Trace, x: object, *shape: object, dtype: object = None, **kwargs: object) -> Value | Row:
        if dtype is None and isinstance(x, Value) and shape == ():  # zeros_like
            return Value(trace, trace.graph.const(value, x.node.kind))
        number = lift(trace, value)
        return number if dtype is None else _to(trace, number, dtype)

    return of_dtype


def _filled(position: int) -> Callable[..., Value | Row]:
    """Return the function for full_like, new_tensor and new_full, whose result is the argument at `position`."""

    def filled(trace: Trace, x: object, *args: object, dtype: object = None, **kwargs: object) -> Value | Row:
        value = kwargs["fill_value"] if "fill_value" in kwargs else args[position]
        return lift(trace, value) if dtype is None else _to(trace, lift(trace, value), dtype)

    return filled


def _to(trace: Trace, x: object, *targets: object, **kwargs: object) -> Value | Row:
    """Convert to the first dtype among the targets; devices and flags have no effect."""
    for target in (*targets, *kwargs.values()):
        name = conversion(target) or conversion(getattr(target, "dtype", None))
        if name is not None:
            return call(name, (lift(trace, x),))
    return lift(trace, x)


def _items(trace: Trace, x: object) -> list[Node]:
    value = lift(trace, x)
    return [item.node for item in value.items] if isinstance(value, Row) else [value.node]


def _reduction(op: str, kind: str | None = None) -> Callable[..., Value]:
    def reduce(trace: Trace, x: object, *axis: object, **kwargs: object) -> Value:
        nodes = _items(trace, x)
        graph = trace.graph
        nodes = [graph.cast(node, kind) if kind else node for node in nodes]
        return Value(trace, functools.reduce(lambda total, node: graph.make(op, total, node), nodes))

    return reduce


def _dot(trace: Trace, x: object, y: object, **kwargs: object) -> Value:
    if not all(isinstance(lift(trace, row), Row) for row in (x, y)):
        raise Untraceable("a product of rows takes two rows of captured arrays: write * for numbers")
    pairs = _elementwise(trace, "mul", FUNCTIONS["mul"], (x, y), {})
    return _reduction("add")(trace, pairs)


STRUCTURAL: dict[str, Callable[..., Value | Row]] = {
    **dict.fromkeys(
        ("unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "contiguous", "clone", "item"), _same
    ),
    **dict.fromkeys(("to", "type", "astype", "type_as", "cast"), _to),
    "zeros_like": _constant(0),
    "ones_like": _constant(1),
    "new_zeros": _constant(0),
    "new_ones": _constant(1),
    "full_like": _filled(0),
    "new_tensor": _filled(0),
    "new_full": _filled(1),
    "sum": _reduction("add"),
    "any": _reduction("or", BOOL),
    "all": _reduction("and", BOOL),
    "dot": _dot,
    "vdot": _dot,
    "inner": _dot,
    "matmul": _dot,
}
