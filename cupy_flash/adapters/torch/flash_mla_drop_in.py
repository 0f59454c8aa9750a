"""FlashMLA's functions on torch tensors: attention to latent rows, of which a part is the values.

The signatures are those of FlashMLA 1.0 (commit 9241ae3): flash_mla_with_kvcache, flash_mla_sparse_fwd and
get_mla_metadata. lse of a row that sees no key is +inf there, where `cupy_flash.attention` has -inf, and a sink changes
out alone.
"""

from __future__ import annotations

from typing import Any

import torch

from ...problem.checks import Requirements
from ...problem.records import CacheOptions, Options, UnsupportedError
from .kv_cache import attend
from .transforms import forward

# A row of FlashMLA's float8 cache: 512 numbers of e4m3, a float32 scale for each 128 of them, and 64 bfloat16.
LATENT, ROTARY, SCALED = 512, 64, 128
ROW_BYTES = LATENT + LATENT // SCALED * 4 + ROTARY * 2

AXES = {"b": "B", "s": "Sq", "h": "Hq", "d": "D", "k": "Hk", "t": "topk"}


def get_mla_metadata(*arguments: object, **options: object) -> tuple[None, None]:
    """Return (None, None): plans of cupy_flash need no metadata of a tile scheduler.

    Args:
        *arguments: ignored, as FlashMLA does.
        **options: ignored likewise.

    Returns:
        What `flash_mla_with_kvcache` takes as tile_scheduler_metadata and num_splits, and ignores.
    """
    return None, None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: object = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_mla_with_kvcache of FlashMLA: attention to all latent rows of a cache, or to those of lists.

    It takes any head dimensions, page sizes, numbers of heads and dtypes of `cupy_flash.attention_with_kv_cache`.
    Indices are places in the cache, page * page size + row. Rows of the float8 format, 656 bytes for 576 numbers, are
    gathered and converted to the dtype of q before the attention, which takes B Sq topk (656 + 2 * 1152) bytes of
    traffic more than a kernel that converts them on the way; with a cache in the dtype of q nothing is gathered.

    Args:
        q: (B, Sq, Hq, D).
        k_cache: (pages, P, Hk, D) in the dtype of q; with is_fp8_kvcache (pages, P, 1, 656) of one byte each.
        block_table: int32 (B, columns); ignored with indices.
        cache_seqlens: int32 (B,): the number of keys; ignored with indices.
        head_dim_v: Dv: the first Dv numbers of a row are its values.
        tile_scheduler_metadata: ignored.
        num_splits: ignored.
        softmax_scale: default 1 / sqrt(D).
        causal: hide the keys after a query, the last of which sees all keys; not with indices.
        is_fp8_kvcache: whether the rows have the float8 format of DeepSeek V3.2; only with indices.
        indices: int32 (B, Sq, topk): the rows that a query sees; negative numbers and those past the cache name none.
        attn_sink: floating (Hq,): out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
        extra_k_cache: more rows, in the format of k_cache.
        extra_indices_in_kvcache: indices of extra_k_cache.
        topk_length: int32 (B,): only so many first indices count.
        extra_topk_length: likewise of extra_indices_in_kvcache.

    Returns:
        (out, lse): (B, Sq, Hq, Dv) in the dtype of q, and (B, Hq, Sq) in float32.
    """
    name = "flash_mla_with_kvcache"
    lists, lengths = (indices, extra_indices_in_kvcache), (topk_length, extra_topk_length)
    _check_beside_cache(name, q, lists, lengths, attn_sink)
    if indices is None:
        _check_dense(name, block_table, cache_seqlens, is_fp8_kvcache, lengths,
                     (extra_k_cache, extra_indices_in_kvcache))  # fmt: skip
        options = CacheOptions(
            cache_seqlens=cache_seqlens, block_table=block_table, causal=causal, scale=softmax_scale,
            return_lse=True, head_dim_v=head_dim_v,
        )  # fmt: skip
        out, lse = attend(q, k_cache, None, options)
        return _with_sink(out, lse, attn_sink), _without_empty_rows(lse)
    if causal:
        raise ValueError(f"{name}: causal=True with indices: the lists alone say what a query sees")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise ValueError(f"{name}: extra_k_cache and extra_indices_in_kvcache must be given together")
    scopes = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        scopes.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    elif extra_topk_length is not None:
        raise ValueError(f"{name}: extra_topk_length without extra_k_cache")
    rows = _listed_fp8_rows if is_fp8_kvcache else _listed_rows
    parts = [rows(q, *scope, head_dim_v, softmax_scale) for scope in scopes]
    out, lse = parts[0] if len(parts) == 1 else _merged(*parts)
    out = _with_sink(out, lse, attn_sink).view(*q.shape[:-1], head_dim_v)
    return out, _without_empty_rows(lse).view(q.shape[2], *q.shape[:2]).transpose(0, 1)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute flash_mla_sparse_fwd of FlashMLA: attention of each query to the latent rows of its list.

    It takes any sizes and dtypes of `cupy_flash.attention`, and autograd differentiates out.

    Args:
        q: (Sq, Hq, D).
        kv: (Sk, Hk, D), of which the first d_v numbers are the values.
        indices: int32 (Sq, Hk, topk): the rows that a query sees; negative numbers and those past Sk name none.
        sm_scale: the factor of the scores.
        d_v: Dv.
        attn_sink: floating (Hq,): out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
        topk_length: int32 (Sq,): only so many first indices count.

    Returns:
        (out, max_logits, lse): (Sq, Hq, Dv) in the dtype of q, and the largest score and lse, (Sq, Hq) in float32; lse
        of a row that sees no key is +inf, and its largest score -inf.
    """
    given = {"indices": (indices, "skt"), "topk_length": (topk_length, "s"), "attn_sink": (attn_sink, "h")}
    _check_arrays("flash_mla_sparse_fwd", (q, "shd"), given)
    lengths = None if topk_length is None else topk_length[:, None, None]
    selected = _valid(indices, kv.shape[0], lengths).transpose(0, 1)[None]
    options = Options(head_dim_v=d_v, scale=sm_scale, selected=selected, return_lse=True, statistics=("max",))
    out, lse, statistics = forward("attention", (q[None], kv[None], None), options)
    out = _with_sink(out, lse, attn_sink)
    return out[0], statistics.max[0].T.contiguous(), _without_empty_rows(lse[0]).T.contiguous()


