"""A minimal causal self-attention layer."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch

from .api import attention


class CausalSelfAttention(torch.nn.Module):
    """Multi-head causal self-attention, (B, S, embed_dim) -> (B, S, embed_dim).

    The submodule `qkv` projects to the queries, keys and values of all heads, in this order; `proj` is the output
    projection.

    Args:
        embed_dim: a positive multiple of num_heads; each head has embed_dim // num_heads dimensions.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads (GQA). None: num_heads.
        dropout: dropout probability of the attention probabilities, in [0, 1), in training mode.
        bias: whether both projections have a bias.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: sizes do not divide, or dropout is out of range.
        TypeError: sizes or dropout are not numbers.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads, num_kv_heads = (
            _whole(name, value)
            for name, value in (
                ("embed_dim", embed_dim),
                ("num_heads", num_heads),
                ("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads),
            )
        )
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(
                f"CausalSelfAttention: embed_dim {embed_dim} must be a positive multiple of num_heads {num_heads}"
            )
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"CausalSelfAttention: num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}"
            )
        _require_probability(dropout)
        self.head_dim = embed_dim // num_heads
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.dropout = dropout
        self.qkv = torch.nn.Linear(embed_dim, sum(self.heads) * self.head_dim, bias, device, dtype)
        self.proj = torch.nn.Linear(embed_dim, embed_dim, bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            x: (B, S, embed_dim).

        Returns:
            (B, S, embed_dim).
        """
        qkv = self.qkv(x).unflatten(-1, (sum(self.heads), self.head_dim))
        q, k, v = qkv.split(self.heads, dim=-2)  # (B, S, H, D) each, views
        out = attention(q, k, v, causal=True, dropout=self.dropout if self.training else 0.0)
        return self.proj(out.flatten(-2))


def _whole(name: str, value: Any) -> int:
    """Return value as an int; TypeError unless it is a whole number."""
    try:
        return operator.index(value)
    except Exception as error:  # foreign objects may raise anything
        raise TypeError(f"CausalSelfAttention: {name} must be a whole number, not {value!r}") from error


def _require_probability(dropout: Any) -> None:
    """Raise TypeError unless dropout is a number, ValueError unless it is in [0, 1)."""
    if isinstance(dropout, bool) or not isinstance(dropout, Real):
        raise TypeError(f"CausalSelfAttention: dropout must be a number, not {dropout!r}")
    if not 0 <= float(dropout) < 1:
        raise ValueError(f"CausalSelfAttention: dropout must be in [0, 1), not {dropout!r}")
