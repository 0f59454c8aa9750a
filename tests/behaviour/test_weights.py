"""attention_weights, top_weights and key_importance against the dense formula, with every option.

With the unit vectors as values attention returns its own probabilities. The reference's gradients of that call are
those of the weights, through the scores and through lse.
"""

import numpy as np
import pytest
from cases import DTYPES, FEATURES, OPTIONS, Case, furthest
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import reference

SMALL = dict(q_len=13, kv_len=17, heads=2, head_dim=4)
CASES = {
    **{name: case for name, case in OPTIONS.items() if not name.startswith(("head-dim-", "wide", "narrow", "dropout"))},
    "dropout": Case(dropout=0.4),
    "one-key": Case(kv_len=1, sink=True),  # without the sink the reference has no rounding error
    "tiles": Case(q_len=150, kv_len=300, causal=True, sink=True, heads=2),
    **{f"feature-{name}": Case(**SMALL | feature) for name, feature in FEATURES.items() if "q_len" not in feature},
    **{
        f"{score}-{mask}": Case(score_mod=score, mask_mod=mask, **SMALL)
        for score, mask in (("relative", None), (None, "document"), ("learned-twice", "sliding"), ("hides", "rows"))
    },
    "gaps": Case(mask_mod="gaps", q_len=150, kv_len=300, heads=2, batch=1),
}


def lse_of(call, **options):
    """Return the lse of the library's own forward."""
    return cupy_flash.attention(call.q, call.k, call.v, return_lse=True, **call.options | options)[1]


def with_unit_values(case, call):
    """Return the call with the unit vectors as values, so that its result is P, and without dropout."""
    units = np.eye(case.kv_len, dtype=call.q.dtype)
    values = np.broadcast_to(units[:, None], (case.batch, case.kv_len, case.kv_heads, case.kv_len))
    values = values.swapaxes(1, 2) if case.layout == "bhsd" else values
    options = {name: x for name, x in call.options.items() if name not in ("dropout", "seed")}
    rng = np.random.default_rng(3)
    dout = rng.normal(size=(case.batch, case.heads, case.q_len, case.kv_len)).astype(call.q.dtype)
    return call._replace(v=values, options=options, dout=dout if case.layout == "bhsd" else dout.swapaxes(1, 2))


def dense(case, call):
    """Return P of the formula in float64, and of the least accurate run in the case's dtype."""
    with np.errstate(invalid="ignore", over="ignore"):
        exact, *runs = (
            reference.attention_weights(call.q, call.k, **call.options | dict(dtype=dtype, order=order))
            for dtype, order in ((None, 0), *((DTYPES[case.dtype], n) for n in range(4)))
        )
    low = runs[0]
    for run in runs[1:]:
        low = furthest(exact, low, run)
    return exact, low


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_probabilities(name):
    case = CASES[name]
    call = case.call()
    lse = lse_of(call)
    P, low = dense(case, call)
    weights = cupy_flash.attention_weights(call.q, call.k, lse, **call.options)
    assert weights.dtype == call.q.dtype and weights.flags.c_contiguous
    assert_matches_reference(weights, P, low, call.q.dtype, f"P of {case}")
    mean = cupy_flash.attention_weights(call.q, call.k, lse, heads="mean", **call.options)
    assert_matches_reference(mean, P.mean(axis=1), low.mean(axis=1), call.q.dtype, f"mean of {case}")
