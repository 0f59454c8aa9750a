"""NaN and infinity on the CPU change only rows that see them, forward and backward; values near the largest float."""

import numpy as np
import pytest
from cases import Case, run_planned

import cupy_flash
from cupy_flash import reference

LENGTH, ROW = 100, 40  # several bands of 16 rows, and several tiles of `tiles` below; row ROW holds the special value

HIDERS = {
    "causal": dict(causal=True),
    "window": dict(window=(2, 0)),
    "top-left-window": dict(window=(0, 5), causal="top_left"),
    "mask": dict(mask="1hqk"),
    "mask-per-key": dict(mask="b1qk"),
    "bias": dict(bias="1hqk", bias_hides=True),
    "bias-bfloat16": dict(bias="qk", bias_hides=True, bias_dtype="bfloat16"),
    "softcap": dict(causal=True, softcap=2.0),
    "softcap-bias": dict(bias="1hqk", bias_hides=True, softcap=2.0, alibi="h", sink=True),
    "dropout": dict(window=(5, 5), dropout=0.3),
    "large-scores": dict(causal=True, scale=5.0),
    "bfloat16": dict(window=(2, 0), dtype="bfloat16"),
    "float64": dict(window=(2, 0), dtype="float64"),
}


def seen(case):
    """Return which keys each query sees, bool (B, Hq, Sq, Sk)."""
    *_, options, _, _, _ = case.call()
    shape = (case.batch, case.heads, LENGTH, LENGTH)
    visible = np.broadcast_to(options.get("mask", True), shape).copy()
    if case.bias is not None:
        visible &= np.asarray(options["bias"], np.float64) > -np.inf
    i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    left, right = case.window or (None, None)
    visible &= (j <= i) | (not case.causal)
    visible &= True if left is None else j >= i - left
    visible &= True if right is None else j <= i + right
    return visible


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("hider", HIDERS)
def test_special_values_reach_only_rows_that_see_them(hider, name, value):
    """No bit changes in rows that do not see the value; a row that sees NaN is NaN, unless dropout removes it."""
    case = Case(LENGTH, LENGTH, batch=2, heads=2, kv_heads=1, head_dim=8, head_dim_v=8, **HIDERS[hider])
    tiles = dict(block_q=32, block_kv=64, threads=1)
    clean, call = run_planned(case, **tiles), case.call()
    getattr(call, name)[1, ROW, 0, 3] = value
    touched = run_planned(case, call, **tiles)

    sees = seen(case)
    heads = [0] if name in ("q", "dout") else [0, 1]  # a query head, or both heads of the key/value head's GQA group
    # The queries and the keys with a score that the special value changes.
    if name in ("q", "dout"):
        queries = np.zeros(sees.shape[:3], bool)
        queries[1, heads, ROW] = True
    else:
        queries = sees[..., ROW] & (np.arange(2) == 1)[:, None, None]
    keys = (sees & queries[..., None]).any(axis=(1, 2))  # (B, Sk)
    rows_of = {
        "out": queries.swapaxes(1, 2) & (name != "dout"),
        "lse": queries & (name in ("q", "k")),
        "dq": queries.swapaxes(1, 2),
        "dk": keys[:, :, None],
        "dv": keys[:, :, None] & (name != "v"),
    }
    if case.bias == "1hqk":
        reached = (sees & queries[..., None]).any(axis=0, keepdims=True)
        assert np.isfinite(touched.dbias[~reached]).all()
    for field, reached in rows_of.items():
        now, before = getattr(touched, field), getattr(clean, field)
        hidden = np.broadcast_to(~reached if field == "lse" else ~reached[..., None], now.shape)
        if value == np.inf and name in ("q", "k", "v"):  # infinity disables the bounded path, which rounds differently
            assert np.isfinite(now[hidden]).all() or field == "lse", field
        else:
            np.testing.assert_array_equal(now[hidden], before[hidden], err_msg=field)
        if np.isnan(value) and not case.dropout:
            which = np.isnan(now) if field == "lse" else np.isnan(now).any(axis=-1)
            np.testing.assert_array_equal(which, np.broadcast_to(reached, which.shape), err_msg=field)


