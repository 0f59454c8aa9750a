"""The reference against drawn masks, scores computed term by term, finite differences, torch, and limiting cases."""

import doctest
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from tolerance import assert_matches_reference

from cupy_flash import reference
from cupy_flash.dropout import keep_mask
from cupy_flash.measure.checks.references import references
from cupy_flash.problem.recorded_call import Call

BATCH, Q_LENGTH, KV_LENGTH, Q_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_V = 2, 4, 5, 4, 2, 3, 2
SLOPES = np.array([0.5, 0.25, 0.125, 1.0], np.float32)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def inputs(q_length=Q_LENGTH, kv_length=KV_LENGTH):
    return (
        normal(BATCH, q_length, Q_HEADS, HEAD_DIM, seed=1),
        normal(BATCH, kv_length, KV_HEADS, HEAD_DIM, seed=2),
        normal(BATCH, kv_length, KV_HEADS, HEAD_DIM_V, seed=3),
    )


def random_mask(*shape):
    """Return a random bool mask in which 70 % of the elements are True."""
    return np.random.default_rng(5).random(shape) < 0.7


def option_sets(q_length):
    """Return {name: options} with every option alone, and all of them together."""
    return {
        "plain": {},
        "causal": dict(causal=True),
        "causal-top-left": dict(causal="top_left"),
        "window": dict(window=(1, 1)),
        "window-left": dict(window=(1, None)),
        "window-right": dict(window=(-1, 0)),
        "window-that-sees-nothing": dict(window=(-3, 2)),
        "scale": dict(scale=1.7),
        "scale-negative": dict(scale=-1.7),
        "scale-zero": dict(scale=0.0),
        "softcap": dict(softcap=0.8),
        "alibi": dict(alibi_slopes=SLOPES),
        "alibi-per-batch": dict(alibi_slopes=np.stack([SLOPES, 2 * SLOPES])),
        "bias": dict(bias=normal(BATCH, Q_HEADS, q_length, KV_LENGTH)),
        "bias-per-head-and-key": dict(bias=normal(1, Q_HEADS, 1, KV_LENGTH)),
        "bias-of-two-dimensions": dict(bias=normal(q_length, KV_LENGTH)),
        "bias-scalar": dict(bias=normal()),
        "mask": dict(mask=random_mask(BATCH, 1, q_length, KV_LENGTH)),
        "sink": dict(sink=normal(Q_HEADS)),
        "sink-and-empty-rows": dict(sink=normal(Q_HEADS), kv_lengths=[2, 0], causal=True),
        "lengths": dict(q_lengths=[4, 2], kv_lengths=[3, 5]),
        "lengths-causal": dict(q_lengths=[4, 2], kv_lengths=[3, 5], causal=True),
        "dropout": dict(dropout=0.4, seed=7),
        "everything": dict(
            causal=True,
            window=(2, 1),
            scale=-0.7,
            softcap=1.5,
            alibi_slopes=np.stack([SLOPES, 2 * SLOPES]),
            bias=normal(BATCH, 1, q_length, KV_LENGTH),
            mask=random_mask(Q_HEADS, q_length, KV_LENGTH),
            sink=normal(Q_HEADS),
            q_lengths=[4, 3],
            kv_lengths=[5, 3],
            dropout=0.3,
            seed=2**40 + 3,
        ),
    }


def test_docstrings():
    assert doctest.testmod(reference).attempted > 0
    assert doctest.testmod(reference).failed == 0


# ---- which key each query sees ----


def drawn(picture):
    return [[int(cell) for cell in row] for row in picture.split()]


