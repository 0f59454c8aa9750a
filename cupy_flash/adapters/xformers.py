"""xFormers' memory_efficient_attention and its relatives by cupy_flash, on a CPU too, with xFormers installed or not.

The classes of xformers.ops.fmha.attn_bias (today those of mslk.attention.fmha.attn_bias) are recognised by their names.
Their masks are options of attention, and their sequences the bounds of a packed batch or the lengths of a KV cache, so
that no mask is materialized.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..problem.build import pose
from ..problem.checks import Requirements
from ..problem.records import CacheOptions, Options, Packed, UnsupportedError
from .torch.kv_cache import attend
from .torch.op import arguments_of, attention_backward
from .torch.transforms import forward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]

# {name of a class: the alignment of its causal diagonal, if it has one}. Windows and sequences are its attributes.
CAUSAL: dict[str, Any] = {
    "LowerTriangularMask": "top_left",
    "LowerTriangularMaskWithTensorBias": "top_left",
    "LowerTriangularFromBottomRightMask": "bottom_right",
    "LowerTriangularFromBottomRightLocalAttentionMask": "bottom_right",
    "LocalAttentionFromBottomRightMask": False,
    "BlockDiagonalMask": False,
    "BlockDiagonalCausalMask": "top_left",
    "BlockDiagonalCausalFromBottomRightMask": "bottom_right",
    "BlockDiagonalCausalLocalAttentionMask": "top_left",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": "bottom_right",
    "BlockDiagonalPaddedKeysMask": False,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": "bottom_right",
    "BlockDiagonalLocalAttentionPaddedKeysMask": False,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": "bottom_right",
    "BlockDiagonalGappyKeysMask": False,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": "bottom_right",
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": False,
    "PagedBlockDiagonalPaddedKeysMask": False,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": "bottom_right",
    "PagedBlockDiagonalCausalLocalPaddedKeysMask": "bottom_right",
    "PagedBlockDiagonalGappyKeysMask": False,
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": "bottom_right",
}


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | object = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute xformers.ops.memory_efficient_attention with cupy_flash, differentiably.

    Args:
        query: (B, M, H, K); or (B, M, K), which is one head; or (B, M, G, H, K), which is G groups of H heads.
        key: (B, N, H, K), of as many dimensions as query. If the heads of a group are one head that was expanded, it is
            read once.
        value: (B, N, H, Kv), likewise.
        attn_bias: a tensor (B, H, M, N), or (B, M, N) or (B, G, H, M, N) like query, with a gradient; or an object of
            one of xFormers' classes for masks. A class that is not served raises UnsupportedError. With PaddedKeys or
            Paged in its name the call reads a KV cache, so it has no gradient and no dropout.
        p: dropout probability.
        scale: default 1 / sqrt(K).
        op: selects a kernel of xFormers and is ignored.
        output_dtype: the dtype of the result, by default that of query.

    Returns:
        (B, M, H, Kv), or with the dimensions of query. A row that sees no key is 0.

    Raises:
        TypeError: as `cupy_flash.attention`.
        ValueError: likewise.
        UnsupportedError: likewise.
    """
    return _attend("memory_efficient_attention", (query, key, value), attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | object = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `memory_efficient_attention`, under which name xFormers has its forward alone.

    Args:
        query: as in `memory_efficient_attention`.
        key: likewise.
        value: likewise.
        attn_bias: likewise.
        p: likewise.
        scale: likewise.
        op: likewise.
        output_dtype: likewise.

    Returns:
        As `memory_efficient_attention`.
    """
    return _attend("memory_efficient_attention_forward", (query, key, value), attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | object = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `memory_efficient_attention` and the lse that `memory_efficient_attention_backward` takes.

    Args:
        query: as in `memory_efficient_attention`.
        key: likewise.
        value: likewise.
        attn_bias: likewise.
        p: UnsupportedError unless 0, as in xFormers.
        scale: as in `memory_efficient_attention`.
        op: likewise.
        output_dtype: likewise.

    Returns:
        (out, lse), lse (B, H, M), with 5 dimensions (B, G, H, M), not padded; packed sequences have B = 1.
    """
    name = "memory_efficient_attention_forward_requires_grad"
    _refuse_dropout(name, p)
    return _attend(name, (query, key, value), attn_bias, 0.0, scale, output_dtype, with_lse=True)


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | object = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention on a part of the keys; `merge_attentions` merges the parts. Both results are differentiable.

    Args:
        query: as in `memory_efficient_attention`.
        key: likewise.
        value: likewise.
        attn_bias: likewise.
        p: UnsupportedError unless 0, as in xFormers.
        scale: as in `memory_efficient_attention`.
        op: likewise.
        output_dtype: likewise.

    Returns:
        (out, lse), as `memory_efficient_attention_forward_requires_grad`.
    """
    _refuse_dropout("memory_efficient_attention_partial", p)
    arrays = (query, key, value)
    return _attend("memory_efficient_attention_partial", arrays, attn_bias, 0.0, scale, output_dtype, with_lse=True)


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | object = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `memory_efficient_attention`.

    Args:
        grad: the gradient of output, with its shape and dtype.
        output: the first result of `memory_efficient_attention_forward_requires_grad`.
        lse: its second result; also with the rows padded to more than M, and for packed sequences one padded row per
            sequence, (sequences, H, longest or more), as some kernels of xFormers return it.
        query: as in `memory_efficient_attention`.
        key: likewise.
        value: likewise.
        attn_bias: likewise; UnsupportedError for a class with PaddedKeys, GappyKeys or Paged in its name.
        p: UnsupportedError unless 0, as in xFormers.
        scale: as in `memory_efficient_attention`.
        op: likewise.

    Returns:
        (dq, dk, dv).
    """
    name = "memory_efficient_attention_backward"
    _refuse_dropout(name, p)
    call = _read(name, (query, key, value), attn_bias, 0.0, scale, by_group=False)
    if call.cache is not None or hasattr(getattr(attn_bias, "k_seqinfo", None), "seqlen"):
        raise UnsupportedError(f"{name}: {type(attn_bias).__name__} has no backward, which xFormers has not either")
    shapes = [tuple(x.shape) for x in (grad, output)]
    if any(shape != (*query.shape[:-1], value.shape[-1]) for shape in shapes) or lse.dim() != max(query.dim(), 4) - 1:
        given = f"{shapes[0]}, {shapes[1]} and {tuple(lse.shape)}"
        raise ValueError(f"{name}: grad, output and lse must be for query {tuple(query.shape)}, not {given}")
    lse = lse.flatten(1, 2) if lse.dim() == 4 else lse
    dout, out = (_four_dimensional(x) for x in (grad, output))
    if call.packed is None:
        lse = lse[..., : query.shape[1]]
    else:
        dout, out, lse = dout[0], out[0], _packed_lse(lse, attn_bias)
    arguments = arguments_of(call.arrays, call.options, call.packed, False)
    gradients = attention_backward(*arguments, dout, out, lse, None, False)[:3]
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(gradients, (query, key, value), strict=True))
    return dq, dk, dv


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merge the results of `memory_efficient_attention_partial` over disjoint keys, differentiably.

    Args:
        attn_split: the out of each part, a sequence or a tensor with the parts as its first dimension.
        lse_split: the lse of each part, likewise.
        write_lse: False returns None instead of lse.
        output_dtype: the dtype of out, by default that of the parts.

    Returns:
        (out, lse) of one call on all keys.
    """
    outs, lses = tuple(attn_split), tuple(lse_split)
    requirements = Requirements("merge_attentions")
    if requirements.require(0 < len(outs) == len(lses), f"{len(outs)} outs and {len(lses)} lses must be as many"):
        shape = outs[0].shape
        requirements.require(
            all(x.shape == shape for x in outs)
            and all(x.dim() > 1 and x.movedim(-1, 1).shape == shape[:-1] for x in lses),
            "all outs must be (B, M, H, K) and all lses (B, H, M), with 5 dimensions (B, M, G, H, K) and (B, G, H, M), "
            f"not {[tuple(x.shape) for x in outs]} and {[tuple(x.shape) for x in lses]}",
        )
    requirements.raise_if_unmet({})
    of_parts = torch.stack(lses)
    peak = of_parts.detach().amax(0)
    peak = peak.where(peak > -torch.inf, 0.0)  # finite for rows that see no key in any part
    weights = (of_parts - peak).exp()
    total = weights.sum(0)
    seen = total > 0
    shares = (weights / total.where(seen, 1.0)).movedim(-1, 2)[..., None]
    merged = sum(share * out for share, out in zip(shares, outs, strict=True))
    lse = (total.where(seen, 1.0).log() + peak).where(seen, -torch.inf)
    return merged.to(output_dtype or outs[0].dtype), lse if write_lse else None


class _Call(NamedTuple):
    """A call in cupy_flash's terms: arrays (B, S, H, D), packed (T, H, D), or of a KV cache if `cache` is given."""

    arrays: tuple[Any, Any, Any]
    options: Options
    packed: Packed | None = None
    cache: CacheOptions | None = None


