"""Kernels for selected keys on the simulator: results and gradients, what a list does not name, planted bugs."""

import numpy as np
import pytest
from cases import check, run_kernels
from planting import change, planted
from selected_cases import CASES, DV, HK, HQ, SK, SQ, B, D, call_of, lists_of, normal
from tiers import exhaustive
from tiles import SMALL_TILE, small_tile

import cupy_flash
from cupy_flash.engines import simt
from cupy_flash.plan import plan
from cupy_flash.simulator.errors import SimulationError

pytestmark = pytest.mark.usefixtures("poisoned_memory", "small_tiles")


@pytest.fixture
def small_tiles(monkeypatch):
    """Make the plans of public functions have the small tile."""
    monkeypatch.setattr(simt, "tiles", lambda problem, device: [SMALL_TILE])
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()


DEFAULT = ("keys-causal-heads", "last-list-and-block-are-cut", "dropout-mask", "lengths-alibi")
WITH_DBIAS = "query-heads-bias"  # whose gradient no kernel computes


@pytest.mark.parametrize(
    "name", [exhaustive(name) if name not in DEFAULT else name for name in CASES if name != WITH_DBIAS]
)
def test_results_and_gradients_are_those_of_the_reference(name):
    case, call = call_of(name)
    check(case, backend="simulator", call=call)


def assert_close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


Q, K, V, DOUT = normal(0, (B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, DV), (B, SQ, HQ, DV))


def results(lists, backend="simulator", k=K, v=V, **options):
    """Return out, lse, dq, dk and dv with lists."""
    options |= dict(selected=lists, backend=backend)
    out, lse = cupy_flash.attention(Q, k, v, return_lse=True, **options)
    return out, lse, *cupy_flash.attention_backward(DOUT, Q, k, v, out, lse, **options)[:3]


