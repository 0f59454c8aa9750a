"""Attention on a KV cache, and appends to it, which a server calls for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from . import dispatch, keyed_plan
from .arrays import AnyArray, ArrayT, is_torch
from .problem.build import pose_with_cache
from .problem.records import CacheOptions, Statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from .explanation import Explanation
    from .problem.argument_types import (
        CacheArguments,
        CacheArgumentsWithoutLse,
        Layout,
        MaskMod,
        Names,
        ScoreMod,
        Statistic,
        Window,
    )


@overload
def attention_with_kv_cache(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray | None, *, return_lse: Literal[False] = False,
    **options: Unpack[CacheArgumentsWithoutLse[AnyArray]],
) -> ArrayT: ...  # fmt: skip


@overload
def attention_with_kv_cache(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray | None, *, return_lse: Literal[True],
    **options: Unpack[CacheArgumentsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention_with_kv_cache(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray | None, *, return_lse: bool,
    **options: Unpack[CacheArgumentsWithoutLse[AnyArray]],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention_with_kv_cache(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray | None, *, return_lse: Literal[True],
    statistics: Sequence[Statistic],
    **options: Unpack[CacheArgumentsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ArrayT, Statistics[ArrayT]]: ...  # fmt: skip


def attention_with_kv_cache(
    q: ArrayT,
    k_cache: AnyArray,
    v_cache: AnyArray | None,
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
    selected: AnyArray | None = None,
    selected_block: int = 1,
    selected_rows: int = 1,
    check_selected: bool = False,
    k_descale: AnyArray | None = None,
    v_descale: AnyArray | None = None,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    k_zero: AnyArray | None = None,
    v_zero: AnyArray | None = None,
    prefix_table: AnyArray | None = None,
    prefix_lengths: AnyArray | None = None,
    prefix_group: AnyArray | None = None,
    split_size: int | None = None,
    head_dim_v: int | None = None,
    layout: Layout = "bshd",
    out: AnyArray | None = None,
    return_lse: bool = False,
    statistics: Names = None,
    backend: str | None = None,
    engine: str | None = None,
) -> ArrayT | tuple[ArrayT, ArrayT] | tuple[ArrayT, ArrayT, Statistics[ArrayT]]:
    """Append new keys and values to a contiguous or paged cache, and compute the attention of new queries on it.

    Sequence b has n_b keys in the cache, the call appends s_b rows of k and v in place, and its Sq queries then see
    L_b = n_b + s_b keys; query i has position L_b - Sq + i. No gradients are recorded. The host never reads lengths,
    tables and positions that are on a GPU, so a call is planned by the capacity of the cache. Arrays are as for
    `cupy_flash.attention`; caches are never copied and may have any strides with a contiguous last dimension.

    Args:
        q: (B, Sq, Hq, D), or packed (T, Hq, D) with cu_seqlens_q; float16, bfloat16, float32 or float64.
        k_cache: (Bc, Sc, Hk, D), or pages (pages, P, Hk, D) with block_table, of any P. The dtype of q, or
            float8_e4m3fn beside a q of 16 bit; with k_scale int8, float8_e4m3fn, float8_e5m2, or uint8 (Bc, Sc, Hk,
            D / 2), whose bytes have two numbers of 4 bits, the even one in the lower half. The capacity is Sc, or
            columns of block_table times P.
        v_cache: (Bc, Sc, Hk, Dv) or (pages, P, Hk, Dv); None with head_dim_v.
        k: rows to append: (B, Snew, Hk, D), or packed as q. They become the keys n_b to L_b - 1.
        v: likewise, (B, Snew, Hk, Dv); None with head_dim_v.
        cache_seqlens: n_b, int32 (B,) or one int for all sequences. None means that all caches are full.
        cache_batch_idx: int32 (B,): sequence b is row cache_batch_idx[b] of a contiguous cache instead of row b.
        cache_leftpad: int32 (B,): keys before this position are not seen; only for contiguous caches.
        block_table: int32 (B, columns): key j of sequence b is row j % P of page block_table[b, j // P]. Entries past
            L_b are never looked up.
        slots: int64, one per row of k, which is written to page slot // P, row slot % P (with a contiguous cache, Sc
            instead of P), or dropped if the slot is negative. cache_seqlens then counts all keys, and s_b is 0.
        positions: int32 (B, Sq), or (T,): positions that replace L_b - Sq + i in the rotation of queries and appended
            keys, and as the q_idx of mods; without rotary tables and mods they have no effect.
        cu_seqlens_q: int32 (B + 1,): sequence b is the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, k and v.
        max_seqlen_q: at least the length of the longest sequence in q.
        rotary_cos: floating (R, rd / 2), rd <= D: rotate the first rd dimensions of q and of the appended k, with row p
            for position p, and row 0 before the first key. k is rotated in float32 and rounded once to the dtype of the
            cache.
        rotary_sin: likewise.
        rotary_interleaved: True if pairs are the dimensions (2i, 2i + 1), False for (i, i + rd / 2).
        causal: True hides the keys after query i's position L_b - Sq + i.
        window: as in `cupy_flash.attention`, with the diagonal offset L_b - Sq.
        scale: factor of q.k, default 1 / sqrt(D).
        softcap: as in `cupy_flash.attention`.
        alibi_slopes: float32 (Hq,) or (B, Hq): adds -slope |L_b - Sq + i - j|.
        sink: floating (Hq,), as in `cupy_flash.attention`.
        mask: bool (B or 1, 1 or Hq, Sq, s): which of the last s keys of its sequence a query sees, True = attend;
            causal and window apply to all keys. For a tree of drafted tokens pass its mask and causal=False.
        score_mod: as in `cupy_flash.attention`, with q_idx = max(L_b - Sq + i, 0), or positions[b, i], and kv_idx = j
            whatever the page. Captured arrays must have room for every position below the capacity.
        mask_mod: likewise.
        selected: int32 (B or 1, Hs, ceil(Sq / selected_rows), n), as in `cupy_flash.attention`; packed (Hs, T //
            selected_rows + B, n). Entries are numbers of keys in their sequence, whatever the page.
        selected_block: as in `cupy_flash.attention`.
        selected_rows: as in `cupy_flash.attention`.
        check_selected: as in `cupy_flash.attention`.
        k_descale: float32 (B, Hk), for caches of float8_e4m3fn: the factor of the stored keys. None is 1.
        v_descale: likewise.
        k_scale: float16 or float32 (Bc, Sc, Hk) or (pages, P, Hk), in any strides, the scale of each key and head of a
            quantised cache, whose key is k_scale * code. An append writes it, beside the codes: it is max|x| divided
            by the largest code (127, 448, 57344), in float32, and then rounded to its dtype, or 1 if that is 0. A code
            is x / k_scale, in float32, rounded to the nearest even and clipped. A row that has a NaN gets codes 0 and
            the scale NaN. A scale may lie in the rows of the cache, behind their codes.
        v_scale: likewise.
        k_zero: with uint8 caches, of the shape and dtype of k_scale: a key is k_scale * (code - k_zero). An append
            writes k_scale = (max x - min x) / 15 and k_zero = -min x / k_scale; a code is x / k_scale + k_zero.
        v_zero: likewise.
        prefix_table: int32 (G, columns): the pages of G prefixes that sequences share, each of which is read once. If
            g = prefix_group[b] >= 0, the first prefix_lengths[g] keys of sequence b are on the pages of prefix g, and
            block_table, cache_seqlens and slots count its own keys, which come after them; L_b counts both.
        prefix_lengths: int32 (G,), any numbers of keys up to columns * P.
        prefix_group: int32 (B,); -1: none.
        split_size: a multiple of 64: split-KV divides the keys of each sequence at multiples of it. The bits of a
            query's result then depend only on its own sequence and the options: not on the batch, its order or padding,
            page numbers, or the number of queries in the call. None divides the work equally among the processors.
        head_dim_v: Dv, if v_cache and v are None: the value of a key is its first head_dim_v numbers, as they are
            stored. The default scale stays 1 / sqrt(D), which is not that of a model whose keys are absorbed.
        layout: "bshd" as above, or "bhsd": q (B, Hq, Sq, D), caches (Bc, Hk, Sc, D) or (pages, Hk, P, D).
        out: an array for the result, of its shape and the dtype of q, in memory of its own. None allocates one.
        return_lse: also return lse, float32 (float64 for float64), (B, Hq, Sq) or (Hq, T).
        statistics: as in `cupy_flash.attention`, in the shape of lse; argmax is the number of the key in its sequence,
            whatever the page.
        backend: as in `cupy_flash.attention`.
        engine: as in `cupy_flash.attention`.

    Returns:
        out (B, Sq, Hq, Dv) or (T, Hq, Dv), or (out, lse), or (out, lse, Statistics). The row of a query that sees no
        key is 0, and its lse is -inf or the sink. Rows from cu_seqlens_q[-1] on are 0, with lse -inf.

    Raises:
        TypeError: as `cupy_flash.attention`, one error with every reason.
        ValueError: likewise. Contents of arrays in host memory are checked; on a GPU wrong contents never fault, and
            make only the result of their own sequence wrong.
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
    options = CacheOptions(
        k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, slots, positions, cu_seqlens_q, max_seqlen_q,
        rotary_cos, rotary_sin, rotary_interleaved, causal, window, scale, softcap, alibi_slopes, sink, mask, score_mod,
        mask_mod, selected, selected_block, selected_rows, check_selected, k_descale, v_descale, k_scale, v_scale,
        k_zero, v_zero, prefix_table, prefix_lengths, prefix_group, split_size, head_dim_v, layout,
        out, return_lse, statistics, backend, engine,
    )  # fmt: skip
    if is_torch(q):
        import cupy_flash.adapters.torch.kv_cache as adapter  # Python takes more than twice the time for `from .`

        return adapter.attend(q, k_cache, v_cache, options)
    result: ArrayT | tuple[ArrayT, ArrayT] | tuple[ArrayT, ArrayT, Statistics[ArrayT]] = keyed_plan.attend(
        (q, k_cache, v_cache), options
    )
    return result


