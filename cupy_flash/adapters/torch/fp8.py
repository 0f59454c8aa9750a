"""Dynamic fp8 quantization of q, k and v to e4m3.

There is one scale per sequence and key/value head, from the largest magnitude. The query heads of a GQA group share a
scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

LARGEST = 448.0  # largest finite e4m3
SMALLEST = 2.0**-100  # lower bound of the largest magnitude, so that 448 / magnitude is finite in float32


def require_roundable(arrays: tuple[Any, Any, Any], descales: Sequence[Any]) -> None:
    """Raise TypeError unless q, k, v are float16 or bfloat16, ValueError if descales are given."""
    dtypes = {x.dtype for x in arrays}
    if not dtypes <= {torch.float16, torch.bfloat16}:
        given = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise TypeError(f"fp8=True rounds q, k and v of float16 or bfloat16, not {given}")
    if any(x is not None for x in descales):
        raise ValueError(
            "fp8=True computes the descales itself: q_descale, k_descale and v_descale are for q, k, v in fp8"
        )


def rounded(call: Any) -> Any:
    """Return the call (op.Call) with q, k, v rounded to fp8, and their descales (B, Hk), fp32."""
    heads = {"bshd": 2, "bhsd": 1}[call.layout] if not call.is_packed else 1
    kv_heads = call.k.shape[heads]
    replaced: dict[str, Any] = {}
    for name, of_queries in (("q", True), ("k", False), ("v", False)):
        x = getattr(call, name)
        if call.is_packed:
            x, descale = _rounded_packed(x, kv_heads, call.cu_seqlens_q if of_queries else call.cu_seqlens_k)
        else:
            x, descale = _rounded_padded(x, kv_heads, heads, call.q_lengths if of_queries else call.kv_lengths)
        replaced |= {name: x, f"{name}_descale": descale}
    return call._replace(**replaced, fp8=False)


def _rounded_padded(x: Any, kv_heads: int, heads: int, lengths: Any) -> tuple[Any, Any]:
    """Round x (B, S, H, D) or (B, H, S, D), with heads in dimension `heads`, to fp8, and return descales (B, Hk).

    Rows from a sequence's length on are ignored.
    """
    rows = 3 - heads
    magnitudes = x.abs()
    if lengths is not None:
        valid = torch.arange(x.shape[rows], device=x.device) < lengths[:, None]  # (B, S)
        magnitudes = magnitudes.where(valid.unsqueeze(heads).unsqueeze(3), 0)
    largest = magnitudes.amax((rows, 3)).unflatten(1, (kv_heads, -1)).amax(2).float().clamp(min=SMALLEST)
    factors = (LARGEST / largest).repeat_interleave(x.shape[heads] // kv_heads, 1)
    return (x * factors.unsqueeze(rows).unsqueeze(3)).to(torch.float8_e4m3fn), largest / LARGEST


def _rounded_packed(x: Any, kv_heads: int, cu_seqlens: Any) -> tuple[Any, Any]:
    """Round x (T, H, D) to fp8, and return descales (B, Hk).

    Rows after the last sequence form a further sequence, whose scale is dropped.
    """
    sequences = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(len(x), device=x.device), right=True)
    of_rows = x.abs().amax(2).unflatten(1, (kv_heads, -1)).amax(2).float()
    largest = of_rows.new_full((len(cu_seqlens), kv_heads), SMALLEST)
    largest = largest.scatter_reduce(0, sequences[:, None].expand_as(of_rows), of_rows, "amax")
    factors = (LARGEST / largest)[sequences].repeat_interleave(x.shape[1] // kv_heads, 1)
    return (x * factors[:, :, None]).to(torch.float8_e4m3fn), (largest / LARGEST)[:-1]
