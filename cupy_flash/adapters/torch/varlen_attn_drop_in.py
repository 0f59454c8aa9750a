"""torch's varlen_attn by cupy_flash: packed sequences, keys in use, and the pages of a KV cache, on the CPU too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...problem.build import pose
from ...problem.records import Options, Packed, UnsupportedError
from .kv_cache_drop_in import attend_to_pages
from .op import as_int32
from .transforms import forward

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute torch.nn.attention.varlen.varlen_attn with cupy_flash, in every dtype that it serves.

    out and lse are differentiable; as in torch, not with seqused_k or block_table.

    Args:
        query: (Tq, Hq, D).
        key: (Tk, Hk, D), or pages (pages, P, Hk, D) with block_table.
        value: (Tk, Hk, Dv), or pages likewise.
        cu_seq_q: int32 (B + 1,), as cu_seqlens_q of `cupy_flash.attention_varlen`; int64 in host memory is cast.
        cu_seq_k: likewise for the keys; with block_table it or seqused_k gives the number of keys of each sequence.
        max_q: at least the longest sequence of queries.
        max_k: at least the longest sequence of keys; not read with block_table.
        return_aux: with lse=True, return (out, lse).
        scale: default 1 / sqrt(D).
        window_size: (left, right), -1 unbounded, from the diagonal that ends at the last query and the last key.
        enable_gqa: query head h reads key/value head h // (Hq // Hk). Without it, Hq and Hk must be equal.
        seqused_k: int32 (B,): only that many keys of each sequence are read.
        block_table: int32 (B, columns): key j of sequence b is row j % P of page block_table[b, j // P].
        num_splits: with block_table or seqused_k the pieces into which the keys are split, for torch's promise of 1:
            the bits of a sequence then do not depend on the others. Without them the keys are never split, but tiles
            depend on max_q and max_k.

    Returns:
        out (Tq, Hq, Dv), or (out, lse) with lse (Hq, Tq), as torch's function returns it.

    Raises:
        TypeError: as `cupy_flash.attention_varlen`.
        ValueError: likewise.
        UnsupportedError: likewise; for more than one piece of packed keys.
    """
    tensors = (query, key, value)
    reasons = _unmet(tensors, enable_gqa, return_aux)
    with_lse = getattr(return_aux, "lse", False) is True
    options = Options(scale=scale, window=window_size, return_lse=with_lse)
    packed = Packed(as_int32(cu_seq_q), as_int32(cu_seq_k), max_q, max_k)
    if reasons:
        _refuse(tensors, options, None if block_table is not None else packed, reasons)
    if block_table is None and seqused_k is not None:
        table = _rows_of_keys(key, packed.cu_seqlens_k, max_k)
        key, value, block_table = key.unsqueeze(1), value.unsqueeze(1), table
    if block_table is not None:
        return attend_to_pages(
            "varlen_attn", query, key, value, block_table, cu_seq_q, cu_seq_k, max_q, seqused_k, dropout_p=0.0,
            softmax_scale=scale, causal=False, window_size=window_size, alibi_slopes=None, num_splits=num_splits or 0,
            return_softmax_lse=with_lse,
        )  # fmt: skip
    if (num_splits or 1) > 1:
        raise UnsupportedError(f"varlen_attn: num_splits={num_splits} of packed keys, which are never split")
    return forward("attention_varlen", tensors, options, packed)


def _unmet(tensors: tuple[Any, ...], enable_gqa: Any, return_aux: Any) -> tuple[str, ...]:
    """Return the requirements of torch's signature that a call does not meet; `pose` checks all others."""
    reasons = []
    if not (return_aux is None or isinstance(getattr(return_aux, "lse", None), bool)):
        reasons.append(f"return_aux must be torch's AuxRequest, not {type(return_aux).__name__}")
    if all(isinstance(x, torch.Tensor) and x.dim() >= 3 for x in tensors):
        heads, kv_heads, v_heads = (x.shape[-2] for x in tensors)
        if not enable_gqa and not heads == kv_heads == v_heads:
            reasons.append(f"{heads} heads of query, {kv_heads} of key and {v_heads} of value need enable_gqa=True")
    return tuple(reasons)


@torch.compiler.disable  # torch.compile cannot trace what pose does with memory
def _refuse(tensors: tuple[Any, ...], options: Options, packed: Packed | None, reasons: tuple[str, ...]) -> None:
    """Raise the one error with `reasons` and, for packed keys, all those of `pose`."""
    if packed is None:
        raise ValueError(f"varlen_attn: {'; '.join(reasons)}")
    pose("varlen_attn", tensors, options, packed, reasons=reasons)


def _rows_of_keys(key: Any, cu_seqlens_k: Any, max_k: int) -> Any:
    """Return the block table of packed keys as pages of one key, int32 (B, max_k); the last rows may repeat."""
    columns = torch.arange(max(max_k, 1), dtype=torch.int32, device=key.device)
    return (cu_seqlens_k[:-1, None] + columns).clamp(max=max(key.shape[0] - 1, 0))