def explain_with_kv_cache(
    q: AnyArray, k_cache: AnyArray, v_cache: AnyArray | None, **options: Unpack[CacheArguments[AnyArray]]
) -> Explanation:
    """Describe how `attention_with_kv_cache` with these arguments would run, without computing or writing anything.

    Args:
        q: as in `attention_with_kv_cache`.
        k_cache: as in `attention_with_kv_cache`.
        v_cache: as in `attention_with_kv_cache`.
        **options: those of `attention_with_kv_cache`.

    Returns:
        Text with the engine and its tiles, the reason for the choice, and the reasons against the other engines; with
        split_size also its cost; the expressions of score_mod and mask_mod and the captured arrays.

    Raises:
        UnsupportedError: no engine serves the call.
    """
    from .api import host_line

    settings = CacheOptions.of("explain_with_kv_cache", options)
    problem, _ = pose_with_cache(q, k_cache, v_cache, settings)
    text = dispatch.plan_for(problem).explain() + host_line(problem, (q, k_cache, v_cache), settings)
    if problem.mods:
        from .mods import explain as mods
        from .mods.trace import mod_of

        text = f"{text}\n{mods.explain(mod_of(settings.score_mod, settings.mask_mod), gradients=False)}"
    from .explanation import Explanation

    return Explanation(text)


