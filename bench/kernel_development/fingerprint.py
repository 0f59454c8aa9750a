"""A fingerprint of a kernel, by which stored results are recognised as stale.

It is the same if only comments, white space or names change, or constants, types and functions that the kernel does not
use.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from functools import lru_cache

from cupy_flash.engines.launch import Launch
from cupy_flash.jit.source import CONFIG, CONSTANT, IDENTIFIER, SWITCH, assemble

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
MARKER = re.compile(r'^#line \d+ "(.*)"\n', re.MULTILINE)
# A type or a function, as clang-format lays it out: from the first column to a brace in the first column.
DEFINITION = re.compile(
    rf"^(?:template <.*>\n)?(?:struct (?P<type>{IDENTIFIER})\b|__device__ [^(;=]*?\b(?P<function>{IDENTIFIER})\()"
    r"(?:[^\n]*\}|(?:[^\n]*\n)+?\});?\n",
    re.MULTILINE,
)
TOKEN = re.compile(rf'(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<name>{IDENTIFIER})|\.?\d[\w.]*|\S')
# Names that mean something to the compiler; all others may be renamed.
OF_THE_COMPILER = re.compile(
    r"__\w+|alignas|asm|auto|bool|break|case|char|class|const|constexpr|continue|decltype|default|define|defined|do|double"
    r"|elif|else|endif|enum|explicit|extern|false|float|for|goto|if|ifdef|ifndef|include|inline|int|long|maybe_unused"
    r"|namespace|new|noexcept|nullptr|once|operator|pragma|private|protected|public|return|short|signed|sizeof|static"
    r"|static_assert|struct|switch|template|this|true|typedef|typename|undef|union|unroll|unsigned|using|void|volatile"
    r"|while|threadIdx|blockIdx|blockDim|gridDim|dim3|(?:make_)?(?:u?(?:char|short|int|long|longlong)|float|double)[1-4]"
    r"|atomic(?:Add|Max|Min|CAS|Exch)|abs|min|max|(?:fabs|fmin|fmax|fma|fmod|exp|exp2|expm1|log|log2|log10|log1p|pow|sqrt"
    r"|rsqrt|cbrt|hypot|sin|cos|tan|sinh|cosh|tanh|asin|acos|atan|atan2|asinh|acosh|atanh|erf|erfc|floor|ceil|trunc|round"
    r"|rint|nearbyint|copysign|nan|isnan|isinf|isfinite|signbit|ldexp|frexp)f?"
)


def fingerprint(*launches: Launch) -> str:
    """Return the fingerprint of kernels, computed from their texts, constants, threads and shared memory."""
    parts = []
    for each in launches:
        text = assemble(each.kernel, dict(each.constants), dict(each.headers))
        parts.append(f"{_of_text(text)} {each.threads} {each.shared_bytes}\n")
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


@lru_cache(maxsize=4096)
def _of_text(text: str) -> str:
    return hashlib.sha256(normalised(text).encode()).hexdigest()


def normalised(text: str) -> str:
    """Return an assembled text without comments and white space, with names replaced by numbers in order of appearance.

    Adjacent strings are joined; types, functions and constants of config.cuh that the text does not use are left out.
    """
    _, *files = MARKER.split(text)
    pieces = list(zip(files[::2], (COMMENT.sub("", body) for body in files[1::2]), strict=True))
    used = _used("".join(body for file, body in pieces if file != CONFIG))
    constants = _constants_read("".join(body for file, body in pieces if file == CONFIG), used)
    numbers: dict[str, int] = {}
    tokens: list[str] = []
    for token in TOKEN.finditer(f"{constants}\n{used}"):
        name, string = token["name"], token["text"]
        if string and tokens and tokens[-1].startswith('"'):
            tokens[-1] = tokens[-1][:-1] + string[1:]
        elif name and not OF_THE_COMPILER.fullmatch(name):
            tokens.append(f"@{numbers.setdefault(name, len(numbers))}")
        else:
            tokens.append(token[0])
    return " ".join(tokens)


def _used(text: str) -> str:
    """Return a text without the types and functions that it does not use."""
    while True:
        counts = Counter(re.findall(IDENTIFIER, text))

        def kept(definition: re.Match[str], counts: Counter[str] = counts) -> str:
            name = definition["type"] or definition["function"]
            own = re.findall(IDENTIFIER, definition[0]).count(name)
            return definition[0] if counts[name] > own else ""

        shorter = DEFINITION.sub(kept, text)
        if shorter == text:
            return text
        text = shorter


def _constants_read(config: str, text: str) -> str:
    """Return the definitions of config.cuh whose names occur in the text."""
    read = set(re.findall(IDENTIFIER, text))
    lines = []
    for line in config.splitlines():
        constant = re.fullmatch(CONSTANT, line.strip()) or re.fullmatch(SWITCH, line.strip())
        if constant and constant["name"] in read:
            lines.append(line)
    return "\n".join(lines)
