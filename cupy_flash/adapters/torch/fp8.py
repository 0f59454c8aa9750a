"""q, k and v in fp8: each number the nearest multiple, in e4m3, of what the largest of its sequence and key/value head
allows. The query heads of a group are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-100  # what counts as the largest of zeros: 448 times its inverse is a float32


def require_roundable(arrays: tuple[Any, Any, Any], descales: Sequence[Any]) -> None:
    """TypeError or ValueError for what is not rounded to fp8 here."""
    dtypes = {x.dtype for x in arrays}
    if not dtypes <= {torch.float16, torch.bfloat16}:
        given = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise TypeError(f"fp8=True rounds q, k and v of float16 or bfloat16, not {given}")
    if any(x is not None for x in descales):
        raise ValueError(
            "fp8=True finds the descales itself: q_descale, k_descale and v_descale are for q, k, v in fp8"
        )


def rounded(call: Any) -> Any:
    """A call (op.Call) in fp8, with its descales."""
    heads = {"bshd": 2, "bhsd": 1}[call.layout] if not call.is_packed else 1
    kv_heads = call.k.shape[heads]
    found: dict[str, Any] = {}
    for name, of_queries in (("q", True), ("k", False), ("v", False)):
        x = getattr(call, name)
        if call.is_packed:
            x, descale = _rounded_packed(x, kv_heads, call.cu_seqlens_q if of_queries else call.cu_seqlens_k)
        else:
            x, descale = _rounded_padded(x, kv_heads, heads, call.q_lengths if of_queries else call.kv_lengths)
        found |= {name: x, f"{name}_descale": descale}
    return call._replace(**found, fp8=False)


def _rounded_padded(x: Any, kv_heads: int, heads: int, lengths: Any) -> tuple[Any, Any]:
    """x (B, S, H, D), or with heads before the sequence; what lies past a length may be anything."""
    rows = 3 - heads
    magnitudes = x.abs()
    if lengths is not None:
        valid = torch.arange(x.shape[rows], device=x.device) < lengths[:, None]  # (B, S)
        magnitudes = magnitudes.where(valid.unsqueeze(heads).unsqueeze(3), 0)
    largest = magnitudes.amax((rows, 3)).unflatten(1, (kv_heads, -1)).amax(2).float().clamp(min=SMALLEST)
    factors = (LARGEST / largest).repeat_interleave(x.shape[heads] // kv_heads, 1)
    return (x * factors.unsqueeze(rows).unsqueeze(3)).to(torch.float8_e4m3fn), largest / LARGEST


def _rounded_packed(x: Any, kv_heads: int, cu_seqlens: Any) -> tuple[Any, Any]:
    """x (T, H, D); the rows past the last sequence are one more, of which nothing is kept."""
    sequences = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(len(x), device=x.device), right=True)
    of_rows = x.abs().amax(2).unflatten(1, (kv_heads, -1)).amax(2).float()
    largest = of_rows.new_full((len(cu_seqlens), kv_heads), SMALLEST)
    largest = largest.scatter_reduce(0, sequences[:, None].expand_as(of_rows), of_rows, "amax")
    factors = (LARGEST / largest)[sequences].repeat_interleave(x.shape[1] // kv_heads, 1)
    return (x * factors[:, :, None]).to(torch.float8_e4m3fn), (largest / LARGEST)[:-1]
