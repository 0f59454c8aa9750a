"""Attention on a KV cache, and appending to one: what a server calls for every token."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, overload

from . import backends
from .arrays import AnyArray, ArrayT

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import CacheArguments, CacheArgumentsWithoutLse, Layout, MaskMod, ScoreMod, Window


@overload
def attention_with_kv_cache(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray, *, return_lse: Literal[False] = False,
    **options: Unpack[CacheArgumentsWithoutLse[AnyArray]],
) -> ArrayT: ...  # fmt: skip


@overload
def attention_with_kv_cache(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray, *, return_lse: Literal[True],
    **options: Unpack[CacheArgumentsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention_with_kv_cache(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray, *, return_lse: bool,
    **options: Unpack[CacheArgumentsWithoutLse[AnyArray]],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...  # fmt: skip


def attention_with_kv_cache(
    q: ArrayT,
    k_cache: AnyArray,
    v_cache: AnyArray,
    *,
    k: AnyArray | None = None,
    v: AnyArray | None = None,
    cache_seqlens: AnyArray | int | None = None,
    cache_batch_idx: AnyArray | None = None,
    cache_leftpad: AnyArray | None = None,
    block_table: AnyArray | None = None,
    slots: AnyArray | None = None,
    positions: AnyArray | None = None,
    cu_seqlens_q: AnyArray | None = None,
    max_seqlen_q: int | None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: AnyArray | None = None,
    sink: AnyArray | None = None,
    mask: AnyArray | None = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    k_descale: AnyArray | None = None,
    v_descale: AnyArray | None = None,
    split_size: int | None = None,
    layout: Layout = "bshd",
    out: AnyArray | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    engine: str | None = None,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """Attention of new queries on the keys and values of a cache, contiguous or paged, after appending new ones.

    Sequence b has n_b keys in the cache, the call appends s_b rows of k and v in place, and its Sq queries then see
    L_b = n_b + s_b keys; query i lies at position L_b - Sq + i. No gradients are recorded. The host never reads
    lengths, tables and positions that are on a GPU: a call is planned by the capacity of the cache. Arrays as for
    `cupy_flash.attention`; caches are never copied and may have any strides with a contiguous last dimension.

    Args:
        q: (B, Sq, Hq, D), or packed (T, Hq, D) with cu_seqlens_q; float16, bfloat16, float32 or float64.
        k_cache: (Bc, Sc, Hk, D), or pages (pages, P, Hk, D) with block_table, P a power of two. The dtype of q, or
            float8_e4m3fn beside a q of 16 bit. The capacity is Sc, or columns of block_table times P.
        v_cache: (Bc, Sc, Hk, Dv) or (pages, P, Hk, Dv).
        k: rows to append: (B, Snew, Hk, D), or packed as q. They become the keys n_b to L_b - 1.
        v: likewise, (B, Snew, Hk, Dv).
        cache_seqlens: n_b, int32 (B,) or one int for all sequences. None: all caches are full.
        cache_batch_idx: int32 (B,): sequence b is row cache_batch_idx[b] of a contiguous cache instead of row b.
        cache_leftpad: int32 (B,): the keys before it are not seen. Contiguous caches alone.
        block_table: int32 (B, columns): key j of sequence b is row j % P of page block_table[b, j // P]. Entries past
            L_b are never looked up.
        slots: int64, one per row of k: it goes to page slot // P, row slot % P (of a contiguous cache Sc instead of P),
            nowhere if negative. cache_seqlens then counts all keys, and s_b is 0.
        positions: int32 (B, Sq), or (T,): the positions by which queries and appended keys are rotated, and the q_idx
            of mods, instead of those where they lie.
        cu_seqlens_q: int32 (B + 1,): sequence b is the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, k and v.
        max_seqlen_q: at least the longest of them.
        rotary_cos: floating (R, rd / 2), rd <= D: rotate the first rd dimensions of q and of the appended k, a position
            p by row p, and one before the first key by row 0. k is rotated in float32 and rounded once to the dtype of
            the cache.
        rotary_sin: likewise.
        rotary_interleaved: whether pairs are dimensions (2i, 2i + 1), else (i, i + rd / 2).
        causal: whether query i sees no key after its own position L_b - Sq + i.
        window: as in `cupy_flash.attention`, with the diagonal offset L_b - Sq.
        scale: factor of q.k, default 1 / sqrt(D).
        softcap: as in `cupy_flash.attention`.
        alibi_slopes: float32 (Hq,) or (B, Hq): adds -slope |L_b - Sq + i - j|.
        sink: floating (Hq,), as in `cupy_flash.attention`.
        mask: bool (B or 1, 1 or Hq, Sq, s): which of the last s keys of its sequence a query sees, True = attend. All
            earlier ones are seen as causal and window say. A tree of drafted tokens is a mask with causal=False.
        score_mod: as in `cupy_flash.attention`, with q_idx = max(L_b - Sq + i, 0), or positions[b, i], and kv_idx = j
            whatever the page. Captured arrays must have room for every position below the capacity.
        mask_mod: likewise.
        k_descale: float32 (B, Hk), for caches of float8_e4m3fn: a key stands for its numbers times the descale. None
            is 1.
        v_descale: likewise.
        split_size: a multiple of 64: pieces of the keys end at its multiples, and the bits of a query then depend on
            its own sequence and the options alone: not on the batch, its order or padding, on page numbers, or on how
            many queries of the sequence a call has. None: equal work for all processors.
        layout: "bshd" as above, or "bhsd": q (B, Hq, Sq, D), caches (Bc, Hk, Sc, D) or (pages, Hk, P, D).
        out: where the result goes, of its shape and the dtype of q. None: a new array.
        return_lse: also return lse, float32 (float64 for float64), (B, Hq, Sq) or (Hq, T).
        backend: as in `cupy_flash.attention`.
        engine: as in `cupy_flash.attention`.

    Returns:
        out (B, Sq, Hq, Dv) or (T, Hq, Dv), or (out, lse). A query that sees no key is 0, and its lse -inf, or with a
        sink the sink. Rows past cu_seqlens_q[-1] are 0, and their lse -inf.

    Raises:
        TypeError: as `cupy_flash.attention`, one error with every reason.
        ValueError: likewise. Contents of arrays are checked in host memory; on a GPU wrong ones never fault and spoil
            only their own sequence.
        UnsupportedError: no engine of this version serves the call.

    Equivalent NumPy, for one sequence of a contiguous cache and one head:

        k_cache[n : n + s], v_cache[n : n + s] = k, v
        L = n + s
        i, j = np.arange(Sq)[:, None], np.arange(L)
        S = np.where(j <= L - Sq + i, scale * q @ k_cache[:L].T, -np.inf)
        P = np.exp(S - S.max(axis=1, keepdims=True))
        out = P / P.sum(axis=1, keepdims=True) @ v_cache[:L]

    Source: Dao et al., Flash-Decoding for long-context inference (2023); paging: Kwon et al., PagedAttention (2023).
    """
    from .pose_cache import CacheOptions, pose_with_cache  # which calls without a cache never need

    options = CacheOptions(
        k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, slots, positions, cu_seqlens_q, max_seqlen_q,
        rotary_cos, rotary_sin, rotary_interleaved, causal, window, scale, softcap, alibi_slopes, sink, mask, score_mod,
        mask_mod, k_descale, v_descale, split_size, layout, out, return_lse, backend, engine,
    )  # fmt: skip
    if _is_torch(q):
        from .adapters.torch import cache

        return cache.attend(q, k_cache, v_cache, options)
    result, lse = backends.forward(*pose_with_cache(q, k_cache, v_cache, options))
    return (result.result(), lse.result()) if return_lse else result.result()


def explain_with_kv_cache(
    q: AnyArray, k_cache: AnyArray, v_cache: AnyArray, **options: Unpack[CacheArguments[AnyArray]]
) -> str:
    """How `attention_with_kv_cache` with these arguments would run, as text; nothing is computed or written.

    Args:
        q: as in `attention_with_kv_cache`.
        k_cache: as in `attention_with_kv_cache`.
        v_cache: as in `attention_with_kv_cache`.
        **options: those of `attention_with_kv_cache`.

    Returns:
        Engine and tiles, why these, and why not the other engines; with split_size also what that costs; of score_mod
        and mask_mod their expressions and what they capture.

    Raises:
        UnsupportedError: no engine serves the call.
    """
    from .pose_cache import CacheOptions, pose_with_cache

    settings = CacheOptions.of("explain_with_kv_cache", options)
    problem, _ = pose_with_cache(q, k_cache, v_cache, settings)
    text = backends.plan_for(problem).explain()
    if not problem.mods:
        return text
    from .mods import explain as mods
    from .mods.trace import mod_of

    return f"{text}\n{mods.explain(mod_of(settings.score_mod, settings.mask_mod), gradients=False)}"


def append_to_kv_cache(
    k: AnyArray,
    v: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    *,
    cache_seqlens: AnyArray | int | None = None,
    slots: AnyArray | None = None,
    cache_batch_idx: AnyArray | None = None,
    block_table: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    rotary_interleaved: bool = True,
    positions: AnyArray | None = None,
    k_descale: AnyArray | None = None,
    v_descale: AnyArray | None = None,
    layout: Layout = "bshd",
) -> None:
    """Write rows of k and v to a KV cache in place, as `attention_with_kv_cache` does before it attends.

    Args:
        k: (B, S, Hk, D), or packed (T, Hk, D) with cu_seqlens or slots.
        v: (B, S, Hk, Dv) or (T, Hk, Dv).
        k_cache: as in `attention_with_kv_cache`.
        v_cache: as in `attention_with_kv_cache`.
        cache_seqlens: n_b, int32 (B,) or an int: the keys of each sequence before its rows.
        slots: int64, one per row, in place of cache_seqlens. Beside slots, cache_seqlens is given only with rotary
            tables and without positions: the keys of each sequence, of which its rows are the last.
        cache_batch_idx: int32 (B,), as in `attention_with_kv_cache`.
        block_table: int32 (B, columns), likewise; not beside slots.
        cu_seqlens: int32 (B + 1,): sequence b is the rows cu_seqlens[b] to cu_seqlens[b + 1] of k and v.
        rotary_cos: floating (R, rd / 2): rotates k.
        rotary_sin: likewise.
        rotary_interleaved: whether pairs are dimensions (2i, 2i + 1), else (i, i + rd / 2).
        positions: int32 (B, S) or (T,): the positions by which keys are rotated.
        k_descale: float32 (B, Hk), for caches of float8_e4m3fn.
        v_descale: likewise.
        layout: of k, v and the caches.

    Raises:
        TypeError: as `attention_with_kv_cache`.
        ValueError: as `attention_with_kv_cache`. Two rows for one place are an error in host memory.
        UnsupportedError: as `attention_with_kv_cache`.
    """
    from .pose_cache import CacheOptions, pose_append

    options = CacheOptions(
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, block_table=block_table, slots=slots,
        positions=positions, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        k_descale=k_descale, v_descale=v_descale, layout=layout,
    )  # fmt: skip
    if _is_torch(k):
        from .adapters.torch import cache

        cache.append(k, v, k_cache, v_cache, cu_seqlens, options)
        return
    backends.append(*pose_append(k, v, k_cache, v_cache, cu_seqlens, options))


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)
