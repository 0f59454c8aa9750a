"""Kernels for selected keys on the simulator: results and gradients, what a list does not name, planted bugs."""

import functools

import derivatives
import numpy as np
import pytest
from cases import Result, check, planned, run_kernels, run_public
from planting import change, planted, skip
from selected_cases import CASES, DV, HK, HQ, SK, SQ, B, D, call_of, lists_of, normal
from tiers import exhaustive, in_tiers
from tiles import SMALL_TILE, small_tile

import cupy_flash
from cupy_flash.engines import simt
from cupy_flash.gpu import run_plan
from cupy_flash.plan import plan
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory", "small_tiles")


@pytest.fixture
def small_tiles(monkeypatch):
    """Make the plans of public functions have the small tile."""
    monkeypatch.setattr(simt, "tiles", lambda problem, device: [SMALL_TILE])
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()


# (case, engine, deterministic): where it is, lists are sorted by the keys that they name
ROWS = {
    f"{engine}-{name}-{'sorted' if deterministic else 'added'}": (name, engine, deterministic)
    for engine in ("simt", "mma")
    for name in CASES
    for deterministic in (False, True)
    if name != "query-heads-bias"  # its gradient, which no kernel computes
}
DEFAULT = (
    "simt-keys-causal-heads-added", "simt-lengths-alibi-sorted", "mma-dropout-mask-added",
    "mma-last-list-and-block-are-cut-sorted",
)  # fmt: skip


def made_of(name, engine="simt", **options):
    """Return the case of a name and its call, in a dtype of the engine."""
    return call_of(name, **options, **dict(dtype="float16") if engine == "mma" else {})


@pytest.mark.parametrize("row", in_tiers(ROWS, DEFAULT))
def test_results_and_gradients_are_those_of_the_reference(row):
    name, engine, deterministic = row
    case, call = made_of(name, engine)
    result = run_kernels(case, call=call, tile=small_tile, engine=engine, deterministic=deterministic)
    check(case, result, call=call)


@pytest.mark.parametrize("engine", ["simt", exhaustive("mma")])
def test_a_bias_that_hides_keys(engine):
    case, call = made_of("query-heads-bias", engine)
    out, lse = (x.numpy() for x in run_plan.forward(*planned(case, call=call, tile=small_tile, engine=engine), start))
    none = [None] * (len(Result._fields) - 2)
    check(case, Result(out, lse, *none), only=("out", "lse"), call=call)


def assert_derivatives_are_those_of_the_reference(name, moving=derivatives.ALL, names=None, **options):
    """Compare a JVP and a double backward; of a call with a bias, whose gradient no kernel computes, the JVP alone."""
    case, call = call_of(name, **options)
    names = names or (derivatives.JVP if case.bias else derivatives.Derivatives._fields)
    parts = dict(second=None) if names == derivatives.JVP else {}
    result = derivatives.run_kernels(case, moving, call, tile=SMALL_TILE, **parts)
    derivatives.check(case, result, moving=moving, names=names, call=call)


