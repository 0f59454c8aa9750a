"""Assembles a kernel and its headers into one self-contained CUDA text.

The text is the compiler's only input. It depends only on the files and the constants and contains no local path, so it
can serve as the cache key of the compiled kernel.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

CONFIG = "config.cuh"
IDENTIFIER = r"[A-Za-z_]\w*"
# Texts instead of compiled patterns, so that importing the package compiles none.
CONSTANT = (
    rf"(?P<head>(?P<kind>constexpr (?:int|bool|float)|using) (?P<name>{IDENTIFIER}) = )(?P<value>[^\s;]+)"
    r"(?P<tail>;\s*(?://.*)?)"
)
SWITCH = rf"(?P<head>(?P<kind>#define) (?P<name>{IDENTIFIER}) )(?P<value>[01])(?P<tail>\s*(?://.*)?)"
DIRECTIVE = r"\s*#\s*(?P<word>\w+)\s*(?P<rest>.*?)\s*(?://.*)?"

Constant = int | float | bool | str


def kernel_folder() -> Path:
    """Return the folder of the .cu and .cuh files, inside the package in a wheel, otherwise beside it.

    Raises FileNotFoundError with both paths if the installation has neither.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "kernels_cu", package.parent / "kernels_cu")
    # Not importlib.resources, which cannot find the folder in an editable install or a checkout.
    for folder in candidates:
        if (folder / "README.md").is_file():
            return folder
    raise FileNotFoundError(f"kernels_cu not found; looked in {candidates[0]} and {candidates[1]}")


def assemble(kernel: str, constants: Mapping[str, Constant], headers: Mapping[str, str] | None = None) -> str:
    """Return the text of kernels_cu/<kernel>.cu with every header inlined once and the values of config.cuh replaced.

    `kernel` is like "simt/forward". `constants` replaces defaults of config.cuh by name; the declaration determines the
    value's type: int for `constexpr int`, bool for `constexpr bool` and `#define`, a number for `constexpr float`, a
    type name for `using`. `#if NAME` and `#if !NAME` on a `#define` of config.cuh are resolved here, so that only the
    taken branch and its headers are in the text. #line markers preserve original files and lines in messages.

    `headers` has generated headers, text by name, which kernels include like files of kernels_cu.

    Raises ValueError for an unknown constant, a value of the wrong type, an include cycle, or a directive that cannot
    be inlined; FileNotFoundError for a missing kernel or header. The message contains the chain of includes.
    """
    if not re.fullmatch(rf"{IDENTIFIER}(/{IDENTIFIER})*", kernel):
        raise ValueError(f'kernel must be like "simt/forward", not {kernel!r}')
    folder = kernel_folder().resolve()
    text = Text(folder, *configure((folder / CONFIG).read_text(encoding="utf-8"), constants), headers or {})
    text.inline(f"{kernel}.cu", ())
    if constants and CONFIG not in text.inlined:
        raise ValueError(f"{kernel} does not include {CONFIG}, so it has no constants: {', '.join(constants)}")
    return "\n".join(text.lines) + "\n"


def configure(config: str, constants: Mapping[str, Constant]) -> tuple[str, dict[str, bool]]:
    """Return (config.cuh with `constants` instead of its defaults, the values of its `#define` switches)."""
    lines = []
    names = []
    switches = {}
    for number, line in enumerate(config.splitlines(), 1):
        if line.startswith("//") or line.strip() in ("", "#pragma once"):
            lines.append(line)
            continue
        match = re.fullmatch(CONSTANT, line) or re.fullmatch(SWITCH, line)
        if match is None:
            raise ValueError(f"{CONFIG}:{number}: not the definition of one constant: {line!r}")
        kind, name, value = match["kind"], match["name"], match["value"]
        if name in constants:
            value = literal(kind, name, constants[name])
        names.append(name)
        if kind == "#define":
            switches[name] = value == "1"
        lines.append(match["head"] + value + match["tail"])
    unknown = sorted(set(constants) - set(names))
    if unknown:
        raise ValueError(f"{CONFIG} has no constant {', '.join(unknown)}; it has {', '.join(names)}")
    return "\n".join(lines), switches


