"""Computes the shared memory of a kernel from the layout in its source, before anything is compiled.

A kernel with dynamic shared memory states where its buffers begin and, last, how many bytes they are:

    struct SharedMemory {
      static constexpr int K = 0;
      static constexpr int V = K + BLOCK_KV * row_bytes(HEAD_DIM);
      static constexpr int BYTES = V + BLOCK_KV * row_bytes(HEAD_DIM_V);
    };

The kernel adds these offsets to the address of its shared memory. Here the definitions on which BYTES depends become a
Python function of the constants of config.cuh. They may be, in the kernel or its headers, outside of `#if`:
`constexpr int` and `constexpr bool`, at the top level or in a struct that is no template, and `constexpr` functions of
one `return`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from .source import CONFIG, IDENTIFIER, Constant, kernel_folder

SIZES = {"e4m3": 1, "half16": 2, "bfloat16": 2, "int": 4, "float": 4, "double": 8}  # bytes, for sizeof
# Operators and literals by their form in Python; `!` and bitwise operators but | have another precedence there.
OPERATORS = {x: x for x in ("+", "-", "*", "%", "|", "<", ">", "<=", ">=", "==", "!=")}
OPERATORS |= {"/": "//", "&&": "and", "||": "or", "true": "True", "false": "False"}
# Texts instead of compiled patterns, so that importing the package compiles none.
TOKEN = rf"{IDENTIFIER}(?:::{IDENTIFIER})?|\d+|&&|\|\||[<>=!]=|\S"
CONFIGURED = rf"^(?:constexpr \w+|using|#define) ({IDENTIFIER}) (?:= )?([^\s;]+)"  # name and default
ALIAS = rf"^using ({IDENTIFIER}) = ({IDENTIFIER});"
STRUCT = rf"^struct ({IDENTIFIER}) \{{\n((?:.*\n)*?)\}};"
NUMBERS = r"constexpr (?:int|bool) ([^;{]+);"
FUNCTION = rf"^__device__ constexpr int ({IDENTIFIER})\(([^)]*)\) \{{\n  return ([^;]+);\n\}}"


class Definition(NamedTuple):
    """A number, or a function of parameters, as C++ text."""

    scope: str  # the struct of which it is a member
    name: str
    parameters: str
    expression: str


def shared_bytes(kernel: str, constants: Mapping[str, Constant]) -> int:
    """Return `SharedMemory::BYTES` of kernels_cu/<kernel>.cu; `constants` replace defaults of config.cuh by name.

    Raises ValueError for a definition that cannot be translated.
    """
    return int(_layout(kernel)(constants))


@lru_cache(maxsize=64)
def _layout(kernel: str) -> Callable[[Mapping[str, Constant]], Any]:
    """Return the function that computes the bytes of a kernel."""
    definitions: dict[str, list[Definition]] = {}
    configured: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for file, text in _texts(kernel_folder(), f"{kernel}.cu", set()):
        if file == CONFIG:
            configured = dict(re.findall(CONFIGURED, text, re.MULTILINE))
        else:
            aliases |= dict(re.findall(ALIAS, text, re.MULTILINE))
            for each in _definitions(text):
                definitions.setdefault(f"{each.scope}::{each.name}" if each.scope else each.name, []).append(each)
    lines: dict[str, None] = {}  # those of Python, each after the lines on which it depends

    def resolve(name: str, scope: str) -> str:
        """Add the lines that define a C++ name, and return its name in Python."""
        name = f"{scope}::{name}" if f"{scope}::{name}" in definitions else name
        python = name.replace("::", "__")
        if name in configured:
            default = _python([configured[name]], str)
            lines[f'{python} = constants.get("{name}", {default})'] = None
            return python
        if len(definitions.get(name, ())) != 1:
            raise ValueError(f"{kernel}: the shared memory depends on {name}, which has not exactly one definition")
        (found,) = definitions[name]
        parameters: dict[str, str] = {}  # the name of each, with its default

        def translated(expression: str) -> str:
            tokens = re.findall(TOKEN, expression)
            return _python(tokens, lambda used: used if used in parameters else resolve(used, found.scope))

        for declaration in filter(None, found.parameters.split(", ")):
            own, _, default = declaration.split(maxsplit=1)[1].partition(" = ")
            parameters[own] = f"{own}={translated(default)}" if default else own
        value = translated(found.expression)
        function = f"lambda {', '.join(parameters.values())}: " if parameters else ""
        lines[f"{python} = {function}{value}"] = None
        return python

    result = resolve(f"{aliases.get('SharedMemory', 'SharedMemory')}::BYTES", "")
    text = "\n  ".join(["def layout(constants):", *lines, f"return {result}"])
    namespace: dict[str, Any] = {"sizeof": SIZES.__getitem__}
    exec(compile(text, f"<the shared memory of {kernel}>", "exec"), namespace)
    layout: Callable[[Mapping[str, Constant]], Any] = namespace["layout"]
    return layout


def _texts(folder: Path, file: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, text without comments) of a file of kernels_cu and of its headers, but those generated from mods."""
    if file in seen or not (folder / file).is_file():
        return
    seen.add(file)
    text = re.sub(r" *//.*", "", (folder / file).read_text(encoding="utf-8"))
    for header in re.findall(r'^#include "(.*)"', text, re.MULTILINE):
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(file), header))
        yield from _texts(folder, beside if (folder / beside).is_file() else header, seen)
    yield file, text


def _definitions(text: str) -> Iterator[Definition]:
    """Yield the definitions in a text."""
    for scope, body in [("", text), *re.findall(STRUCT, text, re.MULTILINE)]:
        for numbers in re.findall(rf"^{'  static ' if scope else ''}{NUMBERS}", body, re.MULTILINE):
            for number in re.split(r",\s+(?=\w+\s+=\s)", numbers):
                name, _, expression = number.partition("=")
                yield Definition(scope, name.strip(), "", expression)
    for name, parameters, expression in re.findall(FUNCTION, text, re.MULTILINE):
        yield Definition("", name, parameters, expression)


def _python(tokens: list[str], resolve: Callable[[str], str]) -> str:
    """Return a C++ expression in Python; consumes its tokens, up to one that ends it. `resolve` returns names."""
    parts: list[str] = []
    while tokens and tokens[0] not in (")", ",", ":"):
        token = tokens.pop(0)
        if token == "?":
            value = _python(tokens, resolve)
            tokens.pop(0)
            return f"({value} if {' '.join(parts)} else {_python(tokens, resolve)})"
        if token == "(":
            inside = [_python(tokens, resolve)]
            while tokens.pop(0) == ",":
                inside.append(_python(tokens, resolve))
            parts.append(f"({', '.join(inside)})")
        elif token in OPERATORS or token.isdigit() or token == "sizeof":
            parts.append(OPERATORS.get(token, token))
        elif token in SIZES:
            parts.append(f'"{token}"')
        elif re.fullmatch(TOKEN, token) and (token[0].isalpha() or token[0] == "_"):
            parts.append(resolve(token))
        else:
            raise ValueError(f"the layout of shared memory has {token}, which has no translation")
    return " ".join(parts)
