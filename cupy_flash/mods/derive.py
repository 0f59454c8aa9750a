"""Derivatives of a score_mod as expressions, by reverse accumulation over its graph.

At kinks the derivative is torch's: min and max split it between equal operands; abs, sign and roundings have derivative
0; clip and relu are choices. A choice passes its derivative to the branch that is taken, before any multiplication, and
0 times a factor that may not be finite is 0, so that a branch that is not taken contributes no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from .ir import REAL, Graph, Node, Program, order, parse

# Operators that may return infinities or NaN for finite operands.
UNBOUNDED = ("div", "pow", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "floordiv")


class Derivative(NamedTuple):
    """Derivatives of one expression; a derivative that is not listed is 0."""

    slope: Node  # with respect to the score
    loads: tuple[tuple[Node, Node], ...]  # (load of a floating element, derivative with respect to it)


class Read(NamedTuple):
    """An element that score_mod reads from an array with a gradient.

    The gradient of the array is the sum of dS * factor over all reads.
    """

    slot: int
    element: Node  # the load
    factor: Node  # the derivative of the new score with respect to the element
    axes: tuple[str, ...] | None  # the input that indexes each axis; None if no block owns the elements

    @property
    def is_owned(self) -> bool:
        """Whether a block owns the elements that its scores read, so that no other block adds to their gradient."""
        return self.axes is not None


@lru_cache(maxsize=256)
def gradient_reads(mods: str, captured_gradient: tuple[bool, ...], part: bool = False) -> tuple[Read, ...]:
    """Return the reads of arrays whose gradients are wanted; if the call is a `part`, no block owns their elements."""
    score = parse(mods).score if any(captured_gradient) else None
    if score is None:
        return ()
    loads = [(load, factor, _axes(load)) for load, factor in derivative(score).loads if captured_gradient[load.value]]
    # If no block owns one read of an array, none of its reads is owned, so that its sums have one form.
    added = {load.value for load, _, axes in loads if axes is None or part}
    return tuple(Read(load.value, load, factor, None if load.value in added else axes) for load, factor, axes in loads)


def added_slots(reads: tuple[Read, ...]) -> tuple[int, ...]:
    """Return the slots to whose gradients any score may add."""
    return tuple(sorted({read.slot for read in reads if not read.is_owned}))


def _axes(load: Node) -> tuple[str, ...] | None:
    """Return the inputs that index a read's axes if they are distinct and include q or kv, else None.

    To own an element that neither q nor kv indexes, one block would have to compute all scores of a head.
    """
    names = tuple(index.op for index in load.args)
    plain = all(name in ("b", "h", "q", "kv") for name in names) and len(set(names)) == len(names)
    return names if plain and {"q", "kv"} & set(names) else None


def may_be_infinite(node: Node) -> bool:
    """Return whether the expression may be infinite or NaN for finite inputs."""
    return any(one.op in UNBOUNDED for one in order((node,)))


def derivative(root: Node) -> Derivative:
    """Return the derivatives of a real expression with respect to the score and every real element that it loads."""
    nodes = order((root,))
    adjoints = _Adjoints(root.graph, nodes)
    adjoints.add(root, root.graph.const(1.0))
    for node in reversed(nodes):
        adjoint = adjoints.of.get(node)
        rule = RULES.get(node.op)
        if adjoint is not None and rule is not None:
            rule(adjoints, node, adjoint)
    zero = root.graph.const(0.0)
    slope = next((adjoints.of.get(node, zero) for node in nodes if node.op == "score"), zero)
    return Derivative(
        slope, tuple((node, adjoints.of[node]) for node in nodes if node.op == "load" and node in adjoints.of)
    )


def tangent(root: Node, moved: tuple[bool, ...]) -> Node:
    """Return the tangent of a real expression, linear in the input `tscore` and in the tangents of captured arrays.

    `moved` has for each slot whether the array has a tangent, which is read as slot len(moved) + slot at the same
    indices. The derivatives of the result are second derivatives of the expression in this direction.
    """
    by = derivative(root)
    adjoints = _Adjoints(root.graph, [])
    total = adjoints.times(root.graph.input("tscore"), by.slope)
    for load, factor in by.loads:
        if moved[load.value]:
            element = root.graph.load(len(moved) + load.value, load.args, REAL)
            total = adjoints.make("add", total, adjoints.times(element, factor))
    return total


class _Adjoints:
    """Derivatives of the root with respect to its nodes, summed over the uses of a node."""

    def __init__(self, graph: Graph, nodes: list[Node]) -> None:
        self.graph = graph
        self.zero, self.one = graph.const(0.0), graph.const(1.0)
        self.of: dict[Node, Node] = {}
        self.varying: set[Node] = set()  # nodes that depend on the score or on a load
        for node in nodes:
            is_input = node.op in ("score", "load")
            if node.kind == REAL and (is_input or (node.op in RULES and self.varying.intersection(node.args))):
                self.varying.add(node)

    def add(self, node: Node, adjoint: Node) -> None:
        if node in self.varying and adjoint is not self.zero:
            before = self.of.get(node)
            self.of[node] = adjoint if before is None else self.sum(before, adjoint)

    def sum(self, x: Node, y: Node) -> Node:
        """Return x + y; simplify where(c, x, 0) + where(c, 0, y) to where(c, x, y)."""
        if x.op == y.op == "where" and x.args[0] is y.args[0]:
            (condition, *first), (_, *second) = x.args, y.args
            halves = list(zip(first, second, strict=True))
            if all(self.zero in pair for pair in halves):
                return self.make("where", condition, *(b if a is self.zero else a for a, b in halves))
        return self.make("add", x, y)

    def make(self, op: str, *args: Node | float) -> Node:
        return self.graph.make(op, *(arg if isinstance(arg, Node) else self.graph.const(arg) for arg in args))

    def times(self, adjoint: Node, factor: Node | float) -> Node:
        """Return adjoint * factor, where 0 * factor is 0 also for an infinite factor or NaN."""
        if not isinstance(factor, Node):
            factor = self.graph.const(float(factor))
        if adjoint is self.zero or factor is self.zero:
            return self.zero
        if adjoint.op == "where" and self.zero in adjoint.args[1:]:
            condition, x, y = adjoint.args
            return self.make("where", condition, self.times(x, factor), self.times(y, factor))
        product = self.make("mul", adjoint, factor)
        if adjoint.op == "const" or not may_be_infinite(factor):
            return product
        return self.make("where", self.make("eq", adjoint, self.zero), self.zero, product)


Rule = Callable[[_Adjoints, Node, Node], None]


def _elementary(factor: Callable[[_Adjoints, Node, Node], Node | float]) -> Rule:
    """Return the rule for a function y(x) whose derivative is factor(adjoints, x, y)."""

    def rule(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
        adjoints.add(node.args[0], adjoints.times(adjoint, factor(adjoints, node.args[0], node)))

    return rule


def _add(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
    for operand in node.args:
        adjoints.add(operand, adjoint)


def _sub(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
    adjoints.add(node.args[0], adjoint)
    adjoints.add(node.args[1], adjoints.make("neg", adjoint))


def _mul(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
    x, y = node.args
    adjoints.add(x, adjoints.times(adjoint, y))
    adjoints.add(y, adjoints.times(adjoint, x))


def _div(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
    x, y = node.args
    adjoints.add(x, adjoints.times(adjoint, adjoints.make("div", 1.0, y)))
    adjoints.add(y, adjoints.times(adjoint, adjoints.make("neg", adjoints.make("div", node, y))))


def _mod(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
    x, y = node.args
    adjoints.add(x, adjoint)
    adjoints.add(y, adjoints.times(adjoint, adjoints.make("neg", adjoints.make("floordiv", x, y))))


def _pow(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
    x, y = node.args
    power = adjoints.make("pow", x, adjoints.make("sub", y, 1.0))
    adjoints.add(x, adjoints.times(adjoint, adjoints.times(y, power)))
    # x ** y is differentiable with respect to y only for x > 0.
    logarithm = adjoints.make("where", adjoints.make("lt", 0.0, x), adjoints.make("log", x), 0.0)
    adjoints.add(y, adjoints.times(adjoint, adjoints.times(logarithm, node)))


def _extremum(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
    x, y = node.args
    shared = adjoints.make("where", adjoints.make("eq", x, y), 0.5, 0.0)
    for operand, other in ((x, y), (y, x)):
        smaller, larger = (other, operand) if node.op == "max" else (operand, other)
        chosen = adjoints.make("where", adjoints.make("lt", smaller, larger), 1.0, shared)
        adjoints.add(operand, adjoints.times(adjoint, chosen))


def _where(adjoints: _Adjoints, node: Node, adjoint: Node) -> None:
    condition, x, y = node.args
    adjoints.add(x, adjoints.make("where", condition, adjoint, 0.0))
    adjoints.add(y, adjoints.make("where", condition, 0.0, adjoint))


def _bell(adjoints: _Adjoints, x: Node) -> Node:
    """Return the derivative of erf."""
    return adjoints.make(
        "mul", adjoints.make("exp", adjoints.make("neg", adjoints.make("mul", x, x))), 2 / math.sqrt(math.pi)
    )


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "mod": _mod,
    "pow": _pow,
    "min": _extremum,
    "max": _extremum,
    "where": _where,
    "neg": _elementary(lambda adjoints, x, y: -1.0),
    "abs": _elementary(lambda adjoints, x, y: adjoints.make("sign", x)),
    "exp": _elementary(lambda adjoints, x, y: y),
    "exp2": _elementary(lambda adjoints, x, y: adjoints.make("mul", y, math.log(2))),
    "expm1": _elementary(lambda adjoints, x, y: adjoints.make("add", y, 1.0)),
    "log": _elementary(lambda adjoints, x, y: adjoints.make("div", 1.0, x)),
    "log2": _elementary(lambda adjoints, x, y: adjoints.make("div", 1 / math.log(2), x)),
    "log1p": _elementary(lambda adjoints, x, y: adjoints.make("div", 1.0, adjoints.make("add", x, 1.0))),
    "sqrt": _elementary(lambda adjoints, x, y: adjoints.make("div", 0.5, y)),
    "sin": _elementary(lambda adjoints, x, y: adjoints.make("cos", x)),
    "cos": _elementary(lambda adjoints, x, y: adjoints.make("neg", adjoints.make("sin", x))),
    "tanh": _elementary(lambda adjoints, x, y: adjoints.make("sub", 1.0, adjoints.make("mul", y, y))),
    "erf": _elementary(lambda adjoints, x, y: _bell(adjoints, x)),
}


def floating_reads(program: Program) -> set[int]:
    """Return the slots of the floating arrays that score_mod reads, which have gradients."""
    roots = () if program.score is None else (program.score,)
    return {node.value for node in order(roots) if node.op == "load" and node.kind == REAL}
