"""Reads all environment variables of cupy_flash; no other module reads any."""

import ctypes
import os
import sys
from typing import Any

if os.name == "posix":
    # C's getenv sees what is assigned to os.environ, which for a variable that is not set raises and catches two
    # exceptions: 5 us of a call of attention. PyDLL keeps the GIL, under which Python changes the environment.
    _getenv: Any = ctypes.PyDLL(None).getenv
    _getenv.argtypes, _getenv.restype = (ctypes.c_char_p,), ctypes.c_char_p
else:

    def _getenv(name: bytes) -> Any:
        return os.environ.get(name.decode())


def backend() -> str | None:
    """CUPY_FLASH_BACKEND: the default backend; None if unset or empty."""
    name = _getenv(b"CUPY_FLASH_BACKEND")
    return os.fsdecode(name) if name else None


def libraries() -> tuple[str | None, ...]:
    """Return sys.prefix and the variables that decide in which folders a process finds CUDA libraries."""
    names = ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")
    return sys.prefix, *map(os.environ.get, names)


def cache_dir() -> str | None:
    """CUPY_FLASH_CACHE_DIR: the folder of compiled kernels; None if unset or empty."""
    return os.environ.get("CUPY_FLASH_CACHE_DIR") or None


def evidence_dir() -> str | None:
    """CUPY_FLASH_EVIDENCE_DIR: a read-only folder of evidence that several machines share; None if unset or empty."""
    return os.environ.get("CUPY_FLASH_EVIDENCE_DIR") or None


def record_file() -> str | None:
    """CUPY_FLASH_RECORD: a file to which a process appends the calls that it makes; None if unset or empty."""
    return os.environ.get("CUPY_FLASH_RECORD") or None
