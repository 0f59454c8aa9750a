"""Traces a score_mod and a mask_mod: calls each once, with stand-ins for the score and its indices.

Arrays of NumPy, CuPy and jax have no hook for `array[traced]`. A function is therefore rebuilt with stand-ins in its
closure, globals and defaults, in place of arrays, numbers, and the functions and objects that hold them.

Traces are cached. A later call of the same code reuses a trace if the captured values have the same types, dtypes and
ranks, and the numbers in the text are the same (trace_guards.py). Contents and shapes of arrays and all other numbers
are collected in every call.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import linecache
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .block_tables import converted, is_block_mask
from .functions import FUNCTIONS, unknown
from .ir import BOOL, REAL, Element, Graph, Node, Program, TooLarge, Untraceable, order, parse
from .trace_guards import Collect
from .traced_objects import Held, original
from .values import Number, Trace, Traced, Value, call, is_array, lift

if TYPE_CHECKING:
    from .trace_guards import CapturedArray
MASK_INPUTS = ("b", "h", "q", "kv")
SCORE_INPUTS = ("score", *MASK_INPUTS)
MOST_NODES = 4096
DEEPEST = 12  # maximum nesting of containers
LARGEST_CONTAINER = 1024
MOST_TRACES = 256

# NumPy and torch have a protocol by which their functions accept stand-ins; other functions are wrapped.
PROTOCOL = ("numpy", "torch")
WRAPPED = ("jax", "jaxlib", "cupy", "cupyx", "mlx", "tensorflow", "math")
# Objects of these, such as layers and lists of layers, hold the user's arrays.
STATEFUL = ("mlx", "tensorflow")
# Every function of singledispatch has this code.
DISPATCHER = functools.singledispatch(abs).__code__  # type: ignore[attr-defined]
HERE = str(Path(__file__).parent)
CONSTANTS = (str, bytes, int, float, complex, np.generic, np.dtype, range, enum.Enum, type(None), type(Ellipsis))


class Mod:
    """A traced score_mod, mask_mod or both: `program`, and the `arrays` and `numbers` that it reads.

    Pass it as score_mod= or mask_mod= instead of the functions. It keeps the arrays and numbers that the functions had
    captured when they were traced; contents of the arrays are read in every call.

    Args:
        score_mod: a function (score, b, h, q_idx, kv_idx) -> score.
        mask_mod: a function (b, h, q_idx, kv_idx) -> bool, True = attend.

    Raises:
        TypeError: a function cannot be traced; the message has the user's line and what to write instead.
        ValueError: it reads more than 32 arrays, or has more than 4096 operations.
    """

    __slots__ = ("arrays", "encoded", "names", "numbers", "program", "text")

    program: Program
    text: str  # the text of the program
    encoded: str  # the text and a line of numbers; `decoded` makes a Mod of it
    arrays: tuple[CapturedArray, ...]
    numbers: tuple[int | float, ...]
    names: tuple[str, ...]  # names of the functions, for explain()

    def __init__(
        self, score_mod: Callable[..., object] | None = None, mask_mod: Callable[..., object] | None = None
    ) -> None:
        if score_mod is None and mask_mod is None:
            raise TypeError("Mod: score_mod or mask_mod must be given")
        mod = mod_of(score_mod, mask_mod)
        for name in self.__slots__:
            setattr(self, name, getattr(mod, name))

    def with_array_at(self, arrays: Mapping[int, CapturedArray]) -> Mod:
        """Return a copy that captures these arrays at their places, and otherwise the arrays of this one.

        Args:
            arrays: the new arrays by their place among `arrays`, each with the dtype and rank of the one it replaces.
        """
        return self.with_arrays(tuple(arrays.get(place, x) for place, x in enumerate(self.arrays)))

    def with_arrays(self, arrays: tuple[CapturedArray, ...]) -> Mod:
        """Return the same mod with other arrays.

        Args:
            arrays: arrays with the same dtypes and ranks, in the same order.
        """
        return _mod(self.program, self.text, self.names, tuple(arrays), self.numbers)

    def __reduce__(self) -> tuple[Callable[..., Mod], tuple[str, tuple[str, ...], tuple[CapturedArray, ...]]]:
        return _copied, (self.encoded, self.names, self.arrays)

    def __repr__(self) -> str:
        arrays = ", ".join(
            f"array{n} {element.dtype} {tuple(a.shape)}" for n, (element, a) in enumerate(self._arrays())
        )
        numbers = ", ".join(f"n{n} = {number:g}" for n, number in enumerate(self.numbers))
        return f"Mod({'; '.join(part for part in (str(self.program), arrays, numbers) if part)})"

    def _arrays(self) -> Iterator[tuple[Element, CapturedArray]]:
        return zip(self.program.arrays, self.arrays, strict=True)


def _mod(
    program: Program,
    text: str,
    names: tuple[str, ...],
    arrays: tuple[CapturedArray, ...],
    numbers: tuple[int | float, ...],
) -> Mod:
    mod = Mod.__new__(Mod)
    mod.program, mod.text, mod.names, mod.arrays, mod.numbers = program, text, names, arrays, numbers
    mod.encoded = f"{text}\n{' '.join(map(repr, numbers))}"
    return mod


def decoded(encoded: str, arrays: Iterable[CapturedArray]) -> Mod:
    """Return the Mod that an `encoded` of another Mod describes, with these captured arrays."""
    program, text, numbers = _decoded(encoded)
    return _mod(program, text, (), tuple(arrays), numbers)


def _copied(encoded: str, names: tuple[str, ...], arrays: tuple[CapturedArray, ...]) -> Mod:
    program, text, numbers = _decoded(encoded)
    return _mod(program, text, names, arrays, numbers)


@functools.lru_cache(maxsize=256)
def _decoded(encoded: str) -> tuple[Program, str, tuple[int | float, ...]]:
    text, _, values = encoded.rpartition("\n")
    program = parse(text)
    read = [float if kind == REAL else int for kind in program.numbers]
    return program, text, tuple(number(value) for number, value in zip(read, values.split(), strict=True))


def mod_of(score_mod: object, mask_mod: object) -> Mod:
    """Return the Mod of a call's options, which are one or two functions, or a Mod."""
    mods = [given for given in (score_mod, mask_mod) if isinstance(given, Mod)]
    if not mods:
        return traced(score_mod, converted(mask_mod) if is_block_mask(mask_mod) else mask_mod)
    if len(mods) != sum(given is not None for given in (score_mod, mask_mod)) or mods[0] is not mods[-1]:
        raise Untraceable("a Mod holds both functions: give Mod(score_mod, mask_mod) alone, as score_mod= or mask_mod=")
    return mods[0]


