"""Comparison and selection: set, setp, selp and slct."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine.context import DTYPES, Context, Group, Step, operand_type
from ..machine.ptx import Instruction, Pair
from .closures import HALVES, Compiler, Function, computed, registrar, ufunc, unsupported
from .convert import decode, flush_subnormals

COMPILERS: dict[str, Compiler] = {}
compiles = registrar(COMPILERS)

_COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _comparison(name: str, type_: str) -> Function:
    """Return the comparison function; for floats `ne` is ordered (false with NaN), and a final u accepts unordered."""
    if not type_.startswith(("f", "bf")):
        return _COMPARISONS[name]
    if name.endswith("u"):
        ordered = _COMPARISONS[name[:-1]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    return _COMPARISONS[name]


def _compare(instruction: Instruction, context: Context) -> tuple[Function, list[Any]]:
    """Return (comparison of set or setp including .ftz, source operands)."""
    type_ = operand_type(instruction)
    if type_ in ("f16x2", "bf16x2"):
        raise unsupported(instruction)
    name = instruction.modifiers[0]
    sources = [context.source(operand, type_, instruction) for operand in instruction.operands[1:3]]
    function = _comparison(name, type_)
    if type_ in HALVES:
        of_values = function

        def function(a: Any, b: Any) -> Any:
            return of_values(decode(np.asarray(a), type_), decode(np.asarray(b), type_))

    if "ftz" in instruction.modifiers:
        unflushed = function

        def function(a: Any, b: Any) -> Any:
            return unflushed(flush_subnormals(a), flush_subnormals(b))

    return function, sources


_COMBINE: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@compiles("setp")
def _set_predicate(instruction: Instruction, context: Context) -> Step:
    function, sources = _compare(instruction, context)
    first = instruction.operands[0]
    targets = [first.first, first.second] if isinstance(first, Pair) else [first]
    results = [context.destination(target, "pred", instruction) for target in targets]
    combine = next((_COMBINE[m] for m in instruction.modifiers if m in _COMBINE), None)
    if combine is None and len(results) == 1:
        plain = isinstance(function, np.ufunc)
        return (ufunc if plain else computed)(results[0], function, *sources)
    other = context.predicate(instruction.operands[3], instruction) if combine else None

    def step(group: Group) -> None:
        outcome = function(*[group.read(source) for source in sources])
        opposite = ~outcome
        if combine is not None and other is not None:
            condition = other(group)
            outcome, opposite = combine(outcome, condition), combine(opposite, condition)
        for result, value in zip(results, (outcome, opposite), strict=False):
            group.write(result, value)

    return step


@compiles("set")
def _set_value(instruction: Instruction, context: Context) -> Step:
    if len(instruction.operands) != 3:
        raise unsupported(instruction)
    function, sources = _compare(instruction, context)
    type_ = instruction.modifiers[-2]
    result = context.destination(instruction.operands[0], type_, instruction)
    true = DTYPES[type_](1.0) if type_ == "f32" else ~np.uint32(0) if type_ == "u32" else np.int32(-1)
    return computed(result, lambda a, b: np.where(function(a, b), true, true.dtype.type(0)), *sources)


@compiles("selp")
def _select(instruction: Instruction, context: Context) -> Step:
    type_ = operand_type(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    a, b = (context.source(operand, type_, instruction) for operand in instruction.operands[1:3])
    condition = context.predicate(instruction.operands[3], instruction)

    def step(group: Group) -> None:
        group.write(result, np.where(condition(group), group.read(a), group.read(b)))

    return step


@compiles("slct")
def _select_by_sign(instruction: Instruction, context: Context) -> Step:
    type_, sign_type = instruction.modifiers[-2:]
    result = context.destination(instruction.operands[0], type_, instruction)
    a, b = (context.source(operand, type_, instruction) for operand in instruction.operands[1:3])
    sign = context.source(instruction.operands[3], sign_type, instruction)
    return computed(result, lambda a, b, c: np.where(c >= 0, a, b), a, b, sign)
