"""Generates NumPy functions of a tile from the text of a mod.

Queries are an int32 column (rows, 1), keys a row (1, columns), b and h int32 numbers, so that by broadcasting a value
that depends only on queries, or only on keys, is computed in one dimension. Reals have the dtype of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .derive import derivative, tangent
from .ir import INPUTS, Node, order, parse

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
CALLS = {
    "exp": "np.exp", "exp2": "np.exp2", "expm1": "np.expm1", "log": "np.log", "log2": "np.log2", "log1p": "np.log1p",
    "sqrt": "np.sqrt", "sin": "np.sin", "cos": "np.cos", "tanh": "np.tanh", "erf": "erf", "pow": "np.power",
    "floor": "np.floor", "ceil": "np.ceil", "trunc": "np.trunc", "round": "np.rint", "sign": "np.sign",
    "abs": "np.abs", "neg": "np.negative", "not": "np.invert", "min": "np.minimum", "max": "np.maximum",
    "where": "np.where", "stop": "",
}  # fmt: skip
DTYPES = {"bool": "np.bool_", "int": "np.int32", "long": "np.int64", "real": "real"}

# (score, b, h, q, kv, arrays, numbers, real, tscore) -> a tuple of results; real is the scalar type of reals
Function: TypeAlias = Callable[..., tuple[np.ndarray, ...]]
# (slot, derivative with respect to the element, its unclamped indices)
Read: TypeAlias = tuple[int, np.ndarray, tuple[np.ndarray, ...]]


def erf(x: np.ndarray) -> np.ndarray:
    """Return the error function of x, in its dtype."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x)).astype(x.dtype)


def function_of(roots: tuple[Node, ...]) -> Function:
    """Return the generated function that computes the roots."""
    lines, names = ["def mod(score, b, h, q, kv, arrays, numbers, real, tscore=None):"], dict[Node, str]()
    for node in order(roots):
        if node.op in INPUTS:
            names[node] = node.op
            continue
        names[node] = f"t{len(names)}"
        lines.append(f"    {names[node]} = {_expression(node, [names[arg] for arg in node.args])}")
    lines.append(f"    return {''.join(f'{names[root]}, ' for root in roots)}")
    namespace: dict[str, Any] = {"np": np, "erf": erf}
    exec(compile("\n".join(lines), "<a mod in NumPy>", "exec"), namespace)
    function: Function = namespace["mod"]
    return function


def _expression(node: Node, args: list[str]) -> str:
    op, dtype = node.op, DTYPES[node.kind]
    if op == "const":
        value = (
            repr(node.value) if not isinstance(node.value, float) or math.isfinite(node.value) else f"'{node.value}'"
        )
        return f"{dtype}({value})"
    if op == "argument":
        return f"{dtype}(numbers[{node.value}])"
    if op == "load":
        array = f"arrays[{node.value}]"
        indices = [
            _index(index, name, f"{array}.shape[{axis}]")
            for axis, (index, name) in enumerate(zip(node.args, args, strict=True))
        ]
        return f"{array}[{', '.join(indices) or '()'}].astype({dtype}, copy=False)"
    if op in DTYPES:
        return f"{args[0]}.astype({dtype})"
    if op in INFIX:
        return f"{args[0]} {INFIX[op]} {args[1]}"
    return f"{CALLS[op]}({', '.join(args)})"


def _index(index: Node, name: str, extent: str) -> str:
    """Return the index clamped to its dimension; inputs need no clamp: problem/mod_checks.py has checked them."""
    return name if index.op in INPUTS else f"np.minimum(np.maximum({name}, 0), {extent} - 1)"


@lru_cache(maxsize=256)
def score_function(text: str) -> Function:
    """Return the Function of score_mod, whose result is a tuple with the modified score."""
    program = parse(text)
    assert program.score is not None
    return function_of((program.score,))


@lru_cache(maxsize=256)
def mask_function(text: str) -> Function:
    """Return the Function of mask_mod, whose result is a tuple with a mask that broadcasts to the tile."""
    program = parse(text)
    assert program.mask is not None
    return function_of((program.mask,))


class Slope:
    """The modified score and its derivatives on a tile."""

    def __init__(self, text: str, wanted: tuple[bool, ...]) -> None:
        program = parse(text)
        assert program.score is not None
        by = derivative(program.score)
        loads = [(load, d) for load, d in by.loads if wanted[load.value]]
        self._loads = [load for load, _ in loads]
        roots = [program.score, by.slope]
        for load, d in loads:
            roots += (d, *load.args)
        self._function = function_of(tuple(roots))

    def indexed_by(self, name: str) -> bool:
        """Return whether every element with a gradient belongs to one sequence (name "b") or to one head ("h")."""
        return all(any(index.op == name for index in load.args) for load in self._loads)

    def evaluate(self, *inputs: object) -> tuple[np.ndarray, np.ndarray, list[Read]]:
        """Return (score, slope, [(slot, derivative with respect to the element, its unclamped indices)])."""
        score, slope, *others = self._function(*inputs)
        reads, start = [], 0
        for load in self._loads:
            slot, rank = load.value, len(load.args)
            reads.append((slot, others[start], tuple(others[start + 1 : start + 1 + rank])))
            start += 1 + rank
        return score, slope, reads


@lru_cache(maxsize=256)
def slope_of(text: str, wanted: tuple[bool, ...]) -> Slope:
    """Return the derivatives of a mod; `wanted` says for each slot whether the captured array gets a gradient."""
    return Slope(text, wanted)


class SecondRead(NamedTuple):
    """An element that a score reads, and the derivatives of the score and of its tangent with respect to it."""

    slot: int
    of_score: np.ndarray
    of_tangent: np.ndarray
    indices: tuple[np.ndarray, ...]  # before clamping


class Direction:
    """The modified score, its tangent, and the derivatives of both, on a tile.

    The arrays among its inputs are the captured arrays, followed by their tangents.
    """

    def __init__(self, text: str, moved: tuple[bool, ...], wanted: tuple[bool, ...]) -> None:
        score = parse(text).score
        assert score is not None
        of_score, moving = derivative(score), tangent(score, moved)
        of_tangent = derivative(moving)
        self._tangent = function_of((score, moving))
        zero, by_load = score.graph.const(0.0), dict(of_tangent.loads)
        self._loads = [load for load, _ in of_score.loads if wanted[load.value]]
        roots = [score, moving, of_score.slope, of_tangent.slope]
        for load, factor in of_score.loads:
            if wanted[load.value]:
                roots += (factor, by_load.get(load, zero), *load.args)
        self._second = function_of(tuple(roots))

    def tangent(self, *inputs: object) -> tuple[np.ndarray, np.ndarray]:
        """Return (score, tangent) for a Function's inputs."""
        score, moving = self._tangent(*inputs)
        return score, moving

    def second(self, *inputs: object) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[SecondRead]]:
        """Return (score, tangent, slope, d tangent / d score, the elements that are read) for a Function's inputs."""
        score, moving, slope, curve, *others = self._second(*inputs)
        reads, start = [], 0
        for load in self._loads:
            stop = start + 2 + len(load.args)
            of_score, of_tangent, *indices = others[start:stop]
            reads.append(SecondRead(load.value, of_score, of_tangent, tuple(indices)))
            start = stop
        return score, moving, slope, curve, reads


@lru_cache(maxsize=256)
def direction_of(text: str, moved: tuple[bool, ...], wanted: tuple[bool, ...]) -> Direction:
    """Return the Direction of a mod. By slot, `moved` says whether it has a tangent, `wanted` whether a gradient."""
    return Direction(text, moved, wanted)