@pytest.mark.parametrize(
    "q_length, kv_length, options, picture",
    [
        pytest.param(2, 5, dict(causal=True), "11110 11111", id="causal-2x5"),
        pytest.param(5, 2, dict(causal=True), "00 00 00 10 11", id="causal-5x2"),
        pytest.param(2, 5, dict(causal="top_left"), "10000 11000", id="top-left-2x5"),
        pytest.param(5, 2, dict(causal="top_left"), "10 11 11 11 11", id="top-left-5x2"),
        pytest.param(2, 5, dict(window=(1, 0)), "00110 00011", id="window-2x5"),
        pytest.param(5, 2, dict(window=(1, 0)), "00 00 00 10 11", id="window-5x2"),
        pytest.param(5, 2, dict(window=(0, 2)), "00 10 11 11 01", id="window-right-5x2"),
        pytest.param(2, 5, dict(window=(None, -1)), "11111 11111", id="window-unbounded"),
        pytest.param(2, 5, dict(window=(2, 2), causal=True), "01110 00111", id="window-and-causal"),
        pytest.param(2, 5, dict(window=(1, 1), causal="top_left"), "10000 11000", id="window-and-top-left"),
        pytest.param(2, 5, dict(causal=True, q_lengths=[2], kv_lengths=[3]), "11000 11100", id="causal-kv-length"),
        pytest.param(5, 2, dict(causal=True, q_lengths=[3], kv_lengths=[2]), "00 10 11 00 00", id="causal-q-length"),
        pytest.param(2, 5, dict(causal="top_left", kv_lengths=[1]), "10000 10000", id="top-left-kv-length"),
        pytest.param(2, 5, dict(mask=drawn("10110 01111"), causal=True), "10110 01111", id="mask-and-causal"),
    ],
)
def test_drawn_masks(q_length, kv_length, options, picture):
    """With q = 0 and v the identity, out is the uniform distribution over the visible keys."""
    q, k = np.zeros((1, q_length, 1, 1)), normal(1, kv_length, 1, 1)
    out, lse = reference.attention(q, k, np.eye(kv_length)[None, :, None], **options)
    visible = np.array(drawn(picture))
    count = visible.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out[0, :, 0].astype(float), visible / np.maximum(count, 1), rtol=1e-15)
    np.testing.assert_array_equal(np.isneginf(lse[0, 0]), count[:, 0] == 0)


# ---- the score, one element at a time ----


