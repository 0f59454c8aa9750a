"""Decode transformers' MLA models from a cache of latent rows, without expanding them.

    python examples/latent_cache.py  # seconds on two CPU cores

DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, GLM-MoE-DSA and others keep one row per
token and layer: the compressed keys and values, and the rotated part of the keys.
transformers stores that row and expands it to all heads in every step. Here attention
reads the rows themselves: the weights that expand keys are applied to the query, and
those that expand values to the result, because q (W c) = (q W) c. The row is the key of
all heads, and its first numbers are the value: attention_with_kv_cache(q, rows, None,
head_dim_v=...) reads it once. The tokens are those of the expanded model.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.cache_utils import Cache, DynamicIndexedLayer

import cupy_flash
from cupy_flash.adapters.transformers import attention_mask as mask_of_patterns

NAME = "latent"
CAPACITY = 256  # tokens for which a layer has room


class LatentLayer(DynamicIndexedLayer):
    """The rows of a layer, (B, CAPACITY, 1, rank + rotary); `keys` and `values` are the
    columns of the tokens so far. Models with an indexer keep its keys beside them."""

    rows: Tensor | None = None

    def update(
        self, latent: Tensor, rotated: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        new, rank = (
            torch.cat((latent, rotated), dim=-1).transpose(1, 2),
            latent.shape[-1],
        )
        if self.rows is None:
            self.lazy_initialization(latent, rotated)
            self.rows = new.new_zeros(len(new), CAPACITY, 1, new.shape[-1])
        count = self.get_seq_length()
        cupy_flash.append_to_kv_cache(new, None, self.rows, None, cache_seqlens=count)
        rows = self.rows[:, : count + new.shape[1]].transpose(1, 2)
        self.keys, self.values = rows[..., :rank], rows[..., rank:]
        return self.keys, self.values


def latent_cache() -> Cache:
    """Return an empty cache, the past_key_values of `generate`."""
    return Cache(layer_class_to_replicate=LatentLayer)


def rows_of_cache(module: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, None]:
    """Return the rows (B, 1, S, D) and no values, in place of the model's expand_kv."""
    size = latent.shape[-1] + rotated.shape[-1]
    return latent.as_strided((*latent.shape[:-1], size), latent.stride()), None


def attend(
    module: Any,
    query: Tensor,
    rows: Tensor,
    value: None,
    attention_mask: Any,
    scaling: float | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return attention (B, S, H, v) of queries (B, H, S, D) to rows, of a batch without
    padding; `indices` are the keys that DeepSeek sparse attention has selected."""
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    expand = module.kv_b_proj.weight.view(query.shape[1], -1, rank)
    q = torch.cat((query[..., :nope] @ expand[:, :nope], query[..., nope:]), dim=-1)
    cache = rows.transpose(1, 2)
    out = cupy_flash.attention_with_kv_cache(
        q.transpose(1, 2),
        cache,
        None,
        cache_seqlens=cache.shape[1],
        head_dim_v=rank,
        scale=scaling,
        selected=None if indices is None else indices[:, None].to(torch.int32),
    )
    return torch.einsum("bshr,hvr->bshv", out, expand[:, nope:]), None


def absorb(model: Any) -> None:
    """Let a model attend to latent rows; past_key_values must be a latent_cache()."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of_patterns)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = MethodType(rows_of_cache, module)


def main() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(
        config, experts_implementation="eager"
    ).eval()
    prompt = torch.randint(256, (2, 40))
    options = dict(max_new_tokens=40, do_sample=False)
    expanded = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    absorb(model)
    cache = latent_cache()
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **options
    )
    heads = 4 * config.num_attention_heads * (2 * config.qk_nope_head_dim + 8)
    equal = (tokens == expanded).float().mean()
    print(f"tokens equal to those of the expanded model: {equal:.1%}")
    print(f"bytes a token and layer: {4 * (config.kv_lora_rank + 8)}, expanded {heads}")


if __name__ == "__main__":
    main()
