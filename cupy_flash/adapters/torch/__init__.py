"""Attention on torch tensors: gradients, compile, export, checkpointing, FSDP2, autocast; and the peers' signatures."""

from torch.nn.attention import register_flash_attention_impl

from .drop_in import (
    attention,
    attention_varlen,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    scaled_dot_product_attention,
    sdpa,
)
from .module import CausalSelfAttention
from .op import forward
from .registry import Activation

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
    "forward",
    "scaled_dot_product_attention",
    "sdpa",
]

# Known to torch, not active: that is torch.nn.attention.activate_flash_attention_impl("cupy_flash").
register_flash_attention_impl("cupy_flash", register_fn=Activation)
