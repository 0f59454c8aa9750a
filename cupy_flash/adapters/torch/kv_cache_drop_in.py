"""flash-attn's functions on a KV cache of torch tensors: flash_attn_with_kvcache, and varlen attention on pages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...problem.checks import Requirements
from ...problem.records import SPLIT_UNIT, CacheOptions, UnsupportedError
from .kv_cache import append_then_attend, attend
from .op import as_int32, is_zero, require_one_device, window_sides


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    sinks: torch.Tensor | None = None,
    scheduler_metadata: object = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    split_size: int | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Compute flash_attn_with_kvcache of flash-attn 2; keyword-only arguments are FlashAttention 3's or cupy_flash's.

    The arguments have the meanings of `cupy_flash.attention_with_kv_cache`, with these differences. Queries are rotated
    as in flash-attn: query i by n_b + i, or all queries of a sequence by n_b if neither causal nor a window is given.

    Args:
        q: (B, Sq, Hq, D), or packed (T, Hq, D) with cu_seqlens_q.
        k_cache: (Bc, Sc, Hk, D), or pages (pages, P, Hk, D) with block_table.
        v_cache: likewise.
        k: rows to append, (B, Snew, Hk, D), or packed as q.
        v: likewise.
        rotary_cos: floating (R, rd / 2); it requires k and v.
        rotary_sin: likewise.
        cache_seqlens: int32 (B,) or an int: the number of keys before the append.
        cache_batch_idx: int32 (B,): row cache_batch_idx[b] of the caches, or of block_table, belongs to sequence b.
        cache_leftpad: int32 (B,); UnsupportedError with block_table.
        block_table: int32 (B, columns), or (R, columns) with cache_batch_idx.
        softmax_scale: default 1 / sqrt(D).
        causal: hide the keys after a query.
        window_size: (left, right), -1 unbounded.
        softcap: 0.0 means no softcap.
        rotary_interleaved: whether pairs are dimensions (2i, 2i + 1).
        alibi_slopes: float32 (Hq,) or (B, Hq).
        num_splits: 0 divides the work equally among the processors; n sets split_size to an n-th of the capacity,
            rounded up to a multiple of 64, so that the bits of the result do not depend on the batch.
        return_softmax_lse: also return softmax_lse, (B, Hq, Sq) or (Hq, T).
        page_table: another name of block_table.
        cu_seqlens_q: int32 (B + 1,), for packed queries.
        cu_seqlens_k_new: ignored without k; else None or cu_seqlens_q itself, or in host memory equal to it.
        max_seqlen_q: at least the longest sequence of queries; needed with cu_seqlens_q.
        rotary_seqlens: UnsupportedError unless None.
        qv: (B, Sq, Hq, Dv) or (T, Hq, Dv): the product of qv and v is added to that of q and k, as in MLA. It is served
            where v_cache and k_cache, and qv and q, are neighbouring columns of one array, as in `kv[..., :Dv]` and
            `kv[..., Dv:]`; rows of k and v to append are joined by a copy. The default scale is 1 / sqrt(D + Dv).
        q_descale: UnsupportedError unless None.
        k_descale: float32 (B, Hk), for caches of float8_e4m3fn.
        v_descale: likewise.
        attention_chunk: UnsupportedError unless 0.
        sinks: floating (Hq,), `sink` of `cupy_flash.attention`.
        scheduler_metadata: ignored, as are pack_gqa and sm_margin: they tune flash-attn's kernels.
        pack_gqa: ignored.
        sm_margin: ignored.
        split_size: as in `cupy_flash.attention_with_kv_cache`; not with num_splits.
        out: an array for the result.

    Returns:
        out (B, Sq, Hq, D), or (out, softmax_lse).
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, {"q_descale": q_descale is not None, "attention_chunk": attention_chunk != 0})
    _refuse_rotary_seqlens(name, rotary_seqlens)
    refused = (rotary_cos, k_descale, v_descale)
    arrays, k, v, head_dim_v = _with_qv(name, qv, (q, k_cache, v_cache), k, v, refused)
    table, cache_batch_idx = _table_and_rows(name, block_table, page_table, cache_batch_idx)
    _check_new_rows(name, k, cu_seqlens_q, cu_seqlens_k_new, rotary_cos)
    options: dict[str, Any] = {
        "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "block_table": table, "causal": causal,
        "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "window": window_size, "scale": softmax_scale,
        "softcap": None if is_zero(softcap) else softcap, "alibi_slopes": alibi_slopes, "sink": sinks, "out": out,
        "k_descale": k_descale, "v_descale": v_descale, "return_lse": return_softmax_lse, "head_dim_v": head_dim_v,
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved,
        "split_size": _split_size(name, num_splits, split_size, k_cache, table),
    }  # fmt: skip
    is_local = bool(causal) or any(side not in (None, -1) for side in window_sides(window_size))
    together = CacheOptions(k, v, cache_seqlens, **options)
    if rotary_cos is None or k is None or (_as_many_rows(q, k) and (is_local or _has_one_query(q, max_seqlen_q))):
        return attend(*arrays, together)
    if cu_seqlens_q is not None:
        raise UnsupportedError(f"{name}: rotary of packed queries needs causal=True or a window")
    # Here flash-attn rotates queries by other positions than those that attend() would use.
    return append_then_attend(*arrays, together, is_local)


def attend_to_pages(
    function: str,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    seqused_k: Any,
    *,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    alibi_slopes: Any,
    num_splits: Any,
    return_softmax_lse: Any,
    softcap: Any = 0.0,
    sink: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out: Any = None,
) -> Any:
    """Return attention of packed queries on pages, with flash-attn's argument names; errors quote `function`."""
    if not is_zero(dropout_p):
        raise UnsupportedError(f"{function}: dropout with block_table: a KV cache records no gradients")
    lengths = seqused_k
    if lengths is None:
        if cu_seqlens_k is None:
            raise ValueError(f"{function}: block_table needs seqused_k or cu_seqlens_k: the keys of each sequence")
        lengths = cu_seqlens_k.diff().to(torch.int32)
    options = CacheOptions(
        cache_seqlens=lengths, block_table=block_table, cu_seqlens_q=as_int32(cu_seqlens_q), max_seqlen_q=max_seqlen_q,
        causal=causal, window=window_size, scale=softmax_scale, softcap=None if is_zero(softcap) else softcap,
        alibi_slopes=alibi_slopes, sink=sink, k_descale=k_descale, v_descale=v_descale, out=out,
        return_lse=return_softmax_lse, split_size=_split_size(function, num_splits, None, k_pages, block_table),
    )  # fmt: skip
    return attend(q, k_pages, v_pages, options)


