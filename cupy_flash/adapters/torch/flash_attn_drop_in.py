"""flash-attn 2's functions on torch tensors, padded, varlen and packed in one tensor, with vLLM's arguments."""

from __future__ import annotations

from typing import Any

import torch

from ...problem.records import Options, Packed, UnsupportedError
from .kv_cache_drop_in import attend_to_pages
from .op import as_int32, is_zero
from .transforms import forward


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_func of flash-attn 2, with a bottom-right causal diagonal.

    Args:
        q: (B, Sq, Hq, D).
        k: (B, Sk, Hk, D).
        v: (B, Sk, Hk, D).
        dropout_p: dropout probability.
        softmax_scale: default 1 / sqrt(D).
        causal: hide the keys after a query; the last query sees all keys.
        window_size: (left, right), -1 unbounded, as `window` of `cupy_flash.attention`.
        softcap: 0.0 means no softcap.
        alibi_slopes: float32 (Hq,) or (B, Hq).
        deterministic: gradients bitwise equal from run to run.
        return_attn_probs: also return softmax_lse and None.

    Returns:
        out (B, Sq, Hq, D), or with return_attn_probs (out, softmax_lse, None); softmax_lse (B, Hq, Sq) is `lse` of
        `cupy_flash.attention`, and flash-attn's third result, the probabilities, is never computed.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend((q, k, v), options, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    s_aux: torch.Tensor | None = None,
    scheduler_metadata: object = None,
    fa_version: int | None = None,
) -> Any:
    """Compute flash_attn_varlen_func of flash-attn 2: `flash_attn_func` of packed sequences.

    Keyword-only arguments are vLLM's. With block_table, k and v are the pages of a KV cache, and no gradients are
    recorded: the call is `cupy_flash.attention_with_kv_cache` on packed queries, with nothing to append.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hk, D), or pages (pages, P, Hk, D) with block_table.
        v: (Tk, Hk, D), or pages likewise.
        cu_seqlens_q: int32 (B + 1,), here and in the varlen functions below; int64 in host memory is cast.
        cu_seqlens_k: likewise for the keys; with block_table, it or seqused_k gives the number of keys of each
        sequence.
        max_seqlen_q: at least the longest sequence of queries.
        max_seqlen_k: at least the longest sequence of keys; not read with block_table, whose columns are the capacity.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.
        block_table: int32 (B, columns): key j of sequence b is row j % P of page block_table[b, j // P].
        seqused_k: int32 (B,), with block_table: the keys of each sequence.
        out: with block_table: an array for the result.
        return_softmax_lse: with block_table: return (out, softmax_lse).
        q_descale: UnsupportedError unless None: q has 16 bit beside pages of float8_e4m3fn.
        k_descale: float32 (B, Hk), with block_table and pages of float8_e4m3fn.
        v_descale: likewise.
        num_splits: with block_table, as in `flash_attn_with_kvcache`.
        s_aux: floating (Hq,), `sink` of `cupy_flash.attention`.
        scheduler_metadata: ignored, as is fa_version: they choose among flash-attn's kernels.
        fa_version: ignored.

    Returns:
        out (Tq, Hq, D), or (out, softmax_lse, None) with softmax_lse (Hq, Tq).

    Raises:
        UnsupportedError: dropout with block_table, or an argument for pages without it.
    """
    if block_table is not None:
        name = "flash_attn_varlen_func"
        if q_descale is not None:
            raise UnsupportedError(f"{name}: q_descale: beside pages of float8_e4m3fn q has 16 bit")
        result = attend_to_pages(
            name, q, k, v, block_table, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k, dropout_p=dropout_p,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, sink=s_aux, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits,
            out=out, return_softmax_lse=bool(return_softmax_lse or return_attn_probs),
        )  # fmt: skip
        return (*result, None) if return_attn_probs else result
    _refuse_without_pages(
        "flash_attn_varlen_func", seqused_k=seqused_k, out=out, return_softmax_lse=return_softmax_lse or None,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits or None,
    )  # fmt: skip
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options.sink = s_aux
    packed = Packed(as_int32(cu_seqlens_q), as_int32(cu_seqlens_k), max_seqlen_q, max_seqlen_k)
    return _attend((q, k, v), options, return_attn_probs, packed)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_kvpacked_func of flash-attn 2: `flash_attn_func` with k and v in one tensor.

    Args:
        q: (B, Sq, Hq, D).
        kv: (B, Sk, 2, Hk, D).
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.
    """
    k, v = _unpacked("flash_attn_kvpacked_func", "kv", kv, "(B, Sk, 2, Hk, D)")
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_varlen_kvpacked_func of flash-attn 2: `flash_attn_varlen_func` with k and v in one tensor.

    Args:
        q: (Tq, Hq, D).
        kv: (Tk, 2, Hk, D).
        cu_seqlens_q: as in `flash_attn_varlen_func`.
        cu_seqlens_k: as in `flash_attn_varlen_func`.
        max_seqlen_q: as in `flash_attn_varlen_func`.
        max_seqlen_k: as in `flash_attn_varlen_func`.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`.
    """
    k, v = _unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, "(Tk, 2, Hk, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_qkvpacked_func of flash-attn 2: `flash_attn_func` with q, k and v in one tensor.

    Args:
        qkv: (B, S, 3, H, D).
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.
    """
    q, k, v = _unpacked("flash_attn_qkvpacked_func", "qkv", qkv, "(B, S, 3, H, D)")
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_varlen_qkvpacked_func of flash-attn 2: `flash_attn_varlen_func` with q, k, v in one tensor.

    Args:
        qkv: (T, 3, H, D).
        cu_seqlens: (B + 1,), of queries and keys.
        max_seqlen: at least the longest sequence.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`.
    """
    q, k, v = _unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(T, 3, H, D)")
    cu_seqlens = as_int32(cu_seqlens)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _unpacked(function: str, name: str, packed: Any, shape: str) -> Any:
    """Unbind a packed tensor along dimension -3 (views); TypeError or ValueError unless it has `shape`."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{function}: {name} must be a torch tensor, not {type(packed)}")
    sizes = shape.split(", ")
    if packed.dim() != len(sizes) or packed.shape[-3] != int(sizes[-3]):
        raise ValueError(f"{function}: {name} must be {shape}, not {tuple(packed.shape)}")
    return packed.unbind(dim=-3)


def _options(
    dropout: Any, scale: Any, causal: Any, window: Any, softcap: Any, alibi_slopes: Any, deterministic: Any
) -> Options:
    return Options(
        causal=causal,
        window=window,
        scale=scale,
        softcap=None if is_zero(softcap) else softcap,
        alibi_slopes=alibi_slopes,
        dropout=dropout,
        deterministic=deterministic,
    )


def _refuse_without_pages(function: str, **arguments: Any) -> None:
    """Raise UnsupportedError if an argument that applies only to pages is given without block_table."""
    names = [name for name, value in arguments.items() if value is not None]
    if names:
        raise UnsupportedError(f"{function}: {', '.join(names)}: served with block_table alone")


def _attend(
    arrays: tuple[Any, Any, Any], options: Options, return_attn_probs: Any, packed: Packed | None = None
) -> Any:
    options.return_lse = return_attn_probs
    result = forward("attention" if packed is None else "attention_varlen", arrays, options, packed)
    return (*result, None) if return_attn_probs else result
