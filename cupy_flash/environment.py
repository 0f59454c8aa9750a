"""The environment variables that cupy_flash reads: all of them, and only here."""

import os


def backend() -> str | None:
    """CUPY_FLASH_BACKEND: the backend of every call that names none; None when unset or empty."""
    return os.environ.get("CUPY_FLASH_BACKEND") or None


def cache_dir() -> str | None:
    """CUPY_FLASH_CACHE_DIR: the folder of compiled kernels; None when unset or empty."""
    return os.environ.get("CUPY_FLASH_CACHE_DIR") or None
