"""Kernels of the lightning indexer on the simulator: the choice of keys, the loss and its gradients, planted bugs."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from indexer_cases import (
    CHOICES,
    SK,
    B,
    assert_loss_and_gradients,
    defined_gradients,
    defined_loss,
    in_pages,
    normal,
    sorted_choice,
    special_choices,
    whole_numbers,
)
from planting import change, planted, skip
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash import device
from cupy_flash.engines import indexer as engine
from cupy_flash.gpu import indexer as gpu
from cupy_flash.problem.indexer import Rule, pose_indexer
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

MMA, SIMT, OF_LISTS = (engine.Tile(*tile, threads=64) for tile in (("mma", 32, 16), ("simt", 16, 16), ("simt", 8, 8)))
SHORT = dict(q_len=18, kv_len=37)


@pytest.fixture(autouse=True)
def on_the_simulator(monkeypatch, poisoned_memory):
    """Run calls in small tiles, with a block for each sequence."""
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")
    monkeypatch.setattr(engine, "TILES", {"select_keys": (MMA, SIMT), "selection_loss": (OF_LISTS,)})
    monkeypatch.setattr(engine, "BLOCKS", 0)  # one block of each sequence


@pytest.fixture
def few_places(monkeypatch):
    """Make lists of candidates short, so that each tile fills them."""
    monkeypatch.setattr(engine, "LEAST_PLACES", 32)


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


@pytest.mark.parametrize("row", in_tiers(ROWS, ("local-keys-float32", "top-left-lengths-bfloat16")))
def test_the_choice_is_that_of_a_full_sort(row, few_places):
    name, dtype = row
    assert_chosen(name, dtype, kv_len=LENGTHS.get(name, SHORT["kv_len"]))


@pytest.mark.parametrize(
    "row",
    in_tiers(
        {f"{name}-{np.dtype(dtype).name}": (name, dtype) for name in CHOICES for dtype in (np.float32, np.float16)},
        ("lengths-float16",),
    ),
)
def test_lists_of_parts_of_the_keys_are_merged(row, monkeypatch):
    """With a warp for each tile of few queries; some parts are past the keys that a query sees."""
    monkeypatch.setattr(engine, "BLOCKS", 1000)
    monkeypatch.setitem(engine.TILES, "select_keys", (engine.Tile("mma", 16, 16, 32), engine.Tile("simt", 16, 16, 128)))
    assert_chosen(*row, q_len=5, kv_len=SK)


@pytest.mark.exhaustive
def test_a_part_that_is_not_merged_is_found(monkeypatch):
    monkeypatch.setattr(engine, "BLOCKS", 1000)
    for bug in (
        change("indexer.merge", "int part = 1", "int part = 2"),
        change("indexer.part", "min(end, (long long)seen)", "min(end - 1, (long long)seen)"),
    ):
        with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
            assert_chosen("lengths", q_len=5, kv_len=SK)


@pytest.mark.parametrize(("page", "dtype"), [(12, np.float32), exhaustive(8, np.float64), exhaustive(16, np.float16)])
def test_keys_in_pages_and_what_lies_past_the_length(page, dtype):
    """Arrays of lengths and pages have any strides."""
    arrays, lists, options = in_pages(page, dtype)
    options |= {name: np.repeat(options[name], 2, axis=-1)[..., ::2] for name in ("kv_lengths", "block_table")}
    np.testing.assert_array_equal(cupy_flash.select_keys(*arrays, **options), lists)


def test_special_scores_and_hidden_keys():
    for arrays, options, lists in special_choices():
        found = cupy_flash.select_keys(*(x.astype(np.float32) for x in arrays), **options)
        assert found[0, 0].tolist() == lists


@pytest.mark.parametrize("sizes", [dict(q_len=0), dict(kv_len=0), exhaustive(dict(q_len=SK, kv_len=5))], ids=str)
def test_no_queries_no_keys_and_queries_before_the_first_key(sizes):
    assert_chosen("causal", **sizes)


@pytest.mark.exhaustive
def test_the_choice_is_the_same_in_every_order_of_the_warps(few_places):
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


def several_tiles(dtype, q_len=6):
    """Return the arrays of a loss, with several tiles of heads and of the keys of a list."""
    return normal(dtype=dtype, q_len=q_len, heads=9, entries=19)


@pytest.mark.parametrize("dtype", [np.float32, *map(exhaustive, (np.float64, np.float16, ml_dtypes.bfloat16))])
def test_the_loss_and_its_gradients(dtype):
    arrays = several_tiles(dtype)
    found = cupy_flash.selection_loss_vjp(*arrays)
    assert_loss_and_gradients(found, arrays)
    assert cupy_flash.selection_loss(*arrays) == found[0]


def test_one_list_for_all_sequences_and_arrays_of_other_dtypes_and_strides():
    """All arrays have any strides; the weights of heads and of rows and the target have dtypes of their own."""
    q, w, k, lists, target, _ = normal(q_len=6)
    strided = [np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1) for x in (q, w, k, lists[:1], target)]
    kinds = np.float32, np.float16, np.float32, np.int32, np.float64
    arrays = [x.astype(kind, order="K") for x, kind in zip(strided, kinds, strict=True)]
    rows = np.arange(6, dtype=ml_dtypes.bfloat16)
    loss, gradients = cupy_flash.selection_loss_vjp(*arrays, rows)
    whole = [x.astype(np.float64) for x in (*arrays[:3], target, np.broadcast_to(rows, (B, 6)))]
    whole.insert(3, np.broadcast_to(arrays[3], lists.shape))
    np.testing.assert_allclose(loss, defined_loss(*whole), rtol=1e-5)
    for gradient, expected, rtol in zip(gradients, defined_gradients(*whole), (1e-4, 1e-2, 1e-4), strict=True):
        np.testing.assert_allclose(gradient.astype(float), expected, rtol=rtol, atol=1e-3)


def test_a_key_that_no_list_names_never_reaches_the_loss():
    q, w, k, lists, target, rows = normal(dtype=np.float32, q_len=6)
    unlisted = [11, SK - 1]
    lists[np.isin(lists, unlisted)] = -1
    expected = cupy_flash.selection_loss_vjp(q, w, k, lists, target, rows)
    k[:, unlisted], target[lists[:, 0] < 0] = np.nan, np.nan
    loss, gradients = cupy_flash.selection_loss_vjp(q, w, k, lists, target, rows)
    assert loss == expected[0]
    for found, before in zip(gradients, expected[1], strict=True):
        np.testing.assert_array_equal(found, before)


@pytest.mark.exhaustive
def test_gradients_are_the_same_in_every_order_of_the_warps():
    names = ("q", "weights", "k", "selected", "target", "row_weights")
    posed = pose_indexer("selection_loss", dict(zip(names, several_tiles(np.float32), strict=True)))
    bits = set()
    for seed in range(5):
        results = gpu.gradients(*posed, device.named("sm_80"), partial(start, order="random", seed=seed))
        bits.add(b"".join(x.numpy().tobytes() for x in results))
    assert len(bits) == 1


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)], ids=str)
def test_a_loss_without_queries_or_entries_is_0(sizes):
    q_len, entries = sizes
    q, w, k, *_ = normal(dtype=np.float32)
    lists, target = np.full((1, 1, q_len, entries), -1, np.int32), np.ones((B, q_len, entries), np.float32)
    loss, gradients = cupy_flash.selection_loss_vjp(q[:, :q_len], w[:, :q_len], k, lists, target)
    assert loss == 0 and not any(x.any() for x in gradients)


def test_a_dimension_that_no_tile_serves_is_refused():
    q, w, k = np.ones((1, 1, 1, 600)), np.ones((1, 1, 1)), np.ones((1, 1, 600))
    with pytest.raises(cupy_flash.UnsupportedError, match="select_keys: dimension 600 is larger than 576"):
        cupy_flash.select_keys(q, w, k, 1)


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
DEFAULT_BUGS = ("last-block-not-ended",)


@pytest.mark.parametrize("row", in_tiers(BUGS, DEFAULT_BUGS))
def test_planted_bugs_are_found(row, monkeypatch, few_places):
    bug, name = row
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        assert_chosen(name, kv_len=LENGTHS.get(name, SHORT["kv_len"]))


LOSS_BUGS = {
    "a-head-is-skipped": change("loss.heads", "int row = 0", "int row = 1"),
    "hidden-keys-have-scores": change(
        "loss.hidden", "tile.key[threadIdx.x] < sequence.kv_len ? sum : -infinity()", "sum"
    ),
    "the-target-of-hidden-keys": skip("loss.names-key"),
    "the-target-is-not-normalised": change("loss.whole", "whole = sum_of(whole)", "whole = 1"),
    "no-target-in-the-gradient": change("loss.gradient", "- of_target", ""),
    "no-row-weights": change("loss.row-weight", "r * lost", "lost"),
    "no-relu-in-dQ": change("loss.relu-of-dQ", "S[r][c] > 0", "true"),
    "no-relu-in-dK": change("loss.relu-of-dK", "a > 0", "true"),
    "weights-of-one-lane": change("loss.dweight", "row_sum(dweights[r])", "dweights[r]"),
    "the-next-entry": change("loss.entry-of-place", "* lists.length + n", "* lists.length"),
    "a-warp-is-lost": change("loss.warps", "int of = 0", "int of = 1"),
}


@pytest.mark.parametrize("bug", in_tiers(LOSS_BUGS, ("the-next-entry",)))
def test_bugs_planted_in_the_loss_are_found(bug, monkeypatch):
    arrays = several_tiles(np.float32, q_len=5)
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        assert_loss_and_gradients(cupy_flash.selection_loss_vjp(*arrays), arrays)


@pytest.mark.exhaustive
def test_a_lost_nan_is_found(monkeypatch):
    with planted(monkeypatch, change("indexer.nan", "s != s ? infinity() :", "")), pytest.raises(AssertionError):
        test_special_scores_and_hidden_keys()