class _Kept(NamedTuple):
    """A trace that later calls may reuse."""

    codes: tuple[types.CodeType | type, ...]  # referenced, so that their ids are not reused
    collect: Collect
    program: Program
    text: str
    names: tuple[str, ...]


_kept: dict[tuple[int, int], list[_Kept]] = {}
_keeping = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in a forked child, where the thread that may have held it does not exist."""
    global _keeping
    _keeping = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def traced(score_mod: object, mask_mod: object) -> Mod:
    """Return the Mod of the functions, from a cached trace if its conditions hold; either function may be None."""
    codes = (_code_of(score_mod), _code_of(mask_mod))
    key = (id(codes[0]), id(codes[1]))
    for kept in _kept.get(key, ()):
        collected = kept.collect(score_mod, mask_mod)
        if collected is not None:
            return _mod(kept.program, kept.text, kept.names, *collected)
    trace = Trace()
    try:
        mod, new = _trace(trace, codes, score_mod, mask_mod)
    finally:
        trace.release()
    if new is not None:
        _keep(key, new)
    return mod


def _trace(
    trace: Trace, codes: tuple[types.CodeType | type, ...], score_mod: object, mask_mod: object
) -> tuple[Mod, _Kept | None]:
    """Return the Mod of the functions, and its trace if a later call may reuse it."""
    roots = {}
    for name, function, inputs in (("f0", score_mod, SCORE_INPUTS), ("f1", mask_mod, MASK_INPUTS)):
        roots[name] = None if function is None else _root(trace, name, function, inputs)
    program, slots, arguments = _program(trace, roots["f0"], roots["f1"])
    names = tuple(_name_of(function) for function in (score_mod, mask_mod) if function is not None)
    mod = _mod(
        program, program.text, names, tuple(trace.arrays[slot] for slot in slots),
        tuple(trace.numbers[index] for index in arguments),
    )  # fmt: skip
    if not trace.sources.reproducible:
        return mod, None
    collect = trace.sources.collect(
        [trace.array_sources[slot] for slot in slots], [trace.number_sources[index] for index in arguments]
    )
    return mod, _Kept(codes, collect, program, mod.text, names)


def _keep(key: tuple[int, int], kept: _Kept) -> None:
    with _keeping:
        while sum(map(len, _kept.values())) >= MOST_TRACES:
            _kept.pop(next(iter(_kept)))
        _kept.setdefault(key, []).append(kept)


def _code_of(function: object) -> types.CodeType | type:
    """Return the code object of a function, method or partial, or an object's class: the same one at every call."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def _name_of(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


