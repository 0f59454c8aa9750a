"""The calls people already make: attention as cupy_flash, torch and flash-attn 2 spell it, on torch tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...problem import Options, Packed, UnsupportedError
from .op import forward


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """`cupy_flash.attention` on torch tensors, with the same arguments and results; see there.

    Differentiable once, with respect to q, k, v, bias and sink, through out and lse. For the backward it saves q, k, v, out, lse,
    the seed and the caller's own tensors among the options. Works under torch.compile, torch.export, checkpointing and FSDP2.
    Autocast casts q, k and v, and torch.use_deterministic_algorithms sets `deterministic`. torch.func.grad and torch.func.jvp
    refuse it, as they refuse every operator that is differentiated by torch.library.register_autograd.
    """
    return forward("attention", (q, k, v), Options.of("attention", options))


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    **options: Any,
) -> Any:
    """`cupy_flash.attention_varlen` on torch tensors, with the same arguments and results; see there and `attention`."""
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return forward("attention_varlen", (q, k, v), Options.of("attention_varlen", options), packed)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: Any = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention, computed by cupy_flash.

    Args:
        query: (..., Hq, L, E). key: (..., H, S, E). value: (..., H, S, Ev). Dimensions before L and S broadcast; with
            enable_gqa those before the heads do. Two dimensions (L, E) are one head.
        attn_mask: broadcastable to (..., Hq, L, S); boolean, True = attend, or floating and added to the scores, with a gradient.
        dropout_p: always applied, as torch's is; in [0, 1).
        is_causal: top-left: query i sees the keys up to i. Not together with attn_mask.
        scale: default 1 / sqrt(E).
        enable_gqa: query head h reads key/value head h // (Hq // H), instead of requiring as many heads in all three.

    Returns:
        (..., Hq, L, Ev) in the dtype of query. A row that may attend to nothing is 0.

    Raises:
        TypeError, ValueError, UnsupportedError: as `cupy_flash.attention`; never another implementation in its stead.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("scaled_dot_product_attention: attn_mask must not be set with is_causal=True")
    features: dict[str, Any] = dict(causal="top_left" if is_causal else False, dropout=dropout_p, scale=scale, layout="bhsd")
    is_mask = isinstance(attn_mask, torch.Tensor) and attn_mask.dtype == torch.bool
    query, key, value, attn_mask = _broadcast((query, key, value), attn_mask, own=3 if enable_gqa else 2)
    tensors = tuple(_four_dimensional(x) for x in (query, key, value))
    features["mask" if is_mask else "bias"] = attn_mask
    out = forward("scaled_dot_product_attention", tensors, Options(**features))
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _broadcast(tensors: tuple[Any, Any, Any], attn_mask: Any, own: int) -> tuple[Any, Any, Any, Any]:
    """query, key, value with equal leading dimensions, all but the last `own`; views."""
    if any(not isinstance(x, torch.Tensor) or x.dim() < own for x in tensors):
        given = ", ".join(str(tuple(x.shape)) if isinstance(x, torch.Tensor) else str(type(x)) for x in tensors)
        raise TypeError(
            f"scaled_dot_product_attention: query, key and value must be tensors of at least {own} dimensions, not {given}"
        )
    try:
        leading = torch.broadcast_shapes(*(x.shape[:-own] for x in tensors))
        query, key, value = (x.expand(*leading, *x.shape[-own:]) for x in tensors)
        if isinstance(attn_mask, torch.Tensor) and attn_mask.dim() > 3 and query.dim() > 4:
            attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in (*tensors, attn_mask) if x is not None)
        hint = "" if own == 3 else "; fewer key/value heads than query heads need enable_gqa=True"
        raise ValueError(
            f"scaled_dot_product_attention: the leading dimensions of {shapes} do not broadcast{hint}"
        ) from error
    return query, key, value, attn_mask


def _four_dimensional(x: Any) -> Any:
    """(..., H, L, E) as (B, H, L, E)."""
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


class _Sdpa(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        routed = scaled_dot_product_attention if func is F.scaled_dot_product_attention else func
        return routed(*args, **(kwargs or {}))


def sdpa() -> Any:
    """Context manager in which F.scaled_dot_product_attention, called by anyone, is `scaled_dot_product_attention`.

    Holds in eager code and under torch.compile, in the thread that enters it. What cupy_flash cannot serve raises; nothing falls
    back to torch's own.

        with cupy_flash.adapters.torch.sdpa():
            loss = model(tokens)
    """
    return _Sdpa()


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
) -> Any:
    """flash_attn.flash_attn_func of flash-attn 2: q (B, Sq, Hq, D), k, v (B, Sk, Hk, D), causal bottom-right.

    softcap 0.0 is off. With return_attn_probs the result is (out, softmax_lse, None): softmax_lse (B, Hq, Sq) is `lse` of
    `cupy_flash.attention`, and the third, there the probabilities for testing, is never computed.
    """
    options = _flash_attn_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _flash_attn("flash_attn_func", (q, k, v), options, return_attn_probs)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
    block_table: Any = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func of flash-attn 2: q (Tq, Hq, D), k, v (Tk, Hk, D), cu_seqlens int32 (B + 1,).

    As `flash_attn_func`, with softmax_lse (Hq, Tq). A block_table (paged keys and values) raises UnsupportedError.
    """
    if block_table is not None:
        raise UnsupportedError("flash_attn_varlen_func: no engine of this version reads paged keys and values (block_table)")
    options = _flash_attn_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _flash_attn("flash_attn_varlen_func", (q, k, v), options, return_attn_probs, packed)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
) -> Any:
    """flash_attn.flash_attn_qkvpacked_func of flash-attn 2: qkv (B, S, 3, H, D), the rest as `flash_attn_func`."""
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"flash_attn_qkvpacked_func: qkv must be a torch tensor, not {type(qkv)}")
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"flash_attn_qkvpacked_func: qkv must be (B, S, 3, H, D), not {tuple(qkv.shape)}")
    options = _flash_attn_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _flash_attn("flash_attn_qkvpacked_func", qkv.unbind(dim=2), options, return_attn_probs)


def _flash_attn_options(
    dropout: Any, scale: Any, causal: Any, window: Any, softcap: Any, alibi_slopes: Any, deterministic: Any
) -> Options:
    return Options(
        causal=causal,
        window=window,
        scale=scale,
        softcap=None if softcap == 0 else softcap,
        alibi_slopes=alibi_slopes,
        dropout=dropout,
        deterministic=deterministic,
    )


def _flash_attn(
    function: str, arrays: tuple[Any, Any, Any], options: Options, return_attn_probs: Any, packed: Packed | None = None
) -> Any:
    options.return_lse = return_attn_probs
    result = forward(function, arrays, options, packed)
    return (*result, None) if return_attn_probs else result
