"""Abstract interpretation of a mask: bounds of every expression for all queries and keys of a tile.

An integer is an interval [lo, hi], and for bit operations a set of known bits; a bool is a pair (may be true, may be
false). This module has the rule for each operator, over a domain that executes it: NumPy arrays with one element per
tile (tiles.py), or the text of a CUDA function (cuda_code.py). A domain calls functions by name, which tiles.py and
kernels_cu/range.cuh define in the same way.

Sums are linear forms, so that equal terms cancel: q + q - k >= q is k <= q. Every result is sound: an interval holds
every value that evaluation can give, wrapped integers included; reals, and operators without a rule, are unbounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .ir import BOOL, INT, LONG, REAL, Node, order

# A linear form is exact if the magnitudes of its factors sum to at most this: int terms are below 2^31 in magnitude,
# and long terms enter sums only below 2^40 (`guarded`), so that no sum overflows 64 bits.
LARGEST_FACTORS = 2**20

BITWISE = ("and", "or", "xor")
COMPARISONS = {"lt": "less", "le": "less_equal", "eq": "equal", "ne": "equal"}


T = TypeVar("T")
IntervalT = TypeVar("IntervalT")


class Domain(Protocol[IntervalT]):
    """An abstract domain: the operations that the rules need, with its own types of intervals, truths and bits."""

    def constant(self, value: int) -> IntervalT:
        """Return the interval of one number."""

    def input(self, name: str) -> IntervalT:
        """Return the interval of b, h, q or kv."""

    def argument(self, node: Node) -> IntervalT:
        """Return the interval of a run-time number."""

    def load(self, node: Node, indices: Sequence[IntervalT]) -> IntervalT:
        """Return the interval of the elements of a captured bool or integer array, at intervals of clamped indices."""

    def call(self, function: str, *operands: Any) -> Any:
        """Return the result of a function of tiles.py or range.cuh; a plain int in `operands` is a constant."""

    def fits(self, interval: IntervalT, kind: str) -> bool:
        """Return whether an interval certainly holds only values of an integer kind that are exact in sums."""


class Form(NamedTuple):
    """An integer as constant + sum of factor * term."""

    constant: int
    terms: dict[Node, int]

    def plus(self, other: Form, factor: int) -> Form:
        """Return this form + factor * other."""
        terms = dict(self.terms)
        for term, count in other.terms.items():
            terms[term] = terms.get(term, 0) + factor * count
        return Form(self.constant + factor * other.constant, {term: count for term, count in terms.items() if count})

    @property
    def is_exact(self) -> bool:
        """Whether no sum of the bounds of the terms overflows 64 bits."""
        return sum(map(abs, self.terms.values())) <= LARGEST_FACTORS and abs(self.constant) < 2**40


class Abstraction(Generic[IntervalT]):
    """Evaluates masks in a domain, by a rule for every operator; each node is evaluated once."""

    def __init__(self, domain: Domain[IntervalT]) -> None:
        self.domain, self.call = domain, domain.call
        self._values: dict[tuple[str, Node], Any] = {}
        self._forms: dict[Node, Form] = {}

    def mask(self, root: Node) -> Any:
        """Return whether a mask may be true and whether it may be false."""
        # Evaluate operands first: recursion into a long chain would exceed Python's stack. Partial sums of a linear
        # form are skipped, because no rule needs their intervals.
        for node in order((root,)):
            if node.kind == BOOL:
                self.truth(node)
            elif node.kind != REAL and self._is_term(node):
                self.interval(node)
        return self.truth(root)

    def truth(self, node: Node) -> Any:
        """Return whether a bool may be true and whether it may be false."""
        return self._once("truth", node, self._truth)

    def interval(self, node: Node) -> IntervalT:
        """Return the least and greatest value of an int or long."""
        return self._once("interval", node, self._interval)

    def bits(self, node: Node) -> Any:
        """Return the known bits of an int or long."""
        return self._once("bits", node, self._bits)

    def _once(self, what: str, node: Node, evaluate: Callable[[Node], T]) -> T:
        if (what, node) not in self._values:
            self._values[what, node] = evaluate(node)
        return self._values[what, node]

    # ---- bools

    def _truth(self, node: Node) -> Any:
        op, args = node.op, node.args
        if op == "const":
            return self.call("always" if node.value else "never")
        if op == "load":
            return self.call("nonzero", self._load(node))
        if op in COMPARISONS and args[0].kind in (INT, LONG):
            return self._comparison(op, *args)
        if op in COMPARISONS and args[0].kind == REAL:
            return self.call("unknown")
        operands = [self.truth(arg) for arg in args]
        if op == "where":
            return self.call("choose", *operands)
        if op in ("xor", "ne"):
            return self.call("negate", self.call("same", *operands))
        functions = {"not": "negate", "and": "both", "or": "either", "eq": "same"}
        if op in functions:
            return self.call(functions[op], *operands)
        return self.call("unknown")

    def _comparison(self, op: str, x: Node, y: Node) -> Any:
        """Compare integers. If they share terms and neither wraps, compare their difference with 0: it is narrower."""
        forms = self._form(x), self._form(y)
        difference = forms[0].plus(forms[1], -1)
        left, right = self.interval(x), self.interval(y)
        shared = forms[0].terms.keys() & forms[1].terms.keys()
        if shared and difference.is_exact and self._stays(x, forms[0]) and self._stays(y, forms[1]):
            left, right = self._sum(difference, x.kind), self.domain.constant(0)
        truth = self.call(COMPARISONS[op], left, right)
        if op in ("eq", "ne") and (_is_bitwise(x) or _is_bitwise(y)):
            truth = self.call("agree", truth, self.bits(x), self.bits(y))
        return self.call("negate", truth) if op == "ne" else truth

    # ---- integers

    def _interval(self, node: Node) -> IntervalT:
        op, args, kind = node.op, node.args, node.kind
        if op == "const":
            return self.domain.constant(node.value)
        if op == "argument":
            return self.domain.argument(node)
        if op == "load":
            return self._load(node)
        if not args:
            return self.domain.input(op)
        if not self._is_term(node):
            return self._narrowed(self._sum(self._form(node), kind), kind)
        if op in (INT, LONG) and args[0].kind in (INT, LONG):
            return self._narrowed(self.interval(args[0]), kind)
        if op in (INT, LONG) and args[0].kind == BOOL:
            return self.call("choose", self.truth(args[0]), self.domain.constant(1), self.domain.constant(0))
        if op == "where":
            return self.call("choose", self.truth(args[0]), self.interval(args[1]), self.interval(args[2]))
        if op in BITWISE:
            return self._narrowed(self.call("interval_of_bits", self.bits(node)), kind)
        if op == "sign":
            one, minus_one = self.domain.constant(1), self.domain.constant(-1)
            return self.call("largest", self.call("smallest", self.interval(args[0]), one), minus_one)
        if op == "shr" and _is_shift(args[1], kind):
            return self.call("shift_right", self.interval(args[0]), args[1].value)
        functions = {"min": "smallest", "max": "largest", "abs": "magnitude", "mul": "multiply", "mod": "modulo"}
        functions["floordiv"] = "floor_divide"
        if op in functions:
            return self._narrowed(self.call(functions[op], *map(self.interval, args)), kind)
        return self._anything(kind)

    def _load(self, node: Node) -> IntervalT:
        return self.domain.load(node, [self.interval(index) for index in node.args])

    def _anything(self, kind: str) -> IntervalT:
        return self.call("any_int" if kind == INT else "any_long")

    def _narrowed(self, interval: IntervalT, kind: str) -> IntervalT:
        """Return the interval of a value of this kind: all ints, if it is an int that may wrap."""
        if kind == LONG or self.domain.fits(interval, kind):
            return interval
        return self.call("wrapped", interval)

    # ---- sums

    def _form(self, node: Node) -> Form:
        """Return the linear form of an integer, equal to its value modulo 2^32 for an int, 2^64 for a long."""
        if node not in self._forms:
            form = self._expand(node)
            self._forms[node] = form if form is not None and form.is_exact else Form(0, {node: 1})
        return self._forms[node]

    def _is_term(self, node: Node) -> bool:
        """Return whether an integer is a single term, not a sum."""
        return self._form(node).terms == {node: 1}

    def _expand(self, node: Node) -> Form | None:
        op, args = node.op, node.args
        if op == "const":
            return Form(node.value, {})
        if op in ("add", "sub"):
            return self._form(args[0]).plus(self._form(args[1]), 1 if op == "add" else -1)
        if op == "neg":
            return Form(0, {}).plus(self._form(args[0]), -1)
        if op == "not" and node.kind != BOOL:  # ~x = -1 - x
            return Form(-1, {}).plus(self._form(args[0]), -1)
        if op == "mul":
            for factor, x in (args, args[::-1]):
                if factor.op == "const":
                    return Form(0, {}).plus(self._form(x), factor.value)
        if op == "shl" and _is_shift(args[1], node.kind):
            return Form(0, {}).plus(self._form(args[0]), 1 << args[1].value)
        if op == LONG and args[0].kind == INT and self._stays(args[0], self._form(args[0])):
            return self._form(args[0])
        return None

    def _stays(self, node: Node, form: Form) -> bool:
        """Return whether a node's linear form equals its value, because the sum fits the kind and does not wrap."""
        return node.op == "const" or self._is_term(node) or self.domain.fits(self._sum(form, node.kind), node.kind)

    def _sum(self, form: Form, kind: str) -> IntervalT:
        """Return the interval of a linear form without wrapping; unbounded for longs that are too large."""
        terms = [self.interval(term) for term in form.terms]
        scaled = [
            term if factor == 1 else self.call("scale", term, factor)
            for term, factor in zip(terms, form.terms.values(), strict=True)
        ]
        if form.constant or not scaled:
            scaled.append(self.domain.constant(form.constant))
        total = reduce(partial(self.call, "add"), scaled)
        far = [term for term in terms if not self.domain.fits(term, kind)]
        return self.call("guarded", total, *far) if far else total

    # ---- bits

    def _bits(self, node: Node) -> Any:
        op, args = node.op, node.args
        if op in BITWISE:
            return self.call(f"bits_{op}", self.bits(args[0]), self.bits(args[1]))
        if op == "not":
            return self.call("bits_not", self.bits(args[0]))
        if op == "shr" and _is_shift(args[1], node.kind):
            return self.call("bits_shift_right", self.bits(args[0]), args[1].value)
        if op == "shl" and not self._is_term(node) and self._stays(node, self._form(node)):
            return self.call("bits_shift_left", self.bits(args[0]), args[1].value)
        if op == "mod" and args[1].op == "const" and args[1].value > 0 and args[1].value & (args[1].value - 1) == 0:
            return self.call("bits_and", self.bits(args[0]), self._constant_bits(args[1].value - 1))
        if op == LONG and args[0].kind == INT:
            return self.bits(args[0])
        return self.call("bits_of_interval", self.interval(node))

    def _constant_bits(self, value: int) -> Any:
        return self.call("bits_of_interval", self.domain.constant(value))


def _is_bitwise(node: Node) -> bool:
    """Return whether the known bits of a value say more than its interval."""
    return node.op in (*BITWISE, "shr", "shl", "mod") or (node.op == LONG and _is_bitwise(node.args[0]))


def _is_shift(count: Node, kind: str) -> bool:
    """Return whether a shift count is a constant for which all backends shift in the same way."""
    return count.op == "const" and 0 <= count.value < (31 if kind == INT else 63)
