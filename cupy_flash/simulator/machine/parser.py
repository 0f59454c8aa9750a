"""parse(): PTX text -> Module, with kernels as flat instruction lists, names resolved and calls inlined.

Each instruction keeps its PTX line and, with -lineinfo, its source line for error messages.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from dataclasses import replace

from ..errors import PtxError, Unsupported
from .calls import flatten, inline
from .ptx import (
    TYPE_BYTES,
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vector,
    constant_bits,
)


@functools.lru_cache(maxsize=32)
def parse(text: str) -> Module:
    """Parse a PTX text; the last 32 results are cached.

    Raises PtxError, with the line, for text that is not PTX as NVRTC writes it; Unsupported for recursion, indirect
    calls and initialisers with addresses; TypeError for anything but a text.
    """
    if not isinstance(text, str):
        raise TypeError(f"PTX must be text or a parsed module, not {type(text).__name__}")
    if ".version" not in text:
        raise PtxError(
            "the text is not PTX, which begins with .version; "
            'cupy_flash.jit.nvrtc.compile(text, name, "compute_80").ptx is that of a CUDA text'
        )
    return _Parser(text).module()


# Comments and .section blocks (debug information) are dropped. Strings match here only so that "//" inside one is kept.
_UNREAD = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/|\.section\b[^{]*\{[^}]*\}', re.DOTALL)
_MARKS = "][{}(),;:|!@<>+=*~-"
_TOKEN = re.compile(
    r"""0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?
    |\.loc\b.*  # a quarter of all lines
    |[.%$A-Za-z_][\w.$%]*(?:::[\w.]+)*|"[^"]*"|\S""",
    re.VERBOSE,
)


def _tokens(text: str) -> tuple[list[str], list[int]]:
    """Return the tokens, and the line of each."""
    read = _UNREAD.sub(lambda match: match[0] if match[0][0] == '"' else " " + "\n" * match[0].count("\n"), text)
    tokens: list[str] = []
    lines: list[int] = []
    for line, rest in enumerate(read.split("\n"), 1):
        in_line = _TOKEN.findall(rest)
        tokens += in_line
        lines += [line] * len(in_line)
    for token in set(tokens):
        if len(token) == 1 and not token.isalnum() and token not in _MARKS + ".%$_":
            raise PtxError(f"PTX line {lines[tokens.index(token)]}: unexpected character {token!r}")
    return tokens, lines


