"""The functions that a mod may call, under the names of several libraries, and the expressions that they become.

FUNCTIONS maps one name of each function to (graph, *operands, **options) -> Node. Operands are nodes, or None where the
library's function takes None; options are Python values. ALIASES maps the other names to these.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .ir import BOOL, COMPARISONS, INT, LONG, REAL, Graph, Node, Untraceable

ALIASES = {
    "absolute": "abs", "fabs": "abs", "multiply": "mul", "subtract": "sub", "truediv": "div", "true_divide": "div",
    "divide": "div", "floor_divide": "floordiv", "remainder": "mod", "power": "pow", "float_power": "pow",
    "negative": "neg", "positive": "pos", "maximum": "max", "minimum": "min", "clamp": "clip",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not", "invert": "not",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne",
    "left_shift": "shl", "right_shift": "shr", "bitwise_left_shift": "shl", "bitwise_right_shift": "shr",
    "lshift": "shl", "rshift": "shr", "rint": "round", "expit": "sigmoid", "fix": "trunc", "swish": "silu",
    "where_v2": "where", "floor_mod": "mod", "clip_by_value": "clip",
    "special_expit": "sigmoid", "special_exp2": "exp2", "special_erf": "erf", "log_sigmoid": "logsigmoid",
}  # fmt: skip


def make(graph: Graph, op: str, *operands: Node | float) -> Node:
    """Return the node of `op` applied to nodes and constants."""
    return graph.make(op, *(x if isinstance(x, Node) else graph.const(x) for x in operands))


def _operator(op: str, arity: int) -> Callable[..., Node]:
    def function(graph: Graph, *operands: Node) -> Node:
        if len(operands) != arity:
            raise Untraceable(f"{op} takes {arity} operand{'s' if arity > 1 else ''}, not {len(operands)}")
        return graph.make(op, *operands)

    return function


def _on_integers(op: str, symbol: str) -> Callable[..., Node]:
    function = _operator(op, 2)

    def checked(graph: Graph, x: Node, y: Node) -> Node:
        if REAL in (x.kind, y.kind):
            raise Untraceable(f"{symbol} takes integers or bools, not floating numbers")
        return function(graph, x, y)

    return checked


def _invert(graph: Graph, x: Node) -> Node:
    if x.kind == REAL:
        raise Untraceable("~ takes an integer or a bool, not a floating number")
    return graph.make("not", x)


def _logical(op: str) -> Callable[..., Node]:
    return lambda graph, *operands: graph.make(op, *(graph.cast(x, BOOL) for x in operands))


def _rounding(op: str) -> Callable[..., Node]:
    def function(graph: Graph, x: Node, decimals: Node | None = None) -> Node:
        if decimals is not None and not (decimals.op == "const" and decimals.value == 0):
            raise Untraceable("round takes no decimals: scale before it and after it")
        return graph.make(op, x) if x.kind == REAL else x

    return function


def _power(graph: Graph, x: Node, y: Node) -> Node:
    """Return x ** y; for integers, multiplications for a constant exponent from 0 to 16, or 2 ** y as a shift."""
    if REAL in (x.kind, y.kind):
        return graph.make("pow", x, y)
    if x.op == "const" and x.value == 2:
        return make(graph, "shl", 1, y)
    if y.op != "const" or not 0 <= y.value <= 16:
        raise Untraceable("** of integers takes an exponent from 0 to 16 that is a number: make one side a float")
    product = graph.const(1)
    for _ in range(y.value):
        product = graph.make("mul", product, x)
    return product


def divide(graph: Graph, x: Node, y: Node, rounding_mode: str | None = None) -> Node:
    """Return x / y; torch's rounding_mode "floor" gives x // y, and "trunc" gives x / y rounded towards 0."""
    if rounding_mode == "floor":
        return graph.make("floordiv", x, y)
    if rounding_mode == "trunc" and REAL in (x.kind, y.kind):
        return make(graph, "trunc", make(graph, "div", x, y))
    if rounding_mode == "trunc":
        magnitude = make(graph, "floordiv", make(graph, "abs", x), make(graph, "abs", y))
        return make(graph, "mul", make(graph, "mul", make(graph, "sign", x), make(graph, "sign", y)), magnitude)
    return graph.make("div", x, y)