def _refuse_dropout(function: str, p: Any) -> None:
    if p != 0:
        raise UnsupportedError(f"{function}: dropout needs autograd: call memory_efficient_attention")


def _attend(
    function: str,
    arrays: tuple[Any, Any, Any],
    attn_bias: Any,
    p: Any,
    scale: Any,
    output_dtype: Any,
    with_lse: bool = False,
) -> tuple[Any, Any]:
    """Return (out, lse), lse None unless asked for."""
    call = _read(function, arrays, attn_bias, p, scale)
    if call.cache is not None:
        result = attend(*call.arrays, replace(call.cache, return_lse=with_lse))
    else:
        call.options.return_lse = with_lse
        name = "attention" if call.packed is None else "attention_varlen"
        result = forward(name, call.arrays, call.options, call.packed)
    out, lse = result if with_lse else (result, None)
    query, _, value = arrays
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    if lse is not None:
        lse = lse.reshape(query.shape[0], *(query.shape[2:-1] or (1,)), query.shape[1])
    return out if output_dtype is None else out.to(output_dtype), lse


def _read(
    function: str, arrays: tuple[Any, Any, Any], attn_bias: Any, p: Any, scale: Any, by_group: bool = True
) -> _Call:
    """Return the call; one error with all reasons if the arguments do not fit each other."""
    kind = type(attn_bias).__name__
    if not (attn_bias is None or isinstance(attn_bias, torch.Tensor) or kind in CAUSAL):
        raise UnsupportedError(f"{function}: attn_bias is a {kind}; those served are tensors and {', '.join(CAUSAL)}")
    requirements = Requirements(function)
    are_tensors = all(isinstance(x, torch.Tensor) for x in arrays)
    requirements.require_type(are_tensors, "query, key and value must be torch tensors")
    ranks = [x.dim() for x in arrays] if are_tensors else []
    requirements.require(
        not are_tensors or ranks[0] in (3, 4, 5) and len(set(ranks)) == 1,
        f"query, key and value must all be (B, M, K), (B, M, H, K) or (B, M, G, H, K), not of {ranks} dimensions",
    )
    requirements.raise_if_unmet({})
    if ranks[0] == 5:
        groups, heads = arrays[0].shape[2:4]
        requirements.require(
            all(x.shape[2] == groups and x.shape[3] in (1, heads) for x in arrays),
            f"key and value must have the {groups} groups of {heads} heads of query, or of 1 head",
        )
    shares = by_group and ranks[0] == 5 and all(_is_expanded(x) for x in arrays[1:])
    q, k, v = _four_dimensional(arrays[0]), *(_four_dimensional(x[:, :, :, 0] if shares else x) for x in arrays[1:])
    bias = attn_bias if isinstance(attn_bias, torch.Tensor) else getattr(attn_bias, "_bias", None)
    if bias is not None and ranks[0] != 4:
        bias = bias.unsqueeze(1) if ranks[0] == 3 else bias.flatten(1, -3)
    options = Options(causal=CAUSAL.get(kind, False), window=_window(attn_bias), scale=scale, bias=bias, dropout=p)
    info = getattr(attn_bias, "q_seqinfo", None)
    if info is None:
        if requirements.unmet:
            pose(function, (q, k, v), options, reasons=tuple(requirements.unmet))
        return _Call((q, k, v), options)

    is_paged = hasattr(attn_bias, "block_tables")
    ends = {"query": (q, info.seqstart_py[-1]), "key": (k, attn_bias.k_seqinfo.seqstart_py[-1])}
    for name, (x, end) in ends.items():
        if name == "key" and is_paged:
            page = attn_bias.page_size
            requirements.require(x.shape[1] % page == 0, f"{x.shape[1]} keys must be whole pages of {page}")
        else:
            requirements.require(x.shape[1] == end, f"{kind} has {end} rows of {name}, which has {x.shape[1]}")
    requirements.require(q.shape[0] == k.shape[0] == v.shape[0] == 1, f"{kind} needs a batch of 1")
    requirements.raise_if_unmet({})
    return _packed(function, (q[0], k[0], v[0]), options, attn_bias)


