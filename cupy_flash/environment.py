"""The environment variables that cupy_flash reads: all of them, and only here."""

import os
import sys


def backend() -> str | None:
    """CUPY_FLASH_BACKEND: the backend of every call that names none; None when unset or empty."""
    return os.environ.get("CUPY_FLASH_BACKEND") or None


def libraries() -> tuple[str | None, ...]:
    """What decides which library of CUDA a process finds: its environment of Python, and the variables of others that
    name folders."""
    names = ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")
    return sys.prefix, *map(os.environ.get, names)


def cache_dir() -> str | None:
    """CUPY_FLASH_CACHE_DIR: the folder of compiled kernels; None when unset or empty."""
    return os.environ.get("CUPY_FLASH_CACHE_DIR") or None