class _Scope:
    """A brace-delimited scope with its registers, variables and labels."""

    def __init__(self, number: int, parent: _Scope | None):
        self.number, self.parent = number, parent
        self.names: dict[str, Operand] = {}
        self.labels: dict[str, str] = {}

    def unique(self, name: str) -> str:
        return name if self.number == 0 else f"{name}#{self.number}"

    def find(self, name: str) -> Operand:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class _Parser:
    """A recursive-descent parser; each method consumes the construct that it is named after."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.tokens, self.line_of = _tokens(text)
        self.tokens.append("")  # end of the text
        self.line_of.append(len(self.lines))
        self.position, self.token = 0, self.tokens[0]
        self.target = ""
        self.files: dict[int, str] = {}
        self.variables: dict[str, Variable] = {}
        self.functions: dict[str, Function] = {}
        self.named: set[str] = set()  # by an operand
        self.scopes = 0

    # ---- tokens

    def take(self, text: str | None = None) -> str:
        token = self.token
        if text is not None and token != text:
            raise self.error(f"expected {text!r}, found {token!r}")
        if not token:
            raise self.error("unexpected end of the text")
        self.position += 1
        self.token = self.tokens[self.position]
        return token

    def accept(self, text: str) -> bool:
        if self.token != text:
            return False
        self.take()
        return True

    def error(self, message: str) -> PtxError:
        line = self.line_of[self.position]
        return PtxError(f"PTX line {line}: {self.lines[line - 1].strip()}: {message}")

    def skip_line(self) -> list[str]:
        line, rest = self.line_of[self.position], []
        while self.token and self.line_of[self.position] == line:
            rest.append(self.take())
        return rest

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        return sign * int(self.take().rstrip("U"), 0)

    # ---- module

    def module(self) -> Module:
        self.files = {
            int(self.tokens[i + 1]): self.tokens[i + 2].strip('"').rsplit("/", 1)[-1]
            for i, token in enumerate(self.tokens)
            if token == ".file"
        }
        while self.token:
            self.module_item()
        kernels = {}
        for function in self.functions.values():
            if function.is_entry:
                kernels[function.name] = flatten(inline(function, self.functions, ()))
        # NVRTC writes all constants of a text as variables, a hundred of which no instruction names.
        variables = {name: one for name, one in self.variables.items() if name in self.named or one.space == "shared"}
        return Module(self.target, variables, kernels)

    def module_item(self) -> None:
        text = self.token
        if text in (".version", ".address_size", ".file"):
            self.skip_line()
        elif text == ".target":
            self.target = self.skip_line()[1]
        elif text in (".visible", ".extern", ".weak", ".common"):
            self.take()
        elif text in (".entry", ".func"):
            self.function()
        elif text in (".global", ".const", ".shared"):
            for variable in self.variable_declaration():
                self.variables[variable.name] = variable
        elif text == ".pragma":
            while self.take() != ";":
                pass
        else:
            raise self.error(f"unknown directive {text!r}")

    def variable_declaration(self) -> list[Variable]:
        """Parse `.space [.align n] [.v2|.v4] .type name[n][m] [= initialiser] {, name ...} ;`."""
        space, align, count = self.take()[1:], 0, 1
        while self.token in (".align", ".v2", ".v4", ".ptr", ".global", ".shared", ".const", ".local"):
            attribute = self.take()
            if attribute == ".align":
                align = self.integer()
            elif attribute in (".v2", ".v4"):
                count = int(attribute[2])
        type_ = self.take()[1:]
        if type_ not in TYPE_BYTES:
            raise self.error(f"unknown type .{type_}")
        variables = []
        while True:
            # A kernel parameter has .ptr and its attributes between type and name.
            while self.token in (".ptr", ".global", ".shared", ".const", ".local", ".align"):
                if self.take() == ".align":
                    self.integer()
            name, elements = self.take(), count
            while self.accept("["):
                elements *= 0 if self.token == "]" else self.integer()
                self.take("]")
            size = elements * TYPE_BYTES[type_]
            data = None
            if self.accept("="):
                data = self.initialiser(type_).ljust(size, b"\0")
            variables.append(Variable(name, space, align or TYPE_BYTES[type_] * count, size, type_, data))
            if self.token != "," or self.tokens[self.position + 1] == ".param":
                break
            self.take(",")
        self.accept(";")
        return variables

    def initialiser(self, type_: str) -> bytes:
        if self.accept("{"):
            data = b""
            while not self.accept("}"):
                data += self.initialiser(type_)
                self.accept(",")
            return data
        where = f"PTX line {self.line_of[self.position]}"
        value = self.operand(None)
        if not isinstance(value, Immediate):
            raise Unsupported(
                f"a variable that is initialised with the address of a variable or function is not simulated: {where}: "
                f"{self.lines[self.line_of[self.position] - 1].strip()}"
            )
        if value.kind == "int":
            return (value.bits % (1 << 8 * TYPE_BYTES[type_])).to_bytes(TYPE_BYTES[type_], "little")
        return constant_bits(value, type_).to_bytes(TYPE_BYTES[type_], "little")

    # ---- functions

    def parameter_list(self) -> list[Variable]:
        parameters = []
        self.take("(")
        while not self.accept(")"):
            parameters += self.variable_declaration()
            self.accept(",")
        return parameters

    def function(self) -> None:
        is_entry = self.take() == ".entry"
        results = self.parameter_list() if self.token == "(" else []
        name = self.take()
        parameters = self.parameter_list() if self.token == "(" else []
        function = Function(name, is_entry, parameters, results)
        while self.token.startswith("."):
            directive, numbers = self.take(), []
            while self.token not in ("{", ";", "") and not self.token.startswith("."):
                text = self.take()
                numbers += [int(text)] if text.isdigit() else []
            if directive == ".pragma":
                self.take(";")
            elif directive == ".reqnctapercluster":
                x, y, z = (*numbers, 1, 1)[:3]
                function.cluster = (x, y, z)
            elif directive in (".maxntid", ".reqntid"):
                function.max_threads = math.prod(numbers)
            elif directive == ".minnctapersm":
                (function.min_blocks,) = numbers
            elif directive == ".maxnreg":
                (function.max_registers,) = numbers
        if self.accept(";"):
            return  # a declaration
        scope = _Scope(0, None)
        for variable in parameters + results:
            scope.names[variable.name] = Symbol(variable.name)
        self.source: tuple[str, int] | None = None
        self.take("{")
        references: list[tuple[int, _Scope]] = []
        self.block(function, scope, references)
        for index, where in references:
            instruction = function.body[index]
            assert isinstance(instruction, Instruction)
            operands = tuple(self.resolve_label(operand, where) for operand in instruction.operands)
            function.body[index] = replace(instruction, operands=operands)
        self.functions[name] = function

    def resolve_label(self, operand: Operand, scope: _Scope) -> Operand:
        if isinstance(operand, Symbol):
            label = scope.find_label(operand.name)
            if label is not None:
                return replace(operand, name=label)
        return operand

    def block(self, function: Function, scope: _Scope, references: list[tuple[int, _Scope]]) -> None:
        while not self.accept("}"):
            text = self.token
            if text == "{":
                self.take()
                self.scopes += 1
                self.block(function, _Scope(self.scopes, scope), references)
            elif text == ".reg":
                self.register_declaration(scope)
            elif text in (".local", ".shared", ".param"):
                for variable in self.variable_declaration():
                    unique = scope.unique(variable.name)
                    if variable.space == "shared":
                        unique = f"{function.name}:{unique}"
                    function.variables[unique] = replace(variable, name=unique)
                    scope.names[variable.name] = Symbol(unique)
            elif text.startswith(".loc"):
                _, file, line, *_ = self.take().split()
                self.source = (self.files.get(int(file), "?"), int(line)) if int(line) else None
            elif text == ".pragma":
                while self.take() != ";":
                    pass
            elif not text:
                raise self.error("unexpected end of the text inside a function")
            elif self.tokens[self.position + 1] == ":":
                self.label(function, scope)
            else:
                instruction = self.instruction(scope)
                if any(isinstance(operand, Symbol) for operand in instruction.operands):
                    references.append((len(function.body), scope))
                function.body.append(instruction)

    def label(self, function: Function, scope: _Scope) -> None:
        name = self.take()
        self.take(":")
        unique = scope.unique(name)
        scope.labels[name] = unique
        if self.token == ".branchtargets":
            self.take()
            targets = []
            while not self.accept(";"):
                targets.append(self.take())
                self.accept(",")
            function.tables[unique] = tuple(targets)
        else:
            function.body.append(unique)

    def register_declaration(self, scope: _Scope) -> None:
        self.take(".reg")
        type_ = self.take()[1:]
        if type_ not in TYPE_BYTES:
            raise self.error(f"unknown register type .{type_}")
        while True:
            name = self.take()
            names = [name]
            if self.accept("<"):
                names = [f"{name}{i}" for i in range(self.integer())]
                self.take(">")
            for one in names:
                scope.names[one] = Register(scope.unique(one), type_)
            if not self.accept(","):
                break
        self.take(";")

    def instruction(self, scope: _Scope) -> Instruction:
        line = self.line_of[self.position]
        guard: Register | Not | None = None
        if self.token == "@":
            self.take()
            negated = self.accept("!")
            register = self.operand(scope)
            if not isinstance(register, Register):
                raise self.error("a guard predicate must be a register")
            guard = Not(register) if negated else register
        opcode, modifiers = _opcode(self.take())
        operands: list[Operand] = []
        while self.token != ";":
            following = self.tokens[self.position + 1]
            if following in (",", ";") and isinstance(register := scope.find(self.token), Register):
                # Most operands are a register alone, which needs no look at the other forms.
                operands.append(register)
                self.position += 1
                self.token = following
            elif self.token == "(":
                self.take()
                items = []
                while not self.accept(")"):
                    items.append(self.operand(scope))
                    self.accept(",")
                operands.append(Vector(tuple(items)))
            else:
                operands.append(self.operand(scope))
            if self.token == ",":
                self.take()
            elif self.token != ";":
                raise self.error(f"expected ',' or ';', found {self.token!r}")
        self.take(";")
        text = " ".join(self.lines[line - 1].split("//")[0].split())
        return Instruction(opcode, modifiers, tuple(operands), guard, line, text, self.source)

    def operand(self, scope: _Scope | None) -> Operand:
        first = self.operand_item(scope)
        if self.token == "|":
            self.take()
            return Pair(first, self.operand_item(scope))
        return first

    def operand_item(self, scope: _Scope | None) -> Operand:
        token = self.take()
        known = scope.find(token) if scope else None
        if isinstance(known, Register):  # most operands
            return known
        if token == "{":
            items = []
            while not self.accept("}"):
                items.append(self.operand(scope))
                self.accept(",")
            return Vector(tuple(items))
        if token == "[":
            base = self.operand_item(scope)
            offset = 0
            if isinstance(base, Symbol):
                base, offset = replace(base, offset=0), base.offset
            if isinstance(base, Register) and self.token in ("+", "-"):
                sign = 1 if self.take() == "+" else -1
                offset = sign * self.integer()
            coordinates = self.operand_item(scope) if self.accept(",") else None
            self.take("]")
            if not isinstance(base, Register | Symbol | Immediate):
                raise self.error("unknown address form")
            address = Address(base, offset)
            return TensorAddress(address, coordinates) if isinstance(coordinates, Vector) else address
        if token == "!":
            register = self.operand_item(scope)
            if not isinstance(register, Register):
                raise self.error("'!' must precede a predicate register")
            return Not(register)
        negative = token == "-"
        if negative:
            token = self.take()
        if token[0].isdigit():
            return _number(token, negative)
        if token[0] in _MARKS or token[0] == '"':
            raise self.error(f"unknown operand {token!r}")
        if token == "_":
            return None
        if token[0] == "%":
            return Special(token[1:])
        if token == "WARP_SZ":
            return Immediate(32, "int")
        symbol = known if isinstance(known, Symbol) else Symbol(token)
        self.named.add(symbol.name)
        if self.token in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            symbol = replace(symbol, offset=sign * self.integer())
        return symbol


@functools.lru_cache(maxsize=1024)
def _opcode(token: str) -> tuple[str, tuple[str, ...]]:
    """Return the opcode and the modifiers."""
    opcode, *modifiers = token.split(".")
    return opcode, tuple(modifiers)


@functools.lru_cache(maxsize=1024)
def _number(text: str, negative: bool) -> Immediate:
    if text[:2] in ("0f", "0F"):
        return Immediate(int(text[2:], 16) ^ (negative << 31), "f32")
    if text[:2] in ("0d", "0D"):
        return Immediate(int(text[2:], 16) ^ (negative << 63), "f64")
    if "." in text:
        return Immediate(int.from_bytes(struct.pack("<d", -float(text) if negative else float(text)), "little"), "f64")
    text = text.rstrip("U")
    octal = len(text) > 1 and text[0] == "0" and text.isdigit()
    value = int(text, 8 if octal else 0)
    return Immediate(-value if negative else value, "int")
