"""Exact attention on every Python array, forward and backward, with memory linear in the sequence length."""

from . import memory
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
from .problem import Gradients, UnsupportedError

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_vjp",
    "compile",
    "explain",
    "memory",
    "merge",
]
