"""The lightning indexer: select_keys, and selection_loss with its gradients, against their definitions in NumPy."""

import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from indexer_cases import (
    CHOICES,
    HEADS,
    SK,
    SQ,
    B,
    assert_loss_and_gradients,
    defined_loss,
    in_pages,
    normal,
    scores,
    sorted_choice,
    special_choices,
    whole_numbers,
)

import cupy_flash
from cupy_flash.cpu import indexer as engine


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
    arrays, whole, options = in_pages(12)
    np.testing.assert_array_equal(cupy_flash.select_keys(*arrays, **options), whole)


def test_special_scores_and_hidden_keys():
    """NaN counts as the largest score; -inf is a score, and a key with it is visible; hidden keys are never listed."""
    for arrays, options, lists in special_choices():
        assert cupy_flash.select_keys(*arrays, **options)[0, 0].tolist() == lists


def test_memory_is_linear(monkeypatch):
    monkeypatch.setattr(engine, "SCORES", 2**16)
    length = 2048
    rng = np.random.default_rng(0)
    q, w, k = (rng.normal(size=(1, length, *rest)).astype(np.float32) for rest in ((1, 4), (1,), (4,)))
    tracemalloc.start()
    cupy_flash.select_keys(q, w, k, 16, block=8)
    assert tracemalloc.get_traced_memory()[1] < length * length / 2  # a bool for each pair would take twice this
    tracemalloc.stop()


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


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_loss_and_its_gradients_in_other_dtypes(dtype):
    arrays = normal(dtype=dtype)
    assert_loss_and_gradients(cupy_flash.selection_loss_vjp(*arrays), arrays)


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


def test_a_backend_that_is_not_that_of_the_arrays_is_refused(monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "cuda")
    reason = "CUPY_FLASH_BACKEND is cuda, and the arrays are on cpu, and arrays never change device"
    with pytest.raises(cupy_flash.UnsupportedError, match=reason):
        cupy_flash.select_keys(Q, W, K, 2)
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "gpu")
    with pytest.raises(ValueError, match="CUPY_FLASH_BACKEND must be one of cpu, cuda, simulator, not 'gpu'"):
        cupy_flash.select_keys(Q, W, K, 2)
