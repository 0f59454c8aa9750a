"""Attention for jax: eager, and compiled through XLA's FFI on a CPU and on a GPU."""

from .op import attention, attention_varlen

__all__ = ["attention", "attention_varlen"]