def _refuse(function: str, given: dict[str, bool]) -> None:
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise UnsupportedError(f"{function}: {', '.join(names)} is not supported")


def _with_qv(
    function: str, qv: Any, arrays: tuple[Any, Any, Any], k: Any, v: Any, refused: tuple[object, ...]
) -> tuple[tuple[Any, Any, Any], Any, Any, int | None]:
    """Return (q, k_cache, v_cache), k, v and head_dim_v; with qv the values are the first columns of the keys."""
    q, k_cache, v_cache = arrays
    if qv is None:
        return arrays, k, v, None
    if any(option is not None for option in refused):
        raise UnsupportedError(f"{function}: rotary, k_descale or v_descale with qv is not supported")
    together = _joined(function, {"qv": qv, "q": q}), _joined(function, {"v_cache": v_cache, "k_cache": k_cache}), None
    _check_columns(function, {"k": (k, k_cache), "v": (v, v_cache)})
    if k is not None:
        k, v = torch.cat((v, k), dim=-1), None
    return together, k, v, v_cache.shape[-1]


def _check_columns(function: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    """Raise one error with every reason unless new rows can be joined as the columns of the caches are."""
    requirements = Requirements(function)
    given = {name: rows for name, (rows, _) in pairs.items() if rows is not None}
    requirements.require(len(given) != 1, "k and v are appended together: give both or neither")
    for name, rows in given.items():
        cache = pairs[name][1]
        if requirements.require_type(isinstance(rows, torch.Tensor), f"{name} must be a tensor, not {type(rows)}"):
            same = rows.dtype == cache.dtype
            requirements.require_type(
                same, f"{name} must have the dtype of {name}_cache, {cache.dtype}, not {rows.dtype}"
            )
            expected, shape = tuple(cache.shape[-2:]), tuple(rows.shape)
            requirements.require(shape[-2:] == expected, f"the last axes of {name} must be {expected}, not {shape}")
    shapes = [tuple(rows.shape[:-1]) for rows in given.values()]
    requirements.require(shapes[1:] == shapes[:-1], f"k and v must agree in all axes but the last, not {shapes}")
    requirements.raise_if_unmet({})


def _joined(function: str, pair: dict[str, Any]) -> torch.Tensor:
    """Return the view of one array whose last axis has the columns of the first tensor and then of the second."""
    (first, x), (second, y) = pair.items()
    if torch.compiler.is_compiling():
        raise UnsupportedError(f"{function}: qv under torch.compile, which does not know whether tensors share memory")
    for name, tensor in pair.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{function}: {name} must be a tensor, not {type(tensor)}")
    steps = [[s for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1] for t in (x, y)]
    together = (
        (x.shape[:-1], x.dtype, x.device, steps[0]) == (y.shape[:-1], y.dtype, y.device, steps[1])
        and x.stride()[-1:] == y.stride()[-1:] == (1,)
        and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        and x.storage_offset() + x.shape[-1] == y.storage_offset()
    )
    if not together:
        raise UnsupportedError(
            f"{function}: qv needs {first} and {second} as neighbouring columns of one array, [{first} | {second}], "
            f"not {tuple(x.shape)} with strides {x.stride()} and {tuple(y.shape)} with strides {y.stride()}, which "
            "would be copied"
        )
    return x.as_strided((*x.shape[:-1], x.shape[-1] + y.shape[-1]), x.stride())


def _refuse_rotary_seqlens(function: str, rotary_seqlens: Any) -> None:
    if rotary_seqlens is not None:
        raise UnsupportedError(
            f"{function}: rotary_seqlens is not supported, because rotation starts at cache_seqlens here: "
            "cupy_flash.attention_with_kv_cache takes positions"
        )


def _table_and_rows(function: str, block_table: Any, page_table: Any, cache_batch_idx: Any) -> tuple[Any, Any]:
    """Return the block table, of which page_table is FlashAttention 3's name, and the rows of contiguous caches."""
    if block_table is not None and page_table is not None:
        raise ValueError(f"{function}: block_table and page_table are names of one argument")
    table = page_table if block_table is None else block_table
    if table is None or cache_batch_idx is None:
        return table, cache_batch_idx
    return _rows_of_table(function, table, cache_batch_idx), None


def _rows_of_table(function: str, table: Any, rows: Any) -> Any:
    """Return the rows of a block table that cache_batch_idx selects, one per sequence.

    An index of no row selects pages of -1, which do not exist either. In host memory the operators refuse such pages.
    On a GPU the host reads no indices, and the kernels drop rows that are appended to such pages.
    """
    for name, array in (("block_table", table), ("cache_batch_idx", rows)):
        if not isinstance(array, torch.Tensor) or array.dtype != torch.int32:
            raise TypeError(f"{function}: {name} must be an int32 tensor, not {getattr(array, 'dtype', type(array))}")
    if table.dim() != 2 or rows.dim() != 1:
        shapes = f"{tuple(table.shape)} and {tuple(rows.shape)}"
        raise ValueError(f"{function}: block_table and cache_batch_idx must be (R, columns) and (B,), not {shapes}")
    require_one_device(function, {"block_table": table, "cache_batch_idx": rows})
    count = table.shape[0]
    exists = (rows >= 0) & (rows < count)
    if _is_readable(rows) and not exists.all():
        raise ValueError(f"{function}: cache_batch_idx is {rows.tolist()}, and block_table has {count} rows")
    return F.pad(table, (0, 0, 0, 1), value=-1).index_select(0, torch.where(exists, rows, count))


def _check_new_rows(function: str, k: Any, cu_seqlens_q: Any, cu_seqlens_k_new: Any, rotary_cos: Any) -> None:
    """Raise ValueError for rotary without k, UnsupportedError unless k and v are packed with the lengths of q."""
    if k is None:
        if rotary_cos is not None:
            raise ValueError(f"{function}: rotary_cos and rotary_sin need k and v, as in flash-attn")
        return
    if cu_seqlens_k_new is cu_seqlens_q or (cu_seqlens_k_new is None and len(k.shape) == 3):
        return
    elsewhere = "append the rows with cupy_flash.append_to_kv_cache first, and call without k and v"
    if cu_seqlens_q is None or cu_seqlens_k_new is None:
        raise UnsupportedError(f"{function}: k and v must be packed if and only if q is: {elsewhere}")
    if not (_is_readable(cu_seqlens_q) and _is_readable(cu_seqlens_k_new)):
        raise UnsupportedError(
            f"{function}: cu_seqlens_k_new must be cu_seqlens_q itself, because values on a GPU, or under "
            f"torch.compile, are not read to compare them; if k and v have other lengths than q, {elsewhere}"
        )
    if cu_seqlens_q.tolist() != cu_seqlens_k_new.tolist():
        lengths = f"cu_seqlens_k_new is {cu_seqlens_k_new.tolist()}, and cu_seqlens_q {cu_seqlens_q.tolist()}"
        raise UnsupportedError(f"{function}: k and v must have the lengths of q: {lengths}; {elsewhere}")


def _is_readable(tensor: Any) -> bool:
    """Return whether the values of a tensor can be read without waiting for a device or ending a trace."""
    return not torch.compiler.is_compiling() and type(tensor) is torch.Tensor and tensor.is_cpu


def _split_size(function: str, num_splits: Any, split_size: Any, k_cache: Any, table: Any) -> Any:
    """Return the split_size that divides the capacity into num_splits pieces."""
    if not num_splits:
        return split_size
    if split_size is not None:
        raise ValueError(f"{function}: num_splits and split_size are two ways to say one thing: give one")
    if num_splits < 0:
        raise ValueError(f"{function}: num_splits must be at least 0, not {num_splits}")
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[-1])
    return max(-(-capacity // (num_splits * SPLIT_UNIT)), 1) * SPLIT_UNIT


def _as_many_rows(q: Any, k: Any) -> bool:
    return len(q.shape) == 3 or q.shape[1:2] == k.shape[1:2]


def _has_one_query(q: Any, max_seqlen_q: Any) -> bool:
    return max_seqlen_q == 1 if len(q.shape) == 3 else q.shape[1:2] == (1,)
