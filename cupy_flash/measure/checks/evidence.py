"""Finds the kernels, besides those of this package, that confirm how the simulator executes an instruction.

A form of an instruction is confirmed either by a kernel in Triton or Gluon, whose compilers are used on GPUs every day
and which gives right results in the simulator (tests/other_kernels), or by a micro-kernel whose results follow from
the PTX ISA and not from the simulator's code (Kernel.expected, tests/simulator/test_simulator_conformance.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .instructions import CASES, WARP_CASES
from .micro_kernels import kernels

# {form: a case of tests/other_kernels}; python -m other_kernels.instruction_forms writes the file.
FILE = Path(__file__).with_name("other_kernels.json")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:^|[;{}:])\s*(?:@!?%\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?=[\s;\[])([^;]*)", re.MULTILINE)
_HINT = re.compile(r"\.(nc|uni|tile|L1::\w+|L2::\w+|ca|cg(?=\.))(?=\.|$)")
# Opcodes that move or compare bits: only the size of their type affects the result.
_UNTYPED = {"ld", "st", "mov", "selp", "setp.eq", "setp.ne"}
# Opcodes with the same result for signed and unsigned integers.
_SIGNLESS = {"add", "sub", "mul.lo", "mad.lo"}


class Evidence(NamedTuple):
    """The kernels that confirm a form of an instruction: at most one of each kind, None if there is none."""

    form: str
    other_kernel: str | None
    micro_kernel: str | None


def forms(ptx: str) -> set[str]:
    """Return the forms of the instructions in a PTX text: their names without the parts that affect no result.

    These parts are cache hints, the kind of a type of which only the size matters, the default rounding, the number of
    parameters read at once, and the width N of wgmma. The form of a wgmma also says whether A comes from registers.
    """
    found = (_form(name, operands) for name, operands in _INSTRUCTION.findall(_COMMENT.sub("", ptx)))
    return {form for form in found if "." in form}  # leave out bra, exit and ret


def _form(name: str, operands: str) -> str:
    name = re.sub(r"^ld\.param\.v\d", "ld.param", _HINT.sub("", _HINT.sub("", name)))
    opcode = name.split(".")[0]
    if opcode == "wgmma" and "mma_async" in name:
        in_registers = "{" in operands.split("}", 1)[-1]
        return re.sub(r"(m64)n\d+", r"\1nN", name) + (" A in registers" if in_registers else "")
    if name.startswith(tuple(f"{untyped}." for untyped in _UNTYPED)) and not (
        opcode == "ld" and name[-3:] in (".s8", "s16")
    ):
        name = re.sub(r"\.[usf](\d+)$", r".b\1", name)
    elif name.startswith(tuple(f"{signless}." for signless in _SIGNLESS)):
        name = re.sub(r"\.s(\d+)$", r".u\1", name)
    return re.sub(r"^(add|sub|mul)\.rn\.", r"\1.", name)


def evidence_for(texts: Iterable[str]) -> list[Evidence]:
    """Return the evidence for each form in these PTX texts, sorted by form."""
    every = sorted(set().union(*map(forms, texts)))
    return [Evidence(form, other_kernels().get(form), micro_kernels().get(form)) for form in every]


@cache
def other_kernels() -> dict[str, str]:
    """Return {form: the first case of tests/other_kernels with it}."""
    stored: dict[str, str] = json.loads(FILE.read_text("ascii"))
    return stored


@cache
def micro_kernels() -> dict[str, str]:
    """Return {form: the first micro-kernel with it, whose results follow from the PTX ISA}."""
    transcribed = {case.name for case in (*CASES, *WARP_CASES)}
    found: dict[str, str] = {}
    for kernel in sorted(kernels(), key=lambda kernel: kernel.expected is not None):
        if kernel.expected is not None or kernel.name in transcribed:
            for form in forms(kernel.text):
                found.setdefault(form, kernel.name)
    return found
