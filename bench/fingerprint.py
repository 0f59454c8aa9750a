"""A fingerprint of a kernel, by which stored results are recognised as stale.

It is the same if only comments, white space or names change, or constants that the kernel does not read.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from cupy_flash.launch import Launch
from cupy_flash.source import CONFIG, CONSTANT, IDENTIFIER, SWITCH, assemble

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
MARKER = re.compile(r'^#line \d+ "(.*)"\n', re.MULTILINE)
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
    """Return the fingerprint of kernels: of their texts with constants, threads and shared memory."""
    parts = []
    for each in launches:
        text = assemble(each.kernel, dict(each.constants), dict(each.headers))
        parts.append(f"{_of_text(text)} {each.threads} {each.shared_bytes}\n")
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


@lru_cache(maxsize=4096)
def _of_text(text: str) -> str:
    return hashlib.sha256(normalised(text).encode()).hexdigest()


def normalised(text: str) -> str:
    """Return an assembled text without comments and white space, its names numbered in their order.

    Adjacent strings are joined, and constants of config.cuh that the text does not read are left out.
    """
    before, *files = MARKER.split(text)
    pieces = list(zip(files[::2], (COMMENT.sub("", body) for body in files[1::2]), strict=True))
    read = set(re.findall(IDENTIFIER, "\n".join(body for file, body in pieces if file != CONFIG)))
    bodies = [before] + [_constants_read(body, read) if file == CONFIG else body for file, body in pieces]
    numbers: dict[str, int] = {}
    tokens: list[str] = []
    for token in TOKEN.finditer("\n".join(bodies)):
        name, string = token["name"], token["text"]
        if string and tokens and tokens[-1].startswith('"'):
            tokens[-1] = tokens[-1][:-1] + string[1:]
        elif name and not OF_THE_COMPILER.fullmatch(name):
            tokens.append(f"@{numbers.setdefault(name, len(numbers))}")
        else:
            tokens.append(token[0])
    return " ".join(tokens)


def _constants_read(config: str, read: set[str]) -> str:
    """Return the definitions of config.cuh that define a name of `read`."""
    lines = []
    for line in config.splitlines():
        constant = re.fullmatch(CONSTANT, line.strip()) or re.fullmatch(SWITCH, line.strip())
        if constant and constant["name"] in read:
            lines.append(line)
    return "\n".join(lines)
