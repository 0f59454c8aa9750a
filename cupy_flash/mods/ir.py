"""Expressions of a mod: an acyclic graph of immutable nodes, simplified and hash-consed as it is built.

A node has an operator, operands and a kind. Kinds widen in the order bool < int < long < real: int is 32 bits, long 64,
real the accumulation dtype of the call. Integers wrap; x // 0 and x % 0 are 0; // and % round down as in Python.

    score b h q kv                                   inputs: the score (real), and int indices
    tscore                                           the score's tangent, an input only of derivatives
    const=value, argument=n                          numbers: in the text, or given at run time
    load=slot i j ...                                an element of a captured array; indices are clamped
    add sub mul floordiv mod pow min max neg abs sign    of the widest kind of the operands, at least int; pow is real
    shl shr                                          the same; shr keeps the sign
    div exp exp2 expm1 log log2 log1p sqrt sin cos tanh erf    real
    floor ceil trunc round                           real to real; round ties to even
    lt le eq ne                                      bool; gt and ge are lt and le with swapped operands
    and or xor not                                   of bools, or bitwise
    where c x y                                      of the wider kind of x and y
    int long real                                    conversions; int and long truncate, and ne 0 converts to bool
    stop                                             the operand, with derivative 0

Simplification preserves every value except the sign of a zero, which no softmax sees; it never reorders float sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

BOOL, INT, LONG, REAL = KINDS = ("bool", "int", "long", "real")
WIDTH = {kind: width for width, kind in enumerate(KINDS)}
INPUTS = {"score": REAL, "b": INT, "h": INT, "q": INT, "kv": INT, "tscore": REAL}
COMPARISONS = ("lt", "le", "eq", "ne")
LOGIC = ("and", "or", "xor")
ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "min", "max")
REAL_FUNCTIONS = ("div", "pow", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sin", "cos", "tanh", "erf")
ROUNDINGS = ("floor", "ceil", "trunc", "round")
INT32 = range(-(2**31), 2**31)
# Captured ints that kernels take as arguments: the sum of two and a position fits int32. Larger ones are constants of
# the text.
ARGUMENTS = range(-(2**29), 2**29)

# {dtype of a captured array: kind of its elements}
LOADED = {
    "bool": BOOL,
    **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16"), INT),
    **dict.fromkeys(("int64", "uint32"), LONG),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), REAL),
}


class Untraceable(TypeError):
    """The error of a mod that cannot be traced; the message says what to write instead."""


class TooLarge(Untraceable, ValueError):
    """The error of a mod that reads too many arrays or has too many operations."""


# The value of a const is a bool, int or float; of an argument its index; of a load its slot; of a `last`
# (cuda_code.py) its slot and axis.
NodeValue: TypeAlias = int | float | tuple[int, int] | None


class Node:
    """An operator applied to operands; equal nodes of one graph are one object, so `is` compares expressions."""

    __slots__ = ("args", "graph", "inputs", "kind", "op", "value")

    op: str
    args: tuple[Node, ...]
    value: Any  # a NodeValue
    kind: str
    graph: Graph
    inputs: frozenset[str]  # the members of INPUTS on which the value depends

    def __repr__(self) -> str:
        return expression(self)


def _floordiv(x: int, y: int) -> int:
    return x // y if y else 0


def _mod(x: int, y: int) -> int:
    return x % y if y else 0


FOLD: dict[str, Callable[..., int | float]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y,
    "floordiv": _floordiv, "mod": _mod, "pow": math.pow, "min": min, "max": max, "neg": lambda x: -x, "abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
    "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y,
    "shl": lambda x, y: x << y, "shr": lambda x, y: x >> y,
    "exp": math.exp, "exp2": lambda x: 2.0**x, "expm1": math.expm1, "log": math.log, "log2": math.log2,
    "log1p": math.log1p, "sqrt": math.sqrt, "sin": math.sin, "cos": math.cos, "tanh": math.tanh, "erf": math.erf,
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round,
}  # fmt: skip


class Graph:
    """The nodes of one trace. `make` widens kinds, folds constants, simplifies, and shares equal expressions."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, str, tuple[int, ...], str | None], Node] = {}

    def node(self, op: str, kind: str, args: tuple[Node, ...] = (), value: NodeValue = None) -> Node:
        """Return the node as given, neither widened nor simplified; for `make` and `parse`."""
        # The key contains repr(value), because -0.0 == 0.0 and 1 == True, but NaN != NaN.
        key = (op, kind, tuple(map(id, args)), None if value is None else repr(value))
        node = self.nodes.get(key)
        if node is None:
            node = Node()
            node.op, node.kind, node.args, node.value, node.graph = op, kind, args, value, self
            own = frozenset((op,)) if op in INPUTS else frozenset()
            node.inputs = own.union(*(arg.inputs for arg in args))
            node = self.nodes.setdefault(key, node)  # threads that derive from one cached program share its nodes
        return node

    def input(self, name: str) -> Node:
        """Return the node of a member of INPUTS."""
        return self.node(name, INPUTS[name])

    def const(self, value: int | float, kind: str | None = None) -> Node:
        """Return a constant, by default of the narrowest kind that holds it."""
        kind = kind or kind_of(value)
        return self.node("const", kind, value={BOOL: bool, REAL: float}.get(kind, int)(value))

    def argument(self, index: int, kind: str) -> Node:
        """Return a number that is given at run time, element `index` of Program.numbers."""
        return self.node("argument", kind, value=index)

    def load(self, slot: int, indices: Iterable[Node], kind: str) -> Node:
        """Return the element of captured array `slot` at int or long indices, one for each dimension."""
        return self.node("load", kind, tuple(indices), slot)

    def make(self, op: str, *args: Node) -> Node:
        """Return `op` of the operands, simplified by the rules below."""
        if op in KINDS:
            return self.cast(args[0], op)
        args, kind = self._widened(op, args)
        if all(arg.op == "const" for arg in args) and op in FOLD:
            folded = self._folded(op, kind, args)
            if folded is not None:
                return folded
        rule = RULES.get(op)
        simpler = rule(self, kind, *args) if rule else None
        return self.node(op, kind, args) if simpler is None else simpler

    def cast(self, x: Node, kind: str) -> Node:
        """Return x converted to another kind."""
        if x.kind == kind:
            return x
        if kind == BOOL:
            return self.make("ne", x, self.const(0, x.kind))
        if x.op == "const" and (kind == REAL or (math.isfinite(x.value) and _fits(math.trunc(x.value), kind))):
            return self.const(x.value, kind)
        if x.op in KINDS and WIDTH[x.args[0].kind] < WIDTH[x.kind] < WIDTH[kind]:  # widened twice
            return self.cast(x.args[0], kind)
        return self.node(kind, kind, (x,))

    def _widened(self, op: str, args: tuple[Node, ...]) -> tuple[tuple[Node, ...], str]:
        """Return the operands converted to the kind in which `op` computes, and the kind of its result."""
        if op == "where":
            condition, *branches = args
            kind = widest(branches)
            return (self.cast(condition, BOOL), *(self.cast(branch, kind) for branch in branches)), kind
        if op in REAL_FUNCTIONS or op in ROUNDINGS or op == "stop":
            kind = REAL
        elif op in LOGIC or op in COMPARISONS or op == "not":
            kind = widest(args)
        else:
            kind = widest(args, INT)
        return tuple(self.cast(arg, kind) for arg in args), BOOL if op in COMPARISONS else kind

    def _folded(self, op: str, kind: str, args: tuple[Node, ...]) -> Node | None:
        """Return the constant result of `op` for constants; None if the kind's arithmetic may differ from Python's."""
        try:
            value = FOLD[op](*(arg.value for arg in args))
        except (ArithmeticError, ValueError):
            return None
        return self.const(value, kind) if _fits(value, kind) else None