def append_to_kv_cache(
    k: AnyArray,
    v: AnyArray | None,
    k_cache: AnyArray,
    v_cache: AnyArray | None,
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
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    k_zero: AnyArray | None = None,
    v_zero: AnyArray | None = None,
    layout: Layout = "bshd",
) -> None:
    """Write rows of k and v to a KV cache in place, as `attention_with_kv_cache` does before it attends.

    Args:
        k: (B, S, Hk, D), or packed (T, Hk, D) with cu_seqlens or slots.
        v: (B, S, Hk, Dv) or (T, Hk, Dv); None if v_cache is None, for values inside keys.
        k_cache: as in `attention_with_kv_cache`.
        v_cache: as in `attention_with_kv_cache`.
        cache_seqlens: n_b, int32 (B,) or an int: the number of keys of each sequence before the append.
        slots: int64, one per row, instead of cache_seqlens. With slots, cache_seqlens is given only for rotary tables
            without positions, and counts the keys of each sequence after the append.
        cache_batch_idx: int32 (B,), as in `attention_with_kv_cache`.
        block_table: int32 (B, columns), likewise; not with slots.
        cu_seqlens: int32 (B + 1,): sequence b is the rows cu_seqlens[b] to cu_seqlens[b + 1] of k and v.
        rotary_cos: floating (R, rd / 2): table by which k is rotated.
        rotary_sin: likewise.
        rotary_interleaved: True if pairs are the dimensions (2i, 2i + 1), False for (i, i + rd / 2).
        positions: int32 (B, S) or (T,): the positions by which keys are rotated; they have no effect without rotary
            tables.
        k_descale: float32 (B, Hk), for caches of float8_e4m3fn.
        v_descale: likewise.
        k_scale: as in `attention_with_kv_cache`, written in place as the caches are.
        v_scale: likewise.
        k_zero: likewise.
        v_zero: likewise.
        layout: layout of k, v and the caches.

    Raises:
        TypeError: as `attention_with_kv_cache`.
        ValueError: as `attention_with_kv_cache`; also for two rows with one slot, if slots are in host memory.
        UnsupportedError: as `attention_with_kv_cache`.
    """
    options = CacheOptions(
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, block_table=block_table, slots=slots,
        positions=positions, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        k_descale=k_descale, v_descale=v_descale, k_scale=k_scale, v_scale=v_scale, k_zero=k_zero, v_zero=v_zero,
        layout=layout,
    )  # fmt: skip
    if is_torch(k):
        import cupy_flash.adapters.torch.kv_cache as adapter

        adapter.append(k, v, k_cache, v_cache, cu_seqlens, options)
        return
    keyed_plan.append((k, v, k_cache, v_cache, cu_seqlens), options)