def one_row(q, k, v, b, h, i, o):
    """Return out and lse of one query, computed by Python loops that follow the docstring of `attention`."""
    q_length = o.get("q_lengths", [q.shape[1]] * BATCH)[b]
    kv_length = o.get("kv_lengths", [k.shape[1]] * BATCH)[b]
    causal, (left, right) = o.get("causal", False), o.get("window", (None, None))
    if i >= q_length:
        return [0.0] * v.shape[3], -math.inf
    diagonal = i + (0 if causal == "top_left" else kv_length - q_length)
    bias = np.broadcast_to(o.get("bias", 0.0), (BATCH, Q_HEADS, q.shape[1], k.shape[1]))
    mask = np.broadcast_to(o.get("mask", True), bias.shape)
    slopes = np.broadcast_to(o.get("alibi_slopes", 0.0), (BATCH, Q_HEADS))
    scores = {}
    for j in range(kv_length):
        hidden = [
            causal and j > diagonal,
            left not in (None, -1) and j < diagonal - left,
            right not in (None, -1) and j > diagonal + right,
            not mask[b, h, i, j],
        ]
        if any(hidden):
            continue
        score = o.get("scale", q.shape[3] ** -0.5) * math.fsum(q[b, i, h] * k[b, j, h // 2])
        if "softcap" in o:
            score = o["softcap"] * math.tanh(score / o["softcap"])
        scores[j] = score - float(slopes[b, h]) * abs(diagonal - j) + bias[b, h, i, j]
    terms = list(scores.values()) + ([o["sink"][h]] if "sink" in o else [])
    if not terms:
        return [0.0] * v.shape[3], -math.inf
    lse = math.log(math.fsum(map(math.exp, terms)))
    weights = {j: math.exp(score - lse) for j, score in scores.items()}
    if "dropout" in o:
        dropped = round(65536 * o["dropout"])
        keep = keep_mask(o["seed"], b * Q_HEADS + h, i, i + 1, 0, k.shape[1], o["dropout"])[0]
        weights = {j: weight * keep[j] * 65536 / (65536 - dropped) for j, weight in weights.items()}
    return [math.fsum(weights[j] * v[b, j, h // 2, d] for j in weights) for d in range(v.shape[3])], lse


@pytest.mark.parametrize("name", option_sets(Q_LENGTH))
def test_forward_row_by_row(name):
    q, k, v = inputs()
    options = option_sets(Q_LENGTH)[name]
    out, lse = reference.attention(q, k, v, **options)
    for b, h, i in np.ndindex(BATCH, Q_HEADS, Q_LENGTH):
        expected_out, expected_lse = one_row(q, k, v, b, h, i, options)
        np.testing.assert_allclose(out[b, i, h].astype(float), expected_out, rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(float(lse[b, h, i]), expected_lse, rtol=1e-13, atol=1e-14)


def test_layouts_agree():
    q, k, v = inputs()
    dout, dlse = normal(BATCH, Q_LENGTH, Q_HEADS, HEAD_DIM_V), normal(BATCH, Q_HEADS, Q_LENGTH)
    out, lse = reference.attention(q, k, v, causal=True)
    gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, causal=True)
    dout, q, k, v = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    out_heads_first, lse_heads_first = reference.attention(q, k, v, causal=True, layout="bhsd")
    heads_first = reference.attention_backward(dout, q, k, v, dlse=dlse, causal=True, layout="bhsd")
    np.testing.assert_array_equal(out_heads_first.swapaxes(1, 2), out)
    np.testing.assert_array_equal(lse_heads_first, lse)
    for expected, actual in zip(gradients[:3], heads_first[:3], strict=True):
        np.testing.assert_array_equal(actual.swapaxes(1, 2), expected)


# ---- gradients ----


@pytest.mark.parametrize("q_length", [Q_LENGTH, 7], ids=["more-keys", "more-queries"])
@pytest.mark.parametrize("name", option_sets(Q_LENGTH))
def test_gradients_are_finite_differences(name, q_length):
    """Central differences in longdouble along random directions, of each input alone and of all inputs together."""
    options = option_sets(q_length)[name]
    eps = np.finfo(np.longdouble).eps
    step, tolerance = eps ** (np.longdouble(1) / 3), 100 * eps ** (np.longdouble(2) / 3)
    arrays = dict(zip("qkv", inputs(q_length), strict=True))
    arrays |= {name: options[name] for name in ("bias", "sink") if name in options}
    arrays = {name: np.asarray(x, np.longdouble) for name, x in arrays.items()}
    fixed = {name: value for name, value in options.items() if name not in arrays}
    dout, dlse = normal(BATCH, q_length, Q_HEADS, HEAD_DIM_V, seed=7), normal(BATCH, Q_HEADS, q_length, seed=8)

    def loss(changed):
        out, lse = reference.attention(**{**arrays, **changed}, **fixed)
        return (dout * out).sum() + (dlse * np.where(np.isfinite(lse), lse, 0)).sum()

    gradients = reference.attention_backward(dout, **arrays, dlse=dlse, **fixed)._asdict()
    assert {name for name, x in gradients.items() if x is not None} == {f"d{name}" for name in arrays}
    assert all(gradients[f"d{name}"].shape == x.shape for name, x in arrays.items())
    directions = {name: normal(*x.shape, seed=9) for name, x in arrays.items()}
    for moved in [*([name] for name in arrays), list(arrays)]:
        ahead, behind = ({n: arrays[n] + sign * step * directions[n] for n in moved} for sign in (1, -1))
        difference = (loss(ahead) - loss(behind)) / (2 * step)
        terms = np.concatenate([(gradients[f"d{name}"] * directions[name]).ravel() for name in moved])
        assert abs(terms.sum() - difference) <= tolerance * (1 + np.abs(terms).sum()), moved


@pytest.mark.parametrize("causal", [False, "top_left"], ids=["plain", "causal"])
@pytest.mark.parametrize("q_length, kv_length", [(33, 33), (17, 40), (40, 17)], ids=["square", "wide", "tall"])
def test_torch_agrees(q_length, kv_length, causal):
    q, k, v = normal(2, 4, q_length, 16), normal(2, 2, kv_length, 16), normal(2, 2, kv_length, 8)
    dout = normal(2, 4, q_length, 8)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch_out = sdpa(*tensors, is_causal=bool(causal), enable_gqa=True)
    torch_gradients = torch.autograd.grad(torch_out, tensors, torch.from_numpy(dout))
    call = Call(q, k, v, dict(causal=causal, layout="bhsd"), dout, None, None)
    (out, _, *gradients), (low_out, _, *low_gradients) = references(call, np.float64)
    for name, actual, expected, low in zip(
        ("out", "dq", "dk", "dv"),
        (torch_out, *torch_gradients),
        (out, *gradients[:3]),
        (low_out, *low_gradients[:3]),
        strict=True,
    ):
        assert_matches_reference(actual.detach().numpy(), expected, low, np.float64, name)


# ---- rows that see no key, padding, huge and infinite scores ----


def test_rows_that_see_no_key():
    q, k, v = inputs(q_length=7)
    options = dict(causal=True, q_lengths=[7, 6], kv_lengths=[5, 0])
    empty = np.zeros((BATCH, 7), bool)
    empty[0, :2] = empty[1] = True
    dout, dlse = normal(BATCH, 7, Q_HEADS, HEAD_DIM_V), normal(BATCH, Q_HEADS, 7)
    sink = normal(Q_HEADS)

    out, lse = reference.attention(q, k, v, **options)
    assert not out[empty].any() and out[~empty].all()
    np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(empty[:, None], lse.shape))
    gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    assert all(np.isfinite(x).all() for x in gradients[:3])
    assert not gradients.dq[empty].any() and not gradients.dk[1].any() and not gradients.dv[1].any()

    out, lse = reference.attention(q, k, v, sink=sink, **options)
    assert not out[empty].any()
    np.testing.assert_array_equal(lse[1, :, :6], np.broadcast_to(sink[:, None], (Q_HEADS, 6)))
    assert np.isneginf(lse[1, :, 6]).all()  # past q_lengths lse is -inf, with or without a sink
    dsink = reference.attention_backward(0 * dout, q, k, v, dlse=dlse, sink=sink, **options).dsink
    weight = np.exp(sink[:, None] - lse[0])
    np.testing.assert_allclose(dsink, (weight * dlse[0]).sum(axis=1) + dlse[1, :, :6].sum(axis=1), rtol=1e-15)


@pytest.mark.parametrize("q_length, kv_length", [(0, 5), (5, 0), (0, 0)], ids=["no-queries", "no-keys", "nothing"])
def test_empty_sequences(q_length, kv_length):
    q, k, v = inputs(q_length, kv_length)
    dout = np.ones((BATCH, q_length, Q_HEADS, HEAD_DIM_V))
    options = dict(sink=normal(Q_HEADS), dropout=0.5, seed=1)
    out, lse = reference.attention(q, k, v, **options)
    np.testing.assert_array_equal(out, np.zeros(dout.shape))
    np.testing.assert_array_equal(lse, np.broadcast_to(options["sink"][:, None], (BATCH, Q_HEADS, q_length)))
    for gradient, x in zip(reference.attention_backward(dout, q, k, v, **options)[:3], (q, k, v), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))


def test_empty_batch():
    q, k, v = (x[:0] for x in inputs())
    out, lse = reference.attention(q, k, v, dropout=0.5, seed=1)
    assert out.shape == (0, Q_LENGTH, Q_HEADS, HEAD_DIM_V) and lse.shape == (0, Q_HEADS, Q_LENGTH)


def test_lengths_are_slices_and_padding_does_not_matter():
    q, k, v = inputs()
    bias, sink = normal(BATCH, Q_HEADS, Q_LENGTH, KV_LENGTH), normal(Q_HEADS)
    dout, dlse = normal(BATCH, Q_LENGTH, Q_HEADS, HEAD_DIM_V), normal(BATCH, Q_HEADS, Q_LENGTH)
    q_lengths, kv_lengths = [2, 4], [4, 3]
    for b, (rows, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        for x, length in ((q, rows), (dout, rows), (k, keys), (v, keys)):
            x[b, length:] = np.nan
        bias[b, :, rows:] = bias[b, :, :, keys:] = dlse[b, :, rows:] = np.nan
    options = dict(causal=True, sink=sink, softcap=1.0)
    lengths = dict(q_lengths=np.array(q_lengths, np.int32), kv_lengths=np.array(kv_lengths, np.int32))
    out, lse = reference.attention(q, k, v, bias=bias, **options, **lengths)
    gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, bias=bias, **options, **lengths)
    dsink = np.zeros(Q_HEADS)
    for b, (rows, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        part = q[b : b + 1, :rows], k[b : b + 1, :keys], v[b : b + 1, :keys]
        options["bias"] = bias[b, :, :rows, :keys]
        expected_out, expected_lse = reference.attention(*part, **options)
        np.testing.assert_array_equal(out[b, :rows], expected_out[0])
        np.testing.assert_array_equal(lse[b, :, :rows], expected_lse[0])
        assert not out[b, rows:].any() and np.isneginf(lse[b, :, rows:]).all()
        expected = reference.attention_backward(
            dout[b : b + 1, :rows], *part, dlse=dlse[b : b + 1, :, :rows], **options
        )
        for name, length in (("dq", rows), ("dk", keys), ("dv", keys)):
            actual = getattr(gradients, name)[b]
            np.testing.assert_allclose(actual[:length], getattr(expected, name)[0], rtol=1e-15, atol=1e-17)
            assert not actual[length:].any()
        np.testing.assert_allclose(gradients.dbias[b, :, :rows, :keys], expected.dbias, rtol=1e-15, atol=1e-17)
        assert not gradients.dbias[b, :, rows:].any() and not gradients.dbias[b, :, :, keys:].any()
        dsink = dsink + expected.dsink
    np.testing.assert_allclose(gradients.dsink, dsink, rtol=1e-15)


def test_infinite_bias_hides_the_key():
    q, k, v = inputs()
    mask = random_mask(Q_LENGTH, KV_LENGTH)
    mask[1] = False
    bias = np.where(mask, 0.0, -np.inf)
    dout = normal(BATCH, Q_LENGTH, Q_HEADS, HEAD_DIM_V)
    for expected, actual in zip(
        reference.attention(q, k, v, mask=mask), reference.attention(q, k, v, bias=bias), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    hidden, biased = (reference.attention_backward(dout, q, k, v, **o) for o in (dict(mask=mask), dict(bias=bias)))
    for expected, actual in zip(hidden[:3], biased[:3], strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert not biased.dbias[~mask].any()
    k[0, 2, 0, 0], k[1, 2] = np.nan, np.inf  # NaN and infinity in a hidden key are hidden too
    mask[:, 2], bias[:, 2] = False, -np.inf
    with np.errstate(invalid="ignore"):
        hidden, biased = (reference.attention(q, k, v, **o) for o in (dict(mask=mask), dict(bias=bias)))
    for expected, actual in zip(hidden, biased, strict=True):
        assert np.isfinite(expected[:, [0, 2, 3]] if expected.ndim == 4 else expected[..., [0, 2, 3]]).all()
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", [None, np.float32, ml_dtypes.bfloat16], ids=["exact", "fp32", "bf16"])
def test_huge_scores_pick_the_largest(dtype):
    q, k, v = inputs()
    q, k = q / np.abs(q).max(), np.where(np.arange(KV_LENGTH)[:, None, None] == 2, 1e4, -1e4) * np.ones_like(k)
    out, lse = reference.attention(np.abs(q) + 1, k, v, scale=1.0, dtype=dtype)
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, 2:3].repeat(2, axis=2), out.shape).astype(out.dtype))
    assert (lse > 1e4).all() and np.isfinite(lse).all()
    gradients = reference.attention_backward(np.ones(out.shape), np.abs(q) + 1, k, v, scale=1.0, dtype=dtype)
    assert all(np.isfinite(x.astype(float)).all() for x in gradients[:3])


# ---- packed sequences ----


def pack(x, lengths, total):
    packed = np.full((total, *x.shape[2:]), np.nan, x.dtype)
    packed[: sum(lengths)] = np.concatenate([x[b, :length] for b, length in enumerate(lengths)])
    return packed


@pytest.mark.parametrize("dtype", [None, np.float32], ids=["exact", "fp32"])
def test_varlen_is_padded_batches_packed(dtype):
    q_lengths, kv_lengths, tail = [3, 0, 5, 2], [4, 2, 0, 7], 3
    q, dout = normal(4, 5, Q_HEADS, HEAD_DIM), normal(4, 5, Q_HEADS, HEAD_DIM_V)
    k, v = normal(4, 7, KV_HEADS, HEAD_DIM), normal(4, 7, KV_HEADS, HEAD_DIM_V)
    dlse = normal(4, 5, Q_HEADS)
    rows, keys = sum(q_lengths) + tail, sum(kv_lengths) + tail
    packed = [pack(q, q_lengths, rows), pack(k, kv_lengths, keys), pack(v, kv_lengths, keys)]
    cu_seqlens = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in (q_lengths, kv_lengths)]
    options = dict(causal=True, window=(4, None), softcap=2.0, alibi_slopes=np.stack([SLOPES * b for b in range(4)]))
    options |= dict(sink=normal(Q_HEADS), dropout=0.25, seed=11, dtype=dtype)
    padded = dict(q_lengths=q_lengths, kv_lengths=kv_lengths)

    out, lse = reference.attention_varlen(*packed, *cu_seqlens, **options)
    dense_out, dense_lse = reference.attention(q, k, v, **options, **padded)
    dlse_padded = dlse.swapaxes(1, 2)
    gradients = reference.attention_varlen_backward(
        pack(dout, q_lengths, rows), *packed, *cu_seqlens, dlse=pack(dlse, q_lengths, rows).T, **options
    )
    dense = reference.attention_backward(dout, q, k, v, dlse=dlse_padded, **options, **padded)

    pairs = [("out", out, dense_out, q_lengths), ("lse", lse.T, dense_lse.swapaxes(1, 2), q_lengths)]
    pairs += [("dq", gradients.dq, dense.dq, q_lengths), ("dk", gradients.dk, dense.dk, kv_lengths)]
    pairs += [("dv", gradients.dv, dense.dv, kv_lengths)]
    rounding = 16 * np.finfo(out.dtype).eps
    for name, actual, expected, lengths in pairs:
        total = sum(lengths)
        assert actual.dtype == out.dtype, name
        np.testing.assert_allclose(
            actual[:total], pack(expected, lengths, total), rtol=rounding, atol=rounding, err_msg=name
        )
        np.testing.assert_array_equal(actual[total:], np.full(actual[total:].shape, -np.inf if name == "lse" else 0))
    np.testing.assert_allclose(gradients.dsink, dense.dsink, rtol=rounding)


def test_varlen_refuses_dense_options():
    q, k, v = (x[0] for x in inputs())
    with pytest.raises(TypeError, match="kv_lengths, mask"):
        reference.attention_varlen(q, k, v, [0, 4], [0, 5], kv_lengths=[5], mask=True)


def test_dropout_needs_a_seed():
    with pytest.raises(ValueError, match="seed"):
        reference.attention(*inputs(), dropout=0.1)


# ---- the low-precision run, and the tolerance derived from it ----


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_low_precision_run(dtype, name):
    """Inputs and results are rounded: the error is not 0, and at most a few units of rounding."""
    options = option_sets(Q_LENGTH)[name]
    eps = float(ml_dtypes.finfo(dtype).eps)
    q, k, v = (x.astype(dtype) for x in inputs())
    dout = normal(BATCH, Q_LENGTH, Q_HEADS, HEAD_DIM_V).astype(dtype)
    low_out, low_lse = reference.attention(q, k, v, **options, dtype=dtype)
    low = reference.attention_backward(dout, q, k, v, **options, dtype=dtype)
    out, lse = reference.attention(q, k, v, **options)
    exact = reference.attention_backward(dout, q, k, v, **options)
    assert out.dtype == lse.dtype == exact.dq.dtype == np.float64
    assert low_out.dtype == low.dq.dtype == low.dk.dtype == low.dv.dtype == dtype and low_lse.dtype == np.float32
    for what, actual, expected in [("out", low_out, out), *zip(low._fields[:3], low[:3], exact[:3], strict=True)]:
        error = np.abs(actual.astype(float) - expected).max()
        assert 0 < error < 8 * eps * np.abs(expected).max(), what


def test_another_order_rounds_every_result_differently():
    q, k, v = (x.astype(np.float32) for x in inputs(64, 80))
    dout = normal(BATCH, 64, Q_HEADS, HEAD_DIM_V)
    options = dict(causal=True, softcap=1.5, bias=normal(Q_HEADS, 1, 80), sink=normal(Q_HEADS))
    exact, *runs = (
        reference.attention_backward(dout, q, k, v, **options, dtype=dtype, order=order)
        for dtype, order in ((None, 0), (None, 1), *((np.float32, order) for order in range(4)))
    )
    for name, expected, same, *low in zip(exact._fields, exact, *runs, strict=True):
        largest = np.abs(expected).max()
        assert np.abs(same - expected).max() < 1e-14 * largest, name
        assert all(0 < np.abs(x - expected).max() < 1e-5 * largest for x in low), name
        assert not all(np.array_equal(low[0], x) for x in low[1:]), name


def test_a_backward_rounds_its_scores_apart_from_lse():
    """P of a single key is 1. Its error is 0 only if the backward uses the same rounded scores as lse (errors[0])."""
    q, k, v, dout = normal(4, 1, 1, 1, 64).astype(np.float32)
    errors = [
        np.abs(reference.attention_backward(dout, q, k, v, scale=4.0, dtype=np.float32, order=order).dv - dout).max()
        for order in range(8)
    ]
    assert errors[0] == 0 < max(errors[1:]) < 1e-4


FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def descales(batch):
    names = ("q_descale", "k_descale", "v_descale")
    return {name: np.abs(normal(batch, KV_HEADS, seed=seed)) for seed, name in enumerate(names)}


def per_query_head(descale):
    return descale.repeat(Q_HEADS // KV_HEADS, axis=1)


def test_each_descale_scales_its_sequence_and_head():
    """There is one descale per sequence and key/value head; q has the descale of its GQA group, also in packed
    batches.
    """
    q, k, v = (x.astype(FP8) for x in inputs())
    q_descale, k_descale, v_descale = descales(BATCH).values()
    scaled = (
        q.astype(float) * per_query_head(q_descale)[:, None, :, None],
        k.astype(float) * k_descale[:, None, :, None],
        v.astype(float) * v_descale[:, None, :, None],
    )
    expected = reference.attention(*scaled, causal=True, softcap=2.0)
    results = reference.attention(q, k, v, causal=True, softcap=2.0, **descales(BATCH))
    for actual, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-13)
    bounds = (np.arange(BATCH + 1) * Q_LENGTH, np.arange(BATCH + 1) * KV_LENGTH)
    out, lse = reference.attention_varlen(
        *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)), *bounds, causal=True, softcap=2.0, **descales(BATCH)
    )
    np.testing.assert_array_equal(out.reshape(results[0].shape), results[0])
    np.testing.assert_array_equal(lse.reshape(Q_HEADS, BATCH, -1).swapaxes(0, 1), results[1])


