"""Cases of attention_weights, top_weights and key_importance, and the dense formula for them."""

from __future__ import annotations

import numpy as np
from cache_cases import CacheCase
from cases import DTYPES, FEATURES, OPTIONS, Case, furthest

import cupy_flash
from cupy_flash import reference

ORDERS = 3  # low-precision runs, which differ in the order of their sums
SMALL = dict(q_len=13, kv_len=17, heads=4, kv_heads=2, head_dim=4)
MODS = (("relative", None), (None, "document"), ("learned-twice", "sliding"), ("hides", "rows"))
GRADIENTS = {
    **{name: Case(**SMALL | feature) for name, feature in FEATURES.items() if not feature.keys() & {"q_len", "dtype"}},
    **{f"{score}-{mask}": Case(score_mod=score, mask_mod=mask, **SMALL) for score, mask in MODS},
    "float64": Case(dtype="float64", bias="1hqk", sink=True, softcap=1.5, **SMALL),
    "bias-of-keys": Case(bias="k", **SMALL),
    "scale-above-one": Case(scale=1.7, **SMALL),
    "lengths-zero": OPTIONS["lengths-zero"],
    "empty-rows": Case(causal=True, q_len=29, kv_len=17),
    "tiles": Case(q_len=150, kv_len=300, causal=True, sink=True, heads=2),
}
OF_VALUES = ("head-dim-", "wide", "narrow", "dropout", "no-dlse", "scores-", "one-key")
CASES = {
    **GRADIENTS,
    **{name: case for name, case in OPTIONS.items() if not name.startswith(OF_VALUES)},
    **{f"scores-{name}": Case(scores=name, causal=True, q_len=29, sink=True) for name in ("huge", "one-hot", "tiny")},
    "dropout": Case(dropout=0.4),
    "one-key": Case(kv_len=1, sink=True),  # without the sink the reference has no rounding error
    "gaps": Case(mask_mod="gaps", q_len=150, kv_len=300, heads=2, batch=1),
}
INTEGERS = Case(scores="integers", causal=True, **SMALL)  # its scores are exact in any order of summation, with ties

CACHES = {
    "plain": CacheCase(q_len=3),
    "append": CacheCase(q_len=3, appended=3, sink=True),
    "paged": CacheCase(page=8, q_len=4, alibi="bh", hole=2**31 - 1),
    "batch-idx": CacheCase(batch_idx=(3, 1), layout="bhsd", q_len=2),
    "leftpad": CacheCase(leftpad=(2, 9), q_len=2),
    "packed": CacheCase(packed=(3, 1), page=8, softcap=1.5),
    "rotary": CacheCase(rotary=(8, True), q_len=4, appended=2, window=(6, None)),
    "tree": CacheCase(mask="bhqs", q_len=3, appended=3, causal=False, positions=True, page=8, rotary=(8, False)),
    "empty": CacheCase(lengths=(0, 9), q_len=3),
    "float16": CacheCase(dtype="float16", q_len=2),
    "fp8": CacheCase(dtype="float16", cache_dtype="float8_e4m3fn", descales=True, page=4),
    "long": CacheCase(lengths=(1100, 300), capacity=1200, q_len=3, head_dim=8, heads=2, kv_heads=1, scale=-1.0),
}


def lse_of(call):
    """Return the lse of the library's own forward."""
    return cupy_flash.attention(call.q, call.k, call.v, return_lse=True, **call.options)[1]


def heads_first(case, x):
    """Return an array of the layout of out as (B, Hq, Sq, ...), or one of those as out."""
    return x if case.layout == "bhsd" else x.swapaxes(1, 2)


def dense(case, call):
    """Return P of the formula in float64, and of the least accurate run in the case's dtype.

    P is recomputed from the scores and lse, so that the error of a run includes the rounding of lse.
    """

    def run(dtype, order):
        options = reference.Options(**call.options | dict(dtype=dtype, order=order, dropout=0.0))
        q, k = (heads_first(case, x) for x in (call.q, call.k))
        forward = reference._forward(options, 0, q, k, k)
        lse = np.where(np.isneginf(forward.lse), np.inf, forward.lse)[..., None]
        scores = reference._scores_again(options, 0, forward).scores
        return np.exp(scores - lse).astype(forward.q.dtype if dtype is None else dtype)

    with np.errstate(invalid="ignore", over="ignore"):
        exact, low, *others = (
            run(*precision) for precision in ((None, 0), *((DTYPES[case.dtype], n) for n in range(ORDERS)))
        )
    for other in others:
        low = furthest(exact, low, other)
    return exact, low