def _check_beside_cache(
    function: str, q: Any, lists: tuple[Any, Any], lengths: tuple[Any, Any], attn_sink: Any
) -> None:  # fmt: skip
    """Raise unless q and the arrays beside a cache and a second one are those of `flash_mla_with_kvcache`."""
    given = {
        "indices": (lists[0], "bst"), "topk_length": (lengths[0], "b"), "attn_sink": (attn_sink, "h"),
        "extra_indices_in_kvcache": (lists[1], "bst"), "extra_topk_length": (lengths[1], "b"),
    }  # fmt: skip
    _check_arrays(function, (q, "bshd"), given)


def _check_arrays(function: str, queries: tuple[Any, str], given: dict[str, tuple[Any, str]]) -> None:
    """Raise one error with every reason unless q, the sink and the arrays of lists are tensors of these axes.

    Arrays of lists are int32. Nothing is broadcast.
    """
    requirements = Requirements(function)
    sizes: dict[str, int] = {}
    for name, (array, axes) in {"q": queries, **given}.items():
        if array is None:
            continue
        if not requirements.require_type(
            isinstance(array, torch.Tensor), f"{name} must be a tensor, not {type(array)}"
        ):
            continue
        shape = tuple(array.shape)
        expected = [sizes.get(axis, size) for axis, size in zip(axes, shape, strict=False)]
        wanted = ", ".join([f"{AXES[axis]} = {sizes[axis]}" if axis in sizes else AXES[axis] for axis in axes])
        requirements.require(
            len(shape) == len(axes) and list(shape) == expected, f"{name} must be ({wanted}), not {shape}"
        )
        if name == "q":
            sizes = dict(zip(axes, shape, strict=False))
        elif name == "attn_sink":
            requirements.require_type(array.dtype.is_floating_point, f"{name} must be floating, not {array.dtype}")
        else:
            requirements.require_type(array.dtype == torch.int32, f"{name} must be int32, not {array.dtype}")
    requirements.raise_if_unmet({})


def _check_dense(
    function: str, block_table: object, cache_seqlens: object, is_fp8: bool, lengths: tuple[object, ...],
    extra: tuple[object, ...],
) -> None:  # fmt: skip
    """Raise unless a call without indices has what it needs, and nothing of lists."""
    if block_table is None or cache_seqlens is None:
        raise ValueError(f"{function}: a call without indices needs block_table and cache_seqlens")
    if is_fp8:
        raise UnsupportedError(f"{function}: is_fp8_kvcache without indices, as in FlashMLA")
    if any(x is not None for x in (*lengths, *extra)):
        raise ValueError(f"{function}: topk_length, extra_k_cache and the like belong to calls with indices")


