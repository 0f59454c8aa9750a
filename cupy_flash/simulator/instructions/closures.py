"""Helpers to compile an instruction into a closure over its operands' arrays (a Step)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import Unsupported
from ..machine.context import Array, Context, Group, Step
from ..machine.ptx import Instruction

Function = Callable[..., Any]
Compiler = Callable[[Instruction, Context], Step]
_ROUNDINGS = {"rn", "rz", "rm", "rp", "rna"}
HALVES = {"f16", "bf16", "f16x2", "bf16x2"}


def registrar(table: dict[str, Compiler]) -> Callable[..., Callable[[Compiler], Compiler]]:
    """Return a decorator factory: @compiles("add", "sub") registers a compiler for these opcodes in the table."""

    def compiles(*opcodes: str) -> Callable[[Compiler], Compiler]:
        def register(compiler: Compiler) -> Compiler:
            table.update(dict.fromkeys(opcodes, compiler))
            return compiler

        return register

    return compiles


def computed(result: Array, function: Function, *sources: Any) -> Step:
    """Return a step that sets result = function(*sources) for the group's lanes."""

    def step(group: Group) -> None:
        if group.plain:
            result[...] = function(*sources)
        else:
            group.write(result, function(*[group.read(source) for source in sources]))

    return step


def ufunc(result: Array, function: Function, *sources: Any) -> Step:
    """Return a step as `computed` for a NumPy ufunc with the register's dtype, in place if all lanes are active."""

    def step(group: Group) -> None:
        if group.plain:
            function(*sources, out=result)
        elif group.mask is None and isinstance(group.index, slice):
            function(*[group.read(source) for source in sources], out=result[group.index])
        else:
            group.write(result, function(*[group.read(source) for source in sources]))

    return step


def typed_sources(instruction: Instruction, context: Context, type_: str, first: int = 1) -> list[Any]:
    """Return views of the operands from `first` on, all of one type."""
    return [context.source(operand, type_, instruction) for operand in instruction.operands[first:]]


def unsupported(instruction: Instruction) -> Unsupported:
    """Return the error for an instruction form that the simulator does not execute."""
    return Unsupported(f"this form of {instruction.opcode} is not simulated: {instruction.where}")


def rounding(instruction: Instruction, default: str = "rn") -> str:
    """Return the rounding mode among the modifiers, or `default`."""
    for modifier in instruction.modifiers:
        if modifier in _ROUNDINGS:
            return modifier
    return default
