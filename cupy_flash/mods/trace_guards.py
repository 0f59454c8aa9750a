"""Guards of a trace: expressions that fetch captured values in a later call, and conditions for reusing the trace.

Both are Python expressions over the call's functions `f0` (score_mod) and `f1` (mask_mod), for example
`f0.__closure__[1].cell_contents`. They are compiled to one function, which returns the arrays and numbers of a call in
one or two microseconds, or None if the call must be traced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from .ir import ARGUMENTS, INT32

LOCAL = r"\bv\d+\b"


class CapturedArray(Protocol):
    """An array of some library, as a mod captures it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""

    @property
    def dtype(self) -> object:
        """The dtype, an object of the array's library."""


# (score_mod, mask_mod) -> (arrays, numbers); it returns None for a call that must be traced
Collect: TypeAlias = Callable[[object, object], tuple[tuple[CapturedArray, ...], tuple[int | float, ...]] | None]


class Sources:
    """The expressions and conditions of one trace, in the order in which the trace needed them."""

    def __init__(self) -> None:
        self.reproducible = True  # False if the trace read a value that no expression can fetch in a later call
        self._steps: list[tuple[str, str]] = []  # (local, expression), or ("", condition)
        self._locals: dict[str, str] = {}  # expression -> name of the local
        self._constants: dict[str, object] = {}
        self._conditions: set[str] = set()

    def reach(self, expression: str) -> str:
        """Return a local variable that holds the value of the expression."""
        local = self._locals.get(expression)
        if local is None:
            local = self._locals[expression] = f"v{len(self._locals)}"
            self._steps.append((local, expression))
        return local

    def constant(self, value: object) -> str:
        """Return an expression for a value that the trace holds."""
        if type(value) is int or (type(value) is float and math.isfinite(value)):
            return f"({value!r})"
        name = next((name for name, other in self._constants.items() if other is value), None)
        if name is None:
            name = f"c{len(self._constants)}"
            self._constants[name] = value
        return name

    def release(self) -> None:
        """Release the values of the trace; a compiled function of `collect` holds its own references."""
        self._constants.clear()

    def require(self, condition: str) -> None:
        """Reuse this trace in a later call only if the condition holds."""
        if condition not in self._conditions:
            self._conditions.add(condition)
            self._steps.append(("", condition))

    def collect(self, arrays: list[str], numbers: list[str]) -> Collect:
        """Compile the guards to a function (score_mod, mask_mod) -> (arrays, numbers), None if the trace is invalid."""
        results = [f"({''.join(f'{item}, ' for item in items)})" for items in (arrays, numbers)]
        needed = self._needed([condition for local, condition in self._steps if not local] + results)
        lines = ["def collect(f0, f1):", "    try:"]
        for local, expression in self._steps:
            if not local:
                lines.append(f"        if not ({expression}): return None")
            elif local in needed:
                lines.append(f"        {local} = {expression}")
        lines += [f"        return {', '.join(results)}", "    except Exception: return None"]
        namespace: dict[str, Any] = {**self._constants, "ARGUMENTS": ARGUMENTS, "INT32": INT32}
        exec(compile("\n".join(lines), "<the captured values of a mod>", "exec"), namespace)
        collect: Collect = namespace["collect"]
        return collect

    def _needed(self, expressions: list[str]) -> set[str]:
        """Return the locals that expressions use, directly or through other locals."""
        definitions = dict(self._steps)
        needed: set[str] = set()
        while expressions:
            names = set(re.findall(LOCAL, expressions.pop())) - needed
            needed |= names
            expressions += [definitions[name] for name in names]
        return needed