def _valid(indices: torch.Tensor, rows: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """Return indices, with -1 for those that name none of `rows` rows or come after the first `lengths` ones."""
    is_named = (indices >= 0) & (indices < rows)
    if lengths is not None:
        is_named &= torch.arange(indices.shape[-1], dtype=lengths.dtype, device=indices.device) < lengths
    return torch.where(is_named, indices, -1)


def _lists(indices: torch.Tensor, pages: torch.Tensor, topk_length: torch.Tensor | None) -> torch.Tensor:
    """Return the lists of all queries, int32 (1, 1, B * Sq, topk)."""
    lengths = None if topk_length is None else topk_length[:, None, None]
    return _valid(indices, pages.shape[0] * pages.shape[1], lengths).flatten(0, 1)[None, None]


def _listed_rows(
    q: torch.Tensor, pages: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None, head_dim_v: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out (1, B * Sq, Hq, Dv) and lse: all pages are those of one sequence, whose keys the indices number."""
    count, size = pages.shape[:2]
    options = CacheOptions(
        cache_seqlens=count * size, block_table=torch.arange(count, dtype=torch.int32, device=q.device)[None],
        causal=False, scale=scale, return_lse=True, head_dim_v=head_dim_v,
        selected=_lists(indices, pages, topk_length),
    )  # fmt: skip
    out, lse = attend(q.flatten(0, 1)[None], pages, None, options)
    return out, lse


def _listed_fp8_rows(
    q: torch.Tensor, pages: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None, head_dim_v: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the result of `_listed_rows` on a copy of the listed rows, converted to the dtype of q."""
    if pages.element_size() != 1 or pages.shape[2:] != (1, ROW_BYTES) or q.shape[-1] != LATENT + ROTARY:
        raise UnsupportedError(
            f"flash_mla_with_kvcache: is_fp8_kvcache needs q of head dimension {LATENT + ROTARY} and pages of "
            f"(P, 1, {ROW_BYTES}) bytes, the format of DeepSeek V3.2, not {tuple(q.shape)} and {pages.dtype} "
            f"{tuple(pages.shape)}"
        )
    lists, pages = _lists(indices, pages, topk_length), pages.view(torch.uint8)
    if pages.numel() == 0:  # entries of no row are gathered as row 0
        pages = pages.new_zeros(1, 1, 1, ROW_BYTES)
    place, size = lists.flatten().clamp(min=0), pages.shape[1]
    rows = pages[place // size, place % size, 0]
    scales = rows[:, LATENT : -2 * ROTARY].view(torch.float32)
    latent = rows[:, :LATENT].view(torch.float8_e4m3fn).to(torch.float32).view(-1, LATENT // SCALED, SCALED)
    latent = (latent * scales[..., None]).view(-1, LATENT).to(q.dtype)
    rotary = rows[:, -2 * ROTARY :].view(torch.bfloat16).to(q.dtype)
    keys = torch.cat((latent, rotary), dim=-1)[None, :, None]
    own = torch.arange(lists.numel(), dtype=torch.int32, device=q.device).view(lists.shape)
    selected = torch.where(lists >= 0, own, -1)
    options = Options(head_dim_v=head_dim_v, scale=scale, selected=selected, return_lse=True)
    out, lse = forward("attention", (q.flatten(0, 1)[None], keys, None), options)
    return out, lse


def _merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of both parts' keys."""
    (out, lse), (other_out, other_lse) = one, other
    total = out * _share(lse, other_lse) + other_out * _share(other_lse, lse)
    return total.to(out.dtype), torch.logaddexp(lse, other_lse)


def _with_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Return out times exp(lse) / (exp(lse) + exp(sink)), of out (B, S, Hq, Dv) and lse (B, Hq, S)."""
    return out if sink is None else (out * _share(lse, sink[:, None])).to(out.dtype)


def _share(lse: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return exp(lse) / (exp(lse) + exp(other)), (B, S, Hq, 1), of lse (B, Hq, S)."""
    share = torch.sigmoid(lse - other)
    share = torch.where(lse == -torch.inf, 0, share)  # NaN if other is -inf too
    return share.transpose(1, 2)[..., None]


def _without_empty_rows(lse: torch.Tensor) -> torch.Tensor:
    """Return lse with +inf in place of -inf."""
    return torch.where(lse == -torch.inf, torch.inf, lse)
