"""Attention on torch tensors, under every transform; the APIs of SDPA, FlexAttention, varlen_attn and flash-attn."""

from torch import distributed
from torch.nn.attention import register_flash_attention_impl

from .api import attention, attention_varlen
from .flash_attn_drop_in import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .flash_mla_drop_in import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from .flex_attention_drop_in import flex_attention
from .kv_cache_drop_in import flash_attn_with_kvcache
from .module import CausalSelfAttention
from .registry import Activation
from .sdpa_drop_in import multi_head_attention_forward, scaled_dot_product_attention, sdpa
from .transforms import forward
from .varlen_attn_drop_in import varlen_attn

__all__ = [
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
    "forward",
    "get_mla_metadata",
    "multi_head_attention_forward",
    "scaled_dot_product_attention",
    "sdpa",
    "varlen_attn",
]

# torch.nn.attention.activate_flash_attention_impl("cupy_flash") activates the implementation registered here.
register_flash_attention_impl("cupy_flash", register_fn=Activation)

if distributed.is_available():  # not in every build of torch
    from . import sharding  # noqa: F401  # registers the strategies for DTensor, a part of torch.distributed