@pytest.mark.parametrize(
    "name", in_tiers({name: name for name in CASES}, ["rows-sink", "dropout-mask", "query-heads-bias"])
)
def test_derivatives_are_those_of_the_reference(name):
    assert_derivatives_are_those_of_the_reference(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("moving", [(), *((name,) for name in derivatives.ALL)], ids=str)
def test_derivatives_in_any_direction(moving):
    assert_derivatives_are_those_of_the_reference("rows-sink", moving)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_derivatives_in_any_dtype(dtype):
    assert_derivatives_are_those_of_the_reference("dropout-mask", dtype=dtype)


@pytest.mark.exhaustive
def test_derivatives_with_a_mod_and_values_inside_keys():
    """In the JVP the mod reads an array that has a tangent, whose gradient no kernel computes."""
    table, moved = normal(11, (HQ,), (HQ,))
    options = dict(selected=lists_of(np.random.default_rng(12), heads=HK), head_dim_v=DV)

    def both(backend):
        both = options | dict(backend=backend)
        mod = cupy_flash.Mod(score_mod=lambda s, b, h, i, j: s * 0.5 + s * s * table[h] + (i - j) * 0.01)
        tangents, arrays = (Q, K, None), (Q, K, None)
        first = cupy_flash.attention_jvp(*arrays, *tangents, return_lse=True, tcaptured=(moved,), score_mod=mod, **both)
        both["score_mod"] = lambda s, b, h, i, j: s * 0.5 + s * s * 0.1 * h + (i - j) * 0.01
        out, lse = cupy_flash.attention(*arrays, return_lse=True, **both)
        second = cupy_flash.attention_double_backward(*tangents, DOUT, *arrays, out, lse, **both)
        return *first, *(x for x in second if isinstance(x, np.ndarray))

    assert_close(both("simulator"), both("cpu"))


@pytest.mark.exhaustive
def test_double_backwards_have_the_same_bits_in_every_order():
    case, call = call_of("keys-causal-heads", batch=1)
    bits = set()
    for seed in range(5):
        in_order = functools.partial(start, order="random", seed=seed)
        found = derivatives.run_kernels(case, call=call, tile=SMALL_TILE, start=in_order)
        bits.add(b"".join(x.tobytes() for x in found if x is not None))
    assert len(bits) == 1


@pytest.mark.parametrize(("engine", "runs"), [("simt", 2), exhaustive("simt", 5), exhaustive("mma", 5)])
def test_sorted_lists_give_the_same_bits_in_every_order(engine, runs):
    case, call = made_of("keys-causal-heads", engine, batch=1)
    bits = set()
    for seed in range(runs):
        in_order = functools.partial(start, order="random", seed=seed)
        found = run_kernels(case, call=call, tile=small_tile, engine=engine, deterministic=True, start=in_order)
        bits.add(b"".join(x.tobytes() for x in found if x is not None))
    assert len(bits) == 1


def assert_close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


Q, K, V, DOUT = normal(0, (B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, DV), (B, SQ, HQ, DV))


def results(lists, backend="simulator", k=K, v=V, **options):
    """Return out, lse, dq, dk and dv with lists."""
    options |= dict(selected=lists, backend=backend)
    out, lse = cupy_flash.attention(Q, k, v, return_lse=True, **options)
    return out, lse, *cupy_flash.attention_backward(DOUT, Q, k, v, out, lse, **options)[:3]


def packed_batch():
    """Return q, k, v, dout, bounds and options of sequences whose lists begin at their own place.

    Those between belong to no row, and are not read.
    """
    lengths, rows, block = ([0, 5, 19], [0, 17, 50]), 4, 8
    lists = np.full((HK, 19 // rows + 2, 3), 99, np.int32)
    for b, (first, count, n) in enumerate(((0, 2, 3), (5, 4, 5))):
        place = first // rows + b
        lists[:, place : place + count] = lists_of(np.random.default_rng(b), HK, 1, 1, 3, 1, count, n)[0]
    bounds = (*(np.array(x, np.int32) for x in lengths), 14, 33)
    arrays = normal(1, (19, HQ, D), (50, HK, D), (50, HK, DV), (19, HQ, DV))
    return *arrays, bounds, dict(causal=True, selected=lists, selected_block=block, selected_rows=rows)


def test_a_packed_batch():
    q, k, v, dout, bounds, options = packed_batch()

    def both(backend):
        out, lse = cupy_flash.attention_varlen(q, k, v, *bounds, return_lse=True, backend=backend, **options)
        given = (dout, q, k, v, out, lse, *bounds)
        return out, lse, *cupy_flash.attention_varlen_backward(*given, backend=backend, **options)[:3]

    assert_close(both("simulator"), both("cpu"))


@pytest.mark.exhaustive
def test_derivatives_of_a_packed_batch():
    q, k, v, dout, bounds, options = packed_batch()

    def both(backend):
        moved = cupy_flash.attention_varlen_jvp(q, k, v, *bounds, q, k, v, return_lse=True, backend=backend, **options)
        out, lse = moved[0], moved[2]
        second = cupy_flash.attention_varlen_double_backward(
            q, k, v, dout, q, k, v, out, lse, *bounds, backend=backend, **options
        )
        return *moved, *(x for x in second if x is not None)

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
    clean = results(lists, "cpu", causal=True)
    dirty = results(lists, k=k, v=v, causal=True)
    for index in (0, 2):  # out and dq
        assert np.isnan(dirty[index][names]).any()
        assert_close([dirty[index][~names]], [clean[index][~names]])


def with_lists(call, change):
    """Return a call, whose lists are checked no more, with other lists."""
    return call._replace(options=call.options | dict(selected=change(call.options["selected"])))


def test_wrong_entries_are_never_followed(monkeypatch):
    """Entries past the keys are hidden; entries that stand twice give some result."""
    monkeypatch.setattr("cupy_flash.problem.build.check_entries", lambda *arguments: None)
    case, call = call_of("last-list-and-block-are-cut", batch=1)
    rng = np.random.default_rng(8)
    wrong = rng.choice(np.array([3, 2**26, 2**27 - 1, 2**31 - 1], np.int32), call.options["selected"].shape)

    def kernels(lists):
        return run_kernels(case, call=with_lists(call, lists), tile=small_tile, deterministic=True)

    expected = run_public(case, call=with_lists(call, lambda x: np.where(wrong == 3, x, -1)))
    for x, y in zip(kernels(lambda x: np.where(wrong == 3, x, wrong))[:5], expected[:5], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    kernels(lambda x: np.full_like(x, 1))


def test_rows_with_empty_lists_see_nothing():
    """Their lse is that of the sink."""
    sink = np.arange(4.0)
    out, lse, *gradients = results(np.full((1, 1, SQ, 3), -1, np.int32), sink=sink)
    assert not out.any() and not any(x.any() for x in gradients)
    np.testing.assert_array_equal(lse, np.broadcast_to(sink[:, None], lse.shape))


@pytest.mark.parametrize("deterministic", [False, exhaustive(True)])
def test_values_inside_keys(deterministic):
    """The gradient of the keys is the sum of both, also where blocks add to it."""
    lists = lists_of(np.random.default_rng(10), heads=HK)
    options = dict(selected=lists, head_dim_v=DV)
    expected = cupy_flash.attention(Q, K, None, return_lse=True, **options)
    kernels = options | dict(backend="simulator", deterministic=deterministic)
    found = cupy_flash.attention_backward(DOUT, Q, K, None, *expected, **kernels)
    assert_close(found[:2], cupy_flash.attention_backward(DOUT, Q, K, None, *expected, **options)[:2])


# (bug, case, engine, whether a call is deterministic, error)
WRONG = (AssertionError, SimulationError)
BUGS = {
    "the-next-page": (
        change("listed-key-exists", "named < visible.end", "true")
        + change("listed-keys-alone", "tile.key[row] < kv_len", "true"),
        "last-list-and-block-are-cut", "simt", False, SimulationError,
    ),
    "last-block-not-cut": (
        change("cut-block", "end)}", "begin + BLOCK_KV)}")
        + change("listed-keys-alone", "tile.key[row] < kv_len", "true"),
        "last-list-and-block-are-cut", "simt", True, SimulationError,
    ),
    "inverse-list-off-by-one": (
        change("lists-of-block", "block * CHUNKS - 1", "block * CHUNKS"), "keys-causal-heads", "simt", True, WRONG,
    ),
    "rows-of-other-lists": (
        change("rows-of-inverse-list", "place < places.end", "true"), "keys-causal-heads", "simt", True, WRONG,
    ),
    "entries-of-one-key": (
        change("key-of-entry", "entry * KEYS_OF_ENTRY", "entry"), "last-list-and-block-are-cut", "mma", False, WRONG,
    ),
    "one-head-of-a-group": (
        change("listed-head", "row % HEADS_OF_LIST", "0"), "keys-causal-heads", "mma", False, WRONG,
    ),
    "rows-of-the-first-list": (
        change("listed-query", "list * lists.queries +", ""), "dropout-mask", "mma", False, WRONG,
    ),
    "no-scale-on-added-keys": (
        change("scale-added-dK", "* (real)p.scale", ""), "keys-causal-heads", "simt", False, WRONG,
    ),
    "adds-to-keys-past-the-end": (
        change("add-to-listed-keys", "continue;", ""), "keys-causal-heads", "simt", False, SimulationError,
    ),
    "only-the-first-tile-with-keys": (
        change("pass-lists-of-no-key", "!valid &&", "start == 0 &&"), "one-sequence-of-lists", "mma", False, WRONG,
    ),
}  # fmt: skip
DEFAULT_BUGS = ("the-next-page", "last-block-not-cut", "inverse-list-off-by-one", "adds-to-keys-past-the-end")


@pytest.mark.parametrize("row", in_tiers(BUGS, DEFAULT_BUGS))
def test_planted_bugs_are_found(row, monkeypatch):
    bug, name, engine, deterministic, error = row
    case, call = made_of(name, engine, batch=1)
    expected = run_public(case, call=call)
    with planted(monkeypatch, bug), pytest.raises(error):
        found = run_kernels(case, call=call, tile=small_tile, engine=engine, deterministic=deterministic)
        for x, y in zip(found[:5], expected[:5], strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=0.03, atol=0.03)


@pytest.mark.exhaustive
def test_the_lists_of_the_sequence_before_are_found(monkeypatch):
    with planted(monkeypatch, change("first-list", "+ sequence.batch", "")), pytest.raises(WRONG):
        test_a_packed_batch()


def test_wrong_entries_in_sorted_lists_are_found(monkeypatch):
    bug = change("inverse-entry-exists", "&& entry < blocks", "")
    with planted(monkeypatch, bug), pytest.raises(SimulationError):
        test_wrong_entries_are_never_followed(monkeypatch)


# (bug, case, results in which it is)
BUGS_OF_DERIVATIVES = {
    "tangent-of-a-score-is-the-score": (change("listed-tangent", "tS[r][c]", "S[r][c]"), "rows-sink", derivatives.JVP),
    "tsink-of-the-first-head": (change("tsink-of-listed-row", "[of]", "[head]"), "rows-sink", derivatives.JVP),
    "keys-for-their-tangents": (change("simt.load-tK", "p.tk", "p.k"), "rows-sink", derivatives.JVP),
    "delta-for-its-tangent": (
        change("delta-tangent-of-listed-row", "p.delta_tangent", "p.delta"), "rows-sink", ("dq", "dk"),
    ),
    "values-for-their-tangents": (change("listed-tV", "p.tv", "p.v"), "rows-sink", ("dq", "dk")),
    "no-curve-of-the-softcap": (
        skip("second-gradient-of-listed-key"), "last-list-and-block-are-cut", ("dq", "dk"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", in_tiers(BUGS_OF_DERIVATIVES, list(BUGS_OF_DERIVATIVES)[:4]))
def test_planted_bugs_in_derivatives_are_found(row, monkeypatch):
    bug, name, names = row
    with planted(monkeypatch, bug), pytest.raises(AssertionError, match="error"):
        assert_derivatives_are_those_of_the_reference(name, names=names, batch=1)