def where(graph: Graph, condition: Node, x: Node | None = None, y: Node | None = None) -> Node:
    """Return x where the condition is true, else y."""
    if x is None or y is None:
        raise Untraceable("where takes a condition and two branches")
    return graph.make("where", condition, x, y)


def clip(graph: Graph, x: Node, low: Node | None = None, high: Node | None = None, **names: Node | None) -> Node:
    """Return x clipped to [low, high]; reals by `where`, whose derivative at the bounds is 1, as in torch's clamp."""
    low = next((names[name] for name in ("min", "a_min") if names.get(name) is not None), low)
    high = next((names[name] for name in ("max", "a_max") if names.get(name) is not None), high)
    for bound, op in ((low, "max"), (high, "min")):
        if bound is None:
            continue
        if REAL in (x.kind, bound.kind):
            outside = graph.make("lt", x, bound) if op == "max" else graph.make("lt", bound, x)
            x = graph.make("where", outside, bound, x)
        else:
            x = graph.make(op, x, bound)
    return x


def _extremum_of_numbers(op: str) -> Callable[..., Node]:
    """Return fmax or fmin of x and y, which is the other operand if one is NaN."""

    def function(graph: Graph, x: Node, y: Node) -> Node:
        of_numbers = graph.make("where", isnan(graph, y), x, graph.make(op, x, y))
        return graph.make("where", isnan(graph, x), y, of_numbers)

    return function


def isnan(graph: Graph, x: Node) -> Node:
    """Return whether x is NaN, as x != x."""
    return graph.make("ne", x, x)


def sigmoid(graph: Graph, x: Node) -> Node:
    """Return 1 / (1 + exp(-x))."""
    return make(graph, "div", 1.0, make(graph, "add", make(graph, "exp", make(graph, "neg", x)), 1.0))


def softplus(graph: Graph, x: Node, beta: Node | None = None, threshold: Node | None = None) -> Node:
    """Return log(1 + exp(beta x)) / beta, exact for every x, so that torch's threshold has no effect."""
    if beta is not None:
        return make(graph, "div", softplus(graph, make(graph, "mul", x, beta)), beta)
    tail = make(graph, "log1p", make(graph, "exp", make(graph, "neg", make(graph, "abs", x))))
    return make(graph, "add", make(graph, "max", x, 0.0), tail)


def logaddexp(graph: Graph, x: Node, y: Node) -> Node:
    """Return log(exp x + exp y)."""
    distance = make(graph, "abs", make(graph, "sub", x, y))
    distance = make(graph, "where", make(graph, "eq", x, y), 0.0, distance)  # inf - inf is NaN
    return make(
        graph, "add", make(graph, "max", x, y), make(graph, "log1p", make(graph, "exp", make(graph, "neg", distance)))
    )


def gelu(graph: Graph, x: Node, approximate: str | bool = "none") -> Node:
    """Return torch's gelu; approximate is "none" or "tanh", or jax's True or False."""
    half = make(graph, "mul", x, 0.5)
    if approximate in ("tanh", True):
        cube = make(graph, "mul", make(graph, "mul", x, x), x)
        inner = make(graph, "mul", make(graph, "add", x, make(graph, "mul", cube, 0.044715)), math.sqrt(2 / math.pi))
        return make(graph, "mul", half, make(graph, "add", make(graph, "tanh", inner), 1.0))
    bell = make(graph, "erf", make(graph, "mul", x, math.sqrt(0.5)))
    return make(graph, "mul", half, make(graph, "add", bell, 1.0))


def _to_integer(graph: Graph, x: Node) -> Node:
    return x if x.kind == LONG else graph.cast(x, INT)


def _relu(graph: Graph, x: Node) -> Node:
    return make(graph, "where", make(graph, "le", x, 0), 0, x)  # relu(NaN) is NaN; its derivative at 0 is 0


def _masked_fill(graph: Graph, x: Node, condition: Node, value: Node) -> Node:
    return graph.make("where", condition, value, x)


