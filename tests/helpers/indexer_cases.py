"""Cases of select_keys and selection_loss, and their definitions in NumPy."""

import numpy as np
from tolerance import assert_matches_reference

B, SQ, SK, HEADS, DIM = 2, 21, 45, 3, 8


def scores(q, w, k, scale=1.0):
    return np.einsum("bth,bths->bts", w, np.maximum(scale * np.einsum("bthd,bsd->bths", q, k), 0))


def whole_numbers(seed=0, q_len=SQ, kv_len=SK, dtype=np.float64):
    """Return q_idx, weights and k_idx whose scores are exact in every dtype, with many ties."""
    rng = np.random.default_rng(seed)
    shapes = (B, q_len, HEADS, DIM), (B, q_len, HEADS), (B, kv_len, DIM)
    return [rng.integers(-1, 2, size=shape).astype(dtype) for shape in shapes]


def sorted_choice(q, w, k, n, causal=True, block=1, local=0, kv_lengths=None, scale=1.0):
    """Return the lists by a full sort of all scores."""
    lists = np.full((B, 1, q.shape[1], n), -1)
    for b, I in enumerate(scores(q, w, k, scale)):
        length = k.shape[1] if kv_lengths is None else kv_lengths[b]
        position = np.arange(len(I)) + (0 if causal == "top_left" else length - len(I))
        for t, row in enumerate(I):
            seen = [s for s in range(length) if not causal or s <= position[t]]
            best = {}
            for s in seen:
                best[s // block] = max(row[s], best.get(s // block, -np.inf))
            own = position[t] // block
            forced = [e for e in best if own - local < e <= own]
            others = sorted((e for e in best if e not in forced), key=lambda e: (-best[e], e))
            chosen = sorted((forced + others)[:n])
            lists[b, 0, t, : len(chosen)] = chosen
    return lists


CHOICES = {
    "causal": dict(n=6),
    "all-keys": dict(n=6, causal=False, scale=-0.5),
    "top-left-lengths": dict(n=5, causal="top_left", kv_lengths=np.array([30, 0], np.int32)),
    "lengths": dict(n=7, kv_lengths=np.array([45, 9], np.int32)),
    "more-than-keys": dict(n=50),
    "blocks": dict(n=3, block=8),
    "blocks-of-12": dict(n=2, block=12),
    "blocks-local": dict(n=4, block=4, local=2),
    "all-local": dict(n=2, block=8, local=2, causal=False),
    "local-keys": dict(n=5, local=3, kv_lengths=np.array([44, 3], np.int32)),
}


def in_pages(page, dtype=np.float64):
    """Return arrays with NaN past the lengths and between pages in any order, the choice, and the options."""
    q, w, k = whole_numbers(3, kv_len=48)
    lengths = np.array([47, 20], np.int32)
    used = [-(-length // page) for length in lengths]
    numbers = np.random.default_rng(0).permutation(sum(used))
    table = np.full((B, 48 // page), [[-1], [99]], np.int32)
    pool = np.full((sum(used), page, DIM), np.nan)
    for b, length in enumerate(lengths):
        table[b, : used[b]] = numbers[used[0] * b :][: used[b]]
        for s in range(length):
            pool[table[b, s // page], s % page] = k[b, s]
    options = dict(n=5, block=8, kv_lengths=lengths)
    lists = sorted_choice(q, w, k, **options)
    return [x.astype(dtype) for x in (q, w, pool)], lists, options | dict(block_table=table)


def special_choices():
    """Return (arrays, options, lists) with NaN and infinities in the scores."""
    q, w = np.ones((1, 4, 1, 1)), np.ones((1, 4, 1))
    w[0, 3] = -1
    k = np.array([1, np.inf, np.nan, 2, 3.0, np.nan])[None, :, None]
    length = np.array([5], np.int32)
    return [
        ((q, w, k), dict(n=3, kv_lengths=length), [[0, 1, -1], [0, 1, 2], [1, 2, 3], [0, 2, 3]]),
        ((q[:, 3:], w[:, 3:], k), dict(n=5, kv_lengths=length), [[0, 1, 2, 3, 4]]),
        ((q[:, :1], abs(w[:, :1]), k[:, :3]), dict(n=1), [[1]]),
        ((q, abs(w), np.full((1, 6, 1), np.inf)), dict(n=2, local=1), [[0, 2], [0, 3], [0, 4], [0, 5]]),
    ]


def normal(seed=4, dtype=np.float64, q_len=SQ, heads=HEADS, entries=7):
    """Return q_idx, weights, k_idx, lists, target and row weights; some entries name no key, and a list is empty."""
    rng = np.random.default_rng(seed)
    q, w, k = (rng.normal(size=x).astype(dtype) for x in ((B, q_len, heads, DIM), (B, q_len, heads), (B, SK, DIM)))
    lists = np.argsort(rng.random((B, 1, q_len, SK)))[..., :entries].astype(np.int32)
    lists[rng.random(lists.shape) < 0.2] = -3
    lists[0, 0, 2] = -1
    target, rows = rng.random((B, q_len, entries)), rng.random((B, q_len))
    target[:, 5:, ::3] = 0
    target[1, 4] = 0
    return q, w, k, lists, target.astype(dtype), rows.astype(dtype)


def defined_loss(q, w, k, lists, target, rows=None):
    """Return the loss in the dtype of q."""
    listed, j = lists[:, 0] >= 0, np.maximum(lists[:, 0], 0)
    I = np.where(listed, np.take_along_axis(scores(q, w, k), j, axis=2), -np.inf)
    with np.errstate(all="ignore"):
        log_p = I - np.logaddexp.reduce(I, axis=2, keepdims=True)
        p = np.where(listed, target, 0)
        p = np.nan_to_num(p / p.sum(axis=2, keepdims=True))
        terms = np.where(p > 0, p * (np.log(p) - log_p), 0)
    return (terms.sum(axis=2) * (1 if rows is None else rows)).sum()


def defined_gradients(q, w, k, lists, target, rows):
    """Return the gradients of the loss by q_idx, weights and k_idx, in the dtype of q."""
    listed, j = lists[:, 0] >= 0, np.maximum(lists[:, 0], 0)
    K = k[np.arange(B)[:, None, None], j]
    a = np.einsum("bthd,btnd->bthn", q, K)
    I = np.where(listed, np.einsum("bth,bthn->btn", w, np.maximum(a, 0)), -np.inf)
    with np.errstate(all="ignore"):
        p = np.where(listed, target, 0)
        p = np.nan_to_num(p / p.sum(axis=2, keepdims=True))
        softmax = np.nan_to_num(np.exp(I - np.logaddexp.reduce(I, axis=2, keepdims=True)))
    dI = rows[:, :, None] * (softmax * p.any(axis=2, keepdims=True) - p)
    da = dI[:, :, None] * w[..., None] * (a > 0)
    dk = np.zeros_like(k)
    np.add.at(dk, (np.arange(B)[:, None, None], j), np.einsum("bthn,bthd->btnd", da, q) * listed[..., None])
    return np.einsum("bthn,btnd->bthd", da, K), np.einsum("btn,bthn->bth", dI, np.maximum(a, 0)), dk


def assert_loss_and_gradients(found, arrays):
    """Assert that (loss, gradients) are those of the definition, in the dtype of the arrays."""
    loss, gradients = found
    dtype = arrays[0].dtype
    low_dtype = np.float64 if dtype == np.float64 else np.float32
    exact, low = ([x if x.dtype == np.int32 else x.astype(kind) for x in arrays] for kind in (np.longdouble, low_dtype))
    assert loss.dtype == low_dtype
    assert_matches_reference(loss, defined_loss(*exact), defined_loss(*low), loss.dtype, "loss")
    for gradient, expected, rounded in zip(gradients, defined_gradients(*exact), defined_gradients(*low), strict=True):
        assert gradient.dtype == dtype
        assert_matches_reference(gradient, expected, rounded.astype(dtype), dtype, "gradient")
