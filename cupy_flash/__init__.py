"""Exact attention on every Python array, forward and backward, with memory linear in the sequence length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_vjp,
    compile,
    explain,
    merge,
)
from .kv_cache import append_to_kv_cache, attention_with_kv_cache, explain_with_kv_cache
from .problem import Gradients, UnsupportedError

if TYPE_CHECKING:
    from . import memory

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "UnsupportedError",
    "append_to_kv_cache",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_vjp",
    "attention_with_kv_cache",
    "compile",
    "explain",
    "explain_with_kv_cache",
    "memory",
    "merge",
]


if not TYPE_CHECKING:  # a type checker would take any name from it

    def __getattr__(name: str) -> Any:
        """Import `cupy_flash.memory` lazily, on first use."""
        if name == "memory":
            from importlib import import_module

            return import_module(".memory", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
