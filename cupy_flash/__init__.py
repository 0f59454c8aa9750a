"""Exact attention on every Python array, forward and backward, with memory linear in the sequence length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api import (
    attention,
    attention_backward,
    attention_double_backward,
    attention_jvp,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_double_backward,
    attention_varlen_jvp,
    attention_vjp,
    compile,
    explain,
    merge,
)
from .kv_cache import append_to_kv_cache, attention_with_kv_cache, explain_with_kv_cache
from .problem.records import Gradients, SecondGradients, Statistics, UnsupportedError

if TYPE_CHECKING:
    from . import memory, reference
    from .indexer import select_keys, selection_loss, selection_loss_vjp
    from .mask_blocks import block_mask, selected_from_block_mask
    from .measure.checks.verdicts import check
    from .measure.tuning import tune
    from .mods.masks import and_masks, noop_mask, not_mask, or_masks
    from .mods.trace import Mod
    from .problem.weights import WeightsGradients
    from .weights import (
        attention_weights,
        attention_weights_varlen,
        attention_weights_vjp,
        attention_weights_with_kv_cache,
        key_importance,
        key_importance_varlen,
        key_importance_vjp,
        key_importance_with_kv_cache,
        top_weights,
        top_weights_varlen,
        top_weights_with_kv_cache,
    )

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "Mod",
    "SecondGradients",
    "Statistics",
    "UnsupportedError",
    "WeightsGradients",
    "and_masks",
    "append_to_kv_cache",
    "attention",
    "attention_backward",
    "attention_double_backward",
    "attention_jvp",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_double_backward",
    "attention_varlen_jvp",
    "attention_vjp",
    "attention_weights",
    "attention_weights_varlen",
    "attention_weights_vjp",
    "attention_weights_with_kv_cache",
    "attention_with_kv_cache",
    "block_mask",
    "check",
    "compile",
    "explain",
    "explain_with_kv_cache",
    "key_importance",
    "key_importance_varlen",
    "key_importance_vjp",
    "key_importance_with_kv_cache",
    "memory",
    "merge",
    "noop_mask",
    "not_mask",
    "or_masks",
    "reference",
    "select_keys",
    "selected_from_block_mask",
    "selection_loss",
    "selection_loss_vjp",
    "top_weights",
    "top_weights_varlen",
    "top_weights_with_kv_cache",
    "tune",
]


MODULES = ("memory", "reference")
LAZY = dict.fromkeys(("and_masks", "noop_mask", "not_mask", "or_masks"), ".mods.masks")
LAZY |= {"Mod": ".mods.trace", "block_mask": ".mask_blocks", "selected_from_block_mask": ".mask_blocks"}
LAZY |= {"WeightsGradients": ".problem.weights"}
LAZY |= dict.fromkeys(
    (
        "attention_weights",
        "attention_weights_varlen",
        "attention_weights_vjp",
        "attention_weights_with_kv_cache",
        "key_importance",
        "key_importance_varlen",
        "key_importance_vjp",
        "key_importance_with_kv_cache",
        "top_weights",
        "top_weights_varlen",
        "top_weights_with_kv_cache",
    ),
    ".weights",
)
LAZY |= dict.fromkeys(("select_keys", "selection_loss", "selection_loss_vjp"), ".indexer")
LAZY |= {"check": ".measure.checks.verdicts", "tune": ".measure.tuning"}

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every name

    def __getattr__(name: str) -> Any:
        """Import a submodule of MODULES, or the name in LAZY, at its first use."""
        from importlib import import_module

        if name in MODULES:
            return import_module(f".{name}", __name__)
        if name in LAZY:
            return getattr(import_module(LAZY[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
