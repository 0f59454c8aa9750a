"""Compiles CUDA text to cubin or PTX with NVRTC through ctypes; needs no toolkit, driver, GPU or CuPy.

NVRTC 12 or 13 is found with cuda-pathfinder: in a wheel of the extras cuda12 and cuda13, or in a toolkit. There is no
include path, so text, flags and compiler version determine the result.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

MISSING = (
    "NVRTC, NVIDIA's run-time compiler, was not found. Install the extra of your CUDA version: "
    'python -m pip install "cupy-flash[cuda13]" (or cuda12). CuPy\'s wheels "cupy-cuda13x[ctk]" (or 12x) contain it '
    "too, as does a CUDA toolkit in the folder CUDA_PATH."
)


class Resources(NamedTuple):
    """Resource usage of a kernel as ptxas reports it: registers per thread; the rest in bytes."""

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
    code: bytes  # cubin of an sm target, PTX text of a compute target
    log: str
    path: Path | None = None  # the file with `code`; None if not stored

    def __repr__(self) -> str:
        place = "" if self.path is None else f" in {self.path}"
        return f"<Compiled {self.name} for {self.target}: {len(self.code)} bytes{place}>"

    @property
    def ptx(self) -> str:
        """The PTX text of a compute target; ValueError for a cubin. `.file` lines name files relative to kernels_cu."""
        if not self.target.startswith("compute_"):
            raise ValueError(f"{self.name} was compiled for {self.target}: a cubin, not PTX; ask for a compute target")
        return self.code.decode()

    @property
    def resources(self) -> dict[str, Resources]:
        """Resource usage by kernel name, parsed from the log; empty for PTX, which ptxas has not compiled.

        Spills and stack include those of called functions that ptxas did not inline.
        """
        usage = {}
        _, *kernels = re.split(r"Compiling entry function '(\w+)'", self.log)
        for kernel, log in zip(kernels[::2], kernels[1::2], strict=True):
            frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
            registers, smem = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes smem", log)
            if registers is None or not frames:
                raise RuntimeError(f"the ptxas log of {kernel} cannot be parsed:\n{self.log}")
            stack, stores, loads = (sum(map(int, column)) for column in zip(*frames, strict=True))
            usage[kernel] = Resources(int(registers[1]), stack, stores, loads, int(smem[1]) if smem else 0)
        return usage

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warning lines of the log, including numbered infos: ptxas reports lost performance as "info (C7508) ..."."""
        return tuple(line for line in self.log.splitlines() if re.search(r"\bwarning\s*[:#]|\(C\d+\)", line))


class CompileError(RuntimeError):
    """NVRTC failed to compile a text. The log's file names and line numbers are those of kernels_cu."""

    def __init__(self, name: str, target: str, log: str, source: Path | None = None) -> None:
        super().__init__(name, target, log, source)
        self.name: str | None = name  # UnusableCompilerError inherits from ImportError too, whose name may be None
        self.target, self.log = target, log
        self.source = source  # file with the assembled text; None if it could not be written

    def __str__(self) -> str:
        saved = f" The assembled text is in {self.source}" if self.source else ""
        return f"NVRTC {'.'.join(map(str, version()))} cannot compile {self.name} for {self.target}.{saved}\n{self.log}"


class UnusableCompilerError(CompileError, ImportError):
    """NVRTC cannot compile any text for a target: it is too old, or its library of built-in functions is missing."""

    name: str  # as in CompileError


# NVRTC's status codes of compilations that fail for other reasons than the text.
OUT_OF_MEMORY, INVALID_OPTION, BUILTIN_OPERATION_FAILURE = 1, 5, 7


WITH_TENSOR_MEMORY = ("sm_100a", "sm_103a")
# Whether kernels check at run time, in code that ptxas adds, that their accesses to tensor memory are allocated,
# initialised and in the lanes of their warp. Set only in the worker process of a `check` that asks for it.
checks_tensor_memory = False


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libnvrtc, loaded once; ImportError if it is not installed."""
    from cuda import pathfinder

    try:
        return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except pathfinder.DynamicLibNotFoundError as error:
        raise ImportError(MISSING) from error


def path() -> Path:
    """Return the path of the loaded libnvrtc."""
    return Path(library()._name)


@lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    """Return (major, minor) of NVRTC's CUDA release."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@lru_cache(maxsize=1)
def identity() -> str:
    """Return the compiler's header in PTX, with release and build: 13.5.37 where `version` has only 13.5."""
    ptx = compile("", "identity", f"compute_{architectures()[0]}").ptx
    return ", ".join(line.strip("/ ") for line in ptx.splitlines() if line.startswith("// "))