def _root(trace: Trace, source: str, function: object, inputs: tuple[str, ...]) -> Node:
    """Return the node that the function returns, real for a score_mod, bool for a mask_mod."""
    option = "score_mod" if inputs is SCORE_INPUTS else "mask_mod"
    try:
        if not callable(function):
            raise Untraceable(f"it must be a function ({', '.join(inputs)}), not {type(function).__name__}")
        _require_parameters(function, inputs)
        callee = _Rebuilder(trace, source).rebuild(function, source)
        result = callee(*(Value(trace, trace.graph.input(name)) for name in inputs))
        value = None if result is None else lift(trace, result)
        if not isinstance(value, Value):
            raise Untraceable(f"it must return one number, not {'None' if value is None else f'a row of {len(value)}'}")
        if len(trace.graph.nodes) > MOST_NODES:
            raise TooLarge(f"it takes {len(trace.graph.nodes)} operations, more than {MOST_NODES}")
        if inputs is SCORE_INPUTS:
            return trace.graph.cast(value.node, REAL)
        if value.node.kind == REAL:
            raise Untraceable("it must return a bool, not a floating number: an additive bias is a score_mod")
        return trace.graph.cast(value.node, BOOL)
    except Untraceable as error:
        kind = TooLarge if isinstance(error, TooLarge) else Untraceable
        raise kind(f"{option} {_name_of(function)}: {error}{_user_line(error, function)}") from None


def _require_parameters(function: Callable[..., object], inputs: tuple[str, ...]) -> None:
    """Raise Untraceable if the function cannot be called with the inputs by position."""
    try:
        is_wrapper = isinstance(function, types.FunctionType) and function.__code__ is not DISPATCHER
        parameters = inspect.signature(function, follow_wrapped=not is_wrapper)
    except (TypeError, ValueError):  # a builtin or a class may have no signature: then the call itself raises
        return
    try:
        parameters.bind(*inputs)
    except TypeError as error:
        raise Untraceable(
            f"it takes {parameters} but is called with {len(inputs)} positional arguments, ({', '.join(inputs)}): "
            f"{error}. A score_mod takes ({', '.join(SCORE_INPUTS)}), a mask_mod ({', '.join(MASK_INPUTS)}); other "
            "values come by closure or functools.partial"
        ) from None


def _user_line(error: BaseException, function: object) -> str:
    """Return the last line of the user's code in the error's traceback, else the line that defines the function."""
    code = _code_of(function)
    place = (code.co_filename, code.co_firstlineno) if isinstance(code, types.CodeType) else None
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if not frame.f_code.co_filename.startswith(HERE) and _library(frame.f_globals.get("__name__")) not in PROTOCOL:
            place = (frame.f_code.co_filename, step.tb_lineno)
        step = step.tb_next
    if place is None:
        return ""
    return f'\n  File "{place[0]}", line {place[1]}: {linecache.getline(*place).strip()}'