def test_a_value_reaches_its_column_alone():
    """The three columns of V hold inf, -inf and NaN."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 48, 1, 8)).astype(np.float32)
    v[0, 20, 0, :3] = np.inf, -np.inf, np.nan
    v[0, 30, 0, :2] = np.inf
    out = cupy_flash.attention(q, k, v, causal=True)[0, :, 0]
    assert np.isfinite(out[:20]).all() and np.isfinite(out[:, 3:]).all()
    assert np.isposinf(out[20:, 0]).all() and np.isnan(out[20:, 2]).all()
    assert np.isneginf(out[20:30, 1]).all() and np.isnan(out[30:, 1]).all()


@pytest.mark.parametrize("score, value", [(19, 1e31), (-19, 1e-37), (-19, 0), (19.5, 3e38), (-19.5, 1e-30)])
def test_values_at_the_ends_of_the_range(score, value):
    """Scores near the bound below which no row max is needed; an average of equal values is that value."""
    q, k, v = (np.full((1, 40, 1, 4), x, np.float32) for x in (1, score / 4, value))
    k[0, 1:] -= np.linspace(0, 0.1, 39, dtype=np.float32)[:, None, None]
    out = cupy_flash.attention(q, k, v / 40, scale=1.0)
    np.testing.assert_allclose(out, v / 40, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "softcap"),
    [("float16", 1e39), ("float32", 1e39), ("float32", np.float32(np.inf)), ("float64", np.inf), ("float64", 10**400)],
    ids=["float16", "float32", "infinity-of-numpy", "infinity", "int"],
)
def test_a_softcap_beyond_the_range_has_no_effect(dtype, softcap):
    case = Case(dtype=dtype)
    q, k, v, options, *_ = case.call()
    capped = options | dict(softcap=softcap)
    expected = cupy_flash.attention(q, k, v, **options)
    np.testing.assert_array_equal(cupy_flash.attention(q, k, v, **capped), expected)
    assert "softcap" not in cupy_flash.explain(q, k, v, **capped)
    lengths = np.full(len(q), k.shape[1], np.int32)
    cached = dict(cache_seqlens=lengths, causal=False, softcap=softcap)
    np.testing.assert_allclose(cupy_flash.attention_with_kv_cache(q, k, v, **cached), expected, rtol=2e-3, atol=1e-3)


def test_the_reference_has_no_softcap_that_is_infinite():
    q, k, v, _, dout, *_ = Case().call()
    for function, arrays in ((reference.attention, (q, k, v)), (reference.attention_backward, (dout, q, k, v))):
        for actual, expected in zip(function(*arrays, softcap=np.inf), function(*arrays), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_float64_has_a_range_of_its_own():
    q, k, v, options, *_ = Case(dtype="float64").call()
    large = options | dict(scale=1e39, softcap=1e39)
    assert "softcap" in cupy_flash.explain(q, k, v, **large)
    expected = cupy_flash.attention(q, k, v, **options | dict(scale=1.0))
    np.testing.assert_allclose(cupy_flash.attention(1e-39 * q, k, v, **large), expected, rtol=1e-12)


@pytest.mark.parametrize(("q", "k", "scale"), [(3e38, 1.2e-38, 1.5), (-3e38, 1.2e-38, -1.5), (1e38, 1e-38, 10.0)])
def test_a_scale_that_overflows_q_but_no_score(q, k, scale):
    """q times the scale exceeds the largest float, but no score does."""
    rng = np.random.default_rng(0)
    shape = (1, 40, 2, 1)
    q, k = (x * rng.uniform(0.9, 1, shape).astype(np.float32) for x in (np.float32(q), np.float32(k)))
    v, dout = rng.normal(size=(2, *shape)).astype(np.float32)
    out, vjp = cupy_flash.attention_vjp(q, k, v, scale=scale, causal=True)
    # Arrays of moderate size have the same scores.
    fold = 2.0**100
    expected, same = cupy_flash.attention_vjp(q / fold, k * fold, v, scale=scale, causal=True)
    # atol, because a result near 0 is a sum of values of about 1 that cancel.
    for actual, wanted in ((out, expected), (vjp(dout).dv, same(dout).dv)):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=4e-6 * np.abs(wanted).max())
