"""Every import path that README, docs and examples show stays valid, however the package is arranged inside."""

from importlib import import_module

import pytest

import cupy_flash

TORCH = (
    "CausalSelfAttention",
    "attention",
    "attention_varlen",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flex_attention",
    "get_mla_metadata",
    "scaled_dot_product_attention",
    "sdpa",
    "varlen_attn",
)
XFORMERS = (
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
)
JAX = (
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
)
DISTRIBUTED = (
    "packed_rows",
    "positions",
    "ring_attention",
    "ring_attention_varlen",
    "ulysses_attention",
    "ulysses_attention_varlen",
)
MEMORY = (
    "Training",
    "Transformer",
    "coefficients",
    "estimate",
    "find_retained",
    "largest_batch",
    "load",
    "longest_sequence",
    "measure",
    "plot",
    "saved_by_block",
)
REFERENCE = (
    "Options",
    "Tangents",
    "attention",
    "attention_backward",
    "attention_double_backward",
    "attention_jvp",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_double_backward",
    "attention_varlen_jvp",
)
CORE = (
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
)
PATHS = {
    "cupy_flash": CORE,
    "cupy_flash.adapters.jax": JAX,
    "cupy_flash.adapters.torch": TORCH,
    "cupy_flash.adapters.transformers": ("register",),
    "cupy_flash.adapters.xformers": XFORMERS,
    "cupy_flash.distributed": DISTRIBUTED,
    "cupy_flash.memory": MEMORY,
    "cupy_flash.mods.plot": ("plot",),
    "cupy_flash.reference": REFERENCE,
}


@pytest.mark.parametrize("module", PATHS)
def test_the_names_that_users_import_exist(module):
    # Look twice, because the import of a submodule may replace a name of its package.
    for _ in range(2):
        missing = [name for name in PATHS[module] if not hasattr(import_module(module), name)]
        assert missing == []


def test_the_public_functions_are_callable_after_their_modules_are_imported():
    """A submodule with the name of a public function would hide the function once something imports it."""
    for name in set(CORE) - {"memory", "reference"}:
        getattr(cupy_flash, name)
    assert [
        name for name in CORE if name not in ("memory", "reference") and not callable(getattr(cupy_flash, name))
    ] == []


def test_all_lists_the_public_names():
    assert sorted(cupy_flash.__all__) == sorted(CORE)