def _program(trace: Trace, score: Node | None, mask: Node | None) -> tuple[Program, list[int], list[int]]:
    """Return the program over a graph of its own, with slots and arguments in the order of their use.

    where(c, -inf, s) at the root of a score_mod hides keys, so it becomes a mask, which lets whole tiles be skipped.
    """
    graph = trace.graph
    if score is not None:
        score, hiding = _without_hiding(graph, score)
        for seen in hiding:
            mask = seen if mask is None else graph.make("and", seen, mask)
    if score is not None and score.op == "score":
        score = None
    if mask is not None and mask.op == "const" and mask.value:
        mask = None
    roots = [root for root in (score, mask) if root is not None]
    compact, renamed = Graph(), dict[Node, Node]()
    used: dict[str, list[int]] = {"load": [], "argument": []}
    for node in order(roots):
        value = node.value
        if node.op in used:
            if value not in used[node.op]:
                used[node.op].append(value)
            value = used[node.op].index(value)
        renamed[node] = compact.node(node.op, node.kind, tuple(renamed[arg] for arg in node.args), value)
    slots, arguments = used["load"], used["argument"]
    program = Program(
        None if score is None else renamed[score], None if mask is None else renamed[mask],
        tuple(trace.elements[slot] for slot in slots), tuple(trace.kinds[index] for index in arguments),
    )  # fmt: skip
    return program, slots, arguments


def _without_hiding(graph: Graph, score: Node) -> tuple[Node, list[Node]]:
    """Return the score without the conditions at its root that hide keys by position, and these conditions.

    The root is a chain where(c0, where(c1, x, -inf), -inf), -inf on either side: x if all conditions hold, in any
    order. A condition that reads the score stays, because a mask is computed from positions alone.
    """
    hiding, staying = list[Node](), list[Node]()
    while score.op == "where" and any(_is_minus_infinity(branch) for branch in score.args[1:]):
        condition, x, y = score.args
        seen, score = (graph.make("not", condition), y) if _is_minus_infinity(x) else (condition, x)
        (staying if "score" in seen.inputs else hiding).append(seen)
    for seen in reversed(staying):
        score = graph.make("where", seen, score, graph.const(-np.inf))
    return score, hiding


def _is_minus_infinity(node: Node) -> bool:
    return node.op == "const" and bool(node.value == -np.inf)


# ------------------------------------------------------------------------------------------- what a function captures


def _library(module: object) -> str:
    name = str(module or "")
    # A tf.function rewrites the functions inside it to calls of AutoGraph, which are traced like the user's own.
    return "" if name.startswith("tensorflow.python.autograph") else name.partition(".")[0]


