"""Attention for jax: eager, and compiled through XLA's FFI on a CPU and on a GPU."""

from .indexer import select_keys, selection_loss
from .kv_cache import append_to_kv_cache, attention_with_kv_cache
from .nn import dot_product_attention
from .op import attention, attention_jvp, attention_varlen
from .ring import ring_attention, ring_positions
from .weights import (
    attention_weights,
    attention_weights_varlen,
    key_importance,
    key_importance_varlen,
    top_weights,
    top_weights_varlen,
)

__all__ = [
    "append_to_kv_cache",
    "attention",
    "attention_jvp",
    "attention_varlen",
    "attention_weights",
    "attention_weights_varlen",
    "attention_with_kv_cache",
    "dot_product_attention",
    "key_importance",
    "key_importance_varlen",
    "ring_attention",
    "ring_positions",
    "select_keys",
    "selection_loss",
    "top_weights",
    "top_weights_varlen",
]