def literal(kind: str, name: str, value: Constant) -> str:
    """Return `value` as a C++ literal or identifier; ValueError if it does not fit the kind of declaration."""
    if kind == "constexpr int" and type(value) is int and -(2**31) <= value < 2**31:
        return repr(value)
    if kind == "constexpr bool" and type(value) is bool:
        return "true" if value else "false"
    if kind == "#define" and type(value) is bool:
        return "1" if value else "0"
    if kind == "constexpr float" and type(value) in (int, float) and math.isfinite(float(value)):
        return repr(float(value)) + "f"
    if kind == "using" and isinstance(value, str) and re.fullmatch(IDENTIFIER, value, re.ASCII):
        return value
    raise ValueError(f"{name} of {CONFIG} ({kind}) cannot be {value!r}")


class Text:
    """Builder of one kernel's text."""

    def __init__(self, folder: Path, config: str, switches: Mapping[str, bool], headers: Mapping[str, str]) -> None:
        self.folder = folder
        self.headers = headers
        self.config = config
        self.switches = switches
        self.lines: list[str] = []
        self.inlined: set[str] = set()

    def inline(self, name: str, chain: tuple[str, ...]) -> None:
        """Append the file `name`, a path inside kernels_cu, with its headers inlined; `chain` is the include stack."""
        if name in chain:
            raise ValueError(f"include cycle: {' -> '.join((*chain, name))}")
        if name in self.inlined:
            return
        self.inlined.add(name)
        chain = (*chain, name)
        generated = self.config if name == CONFIG else self.headers.get(name)
        text = (self.folder / name).read_text(encoding="utf-8") if generated is None else generated
        counted = 0  # line number that the compiler would assign to the next line
        for number, line, certain in chosen_lines(text, self.switches, " -> ".join(chain)):
            directive = re.fullmatch(DIRECTIVE, line) if "#" in line else None
            if directive and directive["word"] == "include":
                location = f"{' -> '.join(chain)}:{number}"
                if not certain:
                    raise ValueError(f"{location}: an #include can only depend on a #define of {CONFIG}")
                self.inline(self.header(directive["rest"], name, location), chain)
            elif counted == number:
                self.lines.append(line)
                counted += 1
            elif line.strip():
                self.lines += [f'#line {number} "{name}"', line]
                counted = number + 1

    def header(self, operand: str, including: str, location: str) -> str:
        """Return the path inside kernels_cu of `#include operand`, relative to the file `including` or to the root."""
        if not re.fullmatch(r'"[\w./]+"', operand) or operand.startswith('"/'):
            raise ValueError(f'{location}: an #include names a file of kernels_cu as in "mask.cuh", not {operand}')
        for base in (posixpath.dirname(including), ""):
            path = posixpath.normpath(posixpath.join(base, operand.strip('"')))
            if path in self.headers:
                return path
            # Do not follow paths or links out of the folder.
            file = (self.folder / path).resolve()
            if file.is_file() and file.is_relative_to(self.folder):
                return path
        raise FileNotFoundError(f"{location}: {operand} is not a file of kernels_cu")


def chosen_lines(text: str, switches: Mapping[str, bool], location: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (number, line, unconditional) of the lines that remain after resolving `#if` on switches.

    `unconditional` is False inside an #if that the compiler resolves.
    """
    branches: list[bool | None] = []  # per open #if: whether this branch is taken; None if the compiler decides
    for number, line in enumerate(text.splitlines(), 1):
        directive = re.fullmatch(DIRECTIVE, line) if "#" in line else None
        word, operand = (directive["word"], directive["rest"]) if directive else ("", "")
        if word in ("if", "ifdef", "ifndef"):
            switch = re.fullmatch(r"(!?)(\w+)", operand) if word == "if" else None
            if switch and switch[2] in switches:
                branches.append(switches[switch[2]] != bool(switch[1]))
                continue
            branches.append(None)
        elif word in ("elif", "else", "endif"):
            if not branches:
                raise ValueError(f"{location}:{number}: #{word} without #if")
            if branches[-1] is not None and word == "elif":
                raise ValueError(
                    f"{location}:{number}: #elif cannot follow #if on a #define of {CONFIG}; nest the second #if"
                )
            branch = branches.pop()
            if word != "endif":
                branches.append(None if branch is None else not branch)
            if branch is not None:
                continue
        elif word == "pragma" and operand == "once":
            continue
        if False not in branches:
            yield number, line, None not in branches
    if branches:
        raise ValueError(f"{location}: #if without #endif")