FUNCTIONS: dict[str, Callable[..., Node]] = {
    **{op: _operator(op, 2) for op in ("add", "sub", "mul", "floordiv", "mod", "min", "max", *COMPARISONS)},
    **{op: _operator(op, 1) for op in ("neg", "abs", "sign", "exp", "exp2", "expm1", "log", "log2", "log1p")},
    **{op: _operator(op, 1) for op in ("sqrt", "sin", "cos", "tanh", "erf")},
    **{op: _rounding(op) for op in ("floor", "ceil", "trunc", "round")},
    **{f"logical_{op}": _logical(op) for op in ("and", "or", "xor", "not")},
    "and": _on_integers("and", "&"),
    "or": _on_integers("or", "|"),
    "xor": _on_integers("xor", "^"),
    "shl": _on_integers("shl", "<<"),
    "shr": _on_integers("shr", ">>"),
    "not": _invert,
    "gt": lambda graph, x, y: graph.make("lt", y, x),
    "ge": lambda graph, x, y: graph.make("le", y, x),
    "pos": lambda graph, x: x,
    "pow": _power,
    "div": divide,
    "where": where,
    "clip": clip,
    "clamp_min": lambda graph, x, min: clip(graph, x, min),
    "clamp_max": lambda graph, x, max: clip(graph, x, None, max),
    "fmax": _extremum_of_numbers("max"),
    "fmin": _extremum_of_numbers("min"),
    "masked_fill": _masked_fill,
    "square": lambda graph, x: graph.make("mul", x, x),
    "reciprocal": lambda graph, x: make(graph, "div", 1.0, x),
    "rsqrt": lambda graph, x: make(graph, "div", 1.0, graph.make("sqrt", x)),
    "tan": lambda graph, x: make(graph, "div", graph.make("sin", x), graph.make("cos", x)),
    "log10": lambda graph, x: make(graph, "mul", graph.make("log", x), 1 / math.log(10)),
    "sigmoid": sigmoid,
    "logsigmoid": lambda graph, x: make(graph, "neg", softplus(graph, make(graph, "neg", x))),
    "softplus": softplus,
    "logaddexp": logaddexp,
    "relu": _relu,
    "silu": lambda graph, x: graph.make("mul", x, sigmoid(graph, x)),
    "gelu": gelu,
    "isnan": isnan,
    "isinf": lambda graph, x: make(graph, "eq", make(graph, "abs", x), math.inf),
    "isneginf": lambda graph, x: make(graph, "eq", x, -math.inf),
    "isfinite": lambda graph, x: make(graph, "lt", make(graph, "abs", x), math.inf),
    "int": _to_integer,
    "long": lambda graph, x: graph.cast(x, LONG),
    "bool": lambda graph, x: graph.cast(x, BOOL),
    **{name: lambda graph, x: graph.cast(x, REAL) for name in ("float", "double", "half", "bfloat16")},
    "detach": lambda graph, x: graph.make("stop", x) if x.kind == REAL else x,
    "stop_gradient": lambda graph, x: graph.make("stop", x) if x.kind == REAL else x,
}

# {function: indices of operands whose captured numbers become constants of the text, not run-time arguments}: code is
# cheaper with constant divisors, exponents, shifts and bit masks.
IN_TEXT: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("div", "floordiv", "mod"), (1,)),
    **dict.fromkeys(("pow", "shl", "shr", "and", "or", "xor"), (0, 1)),
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), (1,)),
}


def canonical(name: str) -> str:
    """Return the key in FUNCTIONS of a library's function, or the name itself if it is unknown."""
    name = name.strip("_")
    return ALIASES.get(name, name)


def conversion(dtype: object) -> str | None:
    """Return the function that converts to a dtype of any library; None if `dtype` is not one."""
    name = str(getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or dtype).rpartition(".")[2]
    if name.startswith(("int64", "long", "uint32", "uint64")) or dtype is int:
        return "long"
    if name.startswith(("int", "uint")):
        return "int"
    if name.startswith(("float", "double", "half", "bfloat")):
        return "float"
    return "bool" if name.startswith("bool") else None


def unknown(name: str) -> Untraceable:
    """Return the error for a call of a function that is not in FUNCTIONS."""
    return Untraceable(f"a mod cannot call {name}; it can call {', '.join(sorted(FUNCTIONS))}")