def architectures() -> tuple[int, ...]:
    """Return the compute capabilities that this compiler supports, 90 for 9.0, without variants such as 90a."""
    count = ctypes.c_int()
    call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    call("nvrtcGetSupportedArchs", known)
    return tuple(known)


def flags(target: str) -> tuple[str, ...]:
    """Return all NVRTC flags for a target: "sm_90a" for a cubin, "compute_80" for PTX; ValueError if malformed."""
    if not re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", target):
        raise ValueError(f'target must be like "sm_90a" (a cubin) or "compute_80" (PTX), not {target!r}')
    # Without --no-source-include, NVRTC would search the working directory for headers.
    common = (f"--gpu-architecture={target}", "--std=c++17", "--no-source-include")
    if target.startswith("sm_"):
        checks = checks_tensor_memory and target in WITH_TENSOR_MEMORY
        of_ptxas = ("-v", "--g-tensor-memory-access-check")[: 1 + checks]  # -v logs registers and spills
        return (*common, *(f"--ptxas-options={option}" for option in of_ptxas))
    # The simulator needs source lines. Cubins get no line info, which would more than double their size.
    return (*common, "--generate-line-info")


def compile(text: str, name: str, target: str) -> Compiled:
    """Compile `text`, called `name` in messages, for `target`. Releases the GIL.

    Raises CompileError with the compiler's log, UnusableCompilerError if its reason is not the text, MemoryError,
    ValueError for a malformed target, ImportError without NVRTC.
    """
    options = [flag.encode() for flag in flags(target)]
    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        status = library().nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = output("ProgramLog", program).decode(errors="replace")
        if status == OUT_OF_MEMORY:
            raise MemoryError(f"NVRTC has too little memory to compile {name} for {target}")
        if status in (INVALID_OPTION, BUILTIN_OPERATION_FAILURE):
            raise UnusableCompilerError(name, target, log or error_string(status))
        if status != 0:
            raise CompileError(name, target, log or error_string(status))
        if target.startswith("sm_"):
            return Compiled(name, target, output("CUBIN", program), log)
        return Compiled(name, target, with_names_of(text, output("PTX", program).decode()).encode(), log)
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


def with_names_of(text: str, ptx: str) -> str:
    """Return `ptx` with the `.file` names reduced to those of the #line markers in `text`.

    NVRTC prefixes them with the working directory, which would make the PTX of equal texts differ.
    """
    # Longest first: a path that ends in mma/tile.cuh ends in tile.cuh too.
    names = sorted(set(re.findall(r'^#line \d+ "(.+)"$', text, re.MULTILINE)), key=len, reverse=True)

    def rename(line: re.Match[str]) -> str:
        path = line[2].replace("\\", "/")
        return line[1] + next((name for name in names if path.endswith("/" + name)), line[2]) + '"'

    return re.sub(r'^(\s*\.file\s+\d+\s+")(.*?)"', rename, ptx, flags=re.MULTILINE)


def output(kind: str, program: ctypes.c_void_p) -> bytes:
    """Fetch an output of a program from NVRTC; kind is "ProgramLog", "PTX" or "CUBIN"."""
    size = ctypes.c_size_t()
    call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    call(f"nvrtcGet{kind}", program, buffer)
    return buffer.raw if kind == "CUBIN" else buffer.value  # texts end at their NUL


def call(function: str, *arguments: object) -> None:
    """Call an NVRTC function; RuntimeError with NVRTC's error name if it fails."""
    status = getattr(library(), function)(*arguments)
    if status != 0:
        raise RuntimeError(f"{function} failed: {error_string(status)}")


def error_string(status: int) -> str:
    """Return NVRTC's name of a status code."""
    describe = library().nvrtcGetErrorString
    describe.restype = ctypes.c_char_p
    return str(describe(status).decode())
