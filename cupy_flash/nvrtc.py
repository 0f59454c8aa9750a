"""CUDA text to cubin or PTX with NVRTC, through ctypes: no toolkit, no driver, no GPU, no CuPy.

NVRTC 12 and 13 alike, found with cuda-pathfinder: a wheel of the extras cuda12 and cuda13, or a toolkit. Nothing is
read but the text: there is no include path, so text, flags and compiler version say everything about the result.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

MISSING = (
    "NVRTC, NVIDIA's run-time compiler, was not found. The extra of your CUDA version brings it: "
    'python -m pip install "cupy-flash[cuda13]" (or cuda12). So do CuPy\'s wheels as "cupy-cuda13x[ctk]" (or 12x), '
    "and a CUDA toolkit whose folder CUDA_PATH names."
)


class Resources(NamedTuple):
    """What ptxas says one kernel takes: registers per thread, then bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem: int  # static shared memory


@dataclass(frozen=True)
class Compiled:
    """One text compiled for one target."""

    name: str  # "simt/forward"
    target: str  # "sm_90a", "compute_80"
    code: bytes  # the cubin of an sm target, the PTX text of a compute target
    log: str
    path: Path | None = None  # the file that holds `code`; None when it was not stored

    @property
    def ptx(self) -> str:
        """The text of a compute target. Its `.file` lines name files as the assembled text does."""
        if not self.target.startswith("compute_"):
            raise ValueError(f"{self.name} was compiled for {self.target}: a cubin, not PTX; ask for a compute target")
        return self.code.decode()

    @property
    def resources(self) -> dict[str, Resources]:
        """Of every kernel by its name; empty for PTX, which ptxas has not seen.

        Spills and stack include those of the functions that a kernel calls and ptxas did not inline.
        """
        found = {}
        _, *kernels = re.split(r"Compiling entry function '(\w+)'", self.log)
        for kernel, log in zip(kernels[::2], kernels[1::2], strict=True):
            frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
            registers, smem = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes smem", log)
            if registers is None or not frames:
                raise RuntimeError(f"ptxas wrote about {kernel} what is not understood:\n{self.log}")
            stack, stores, loads = (sum(map(int, column)) for column in zip(*frames, strict=True))
            found[kernel] = Resources(int(registers[1]), stack, stores, loads, int(smem[1]) if smem else 0)
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of the log that warn. ptxas says "info (C7508) ..." of what costs speed: numbered lines count too."""
        return tuple(line for line in self.log.splitlines() if re.search(r"\bwarning\s*[:#]|\(C\d+\)", line))


class CompileError(RuntimeError):
    """NVRTC refused a text. Its log names files and lines as they stand in kernels_cu."""

    def __init__(self, name: str, target: str, log: str, source: Path | None = None) -> None:
        super().__init__(name, target, log, source)
        self.name, self.target, self.log = name, target, log
        self.source = source  # the file that holds the assembled text, where one could be written

    def __str__(self) -> str:
        saved = f" The assembled text is in {self.source}" if self.source else ""
        return f"NVRTC {'.'.join(map(str, version()))} cannot compile {self.name} for {self.target}.{saved}\n{self.log}"


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libnvrtc, loaded once. ImportError where there is none."""
    from cuda import pathfinder

    try:
        return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except pathfinder.DynamicLibNotFoundError as error:
        raise ImportError(MISSING) from error


def path() -> Path:
    """The file that `library` has loaded."""
    return Path(library()._name)


@lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    """(major, minor) of the CUDA release that the compiler belongs to."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@lru_cache(maxsize=1)
def identity() -> str:
    """What the compiler writes of itself on top of all PTX: release and build, 13.5.37 where `version` says 13.5."""
    ptx = compile("", "identity", f"compute_{architectures()[0]}").ptx
    return ", ".join(line.strip("/ ") for line in ptx.splitlines() if line.startswith("// "))


def architectures() -> tuple[int, ...]:
    """The compute capabilities this compiler knows, 90 for 9.0; variants such as 90a are not listed."""
    count = ctypes.c_int()
    call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    call("nvrtcGetSupportedArchs", known)
    return tuple(known)


def flags(target: str) -> tuple[str, ...]:
    """All the flags of NVRTC for a target: "sm_90a" makes a cubin for that GPU, "compute_80" makes PTX."""
    if not re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", target):
        raise ValueError(f'target must be like "sm_90a" (a cubin) or "compute_80" (PTX), not {target!r}')
    # Without --no-source-include NVRTC would look for files beside the text's name, in the working directory.
    common = (f"--gpu-architecture={target}", "--std=c++17", "--no-source-include")
    if target.startswith("sm_"):
        return (*common, "--ptxas-options=-v")  # registers and spills into the log
    # The simulator names source lines. A cubin goes without: it would more than double in size.
    return (*common, "--generate-line-info")


def compile(text: str, name: str, target: str) -> Compiled:
    """Compiles `text`, called `name` in messages. ctypes lets other threads run meanwhile.

    Raises CompileError with the compiler's log, ValueError for a malformed target, ImportError without NVRTC.
    """
    options = [flag.encode() for flag in flags(target)]
    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        status = library().nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = output("ProgramLog", program).decode(errors="replace")
        if status != 0:
            raise CompileError(name, target, log or error_string(status))
        if target.startswith("sm_"):
            return Compiled(name, target, output("CUBIN", program), log)
        return Compiled(name, target, with_names_of(text, output("PTX", program).decode()).encode(), log)
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


def with_names_of(text: str, ptx: str) -> str:
    """PTX whose `.file` lines hold the names of the #line markers in `text`.

    NVRTC puts the working directory before them, and equal texts would give unequal PTX.
    """
    # Of two names that fit, mask.cuh and simt/mask.cuh, the longer is meant.
    names = sorted(set(re.findall(r'^#line \d+ "(.+)"$', text, re.MULTILINE)), key=len, reverse=True)

    def rename(line: re.Match[str]) -> str:
        path = line[2].replace("\\", "/")
        return line[1] + next((name for name in names if path.endswith("/" + name)), line[2]) + '"'

    return re.sub(r'^(\s*\.file\s+\d+\s+")(.*?)"', rename, ptx, flags=re.MULTILINE)


def output(kind: str, program: ctypes.c_void_p) -> bytes:
    """What NVRTC holds of a program: its "ProgramLog", "PTX" or "CUBIN"."""
    size = ctypes.c_size_t()
    call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    call(f"nvrtcGet{kind}", program, buffer)
    return buffer.raw if kind == "CUBIN" else buffer.value  # texts end at their NUL


def call(function: str, *arguments: Any) -> None:
    """Calls NVRTC; RuntimeError says what went wrong."""
    status = getattr(library(), function)(*arguments)
    if status != 0:
        raise RuntimeError(f"{function} failed: {error_string(status)}")


def error_string(status: int) -> str:
    """NVRTC's name of a status."""
    describe = library().nvrtcGetErrorString
    describe.restype = ctypes.c_char_p
    return str(describe(status).decode())
