"""Computes the shared memory of a kernel, and other constants, from its source, before anything is compiled.

A kernel with dynamic shared memory states where its buffers begin and, last, how many bytes they are:

    struct SharedMemory {
      static constexpr int K = 0;
      static constexpr int V = K + BLOCK_KV * row_bytes(HEAD_DIM);
      static constexpr int BYTES = V + BLOCK_KV * row_bytes(HEAD_DIM_V);
    };

The kernel adds these offsets to the address of its shared memory. Here the definitions on which BYTES depends become
a Python function of the constants of config.cuh. They are in the kernel or its headers, outside of `#if` except on
SWITCHES, and each is a `constexpr int` or `constexpr bool`, at the top level or in a struct that is no template, or a
`constexpr` function that consists of one `return`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from .source import CONFIG, IDENTIFIER, Constant, chosen_lines, kernel_folder

# Switches of config.cuh on which a layout may depend; it is translated anew for each combination of their values.
SWITCHES = ("STATISTICS", "DSTATISTICS", "SCALED_KV", "CODES_OF_4_BITS", "LATENT")

SIZES = {
    "int8": 1,
    "e4m3": 1,
    "e5m2": 1,
    "nibbles": 1,
    "half16": 2,
    "bfloat16": 2,
    "int": 4,
    "float": 4,
    "double": 8,
}  # bytes, for sizeof
# {operator or literal of C++: its form in Python}. `!`, `&` and `^` are left out because their
# precedence differs in Python. That of `|` differs only beside a comparison, so definitions use it beside arithmetic.
OPERATORS = {x: x for x in ("+", "-", "*", "%", "|", "<", ">", "<=", ">=", "==", "!=")}
OPERATORS |= {"/": "//", "&&": "and", "||": "or", "true": "True", "false": "False"}
# Strings, so that importing the package compiles no pattern.
TOKEN = rf"{IDENTIFIER}(?:::{IDENTIFIER})?|\d+|&&|\|\||[<>=!]=|\S"
CONFIGURED = rf"^(?:constexpr \w+|using|#define) ({IDENTIFIER}) (?:= )?([^\s;]+)"  # name and default
ALIAS = rf"^using ({IDENTIFIER}) = ({IDENTIFIER});"
STRUCT = rf"^struct ({IDENTIFIER}) \{{\n((?:.*\n)*?)\}};"
NUMBERS = r"constexpr (?:int|bool) ([^;{]+);"
FUNCTION = rf"^__device__ constexpr int ({IDENTIFIER})\(([^)]*)\) \{{\n  return ([^;]+);\n\}}"
Definition = tuple[str, str, str]  # qualified name; parameters of a function; expression


def shared_bytes(kernel: str, constants: Mapping[str, Constant]) -> int:
    """Return `SharedMemory::BYTES` of kernels_cu/<kernel>.cu; `constants` replace defaults of config.cuh by name.

    Raises ValueError for a definition that cannot be translated.
    """
    return kernel_constant(kernel, "SharedMemory::BYTES", constants)


def kernel_constant(kernel: str, name: str, constants: Mapping[str, Constant]) -> int:
    """Return a constant of kernels_cu/<kernel>.cu by its qualified name, as `shared_bytes` does."""
    return int(_layout(kernel, name, tuple(bool(constants.get(switch)) for switch in SWITCHES))(constants))


@lru_cache(maxsize=64)
def _layout(kernel: str, name: str, switched: tuple[bool, ...]) -> Callable[[Mapping[str, Constant]], int]:
    """Return the function that computes a constant of a kernel from the constants of config.cuh."""
    translation = Translation(kernel, dict(zip(SWITCHES, switched, strict=True)))
    result = translation.number(name, "")
    text = "\n  ".join(["def layout(constants):", *translation.lines, f"return {result}"])
    namespace: dict[str, Any] = {"SIZES": SIZES}
    exec(compile(text, f"<{name} of {kernel}>", "exec"), namespace)
    layout: Callable[[Mapping[str, Constant]], int] = namespace["layout"]
    return layout


class Translation:
    """Translates constants of a kernel to lines of Python that compute them, with functions inlined."""

    def __init__(self, kernel: str, switches: Mapping[str, bool]) -> None:
        self.kernel = kernel
        self.lines: dict[str, None] = {}  # each after the lines that compute its inputs
        self.configured: dict[str, str] = {}  # defaults of config.cuh, by name
        self.aliases: dict[str, str] = {}
        self.definitions: dict[str, list[Definition]] = {}  # by qualified name
        for file, text in _texts(kernel_folder(), f"{kernel}.cu", set()):
            if file == CONFIG:
                self.configured = dict(re.findall(CONFIGURED, text, re.MULTILINE))
                continue
            text = "\n".join(line for _, line, _ in chosen_lines(text, switches, file))
            self.aliases |= dict(re.findall(ALIAS, text, re.MULTILINE))
            for definition in _definitions(text):
                self.definitions.setdefault(definition[0], []).append(definition)

    def number(self, name: str, scope: str) -> str:
        """Add the lines that compute `name` as seen in the struct `scope`, and return its name in Python."""
        if name in self.configured:
            default = self.expression([self.configured[name]], "", {})
            self.lines[f'{name} = constants.get("{name}", {default})'] = None
            return name
        name, _, expression = self._defined(name, scope)
        python = name.replace("::", "__")
        scope = name.rpartition("::")[0]
        self.lines[f"{python} = {self.expression(re.findall(TOKEN, expression), scope, {})}"] = None
        return python

    def call(self, name: str, arguments: list[str]) -> str:
        """Return a call of a C++ function, inlined as a Python expression; the arguments are Python expressions."""
        _, parameters, expression = self._defined(name, "")
        values: dict[str, str] = {}
        for n, parameter in enumerate(parameters.split(", ")):
            own, _, default = parameter.split(maxsplit=1)[1].partition(" = ")
            values[own] = arguments[n] if n < len(arguments) else self.expression(re.findall(TOKEN, default), "", {})
        return f"({self.expression(re.findall(TOKEN, expression), '', values)})"

    def _defined(self, name: str, scope: str) -> Definition:
        """Return the definition of `name` as seen in the struct `scope`."""
        struct, _, member = name.rpartition("::")
        name = f"{self.aliases.get(struct, struct)}::{member}" if struct else name
        found = self.definitions.get(f"{scope}::{name}") or self.definitions.get(name, [])
        if len(found) != 1:
            raise ValueError(f"{self.kernel}: the layout depends on {name}, which has not exactly one definition")
        return found[0]

    def expression(self, tokens: list[str], scope: str, values: dict[str, str]) -> str:
        """Return the Python translation of a C++ expression, and consume its tokens up to the one that ends it.

        `values` maps the parameters of a function to Python expressions.
        """
        parts: list[str] = []
        while tokens and tokens[0] not in (")", ",", ":"):
            if tokens[0] == "(":
                parts += self._arguments(tokens, scope, values)
                continue
            token = tokens.pop(0)
            if token == "?":
                chosen = self.expression(tokens, scope, values)
                tokens.pop(0)
                return f"({chosen} if {' '.join(parts)} else {self.expression(tokens, scope, values)})"
            if token == "sizeof":
                parts.append(f"SIZES[{self._arguments(tokens, scope, values)[0]}]")
            elif token in SIZES:
                parts.append(f'"{token}"')
            elif token in OPERATORS or token.isdigit():
                parts.append(OPERATORS.get(token, token))
            elif not re.fullmatch(rf"{IDENTIFIER}(::{IDENTIFIER})?", token):
                raise ValueError(f"{self.kernel}: the layout depends on {token}, which has no translation")
            elif token in values:
                parts.append(values[token])
            elif tokens[:1] == ["("]:
                parts.append(self.call(token, self._arguments(tokens, scope, values)))
            else:
                parts.append(self.number(token, scope))
        return " ".join(parts)

    def _arguments(self, tokens: list[str], scope: str, values: dict[str, str]) -> list[str]:
        """Translate the expressions in the parentheses at the start of the tokens, and consume these tokens."""
        arguments = []
        while tokens.pop(0) != ")":
            arguments.append(f"({self.expression(tokens, scope, values)})")
        return arguments


def _texts(folder: Path, file: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, text without comments) of a file of kernels_cu and its headers, except those generated from mods."""
    if file in seen or not (folder / file).is_file():
        return
    seen.add(file)
    text = re.sub(r" *//.*", "", (folder / file).read_text(encoding="utf-8"))
    for header in re.findall(r'^#include "(.*)"', text, re.MULTILINE):
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(file), header))
        yield from _texts(folder, beside if (folder / beside).is_file() else header, seen)
    yield file, text


def _definitions(text: str) -> Iterator[Definition]:
    """Yield the Definition of every constant and function in a text."""
    for struct, body in [("", text), *re.findall(STRUCT, text, re.MULTILINE)]:
        for numbers in re.findall(rf"^{'  static ' if struct else ''}{NUMBERS}", body, re.MULTILINE):
            for number in re.split(r",\s+(?=\w+\s+=\s)", numbers):
                name, _, expression = number.partition("=")
                yield f"{struct}::{name.strip()}" if struct else name.strip(), "", expression
    yield from re.findall(FUNCTION, text, re.MULTILINE)
