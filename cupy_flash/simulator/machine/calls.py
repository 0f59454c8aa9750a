"""Inlining: every call is replaced by the body of its callee."""

from __future__ import annotations

from dataclasses import replace

from ..errors import Unsupported
from .ptx import Address, Function, Immediate, Instruction, Not, Operand, Pair, Register, Symbol, TensorAddress, Vector


def _renamed(operand: Operand, names: dict[str, str], suffix: str) -> Operand:
    """Return a callee's operand after inlining: registers get this call's suffix, symbols the names in `names`."""
    match operand:
        case Register(name, type_):
            return Register(name + suffix, type_)
        case Symbol(name, offset):
            return Symbol(names.get(name, name), offset)
        case Address(base, offset):
            inner = _renamed(base, names, suffix)
            assert isinstance(inner, Register | Symbol | Immediate)
            return Address(inner, offset)
        case TensorAddress(map_, coordinates):
            address, vector = _renamed(map_, names, suffix), _renamed(coordinates, names, suffix)
            assert isinstance(address, Address) and isinstance(vector, Vector)
            return TensorAddress(address, vector)
        case Vector(items):
            return Vector(tuple(_renamed(item, names, suffix) for item in items))
        case Pair(first, second):
            return Pair(_renamed(first, names, suffix), _renamed(second, names, suffix))
        case Not(register):
            return Not(Register(register.name + suffix, register.type))
        case _:
            return operand


def inline(function: Function, functions: dict[str, Function], callers: tuple[str, ...]) -> Function:
    """Replace every call by the callee's body, so that no lane needs a stack or return address; return the function.

    `callers` is the chain of callers, to detect recursion.
    """
    if function.name in callers:
        raise Unsupported(f"recursion is not simulated: {' -> '.join((*callers, function.name))}")
    body: list[Instruction | str] = []
    variables, tables = dict(function.variables), dict(function.tables)
    for item in function.body:
        if isinstance(item, str) or item.opcode != "call":
            body.append(item)
            continue
        results, target, arguments = _call_operands(item)
        if target not in functions:
            raise Unsupported(f"call of {target}, which has no body in this module: {item.where}")
        if item.guard is not None:
            raise Unsupported(f"a predicated call is not simulated: {item.where}")
        callee = inline(functions[target], functions, (*callers, function.name))
        suffix = f"@{item.line}"
        end = f"return{suffix}{target}"
        names = {label: label + suffix for label in callee.body if isinstance(label, str)}
        names |= {table: table + suffix for table in callee.tables}
        names |= {v.name: v.name + suffix for v in callee.variables.values() if v.space != "shared"}
        names |= {formal.name: actual for formal, actual in zip(callee.parameters, arguments, strict=True)}
        names |= {formal.name: actual for formal, actual in zip(callee.results, results, strict=True)}
        for variable in callee.variables.values():
            name = names.get(variable.name, variable.name)
            variables[name] = replace(variable, name=name)
        for table, targets in callee.tables.items():
            tables[names[table]] = tuple(names[label] for label in targets)
        for inner in callee.body:
            if isinstance(inner, str):
                body.append(names[inner])
                continue
            guard = _renamed(inner.guard, names, suffix)
            assert guard is None or isinstance(guard, Register | Not)
            operands = tuple(_renamed(operand, names, suffix) for operand in inner.operands)
            clone = replace(inner, operands=operands, guard=guard)
            if inner.opcode == "ret":
                clone = replace(clone, opcode="bra", modifiers=(), operands=(Symbol(end),))
            body.append(clone)
        body.append(end)
    return replace(function, body=body, variables=variables, tables=tables)


def _call_operands(call: Instruction) -> tuple[list[str], str, list[str]]:
    groups = [operand for operand in call.operands if isinstance(operand, Vector)]
    targets = [operand for operand in call.operands if isinstance(operand, Symbol)]
    if len(targets) != 1:
        raise Unsupported(f"an indirect call is not simulated: {call.where}")
    first_is_result = isinstance(call.operands[0], Vector)
    names = [[_symbol_name(item, call) for item in group.items] for group in groups]
    results = names.pop(0) if first_is_result else []
    return results, targets[0].name, names[0] if names else []


def _symbol_name(operand: Operand, call: Instruction) -> str:
    if not isinstance(operand, Symbol):
        raise Unsupported(f"an argument of a call is not a .param variable: {call.where}")
    return operand.name


def flatten(function: Function) -> Function:
    """Split the body into `instructions` and `labels`, in place; return the function."""
    for item in function.body:
        if isinstance(item, str):
            function.labels[item] = len(function.instructions)
        else:
            function.instructions.append(item)
    return function