def test_fp8_run():
    """P is rounded to e4m3 with 3 mantissa bits, and scores to the 14 bits of the tensor core's accumulator."""
    q, k, v = (x.astype(FP8) for x in inputs(300, 300))
    for options in ({}, dict(dropout=0.5, seed=1), dict(sink=[3.0] * Q_HEADS)):
        out, lse = reference.attention(q, k, v, **options)
        low_out, low_lse = reference.attention(q, k, v, dtype=FP8, **options)
        assert (low_out.dtype.name, low_lse.dtype) == ("bfloat16", np.float32)
        assert 2**-10 < np.abs(low_out.astype(float) - out).max() / np.abs(out).max() < 2**-4
        assert 0 < np.abs(low_lse - lse).max() < 2**-11
    with pytest.raises(TypeError, match="have no gradient"):
        reference.attention_backward(out, q, k, v, q_descale=np.ones((BATCH, KV_HEADS)))
    with pytest.raises(TypeError, match="have no gradient"):
        reference.attention_backward(out, q, k, v, dtype=FP8)


def test_fp8_sums_keep_14_bits():
    a = np.ones((1, 33), np.float32)
    b = np.array([256] + [2**-6] * 31 + [2**-5], np.float32)[:, None]
    assert reference._multiply_in_14_bits(a, b) == 256 + 2**-5
    assert reference._multiply_in_14_bits(-a, b) == -256 - 2**-5
    assert reference._multiply_in_14_bits(a[:, 1:], b[1:]) == 33 * 2**-6