def _packed(function: str, arrays: tuple[Any, Any, Any], options: Options, attn_bias: Any) -> _Call:
    """Return the call on packed queries, with keys that are packed, padded to one length, anywhere, or in pages."""
    q, k, v = arrays
    of_q, of_k = attn_bias.q_seqinfo, attn_bias.k_seqinfo
    table = getattr(attn_bias, "block_tables", None)
    if table is None and not hasattr(of_k, "padding"):
        bounds, longest = of_k.seqstart, of_k.max_seqlen
        if hasattr(of_k, "seqlen"):
            rows = [torch.arange(start, start + n) for start, n in zip(of_k.seqstart_py, of_k.seqlen_py, strict=False)]
            k, v = (x.index_select(0, torch.cat(rows).to(x.device)) for x in (k, v))
            bounds = torch.tensor([0, *accumulate(of_k.seqlen_py)], dtype=torch.int32, device=k.device)
        return _Call((q, k, v), options, Packed(of_q.seqstart, bounds, of_q.max_seqlen, longest))
    if options.dropout != 0:
        raise UnsupportedError(f"{function}: dropout with {type(attn_bias).__name__}, which reads a KV cache")
    cache = CacheOptions(
        cache_seqlens=of_k.seqlen, block_table=table, cu_seqlens_q=of_q.seqstart, max_seqlen_q=of_q.max_seqlen,
        causal=options.causal is not False, window=options.window, scale=options.scale,
    )  # fmt: skip
    if table is not None and not hasattr(of_k, "padding"):
        starts = of_k.seqstart  # seqlen is then the end of a sequence
        cache.mask_mod = lambda b, h, q_idx, kv_idx: kv_idx >= starts[b]
    rows_of_block = of_k.padding if table is None else attn_bias.page_size
    k, v = (x.unflatten(0, (-1, rows_of_block)) for x in (k, v))
    return _Call((q, k, v), options, cache=cache)


def _packed_lse(lse: Any, attn_bias: Any) -> Any:
    """Return lse (H, M) of packed sequences from (1, H, M or more), or from (sequences, H, longest or more)."""
    bounds = attn_bias.q_seqinfo.seqstart_py
    if lse.shape[0] == 1:
        return lse[0, :, : bounds[-1]]
    return torch.cat([row[:, : end - start] for row, (start, end) in zip(lse, pairwise(bounds), strict=True)], 1)


def _window(attn_bias: Any) -> tuple[int, int] | None:
    """Return the keys (before, after) the diagonal that a mask with a window shows."""
    size = getattr(attn_bias, "_window_size", None)
    if size is not None:
        return size - 1, 0
    left = getattr(attn_bias, "window_left", None)
    return None if left is None else (left, attn_bias.window_right)


def _four_dimensional(x: Any) -> Any:
    """Return (B, M, K) or (B, M, G, H, K) as (B, M, heads, K)."""
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def _is_expanded(x: Any) -> bool:
    """Return whether the heads of each group are one head in memory, whose gradient is the sum over them."""
    return x.stride(3) == 0 and not (x.is_leaf and x.requires_grad)
