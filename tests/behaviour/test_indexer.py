"""The lightning indexer: select_keys, and selection_loss with its gradients, against their definitions in NumPy."""

import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash.cpu import indexer as engine

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
    "blocks-local": dict(n=4, block=4, local=2),
    "all-local": dict(n=2, block=8, local=2, causal=False),
    "local-keys": dict(n=5, local=3, kv_lengths=np.array([44, 3], np.int32)),
}


@pytest.fixture(params=[(512, 2**20), (8, 64)], ids=["whole", "tiles"])
def tiles(request, monkeypatch):
    """Make tiles of a few rows and keys, besides the usual ones."""
    keys, size = request.param
    monkeypatch.setattr(engine, "KEYS", (keys, keys))
    monkeypatch.setattr(engine, "SCORES", size)


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_is_that_of_a_full_sort(name, tiles):
    found = cupy_flash.select_keys(*whole_numbers(), **CHOICES[name])
    np.testing.assert_array_equal(found, sorted_choice(*whole_numbers(), **CHOICES[name]))
    assert found.dtype == np.int32


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_choice_in_other_dtypes(dtype):
    found = cupy_flash.select_keys(*whole_numbers(1, dtype=dtype), 6)
    np.testing.assert_array_equal(found, sorted_choice(*whole_numbers(1), 6))


@pytest.mark.parametrize("q_len, kv_len", [(0, SK), (SQ, 0), (SK, 5)])
def test_no_queries_no_keys_and_queries_before_the_first_key(q_len, kv_len):
    arrays = whole_numbers(2, q_len, kv_len)
    np.testing.assert_array_equal(cupy_flash.select_keys(*arrays, 3), sorted_choice(*arrays, 3))