class _Rebuilder:
    """Replaces the captured values of functions by stand-ins, and records the expressions that reach them."""

    def __init__(self, trace: Trace, function: str) -> None:
        self.trace, self.sources = trace, trace.sources
        self._rebuilt = trace.rebuilt.setdefault(function, {})

    def rebuild(self, x: Any, source: str, depth: int = 0) -> Any:
        """Return x with stand-ins for arrays, numbers and objects that hold them; `source` is an expression for x."""
        if type(x) in (int, float):
            return Number(self.trace, x, self.sources.reach(source))
        if isinstance(x, CONSTANTS):
            self.trace._require_value(x, self.sources.reach(source))
            return x
        if is_array(x):
            return self.trace.capture(x, source)
        if depth > DEEPEST:
            raise Untraceable("what it captures is nested too deeply")
        local = self.sources.reach(source)
        if id(x) in self._rebuilt:
            _, stand_in, first = self._rebuilt[id(x)]
            self.sources.require(f"{local} is {first}")
            return stand_in
        if isinstance(x, types.FunctionType):
            return self._function(x, local, depth)
        stand_in = self._stand_in(x, local, depth)
        self._rebuilt[id(x)] = (x, stand_in, local)
        return stand_in

    def _stand_in(self, x: Any, local: str, depth: int) -> Any:
        if type(x) in (list, tuple, collections.deque) or (isinstance(x, tuple) and hasattr(x, "_fields")):
            self._require_type(x, local)
            self._check_size(x)
            self.sources.require(f"len({local}) == {len(x)}")
            items = [self.rebuild(item, f"{local}[{n}]", depth + 1) for n, item in enumerate(x)]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        if type(x) in (dict, collections.OrderedDict):
            self._require_type(x, local)
            self._check_size(x)
            if all(isinstance(key, (*CONSTANTS, tuple)) for key in x):
                self.sources.require(f"list({local}) == {self.sources.constant(list(x))}")
            else:
                self.sources.reproducible = False  # a cached trace would keep the keys alive
            pairs = ((key, self.rebuild(x[key], f"{local}[{self._key(key)}]", depth + 1)) for key in x)
            return type(x)(pairs)
        if isinstance(x, functools.partial):
            self._require_type(x, local)
            function, args, keywords = (
                self.rebuild(getattr(x, name), f"{local}.{name}", depth + 1) for name in ("func", "args", "keywords")
            )
            partial = functools.partial(function, *args, **keywords)
            for name in (name for name in vars(x) if not name.startswith("__")):  # update_wrapper sets the dunder ones
                setattr(partial, name, self.rebuild(getattr(x, name), f"{local}.{name}", depth + 1))
            return partial
        if isinstance(x, functools._lru_cache_wrapper) or type(x).__name__ == "PjitFunction":  # jax.jit
            self._require_type(x, local)
            return self.rebuild(x.__wrapped__, f"{local}.__wrapped__", depth + 1)
        if isinstance(x, types.MethodType):
            self._require_type(x, local)
            function = self.rebuild(x.__func__, f"{local}.__func__", depth + 1)
            return functools.partial(function, self.rebuild(x.__self__, f"{local}.__self__", depth + 1))
        if self._is_opaque(x):
            self.sources.require(f"{local} is {self.sources.constant(x)}")
            if isinstance(x, types.ModuleType):
                self.trace.uses_torch |= _library(x.__name__) == "torch"
                return _Namespace(x) if _library(x.__name__) in WRAPPED else x
            wrapped = _library(getattr(x, "__module__", None)) in WRAPPED and not isinstance(x, type)
            return _accepting_stand_ins(x) if wrapped and callable(x) else x
        if not hasattr(x, "__dict__") and not hasattr(type(x), "__slots__"):
            self.sources.reproducible = False  # a set, an iterator, ...: no condition can compare its state
            return x
        self._require_type(x, local)
        return Held(self, x, local)

    def _key(self, key: object) -> str:
        return repr(key) if type(key) is str else self.sources.constant(key)

    def _is_opaque(self, x: object) -> bool:
        """Return whether x is an object of a library, without the user's state, whose identity is condition enough."""
        if isinstance(x, types.ModuleType):
            library = _library(x.__name__)
            return library in (*PROTOCOL, *WRAPPED) or library in sys.stdlib_module_names
        if isinstance(x, (type, types.BuiltinFunctionType, np.ufunc)):
            return not isinstance(x, type) or _library(x.__module__) in (*PROTOCOL, *WRAPPED, *sys.stdlib_module_names)
        owner = _library(type(x).__module__)
        is_stateful = owner in STATEFUL or hasattr(x, "forward")  # torch modules hold parameters
        return owner in (*PROTOCOL, *WRAPPED) and not is_stateful

    def _require_type(self, x: object, local: str) -> None:
        self.sources.require(f"type({local}) is {self.sources.constant(type(x))}")

    def _check_size(self, x: Sized) -> None:
        if len(x) > LARGEST_CONTAINER:
            raise Untraceable(f"it captures a {type(x).__name__} of {len(x)} items: make it an array")

    def _function(self, function: types.FunctionType, local: str, depth: int) -> Callable[..., object]:
        """Return the function with stand-ins in its closure, globals and defaults."""
        if function.__code__ is DISPATCHER:
            self.sources.require(f"{local}.__code__ is {self.sources.constant(DISPATCHER)}")
            return _Dispatcher(self, function, local, depth)
        library = _library(function.__module__)
        of_library = library in (*PROTOCOL, *WRAPPED) or library in sys.stdlib_module_names - {"__main__"}
        if of_library and not function.__closure__:
            self.sources.require(f"{local} is {self.sources.constant(function)}")
            return _accepting_stand_ins(function) if library in WRAPPED else function
        self.sources.require(f"{local}.__code__ is {self.sources.constant(function.__code__)}")
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        names = () if of_library else _global_names(function.__code__)
        replaced = dict(function.__globals__)
        rebuilt = types.FunctionType(function.__code__, replaced, function.__name__, None, cells or None)
        self._rebuilt[id(function)] = (function, rebuilt, local)  # before the closure, which may hold the function
        for n, (cell, captured) in enumerate(zip(cells, function.__closure__ or (), strict=True)):
            try:
                content = captured.cell_contents
            except ValueError:  # empty
                self.sources.reproducible = False
                continue
            source = f"{local}.__closure__[{n}].cell_contents"
            if function.__code__.co_freevars[n] == "__class__":  # super() reads this cell and accepts no stand-in
                self.sources.require(f"{source} is {self.sources.constant(content)}")
                cell.cell_contents = content
            else:
                cell.cell_contents = self.rebuild(content, source, depth + 1)
        for name in names:
            if name in function.__globals__:
                content = function.__globals__[name]
                replaced[name] = self.rebuild(content, f"{local}.__globals__[{name!r}]", depth + 1)
                continue
            self.sources.require(f"{name!r} not in {local}.__globals__")  # a later global may hide this builtin
            if name in ("isinstance", "type"):
                replaced[name] = getattr(self, f"_{name}")
        for name in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, name)
            if defaults:
                setattr(rebuilt, name, self.rebuild(defaults, f"{local}.{name}", depth + 1))
        return rebuilt

    def _isinstance(self, x: object, kinds: Any) -> bool:
        """Return isinstance(x, kinds), with stand-ins replaced by their originals."""
        kinds = tuple(map(original, kinds)) if isinstance(kinds, tuple) else original(kinds)
        return isinstance(original(x), kinds)

    def _type(self, x: object, *definition: Any) -> Any:
        """Return type(x) for the original of a stand-in; if the mod captures that class too, the class's stand-in."""
        kind = type(original(x), *definition)
        return self._rebuilt[id(kind)][1] if id(kind) in self._rebuilt else kind


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that a function and the functions inside it read."""
    import dis  # the import takes milliseconds

    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))


class _Dispatcher:
    """The stand-in of a function of functools.singledispatch, which chooses by the type of the original."""

    def __init__(self, rebuilder: _Rebuilder, function: Any, local: str, depth: int) -> None:
        self._rebuilder, self._function, self._local, self._depth = rebuilder, function, local, depth

    def __call__(self, first: object, *args: object, **kwargs: object) -> Any:
        return self.dispatch(type(original(first)))(first, *args, **kwargs)

    def dispatch(self, kind: object) -> Callable[..., object]:
        """Return the function that is registered for a class."""
        kind, sources = original(kind), self._rebuilder.sources
        source = f"{self._local}.dispatch({sources.constant(kind)})"
        return self._rebuilder.rebuild(self._function.dispatch(kind), source, self._depth + 1)


class _Namespace:
    """A proxy for a module of a library in WRAPPED, whose functions accept stand-ins."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, types.ModuleType):
            return _Namespace(value)
        return _accepting_stand_ins(value) if callable(value) and not isinstance(value, type) else value