@pytest.mark.parametrize(("size", "most"), [(1, 4.0), (4, 3.0), (10_000, 2.02)])
def test_tolerance_of_few_elements_is_larger(size, most):
    expected = np.zeros(size)
    assert_matches_reference(expected + 0.99 * most, expected, expected + 1, np.float32, "x")
    with pytest.raises(AssertionError, match=f"= {most:.2f}"):
        assert_matches_reference(expected + 1.01 * most, expected, expected + 1, np.float32, "x")


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param(lambda x: x, None, id="equal"),
        pytest.param(lambda x: x + 0.02, None, id="twice-the-low-error"),
        pytest.param(lambda x: np.where(x == 2, 2.05, x), r"worst at \(0, 2\): 2.05", id="one-wrong-element"),
        pytest.param(lambda x: np.where(x == 2, np.nan, x), "NaN in other places", id="nan"),
        pytest.param(lambda x: np.where(np.isinf(x), -x, x), r"\+inf in other places", id="sign-of-infinity"),
        pytest.param(lambda x: np.where(np.isinf(x), 3e38, x), r"\+inf in other places", id="large-for-infinite"),
        pytest.param(lambda x: x[0], "shapes", id="shape"),
    ],
)
def test_tolerance_rule(change, message):
    expected = np.array([[0.0, 1.0, 2.0, np.inf, -np.inf, np.nan]])
    low = expected + 0.01
    actual = change(expected)
    if message is None:
        assert_matches_reference(actual, expected, low, np.float32, "x")
    else:
        with pytest.raises(AssertionError, match=f"x.*{message}"):
            assert_matches_reference(actual, expected, low, np.float32, "x")