def test_keys_in_pages_and_what_lies_past_the_length():
    q, w, k = whole_numbers(3, kv_len=48)
    lengths, table = np.array([47, 20], np.int32), np.array([[5, 0, 3, 2], [1, 4, -1, 99]], np.int32)
    pool = np.full((6, 12, DIM), np.nan)
    for b, length in enumerate(lengths):
        for s in range(length):
            pool[table[b, s // 12], s % 12] = k[b, s]
    found = cupy_flash.select_keys(q, w, pool, 5, block=8, kv_lengths=lengths, block_table=table)
    np.testing.assert_array_equal(found, sorted_choice(q, w, k, 5, block=8, kv_lengths=lengths))


def test_special_scores_and_hidden_keys():
    """NaN counts as the largest score; -inf is a score, and a key with it is visible; hidden keys are never listed."""
    q, w = np.ones((1, 4, 1, 1)), np.ones((1, 4, 1))
    w[0, 3] = -1
    k = np.array([1, np.inf, np.nan, 2, 3.0, np.nan])[None, :, None]
    found = cupy_flash.select_keys(q, w, k, 3, kv_lengths=np.array([5], np.int32))
    assert found[0, 0].tolist() == [[0, 1, -1], [0, 1, 2], [1, 2, 3], [0, 2, 3]]
    assert cupy_flash.select_keys(q, w, k, 5, kv_lengths=np.array([5], np.int32))[0, 0, 3].tolist() == [0, 1, 2, 3, 4]
    infinite = np.full((1, 6, 1), np.inf)
    assert cupy_flash.select_keys(q, abs(w), infinite, 2, local=1)[0, 0].tolist() == [[0, 2], [0, 3], [0, 4], [0, 5]]


def test_memory_is_linear(monkeypatch):
    monkeypatch.setattr(engine, "SCORES", 2**16)
    length = 2048
    rng = np.random.default_rng(0)
    q, w, k = (rng.normal(size=(1, length, *rest)).astype(np.float32) for rest in ((1, 4), (1,), (4,)))
    tracemalloc.start()
    cupy_flash.select_keys(q, w, k, 16, block=8)
    assert tracemalloc.get_traced_memory()[1] < length * length / 2  # a bool for each pair would take twice this
    tracemalloc.stop()


def normal(seed=4, dtype=np.float64):
    """Return q_idx, weights, k_idx, lists, target and row weights; some entries name no key, and a list is empty."""
    rng = np.random.default_rng(seed)
    q, w, k = (rng.normal(size=s).astype(dtype) for s in ((B, SQ, HEADS, DIM), (B, SQ, HEADS), (B, SK, DIM)))
    lists = np.argsort(rng.random((B, 1, SQ, SK)))[..., :7].astype(np.int32)
    lists[rng.random(lists.shape) < 0.2] = -3
    lists[0, 0, 2] = -1
    target, rows = rng.random((B, SQ, 7)), rng.random((B, SQ))
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


@pytest.mark.parametrize("rows", [False, True])
def test_the_loss_is_that_of_its_definition(rows, tiles):
    arrays = normal()[: 6 if rows else 5]
    np.testing.assert_allclose(cupy_flash.selection_loss(*arrays), defined_loss(*arrays), rtol=1e-12)
    loss, gradients = cupy_flash.selection_loss_vjp(*arrays)
    assert loss == cupy_flash.selection_loss(*arrays)
    for place, gradient in enumerate(gradients):
        rng, eps = np.random.default_rng(place), 1e-6
        direction = rng.normal(size=gradient.shape)
        moved = [
            defined_loss(*(x + sign * eps * direction if n == place else x for n, x in enumerate(arrays)))
            for sign in (1, -1)
        ]
        np.testing.assert_allclose((gradient * direction).sum(), (moved[0] - moved[1]) / (2 * eps), rtol=1e-6)


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


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_loss_and_its_gradients_in_other_dtypes(dtype):
    arrays = normal(dtype=dtype)
    exact, low = ([x if x.dtype == np.int32 else x.astype(kind) for x in arrays] for kind in (np.float64, np.float32))
    loss, gradients = cupy_flash.selection_loss_vjp(*arrays)
    assert loss.dtype == np.float32
    assert_matches_reference(loss, defined_loss(*exact), defined_loss(*low), np.float32, "loss")
    found = zip(gradients, defined_gradients(*exact), defined_gradients(*low), strict=True)
    for gradient, expected, rounded in found:
        assert gradient.dtype == dtype
        assert_matches_reference(gradient, expected, rounded.astype(dtype), dtype, "gradient")


def test_a_target_that_is_the_prediction_has_no_loss_and_no_gradient():
    q, w, k, lists, *_ = normal()
    listed = lists[:, 0] >= 0
    target = np.exp(np.take_along_axis(scores(q, w, k), np.maximum(lists[:, 0], 0), axis=2)) * listed
    loss, gradients = cupy_flash.selection_loss_vjp(q, w, k, lists, 3 * target)
    assert all(abs(x).max() < 1e-13 for x in (loss, *gradients))


def test_scores_that_are_far_apart_have_a_finite_loss():
    q, w, k = np.ones((1, 1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32), np.float32([[[0], [300]]])
    lists, target = np.array([[[[0, 1]]]], np.int32), np.array([[[1, 0]]], np.float32)
    assert cupy_flash.selection_loss(q, w, k, lists, target) == 300


def test_a_key_that_no_list_names_never_reaches_the_loss():
    q, w, k, lists, target, rows = normal()
    unlisted = [11, SK - 1]
    lists[np.isin(lists, unlisted)] = -1
    expected = cupy_flash.selection_loss_vjp(q, w, k, lists, target, rows)
    k, target = k.copy(), target.copy()
    k[:, unlisted], target[lists[:, 0] < 0] = np.nan, np.nan
    loss, gradients = cupy_flash.selection_loss_vjp(q, w, k, lists, target, rows)
    assert loss == expected[0]
    for found, before in zip(gradients, expected[1], strict=True):
        np.testing.assert_array_equal(found, before)


def test_gradients_are_the_same_in_every_run(tiles):
    arrays = normal(dtype=np.float32)
    first, *others = ([x.tobytes() for x in cupy_flash.selection_loss_vjp(*arrays)[1]] for _ in range(5))
    assert all(other == first for other in others)


Q, W, K, LISTS, TARGET, ROWS = normal()
ERRORS = {
    "n": (lambda: cupy_flash.select_keys(Q, W, K, 0), ValueError, "n must be in [1, "),
    "local": (lambda: cupy_flash.select_keys(Q, W, K, 2, local=3), ValueError, "local must be at most n, which is 2"),
    "block": (
        lambda: cupy_flash.select_keys(Q, W, K, 2, block=1.5),
        TypeError,
        "block must be a whole number, not 1.5",
    ),
    "causal": (lambda: cupy_flash.select_keys(Q, W, K, 2, causal="left"), ValueError, "causal must be False, True or"),
    "scale": (lambda: cupy_flash.select_keys(Q, W, K, 2, scale=None), TypeError, "scale must be a number, not None"),
    "dtype": (
        lambda: cupy_flash.select_keys(Q, W, K.astype("f4"), 2),
        TypeError,
        "q_idx and k_idx must have one dtype",
    ),
    "weights": (lambda: cupy_flash.select_keys(Q, W[1:], K, 2), ValueError, f"weights must be ({B}, {SQ}, {HEADS})"),
    "lengths": (
        lambda: cupy_flash.select_keys(Q, W, K, 2, kv_lengths=np.array([46, 3], np.int32)),
        ValueError,
        "kv_lengths must be in [0, 45], not 3 to 46",
    ),
    "pages": (
        lambda: cupy_flash.select_keys(Q, W, K, 2, block_table=np.array([[0, 1], [1, 2]], np.int32)),
        ValueError,
        "block_table[1, 1] is 2, and k_idx has 2 pages",
    ),
    "twice": (lambda: cupy_flash.selection_loss(Q, W, K, LISTS * 0, TARGET), ValueError, "names key 0 twice"),
    "past": (
        lambda: cupy_flash.selection_loss(Q, W, K[:, :40], np.where(LISTS < 0, LISTS, 40 + LISTS * 0), TARGET),
        ValueError,
        "selected[0, 0, 0] names key 40 of 40",
    ),
    "target": (
        lambda: cupy_flash.selection_loss(Q, W, K, LISTS, TARGET[..., 1:]),
        ValueError,
        "target must be (2, 21, 7)",
    ),
    "rows": (
        lambda: cupy_flash.selection_loss(Q, W, K, LISTS, TARGET, ROWS[:, :3]),
        ValueError,
        "row_weights must broad",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_are_refused(name):
    call, kind, reason = ERRORS[name]
    with pytest.raises(kind, match=re.escape(reason)):
        call()


def test_the_simulator_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")
    reason = "CUPY_FLASH_BACKEND is simulator, and select_keys runs on the CPU alone in this version"
    with pytest.raises(cupy_flash.UnsupportedError, match=reason):
        cupy_flash.select_keys(Q, W, K, 2)