def _accepting_stand_ins(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function of a library in WRAPPED, so that calls with stand-ins are recorded, or a function of math."""
    name = getattr(function, "__name__", "")
    if _library(getattr(function, "__module__", None)) == "math":
        return _of_python_numbers(function, name)

    is_of_jax = _library(getattr(function, "__module__", None)) == "jax"

    @functools.wraps(function, updated=())
    def either(*args: object, **kwargs: object) -> object:
        if not any(isinstance(x, Traced) for x in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        if name == "gelu" and is_of_jax:  # which approximates by default, unlike those of others
            kwargs.setdefault("approximate", True)
        return call(name, args, kwargs, function)

    return either


def _of_python_numbers(function: Callable[..., object], name: str) -> Callable[..., object]:
    """Return a function of math for numbers that a mod captures; Untraceable for a number that is traced."""

    @functools.wraps(function)
    def of_numbers(*args: object, **kwargs: object) -> object:
        try:
            return function(*(x.fixed() if type(x) is Number else x for x in args), **kwargs)
        except Untraceable:
            if name not in FUNCTIONS:
                raise unknown(f"math.{name}") from None
            instead = f"np.{name} or torch.{name}" if hasattr(np, name) else f"torch.{name}"
            raise Untraceable(f"math.{name} takes Python numbers: write {instead} for a traced number") from None

    return of_numbers
