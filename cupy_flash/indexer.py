"""The lightning indexer of sparse attention: the keys that it chooses for each query, and the loss that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import dispatch
from .arrays import AnyArray, Array, ArrayT, is_torch
from .problem.indexer import Rule, pose_indexer

if TYPE_CHECKING:
    from .problem.argument_types import Causal


def select_keys(
    q_idx: ArrayT,
    weights: AnyArray,
    k_idx: AnyArray,
    n: int,
    *,
    causal: Causal = True,
    block: int = 1,
    local: int = 0,
    kv_lengths: AnyArray | None = None,
    block_table: AnyArray | None = None,
    scale: float = 1.0,
) -> ArrayT:
    """Return the n keys with the largest scores of an indexer for each query, as lists for `selected` of `attention`.

    It is the lightning indexer of DeepSeek V3.2, and with `block` and `local` that of MiniMax M3. The choice is exact
    and the same in every run; memory is that of the lists and of a tile of scores. No gradients are recorded: the
    indexer learns by `selection_loss`.

    Args:
        q_idx: (B, Sq, Hi, Di), float16, bfloat16, float32 or float64.
        weights: (B, Sq, Hi), floating: the weight of each head. Factors such as Di^-0.5 may be part of it.
        k_idx: (B, Sk, Di), the dtype of q_idx; with block_table pages, (pages, keys of a page, Di).
        n: the number of keys or blocks in a list.
        causal: hide the keys after the query: query i has the position i + L - Sq of L keys, with "top_left" i.
        block: choose blocks of so many keys, by the largest score of the visible keys of each.
        local: so many blocks, the query's own and those before it, are always among the n.
        kv_lengths: int32 (B,), the number of keys L of each sequence; None is Sk.
        block_table: int32 (B, pages of a sequence): the pages of each sequence, for the keys in a KV cache.
        scale: a factor of q_idx.

    Returns:
        int32 (B, 1, Sq, n): ascending, -1 last where a query sees fewer keys. Ties go to the lower key. A score that is
        NaN counts as the largest.

    Raises:
        TypeError: an argument has a wrong type; one error with every reason.
        ValueError: likewise, for shapes and contents.
        UnsupportedError: no kernel serves Di or this many entries, or CUPY_FLASH_BACKEND names a backend that does not
            run on the device of the arrays.

    The definition, for one sequence:

        I = np.einsum("th,ths->ts", weights, np.maximum(scale * np.einsum("thd,sd->ths", q_idx, k_idx), 0))
        I[~visible] = -np.inf
        keys = np.sort(np.argsort(-I, axis=1, kind="stable")[:, :n])

    Source: DeepSeek-AI, DeepSeek-V3.2 (2025).

    >>> import numpy as np, cupy_flash
    >>> rng = np.random.default_rng(0)
    >>> q_idx, weights, k_idx = rng.normal(size=(1, 6, 2, 8)), rng.random((1, 6, 2)), rng.normal(size=(1, 6, 8))
    >>> lists = cupy_flash.select_keys(q_idx, weights, k_idx, 3)
    >>> lists[0, 0, :3].tolist()
    [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    >>> q, k, v = rng.normal(size=(3, 1, 6, 4, 16))
    >>> cupy_flash.attention(q, k, v, causal=True, selected=lists).shape
    (1, 6, 4, 16)
    """
    given = dict(q=q_idx, weights=weights, k=k_idx, kv_lengths=kv_lengths, block_table=block_table)
    rule = Rule(n, causal, block, local, scale)
    if is_torch(q_idx):
        from .adapters.torch import indexer as adapter

        return adapter.select_keys(given, rule)
    return dispatch.select_keys(*pose_indexer("select_keys", given, rule)).result()


def selection_loss(
    q_idx: ArrayT,
    weights: AnyArray,
    k_idx: AnyArray,
    selected: AnyArray,
    target: AnyArray,
    row_weights: AnyArray | None = None,
) -> ArrayT:
    """Return the loss that trains an indexer: how far its scores on the lists are from the attention's probabilities.

    It is the sum over the rows of their Kullback-Leibler divergence KL(p || softmax(I)), with p the target of the row
    and I the scores of `select_keys`, both on the row's list. torch records its gradients by q_idx, weights and k_idx,
    as jax does of `adapters.jax.selection_loss`; NumPy users have `selection_loss_vjp`. target and row_weights are
    constants.

    Args:
        q_idx: as in `select_keys`.
        weights: likewise.
        k_idx: (B, Sk, Di).
        selected: int32 (B or 1, 1, Sq, n): lists of keys, of `select_keys` or others; negative entries name none.
        target: floating (B, Sq, n): the probabilities of the listed keys, normalised here over the entries that name a
            key. `attention_weights` with `selected` and heads="mean" computes them.
        row_weights: floating, broadcastable to (B, Sq); None is 1. 0 for padding.

    Returns:
        A number in float32 (float64 for float64). A row without entries, or whose target is 0, adds 0.

    Raises:
        TypeError: as `select_keys`.
        ValueError: likewise; a list in host memory names a key twice or one that is not there.
        UnsupportedError: as `select_keys`.

    The definition, for one sequence:

        I = np.take_along_axis(I, selected, axis=1)
        loss = (row_weights * (p * (np.log(p) - log_softmax(I))).sum(axis=1)).sum()

    >>> import numpy as np, cupy_flash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 6, 4, 16))
    >>> q_idx, weights, k_idx = rng.normal(size=(1, 6, 2, 8)), rng.random((1, 6, 2)), rng.normal(size=(1, 6, 8))
    >>> lists = cupy_flash.select_keys(q_idx, weights, k_idx, 3)
    >>> cupy_flash.selection_loss(q_idx, weights, k_idx, lists, np.ones((1, 6, 3))).shape
    ()
    """
    given = dict(q=q_idx, weights=weights, k=k_idx, selected=selected, target=target, row_weights=row_weights)
    if is_torch(q_idx):
        from .adapters.torch import indexer as adapter

        return adapter.selection_loss(given)
    return dispatch.selection_loss(*pose_indexer("selection_loss", given)).result()


def selection_loss_vjp(
    q_idx: ArrayT,
    weights: AnyArray,
    k_idx: AnyArray,
    selected: AnyArray,
    target: AnyArray,
    row_weights: AnyArray | None = None,
) -> tuple[ArrayT, tuple[ArrayT, ArrayT, ArrayT]]:
    """Return `selection_loss` and its gradients by q_idx, weights and k_idx, computed together.

    Args:
        q_idx: as in `selection_loss`.
        weights: likewise.
        k_idx: likewise.
        selected: likewise.
        target: likewise.
        row_weights: likewise.

    Returns:
        (loss, (dq_idx, dweights, dk_idx)), each gradient in the shape and dtype of its input, and the same in every
        run.

    >>> import numpy as np, cupy_flash
    >>> rng = np.random.default_rng(0)
    >>> q_idx, weights, k_idx = rng.normal(size=(1, 6, 2, 8)), rng.random((1, 6, 2)), rng.normal(size=(1, 6, 8))
    >>> lists = cupy_flash.select_keys(q_idx, weights, k_idx, 3)
    >>> loss, gradients = cupy_flash.selection_loss_vjp(q_idx, weights, k_idx, lists, np.ones((1, 6, 3)))
    >>> [x.shape for x in gradients]
    [(1, 6, 2, 8), (1, 6, 2), (1, 6, 8)]
    """
    given = dict(q=q_idx, weights=weights, k=k_idx, selected=selected, target=target, row_weights=row_weights)
    loss, *gradients = map(Array.result, dispatch.selection_loss_gradients(*pose_indexer("selection_loss_vjp", given)))
    dq_idx, dweights, dk_idx = gradients
    return loss, (dq_idx, dweights, dk_idx)
