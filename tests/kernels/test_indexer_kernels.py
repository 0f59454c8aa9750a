"""Kernels of the lightning indexer on the simulator: the choice of keys, the loss and its gradients, planted bugs."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from indexer_cases import CHOICES, SK, in_pages, sorted_choice, special_choices, whole_numbers
from planting import change, planted
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash import device
from cupy_flash.engines import indexer as engine
from cupy_flash.gpu import indexer as gpu
from cupy_flash.problem.indexer import Rule, pose_indexer
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

MMA, SIMT = engine.Tile("mma", 64, 16), engine.Tile("simt", 16, 16)
SHORT = dict(q_len=18, kv_len=37)


@pytest.fixture(autouse=True)
def on_the_simulator(monkeypatch, poisoned_memory):
    """Run calls in small tiles, with a block for each sequence and short lists of candidates."""
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")
    monkeypatch.setattr(engine, "TILES", {"select_keys": (MMA, SIMT), "selection_loss": (SIMT,)})
    monkeypatch.setattr(engine, "LEAST_PLACES", 32)
    monkeypatch.setattr(engine, "BLOCKS", 0)  # one block of each sequence


def assert_chosen(name, dtype=np.float32, seed=0, **sizes):
    """Assert that a choice is that of a full sort; scores are exact in every dtype, with many ties."""
    exact = whole_numbers(seed, **SHORT | sizes)
    found = cupy_flash.select_keys(*(x.astype(dtype) for x in exact), **CHOICES[name])
    np.testing.assert_array_equal(found, sorted_choice(*exact, **CHOICES[name]))


# (case, dtype): in float16 and bfloat16 on mma
ROWS = {
    f"{name}-{np.dtype(dtype).name}": (name, dtype)
    for name in CHOICES
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
}
LENGTHS = {"top-left-lengths": SK, "lengths": SK, "local-keys": SK}  # their lengths are those of more keys


@pytest.mark.parametrize(
    "row", in_tiers(ROWS, ("lengths-float32", "blocks-local-float64", "all-keys-float16", "top-left-lengths-bfloat16"))
)
def test_the_choice_is_that_of_a_full_sort(row):
    name, dtype = row
    assert_chosen(name, dtype, kv_len=LENGTHS.get(name, SHORT["kv_len"]))


@pytest.mark.parametrize(("page", "dtype"), [(12, np.float32), exhaustive(8, np.float64), exhaustive(16, np.float16)])
def test_keys_in_pages_and_what_lies_past_the_length(page, dtype):
    arrays, lists, options = in_pages(page, dtype)
    np.testing.assert_array_equal(cupy_flash.select_keys(*arrays, **options), lists)


def test_special_scores_and_hidden_keys():
    for arrays, options, lists in special_choices():
        found = cupy_flash.select_keys(*(x.astype(np.float32) for x in arrays), **options)
        assert found[0, 0].tolist() == lists


@pytest.mark.parametrize("sizes", [dict(q_len=0), dict(kv_len=0), exhaustive(dict(q_len=SK, kv_len=5))], ids=str)
def test_no_queries_no_keys_and_queries_before_the_first_key(sizes):
    assert_chosen("causal", **sizes)


@pytest.mark.exhaustive
def test_the_choice_is_the_same_in_every_order_of_the_warps():
    indexer, operands = pose_indexer(
        "select_keys", dict(zip(["q", "weights", "k"], whole_numbers(0, 5, 40), strict=True)), Rule(6)
    )
    lists = {
        gpu.select(indexer, operands, device.named("sm_80"), partial(start, order="random", seed=seed))
        .numpy()
        .tobytes()
        for seed in range(2)
    }
    assert len(lists) == 1


def test_memory_is_that_of_lists_and_candidates(monkeypatch):
    """Also with the tiles, blocks and places of a call, no array has an element for each pair of a query and a key."""
    monkeypatch.undo()
    length, sizes = 2**15, []
    arrays = dict(q=np.empty((1, length, 1, 4)), weights=np.empty((1, length, 1)), k=np.empty((1, length, 4)))
    indexer, operands = pose_indexer("select_keys", arrays, Rule(16))
    gpu.select(indexer, operands, device.named("sm_80"), lambda work: sizes.extend(map(size, work.results.values())))
    assert len(sizes) == 3 and max(sizes) <= 80 * length


def size(array):
    return np.prod(array.shape)


# (bug, case)
BUGS = {
    "ties-go-to-higher-keys": (
        change("indexer.ties", "rank_in(tied) < ties", "rank_in(tied) >= __popc(tied) - ties"),
        "causal",
    ),
    "later-tiles-are-not-merged": (change("indexer.nth", "row.nth = nth", "row.nth = LARGEST - 1"), "causal"),
    "a-head-is-skipped": (change("indexer.heads", "int head = 0", "int head = 1"), "causal"),
    "last-block-not-ended": (change("indexer.last-block", "last ||", ""), "blocks"),
    "the-open-block-is-forgotten": (change("indexer.open-block", "candidates.row.open", "0"), "blocks-of-12"),
    "blocks-before-the-local-ones": (change("indexer.local", "behind < local", "behind <= local"), "blocks-local"),
    "one-key-too-many": (change("indexer.visible", "kv_start + column", "kv_start + column - 1"), "lengths"),
    "one-row-too-few": (change("clamp-length", "max(before, 0)", "max(before - 1, 0)"), "lengths"),
}
DEFAULT_BUGS = ("ties-go-to-higher-keys", "last-block-not-ended")


@pytest.mark.parametrize("row", in_tiers(BUGS, DEFAULT_BUGS))
def test_planted_bugs_are_found(row, monkeypatch):
    bug, name = row
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        assert_chosen(name, kv_len=LENGTHS.get(name, SHORT["kv_len"]))


@pytest.mark.exhaustive
def test_a_lost_nan_is_found(monkeypatch):
    with planted(monkeypatch, change("indexer.nan", "s != s ? infinity() :", "")), pytest.raises(AssertionError):
        test_special_scores_and_hidden_keys()