def kind_of(value: object) -> str:
    """Return the narrowest kind that holds a Python or NumPy number."""
    if isinstance(value, (bool, np.bool_)):
        return BOOL
    if isinstance(value, (int, np.integer)):
        return INT if int(value) in INT32 else LONG
    return REAL


def widest(nodes: Iterable[Node], least: str = BOOL) -> str:
    """Return the widest kind of the nodes, at least `least`."""
    return max((least, *(node.kind for node in nodes)), key=WIDTH.__getitem__)


def _fits(value: int | float, kind: str) -> bool:
    return kind in (BOOL, REAL) or (value in INT32 if kind == INT else -(2**63) <= value < 2**63)


# ------------------------------------------------------------------------------------------------------ simplification
# A rule takes the graph, the kind of the result and the widened operands, and returns a simpler node or None.


def _is(node: Node, value: float) -> bool:
    return node.op == "const" and bool(node.value == value)


def _whole(kind: str) -> bool:
    return kind in (INT, LONG)


def _add(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
    if _is(x, 0):
        return y
    if _is(y, 0):
        return x
    if y.op == "neg":
        return graph.make("sub", x, y.args[0])
    return graph.make("sub", y, x.args[0]) if x.op == "neg" else None


def _sub(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
    if _is(y, 0):
        return x
    if _is(x, 0):
        return graph.make("neg", y)
    if x is y and _whole(kind):  # NaN - NaN is NaN
        return graph.const(0, kind)
    return graph.make("add", x, y.args[0]) if y.op == "neg" else None


def _mul(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
    for factor, other in ((x, y), (y, x)):
        if _is(factor, 1):
            return other
        if _is(factor, -1):
            return graph.make("neg", other)
        if _is(factor, 0) and _whole(kind):  # 0 * NaN is NaN
            return factor
    return None


def _div(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
    if y.op != "const" or not 2.0**-100 <= abs(y.value) <= 2.0**100:
        return None
    power_of_two = abs(math.frexp(y.value)[0]) == 0.5  # then 1 / y is exact
    return graph.make("mul", x, graph.const(1 / y.value)) if power_of_two else None


def _floor_division(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
    return x if _is(y, 1) and _whole(kind) else None


def _modulo(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
    return graph.const(0, kind) if _is(y, 1) and _whole(kind) else None


def _pow(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
    if _is(y, 0):
        return graph.const(1, kind)
    if _is(y, 1):
        return x
    if _is(y, 2):
        return graph.make("mul", x, x)
    return graph.make("exp2", y) if _is(x, 2) else None


def _extremum(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
    return x if x is y else None


def _neg(graph: Graph, kind: str, x: Node) -> Node | None:
    if x.op == "sub" and _whole(kind):  # -(x - x) of reals is -0
        return graph.make("sub", x.args[1], x.args[0])
    return x.args[0] if x.op == "neg" else None


def _abs(graph: Graph, kind: str, x: Node) -> Node | None:
    if x.op == "abs":
        return x
    return graph.make("abs", x.args[0]) if x.op == "neg" else None


def _comparison(of_equals: bool) -> Callable[..., Node | None]:
    """Return the rule of a comparison whose result for equal operands is `of_equals`."""

    def rule(graph: Graph, kind: str, x: Node, y: Node) -> Node | None:
        return graph.const(of_equals) if x is y and x.kind != REAL else None  # a NaN differs from itself

    return rule


def _not(graph: Graph, kind: str, x: Node) -> Node | None:
    if x.op == "const":
        return graph.const(not x.value if kind == BOOL else ~x.value, kind)
    if x.op == "not":
        return x.args[0]
    if x.op in ("eq", "ne"):
        return graph.make("ne" if x.op == "eq" else "eq", *x.args)
    if x.op in ("lt", "le") and x.args[0].kind != REAL:  # a NaN is neither less nor greater
        return graph.make("le" if x.op == "lt" else "lt", x.args[1], x.args[0])
    return None


def _logic(graph: Graph, kind: str, x: Node, y: Node, neutral: bool) -> Node | None:
    if x is y:
        return x
    if kind == BOOL:
        for truth, other in ((x, y), (y, x)):
            if truth.op == "const":
                return other if truth.value == neutral else truth
    return None


def _where(graph: Graph, kind: str, condition: Node, x: Node, y: Node) -> Node | None:
    if condition.op == "const":
        return x if condition.value else y
    if x is y:
        return x
    if condition.op == "not":
        return graph.make("where", condition.args[0], y, x)
    if kind == BOOL and x.op == "const":
        otherwise = graph.make("not", condition)
        return graph.make("or", condition, y) if x.value else graph.make("and", otherwise, y)
    if kind == BOOL and y.op == "const":
        otherwise = graph.make("not", condition)
        return graph.make("or", otherwise, x) if y.value else graph.make("and", condition, x)
    return None


RULES: dict[str, Callable[..., Node | None]] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "floordiv": _floor_division, "mod": _modulo, "pow": _pow,
    "min": _extremum, "max": _extremum, "neg": _neg, "abs": _abs, "not": _not, "where": _where,
    "lt": _comparison(False), "le": _comparison(True), "eq": _comparison(True), "ne": _comparison(False),
    "and": lambda graph, kind, x, y: _logic(graph, kind, x, y, True),
    "or": lambda graph, kind, x, y: _logic(graph, kind, x, y, False),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ programs


class Element(NamedTuple):
    """The dtype and rank of a captured array; both are part of a program's text."""

    dtype: str  # a key of LOADED
    rank: int


class Program(NamedTuple):
    """A traced score_mod, mask_mod, or both, over one graph, with the arrays and numbers that they read.

    Kernels are generated from its text alone, which has no contents or shapes of arrays and no run-time numbers.
    """

    score: Node | None  # real
    mask: Node | None  # bool, True = attend
    arrays: tuple[Element, ...] = ()  # captured arrays, indexed by slot
    numbers: tuple[str, ...] = ()  # the kinds of the numbers given at run time, by index

    @property
    def roots(self) -> tuple[Node, ...]:
        """The traced expressions, score first."""
        return tuple(root for root in (self.score, self.mask) if root is not None)

    @property
    def text(self) -> str:
        """The canonical text: a line for arrays, a line for numbers, a line for each node, then the roots."""
        nodes = order(self.roots)
        line_of = {node: line for line, node in enumerate(nodes)}
        lines = [" ".join(("arrays", *(f"{element.dtype}:{element.rank}" for element in self.arrays)))]
        lines.append(" ".join(("numbers", *self.numbers)))
        for node in nodes:
            op = node.op if node.value is None else f"{node.op}={node.value!r}"
            lines.append(" ".join((node.kind, op, *(str(line_of[arg]) for arg in node.args))))
        lines += [f"{name} {line_of[root]}" for name, root in self._named_roots()]
        return "\n".join(lines)

    def _named_roots(self) -> list[tuple[str, Node]]:
        return [(name, root) for name, root in (("score", self.score), ("mask", self.mask)) if root is not None]

    def __str__(self) -> str:
        return ", ".join(f"{name}: {expression(root)}" for name, root in self._named_roots())


@lru_cache(maxsize=256)
def parse(text: str) -> Program:
    """Return the program of a canonical text; the last 256 are cached, so that equal programs share their nodes."""
    arrays_line, numbers_line, *lines = text.split("\n")
    arrays = tuple(Element(dtype, int(rank)) for dtype, rank in (a.split(":") for a in arrays_line.split()[1:]))
    graph, nodes = Graph(), list[Node]()
    roots: dict[str, Node | None] = {"score": None, "mask": None}
    for line in lines:
        kind, op, *operands = line.split(" ")
        if kind in roots:
            roots[kind] = nodes[int(op)]
            continue
        op, _, value = op.partition("=")
        args = tuple(nodes[int(operand)] for operand in operands)
        nodes.append(graph.node(op, kind, args, _value(op, kind, value)))
    return Program(roots["score"], roots["mask"], arrays, tuple(numbers_line.split()[1:]))


UNARY = frozenset(("neg", "abs", "sign", "not", "stop", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sin",
                   "cos", "tanh", "erf", *ROUNDINGS, *KINDS[1:]))  # fmt: skip


def checked(text: str) -> Program:
    """Return the program of an untrusted text; ValueError unless a trace could have made it.

    Every node is built again by `make`: the nodes of a trace are simplified already, so they do not change.
    """
    try:
        program = parse(text)
        graph, made = Graph(), dict[Node, Node]()
        for node in order(program.roots):
            made[node] = _made_anew(graph, node, tuple(made[arg] for arg in node.args), program)
        score, mask = (None if root is None else made[root] for root in (program.score, program.mask))
        legal = (score is None or score.kind == REAL) and (
            mask is None or (mask.kind == BOOL and "score" not in mask.inputs)
        )
        legal = legal and bool(program.roots) and {element.dtype for element in program.arrays} <= LOADED.keys()
        if not legal or program._replace(score=score, mask=mask).text != text:
            raise ValueError("it is not the text of a trace")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no text of a traced function: {error}") from None
    return program


def _made_anew(graph: Graph, node: Node, args: tuple[Node, ...], program: Program) -> Node:
    """Return a copy of the node in another graph, built as a trace builds it."""
    if node.op in INPUTS and node.op != "tscore":
        return graph.input(node.op)
    if node.op == "const":
        return graph.const(node.value, node.kind)
    if node.op == "argument":
        return graph.argument(node.value, program.numbers[node.value])
    if node.op == "load":
        element = program.arrays[node.value]
        if len(args) != element.rank or any(arg.kind not in (INT, LONG) for arg in args):
            raise ValueError(f"array{node.value} has {element.rank} whole indices")
        return graph.load(node.value, args, LOADED[element.dtype])
    known = node.op in FOLD or node.op in KINDS[1:] or node.op in ("where", "not", "stop")
    if not known or len(args) != (3 if node.op == "where" else 1 if node.op in UNARY else 2):
        raise ValueError(f"{node.op} of {len(args)} operands")
    return graph.make(node.op, *args)


def _value(op: str, kind: str, text: str) -> int | float | None:
    if op == "const":
        return text == "True" if kind == BOOL else float(text) if kind == REAL else int(text)
    return int(text) if op in ("argument", "load") else None


def order(roots: Iterable[Node]) -> list[Node]:
    """Return the nodes that the roots need, each once, operands first."""
    ordered: dict[Node, None] = {}
    stack = list(roots)[::-1]
    while stack:
        node = stack[-1]
        missing = () if node in ordered else [arg for arg in node.args if arg not in ordered]
        if missing:
            stack += missing[::-1]
        else:
            ordered[stack.pop()] = None
    return list(ordered)


INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**", "lt": "<", "le": "<=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
LONGEST_EXPRESSION = 400  # characters; a shared node is repeated at every use


def expression(node: Node) -> str:
    """Return the expression as one line of Python, cut to LONGEST_EXPRESSION characters."""
    written: dict[Node, str] = {}
    for one in order((node,)):
        operands = [written[arg] for arg in one.args]
        if one.op == "const":
            text = f"{one.value:g}" if one.kind == REAL else str(one.value)
        elif one.op == "argument":
            text = f"n{one.value}"
        elif one.op == "load":
            text = f"array{one.value}[{', '.join(operands)}]"
        elif one.op in INFIX:
            text = f"({operands[0]} {INFIX[one.op]} {operands[1]})"
        elif one.op in ("neg", "not"):
            text = f"{'-' if one.op == 'neg' else '~'}{operands[0]}"
        else:
            text = f"{one.op}({', '.join(operands)})" if operands else one.op
        written[one] = text if len(text) <= LONGEST_EXPRESSION else text[:LONGEST_EXPRESSION] + " ..."
    outermost = written[node]
    return outermost[1:-1] if node.op in INFIX and outermost.endswith(")") else outermost
