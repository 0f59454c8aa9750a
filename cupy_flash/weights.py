"""Attention probabilities recomputed on demand, the keys of the largest ones, and the importance of each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from . import dispatch
from .arrays import AnyArray, Array, ArrayT, is_torch
from .problem.records import CacheOptions, Options, Packed, SavedWeights
from .problem.weights import (
    EACH,
    IMPORTANCE,
    LIMIT,
    TOP,
    WEIGHTS,
    WeightsGradients,
    Wish,
    pose_weights,
    pose_weights_with_cache,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .problem.argument_types import CacheReadArguments, PackedOptions, PaddedOptions
    from .problem.weights import Heads, Rows

    Inputs: TypeAlias = tuple[ArrayT, AnyArray, AnyArray]  # q, k and lse


def attention_weights(
    q: ArrayT,
    k: ArrayT,
    lse: AnyArray,
    *,
    rows: Rows = None,
    heads: Heads = EACH,
    limit: float | None = LIMIT,
    **options: Unpack[PaddedOptions[AnyArray]],
) -> ArrayT:
    """Return the softmax probabilities of chosen rows, recomputed from q, k and the lse of `attention`.

    They are the weights by which `attention` averages the values, before dropout. Tile by tile, so that only the result
    takes memory: with `rows`, `heads` and heads="mean" it has the part that is wanted. Gradients are those of
    P = exp(s - lse) with lse an input of its own: with the lse of `attention` autograd continues into that, and a
    detached lse is a constant. NumPy users have `attention_weights_vjp`.

    Args:
        q: (B, Sq, Hq, D), as in `attention`.
        k: (B, Sk, Hk, D), the dtype of q.
        lse: (B, Hq, Sq), float32 (float64 for float64): the second result of `attention` with return_lse=True and the
            same options.
        rows: the rows wanted of each sequence and head: whole numbers in [0, Sq) in host memory, in any order, or a
            slice; None is all.
        heads: "each", "mean" (over all query heads), or a list of query heads.
        limit: the largest result in bytes; a larger one is an error before anything is allocated. None: no limit.
        **options: those of `attention`. The sink plays a part in lse alone; dropout, seed, return_lse and deterministic
            have no effect.

    Returns:
        P in the dtype of q: (B, Hq, rows, Sk), for a list of heads (B, heads, rows, Sk), for "mean" (B, rows, Sk). A
        row sums to 1, with a sink to 1 - exp(sink - lse); a row that sees no key is 0, and so are rows past q_lengths.
        With `selected` the last axis has the keys that the row's list names in place of all Sk: n selected_block
        columns in the order of its entries, 0 where an entry names no key, without gradients. "mean" is for lists that
        all heads share.

    Raises:
        TypeError: as `attention`, one error with every reason.
        ValueError: likewise; also for a result above `limit`.
        UnsupportedError: no engine serves the call; on a GPU `simt` and `mma` do, and `simt` the gradients.

    The definition, for one head:

        s = np.where(visible, softcap * np.tanh(scale * q @ k.T / softcap) + bias, -np.inf)
        P = np.exp(s - lse[:, None])[rows]

    Source: the recomputation of P in the backward of Dao et al., FlashAttention (2022).

    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 8))
    >>> out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> last = cupy_flash.attention_weights(q, k, lse, rows=[5], heads="mean", causal=True)
    >>> last.shape, float(last.sum().round(6))
    ((1, 1, 6), 1.0)
    """
    wish = Wish(WEIGHTS, rows, heads, limit)
    return _compute("attention_weights", (q, k, lse), Options.of("attention_weights", options), wish)[0]


def attention_weights_varlen(
    q: ArrayT,
    k: ArrayT,
    lse: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    rows: Rows = None,
    heads: Heads = EACH,
    limit: float | None = LIMIT,
    **options: Unpack[PackedOptions[AnyArray]],
) -> ArrayT:
    """Return `attention_weights` of sequences of different lengths, packed along the token axis.

    Args:
        q: (Tq, Hq, D), as in `attention_varlen`.
        k: (Tk, Hk, D).
        lse: (Hq, Tq), the second result of `attention_varlen`.
        cu_seqlens_q: as in `attention_varlen`.
        cu_seqlens_k: likewise.
        max_seqlen_q: likewise.
        max_seqlen_k: likewise; the width of the result.
        rows: the rows wanted of q, whole numbers in [0, Tq), or a slice; None is all.
        heads: as in `attention_weights`.
        limit: as in `attention_weights`.
        **options: those of `attention_varlen`.

    Returns:
        P in the dtype of q, (Hq, rows, max_seqlen_k), for "mean" (rows, max_seqlen_k). Column j is key j of the row's
        sequence; columns past its length are 0, and so are rows past cu_seqlens_q[-1].
    """
    function, wish = "attention_weights_varlen", Wish(WEIGHTS, rows, heads, limit)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _compute(function, (q, k, lse), Options.of(function, options), wish, packed)[0]


def attention_weights_with_kv_cache(
    q: ArrayT,
    k_cache: AnyArray,
    lse: AnyArray,
    *,
    rows: Rows = None,
    heads: Heads = EACH,
    limit: float | None = LIMIT,
    **options: Unpack[CacheReadArguments[AnyArray]],
) -> ArrayT:
    """Return `attention_weights` of queries on a KV cache, which has their keys already. No gradients are recorded.

    Args:
        q: (B, Sq, Hq, D), or packed (T, Hq, D) with cu_seqlens_q.
        k_cache: as in `attention_with_kv_cache`.
        lse: (B, Hq, Sq) or (Hq, T), the second result of `attention_with_kv_cache`.
        rows: whole numbers in [0, Sq), of packed queries in [0, T), or a slice; None is all.
        heads: as in `attention_weights`.
        limit: as in `attention_weights`.
        **options: those of `attention_with_kv_cache`, except those of an append (k, v, slots) and out. After a call
            that has appended, cache_seqlens counts the appended keys too.

    Returns:
        P in the dtype of q, (B, Hq, rows, capacity) or (Hq, rows, capacity), without the heads for "mean". Column j is
        key j of the sequence, whatever its page; columns past its length are 0.
    """
    function, wish = "attention_weights_with_kv_cache", Wish(WEIGHTS, rows, heads, limit)
    return _compute_on_cache(function, (q, k_cache, lse), options, wish)[0]


def attention_weights_vjp(
    q: ArrayT,
    k: ArrayT,
    lse: AnyArray,
    *,
    rows: Rows = None,
    heads: Heads = EACH,
    limit: float | None = LIMIT,
    **options: Unpack[PaddedOptions[AnyArray]],
) -> tuple[ArrayT, Callable[[ArrayT], WeightsGradients]]:
    """Return the result of `attention_weights`, and a function that computes its gradients.

    That function keeps the arrays by reference: they must not change before its last call.

    Args:
        q: as in `attention_weights`.
        k: likewise.
        lse: likewise.
        rows: likewise.
        heads: likewise.
        limit: likewise.
        **options: likewise.

    Returns:
        (weights, vjp). vjp(dweights), with the gradient of weights in its shape and dtype, returns
        WeightsGradients(dq, dk, dlse, dbias, dcaptured, None): dS = P dP and dlse = -sum over the keys of P dP. Add
        `attention_backward(..., dlse=dlse)` for what reaches q and k through lse.

    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 8))
    >>> out, lse = cupy_flash.attention(q, k, v, return_lse=True)
    >>> weights, vjp = cupy_flash.attention_weights_vjp(q, k, lse, heads="mean")
    >>> vjp(weights).dlse.shape
    (1, 2, 4)
    """
    wish = Wish(WEIGHTS, rows, heads, limit)
    results, vjp = _with_vjp("attention_weights_vjp", (q, k, lse), Options.of("attention_weights_vjp", options), wish)
    return results[0], vjp


def top_weights(
    q: ArrayT, k: ArrayT, lse: AnyArray, n: int, **options: Unpack[PaddedOptions[AnyArray]]
) -> tuple[ArrayT, ArrayT]:
    """Return the n largest probabilities of each row and their keys, in memory linear in the sequence length.

    Args:
        q: as in `attention_weights`.
        k: likewise.
        lse: likewise.
        n: how many keys, at least 1.
        **options: likewise.

    Returns:
        (values, keys), both (B, Hq, Sq, n), in the dtype of q and int32, in descending order of the scores; of equal
        scores the lower key comes first. Every visible key counts, also where its probability underflows to 0. Where a
        row sees fewer than n keys, values are 0 and keys -1. A score that is NaN counts as the largest. values are
        differentiable as `attention_weights` at these keys.

    Equivalent NumPy, for one head without hidden keys:

        keys = np.argsort(-s, axis=1, kind="stable")[:, :n]
        values = np.take_along_axis(np.exp(s - lse[:, None]), keys, axis=1)

    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 8))
    >>> out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> values, keys = cupy_flash.top_weights(q, k, lse, 2, causal=True)
    >>> keys[0, 0].tolist()
    [[0, -1], [1, 0], [1, 0], [2, 3]]
    """
    values, keys = _compute("top_weights", (q, k, lse), Options.of("top_weights", options), Wish(TOP, n=n))
    return values, keys


def top_weights_varlen(
    q: ArrayT,
    k: ArrayT,
    lse: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    n: int,
    **options: Unpack[PackedOptions[AnyArray]],
) -> tuple[ArrayT, ArrayT]:
    """Return `top_weights` of packed sequences.

    Args:
        q: as in `attention_weights_varlen`.
        k: likewise.
        lse: likewise.
        cu_seqlens_q: likewise.
        cu_seqlens_k: likewise.
        max_seqlen_q: likewise.
        max_seqlen_k: likewise.
        n: how many keys, at least 1.
        **options: likewise.

    Returns:
        (values, keys), both (Hq, Tq, n); keys are numbers within the row's sequence.
    """
    function, wish = "top_weights_varlen", Wish(TOP, n=n)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    values, keys = _compute(function, (q, k, lse), Options.of(function, options), wish, packed)
    return values, keys


def top_weights_with_kv_cache(
    q: ArrayT, k_cache: AnyArray, lse: AnyArray, n: int, **options: Unpack[CacheReadArguments[AnyArray]]
) -> tuple[ArrayT, ArrayT]:
    """Return `top_weights` of queries on a KV cache. No gradients are recorded.

    Args:
        q: as in `attention_weights_with_kv_cache`.
        k_cache: likewise.
        lse: likewise.
        n: how many keys, at least 1.
        **options: likewise.

    Returns:
        (values, keys), both (B, Hq, Sq, n) or (Hq, T, n); keys are numbers within the sequence, whatever the page.
    """
    values, keys = _compute_on_cache("top_weights_with_kv_cache", (q, k_cache, lse), options, Wish(TOP, n=n))
    return values, keys


def key_importance(
    q: ArrayT,
    k: ArrayT,
    lse: AnyArray,
    *,
    row_weights: AnyArray | None = None,
    **options: Unpack[PaddedOptions[AnyArray]],
) -> ArrayT:
    """Return for each key the sum of its probabilities over the rows, each row with a weight, in linear memory.

    With row weights of 1 it is the score by which H2O (Zhang et al., 2023) evicts keys from a cache; with 1 in the last
    rows alone, that of SnapKV (Li et al., 2024).

    Args:
        q: as in `attention_weights`.
        k: likewise.
        lse: likewise.
        row_weights: floating, broadcastable to (B, Hq, Sq); None is 1. With a gradient in its shape and dtype. A row of
            weight 0 adds nothing, whatever its scores are.
        **options: likewise.

    Returns:
        (B, Hq, Sk), float32 (float64 for float64): c_j = sum_i row_weights_i P_ij.

    Equivalent NumPy, for one head:

        c = row_weights @ np.exp(s - lse[:, None])

    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 8))
    >>> out, lse = cupy_flash.attention(q, k, v, return_lse=True)
    >>> cupy_flash.key_importance(q, k, lse).sum(axis=-1).round(6).tolist()
    [[4.0, 4.0]]
    """
    wish = Wish(IMPORTANCE, row_weights=row_weights)
    return _compute("key_importance", (q, k, lse), Options.of("key_importance", options), wish)[0]


def key_importance_varlen(
    q: ArrayT,
    k: ArrayT,
    lse: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    row_weights: AnyArray | None = None,
    **options: Unpack[PackedOptions[AnyArray]],
) -> ArrayT:
    """Return `key_importance` of packed sequences.

    Args:
        q: as in `attention_weights_varlen`.
        k: likewise.
        lse: likewise.
        cu_seqlens_q: likewise.
        cu_seqlens_k: likewise.
        max_seqlen_q: likewise.
        max_seqlen_k: likewise.
        row_weights: broadcastable to (Hq, Tq).
        **options: likewise.

    Returns:
        (B, Hq, max_seqlen_k): a row for each sequence, 0 past its length.
    """
    function, wish = "key_importance_varlen", Wish(IMPORTANCE, row_weights=row_weights)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _compute(function, (q, k, lse), Options.of(function, options), wish, packed)[0]


def key_importance_with_kv_cache(
    q: ArrayT,
    k_cache: AnyArray,
    lse: AnyArray,
    *,
    row_weights: AnyArray | None = None,
    **options: Unpack[CacheReadArguments[AnyArray]],
) -> ArrayT:
    """Return `key_importance` of queries on a KV cache. No gradients are recorded.

    Args:
        q: as in `attention_weights_with_kv_cache`.
        k_cache: likewise.
        lse: likewise.
        row_weights: broadcastable to the shape of lse.
        **options: likewise.

    Returns:
        (B, Hq, capacity), 0 past the length of a sequence.
    """
    wish = Wish(IMPORTANCE, row_weights=row_weights)
    return _compute_on_cache("key_importance_with_kv_cache", (q, k_cache, lse), options, wish)[0]


def key_importance_vjp(
    q: ArrayT,
    k: ArrayT,
    lse: AnyArray,
    *,
    row_weights: AnyArray | None = None,
    **options: Unpack[PaddedOptions[AnyArray]],
) -> tuple[ArrayT, Callable[[ArrayT], WeightsGradients]]:
    """Return the result of `key_importance`, and a function that computes its gradients.

    That function keeps the arrays by reference: they must not change before its last call.

    Args:
        q: as in `key_importance`.
        k: likewise.
        lse: likewise.
        row_weights: likewise.
        **options: likewise.

    Returns:
        (importance, vjp). vjp(dimportance) returns WeightsGradients(dq, dk, dlse, dbias, dcaptured, drow_weights).
    """
    wish = Wish(IMPORTANCE, row_weights=row_weights)
    results, vjp = _with_vjp("key_importance_vjp", (q, k, lse), Options.of("key_importance_vjp", options), wish)
    return results[0], vjp


def _compute(
    function: str, arrays: Inputs[ArrayT], options: Options, wish: Wish, packed: Packed | None = None
) -> tuple[ArrayT, ...]:
    if is_torch(arrays[0]):
        from .adapters.torch import weights as adapter

        return adapter.compute(function, arrays, options, wish, packed)
    results = dispatch.weights(*pose_weights(function, arrays, options, wish, packed))
    return tuple(map(Array.result, results))


def _compute_on_cache(
    function: str, arrays: Inputs[ArrayT], options: Mapping[str, object], wish: Wish
) -> tuple[ArrayT, ...]:
    settings = CacheOptions.of_reading(function, options)
    if is_torch(arrays[0]):
        from .adapters.torch import weights as adapter

        return adapter.compute_on_cache(function, arrays, settings, wish)
    results = dispatch.weights(*pose_weights_with_cache(function, arrays, settings, wish))
    return tuple(map(Array.result, results))


def _with_vjp(
    function: str, arrays: Inputs[ArrayT], options: Options, wish: Wish
) -> tuple[tuple[ArrayT, ...], Callable[[ArrayT], WeightsGradients]]:
    results = dispatch.weights(*pose_weights(function, arrays, options, wish))

    def vjp(gradient: ArrayT) -> WeightsGradients:
        saved = SavedWeights(gradient)
        return dispatch.weights_backward(*pose_weights("vjp", arrays, options, wish, saved=saved)).results()

    return tuple(map(Array.result, results)), vjp