def test_a_packed_batch():
    """The lists of each sequence begin at their own place; those between belong to no row, and are not read."""
    lengths, rows, block = ([0, 5, 19], [0, 17, 50]), 4, 8
    lists = np.full((HK, 19 // rows + 2, 3), 99, np.int32)
    for b, (first, count, n) in enumerate(((0, 2, 3), (5, 4, 5))):
        place = first // rows + b
        lists[:, place : place + count] = lists_of(np.random.default_rng(b), HK, 1, 1, 3, 1, count, n)[0]
    bounds = (*(np.array(x, np.int32) for x in lengths), 14, 33)
    q, k, v, dout = normal(1, (19, HQ, D), (50, HK, D), (50, HK, DV), (19, HQ, DV))

    def both(backend):
        options = dict(causal=True, selected=lists, selected_block=block, selected_rows=rows, backend=backend)
        out, lse = cupy_flash.attention_varlen(q, k, v, *bounds, return_lse=True, **options)
        return out, lse, *cupy_flash.attention_varlen_backward(dout, q, k, v, out, lse, *bounds, **options)[:3]

    assert_close(both("simulator"), both("cpu"))


@pytest.mark.parametrize("page", [6, exhaustive(None), exhaustive(8)])
def test_a_cache(page):
    """Its pages are in any order, keys past the lengths are NaN, and a mod sees positions."""
    capacity, count, lengths = 36 if page == 6 else 40, 5, (29, 17)
    rng = np.random.default_rng(6)
    lists = lists_of(rng, HK, block=8, rows=2, n=4, q_len=count, kv_len=capacity)
    q, k, v = normal(7, (B, count, HQ, D), (B, capacity, HK, D), (B, capacity, HK, DV))
    caches = [
        np.where(np.arange(capacity)[:, None, None] < np.array(lengths)[:, None, None, None], x, np.nan) for x in (k, v)
    ]
    options = dict(
        cache_seqlens=np.array(lengths, np.int32), selected=lists, selected_block=8, selected_rows=2,
        score_mod=lambda s, b, h, i, j: s * 0.5 + (i - j) * 0.01 + h,
    )  # fmt: skip
    if page is not None:
        table = rng.permutation(B * capacity // page).reshape(B, -1).astype(np.int32)
        pages = [np.empty((table.size, page, HK, x.shape[-1])) for x in caches]
        for pool, x in zip(pages, caches, strict=True):
            pool[table.ravel()] = x.reshape(-1, *pool.shape[1:])
        caches, options = pages, options | dict(block_table=table)
    results = [cupy_flash.attention_with_kv_cache(q, *caches, **options, backend=x) for x in ("simulator", "cpu")]
    assert_close(results[:1], results[1:])


def test_a_key_that_no_list_of_a_tile_names_never_reaches_it():
    """Neither do those that the mask hides from all rows of a tile: an early row lists later keys."""
    lists = lists_of(np.random.default_rng(4))
    bad = [3, 11, 30]
    k, v = K.copy(), V.copy()
    k[:, bad], v[:, bad[0]], v[:, bad[1:]] = np.nan, np.inf, np.nan
    i = np.arange(SQ) + SK - SQ  # causal
    names = (np.isin(lists, bad) & (lists <= i[:, None])).any(axis=-1)[:, 0]  # (B, Sq)
    assert 0 < names.sum() < names.size
    clean, dirty = results(lists, causal=True), results(lists, k=k, v=v, causal=True)
    for index in (0, 2):  # out and dq
        assert np.isnan(dirty[index][names]).any()
        np.testing.assert_array_equal(dirty[index][~names], clean[index][~names])


def kernels_of(name, call=None, start=None, **how):
    """Return results of the kernels of a case, in small tiles."""
    case, made = call_of(name)
    return run_kernels(case, call=call or made, tile=small_tile, **how | ({} if start is None else {"start": start}))


def with_lists(call, change):
    """Return a call, whose lists are checked no more, with other lists."""
    return call._replace(options=call.options | dict(selected=change(call.options["selected"])))


def test_wrong_entries_are_never_followed(monkeypatch):
    """Entries past the keys are hidden; entries that stand twice give some result."""
    monkeypatch.setattr("cupy_flash.problem.build.check_entries", lambda *arguments: None)
    _, call = call_of("last-list-and-block-are-cut")
    rng = np.random.default_rng(8)
    wrong = rng.choice(np.array([3, 2**26, 2**27 - 1, 2**31 - 1], np.int32), call.options["selected"].shape)
    expected = kernels_of("last-list-and-block-are-cut", with_lists(call, lambda x: np.where(wrong == 3, x, -1)))
    found = kernels_of("last-list-and-block-are-cut", with_lists(call, lambda x: np.where(wrong == 3, x, wrong)))
    for x, y in zip(found[:5], expected[:5], strict=True):
        np.testing.assert_array_equal(x, y)
    kernels_of("last-list-and-block-are-cut", with_lists(call, lambda x: np.full_like(x, 1)))


@pytest.mark.parametrize("sink", [None, np.arange(4.0)], ids=["", "sink"])
def test_a_row_with_an_empty_list_sees_nothing(sink):
    out, lse, *gradients = results(np.full((1, 1, SQ, 3), -1, np.int32), sink=sink)
    assert not out.any() and not any(x.any() for x in gradients)
    np.testing.assert_array_equal(lse, -np.inf if sink is None else np.broadcast_to(sink[:, None], lse.shape))


BUGS = {
    "the-next-page": (
        change("listed-key-exists", "named < visible.end", "true")
        + change("listed-keys-alone", "tile.key[row] < kv_len", "true"),
        "last-list-and-block-are-cut",
        SimulationError,
    ),
    "last-block-not-cut": (
        change("cut-block", "sequence.kv_len", "kv_start + BLOCK_KV")
        + change("listed-keys-alone", "tile.key[row] < kv_len", "true"),
        "last-list-and-block-are-cut",
        SimulationError,
    ),
    "inverse-list-off-by-one": (
        change("lists-of-block", "block * CHUNKS - 1", "block * CHUNKS"),
        "keys-causal-heads",
        (AssertionError, SimulationError),
    ),
    "entries-of-one-key": (
        change("key-of-entry", "entry * KEYS_OF_ENTRY", "entry"),
        "last-list-and-block-are-cut",
        AssertionError,
    ),
    "heads-after-rows": (change("listed-head", "row % HEADS_OF_LIST", "0"), "keys-causal-heads", AssertionError),
    "rows-of-the-first-list": (
        change("listed-query", "list * lists.queries +", ""),
        "dropout-mask",
        (AssertionError, SimulationError),
    ),
    "rows-of-other-lists": (
        change("rows-of-inverse-list", "place < places.end", "true"),
        "keys-causal-heads",
        (AssertionError, SimulationError),
    ),
}


@pytest.mark.parametrize(("bug", "name", "error"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, name, error, monkeypatch):
    with planted(monkeypatch, bug), pytest.raises(error):
        check(*call_of(name)[:1], backend="simulator", call=call_of(name)[1])


@pytest.mark.parametrize(
    ("bug", "find"),
    [
        (change("first-list", "+ sequence.batch", ""), test_a_packed_batch),
        (change("inverse-entry-exists", "&& entry < blocks", ""), test_wrong_entries_are_never_followed),
    ],
    ids=["lists-of-the-sequence-before", "inverse-of-wrong-entries"],
)
def test_planted_bugs_in_rarer_calls_are_found(bug, find, monkeypatch):
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        find(*[monkeypatch] * find.__code__.co_argcount)
