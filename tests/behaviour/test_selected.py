"""Attention to selected keys: a list of keys, or of blocks of keys, for each row or block of rows."""

import re
import tracemalloc

import derivatives
import numpy as np
import pytest
from cases import check
from row_statistics import ALL, assert_are_of_the_scores, assert_are_the_gradients, drawn, statistics_of
from selected_cases import CASES, DV, HK, HQ, SK, SQ, B, D, call_of, lists_of, normal
from tiers import in_tiers

import cupy_flash
from cupy_flash import reference
from cupy_flash.cpu import selected as engine
from cupy_flash.engines import cpu
from cupy_flash.plan import plan


@pytest.fixture(params=[0.0, 1e9], ids=["union", "each"])
def tiles(request, monkeypatch):
    """Make all tiles of one kind: the union of lists, or with gathered keys for each list."""
    monkeypatch.setattr(engine, "FLOP", request.param)
    monkeypatch.setattr(engine, "FLOP_OF_LIST", 1e9 - request.param)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_reference(name, tiles):
    case, call = call_of(name)
    check(case, call=call)


DEFAULT = ("query-heads-bias", "rows-sink", "last-list-and-block-are-cut", "dropout-mask", "lengths-alibi", "bfloat16")


@pytest.mark.parametrize("name", in_tiers({name: name for name in CASES}, DEFAULT))
def test_derivatives_are_those_of_the_reference(name, tiles):
    case, call = call_of(name)
    derivatives.check(case, call=call)


@pytest.mark.parametrize("name", ["keys-causal-heads", "query-heads-bias", "rows-sink", "lengths-alibi", "bfloat16"])
def test_statistics_and_their_gradients_are_those_of_the_scores_of_the_named_keys(name, tiles):
    case, call = call_of(name)
    found = statistics_of(call)
    assert_are_of_the_scores(case, call, found)
    arrays = (call.q, call.k, call.v)
    out, lse = cupy_flash.attention(*arrays, return_lse=True, **call.options)
    dmax, dentropy = drawn(lse)
    gradients = dict(dlse=call.dlse, statistics=found, dmax=dmax, dentropy=dentropy)
    of_inputs = cupy_flash.attention_backward(call.dout, *arrays, out, lse, **gradients, **call.options)
    assert_are_the_gradients(case, call, of_inputs, dmax, dentropy)


Q, K, V, DOUT = normal(0, (B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, DV), (B, SQ, HQ, DV))


def results(lists, k=K, v=V, **options):
    """Return out, lse, dq, dk and dv with lists."""
    options |= dict(selected=lists)
    out, lse = cupy_flash.attention(Q, k, v, return_lse=True, **options)
    return out, lse, *cupy_flash.attention_backward(DOUT, Q, k, v, out, lse, **options)[:3]


def assert_close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)


def test_lists_of_all_keys_are_dense_attention():
    options = dict(causal=True, softcap=3.0)
    out, lse = cupy_flash.attention(Q, K, V, return_lse=True, **options)
    dense = (out, lse, *cupy_flash.attention_backward(DOUT, Q, K, V, out, lse, **options)[:3])
    keys = np.broadcast_to(np.arange(SK, dtype=np.int32), (1, 1, SQ, SK))
    assert_close(results(keys, **options), dense)
    blocks = np.broadcast_to(np.arange(6, dtype=np.int32), (1, 1, SQ, 6))
    assert_close(results(blocks, selected_block=8, **options), dense)


def test_the_order_of_a_list_and_the_place_of_its_negative_entries_change_no_more_than_rounding(tiles):
    lists = lists_of(np.random.default_rng(2), heads=HK)
    mixed = np.random.default_rng(3).permuted(lists, axis=-1)
    mixed[mixed < 0] = -7
    assert (mixed != lists).any()
    assert_close(results(mixed), results(lists))


def test_of_equal_scores_the_lowest_named_key_is_the_argmax(tiles):
    lists = lists_of(np.random.default_rng(2), heads=HK)
    found = cupy_flash.attention(0 * Q, K, V, selected=lists, return_lse=True, statistics=ALL)[2]
    lowest = np.where(lists < 0, SK, lists).min(axis=-1)
    expected = np.where(lowest == SK, -1, lowest).repeat(HQ // HK, axis=1)
    np.testing.assert_array_equal(found.argmax, expected)


def test_statistics_of_a_cache_are_those_of_its_keys():
    lists, options = lists_of(np.random.default_rng(2), q_len=3), dict(sink=np.arange(4.0), causal=True)
    options |= dict(selected=lists, return_lse=True, statistics=ALL)
    *_, expected = cupy_flash.attention(Q[:, :3], K, V, engine="cpu", **options)
    *_, found = cupy_flash.attention_with_kv_cache(Q[:, :3], K, V, **options)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sink", [None, np.arange(4.0)], ids=["", "sink"])
def test_a_row_with_an_empty_list_sees_nothing(sink):
    lists = np.full((1, 1, SQ, 3), -1, np.int32)
    out, lse, *gradients = results(lists, sink=sink)
    assert not out.any() and not any(x.any() for x in gradients)
    np.testing.assert_array_equal(lse, -np.inf if sink is None else np.broadcast_to(sink[:, None], lse.shape))
    none = np.zeros((B, 1, SQ, 0), np.int32)  # lists without entries
    assert all(x.tobytes() == y.tobytes() for x, y in zip(results(none), results(lists), strict=True))


def test_a_key_that_the_list_of_a_row_does_not_name_never_reaches_it(tiles):
    """Other rows of the same tile name the keys that are NaN and infinite."""
    lists = lists_of(np.random.default_rng(4))
    k, v = K.copy(), V.copy()
    bad = [3, 11, 30]
    k[:, bad], v[:, bad[0]], v[:, bad[1:]] = np.nan, np.inf, np.nan
    names = np.isin(lists, bad).any(axis=-1)[:, 0]  # (B, Sq)
    assert 0 < names.sum() < names.size
    clean, dirty = results(lists), results(lists, k, v)
    for index in (0, 2):  # out and dq
        assert np.isnan(dirty[index][names]).any()
        np.testing.assert_allclose(dirty[index][~names], clean[index][~names], rtol=1e-11)
    of_others = np.isin(lists[..., None], np.arange(SK)) & (lists[..., None] == np.arange(SK))
    touched = (of_others.any(axis=3)[:, 0] & names[..., None]).any(axis=1)  # keys in a list with a bad one
    for x, y in zip(dirty[3:], clean[3:], strict=True):
        np.testing.assert_allclose(x[~touched], y[~touched], rtol=1e-10, atol=1e-13)
    moved = [cupy_flash.attention_jvp(Q, *x, Q, *x, selected=lists) for x in ((k, v), (K, V))]
    second = [cupy_flash.attention_double_backward(
        Q, *x, DOUT, Q, *x, *out[:2], selected=lists
    )[:3] for x, out in (((k, v), dirty), ((K, V), clean))]  # fmt: skip
    for x, y in ((moved[0][1], moved[1][1]), (second[0][0], second[1][0])):
        assert np.isnan(x[names]).any()
        np.testing.assert_allclose(x[~names], y[~names], rtol=1e-10, atol=1e-13)
    for x, y in zip(second[0][1:], second[1][1:], strict=True):
        np.testing.assert_allclose(x[~touched], y[~touched], rtol=1e-9, atol=1e-12)


def test_a_key_that_only_rows_past_the_last_query_would_see_never_reaches_a_gradient(tiles):
    """The last list has three rows of four: the fourth would see key 19."""
    options = dict(causal="top_left", selected_rows=4, sink=np.zeros(HQ))
    lists = np.array([[0, SQ], [1, SQ], [2, SQ], [3, SQ], [4, SQ]], np.int32)[None, None]
    k, v = K.copy(), V.copy()
    k[:, SQ] = v[:, SQ] = np.inf
    clean, dirty = results(lists, **options), results(lists, k, v, **options)
    second = [
        cupy_flash.attention_double_backward(Q, K, V, DOUT, Q, *x, *clean[:2], selected=lists, **options)
        for x in ((K, V), (k, v))
    ]
    for x, y in zip((*clean, *second[0][:3]), (*dirty, *second[1][:3]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)


def test_derivatives_without_tangents_are_zero():
    lists = lists_of(np.random.default_rng(4))
    out, lse = cupy_flash.attention(Q, K, V, selected=lists, return_lse=True)
    moved, tout = cupy_flash.attention_jvp(Q, K, V, selected=lists)
    assert moved.tobytes() == out.tobytes() and not tout.any()
    second = cupy_flash.attention_double_backward(None, None, None, DOUT, Q, K, V, out, lse, selected=lists)
    assert not any(x.any() for x in second if isinstance(x, np.ndarray))


def test_lists_of_a_packed_batch():
    lengths, kv_lengths, rows = (19, 5), (43, 17), 4
    lists = lists_of(np.random.default_rng(5), heads=HK, block=8, rows=rows, n=4)
    padded = dict(q_lengths=np.array(lengths, np.int32), kv_lengths=np.array(kv_lengths, np.int32))
    options = dict(causal=True, selected_block=8, selected_rows=rows)
    both = padded | options | dict(selected=lists)
    out, lse = cupy_flash.attention(Q, K, V, return_lse=True, **both)
    expected = cupy_flash.attention_backward(DOUT, Q, K, V, out, lse, **both)

    packed = np.full((HK, sum(lengths) // rows + B, 4), 99, np.int32)  # unused lists are ignored
    for b, first in enumerate((0, 19)):
        count = -(-lengths[b] // rows)
        packed[:, first // rows + b :][:, :count] = lists[b, :, :count]
    q, dout = (np.concatenate([x[b, :n] for b, n in enumerate(lengths)]) for x in (Q, DOUT))
    k, v = (np.concatenate([x[b, :n] for b, n in enumerate(kv_lengths)]) for x in (K, V))
    bounds = (np.array([0, 19, 24], np.int32), np.array([0, 43, 60], np.int32), 19, 43)
    options |= dict(selected=packed)
    out_t, lse_t = cupy_flash.attention_varlen(q, k, v, *bounds, return_lse=True, **options)
    found = cupy_flash.attention_varlen_backward(dout, q, k, v, out_t, lse_t, *bounds, **options)
    for b, (start, n, first, m) in enumerate(((0, 19, 0, 43), (19, 5, 43, 17))):
        rows_of = ((out_t, out, start, n), (found.dq, expected.dq, start, n))
        for x, y, at, count in (*rows_of, (found.dk, expected.dk, first, m), (found.dv, expected.dv, first, m)):
            np.testing.assert_allclose(x[at : at + count], y[b, :count], rtol=1e-12, atol=1e-14)

    moved = cupy_flash.attention_jvp(Q, K, V, Q, K, V, **both)
    second = cupy_flash.attention_double_backward(Q, K, V, DOUT, Q, K, V, out, lse, **both)
    moved_t = cupy_flash.attention_varlen_jvp(q, k, v, *bounds, q, k, v, **options)
    second_t = cupy_flash.attention_varlen_double_backward(q, k, v, dout, q, k, v, out_t, lse_t, *bounds, **options)
    for b, (start, n, first, m) in enumerate(((0, 19, 0, 43), (19, 5, 43, 17))):
        of_queries, of_keys = (start, n), (first, m)
        pairs = ((moved_t[1], moved[1], of_queries), (second_t.dq, second.dq, of_queries))
        for x, y, (at, count) in (*pairs, (second_t.dk, second.dk, of_keys), (second_t.dv, second.dv, of_keys)):
            np.testing.assert_allclose(x[at : at + count], y[b, :count], rtol=1e-12, atol=1e-13)


PAGE, CAPACITY, LENGTHS = 8, 40, (29, 17)
ON_CACHE = {
    "keys-mods-mask": dict(mods=True, mask=True),
    "blocks-sink": dict(block=8, rows=2, heads=HQ, sink=np.arange(4.0)),
    "packed-window": dict(heads=HK, packed=True, window=(9, None)),
}


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("name", ON_CACHE)
def test_lists_of_keys_in_a_cache(name, paged):
    """Keys past the lengths are NaN, and entries that name them are hidden."""
    made = dict(ON_CACHE[name])
    lists = dict(block=made.pop("block", 1), rows=made.pop("rows", 1), heads=made.pop("heads", 1))
    packed, mods, masked = (made.pop(x, False) for x in ("packed", "mods", "mask"))
    rng, count = np.random.default_rng(6), 5
    lists["lists"] = lists_of(rng, **lists, n=9, q_len=count, kv_len=CAPACITY)
    q, k, v = normal(7, (B, count, HQ, D), (B, CAPACITY, HK, D), (B, CAPACITY, HK, DV))
    options = made | dict(cache_seqlens=np.array(LENGTHS, np.int32))
    mask = rng.random((B, 1, count, 6)) < 0.6
    options |= {"mask": mask} if masked else {}
    caches = [
        np.where(np.arange(CAPACITY)[:, None, None] < np.array(LENGTHS)[:, None, None, None], x, np.nan) for x in (k, v)
    ]
    if paged:
        table = rng.permutation(B * CAPACITY // PAGE).reshape(B, -1).astype(np.int32)
        pages = [np.empty((table.size, PAGE, HK, x.shape[-1])) for x in caches]
        for pool, x in zip(pages, caches, strict=True):
            pool[table.ravel()] = x.reshape(-1, *pool.shape[1:])
        caches, options = pages, options | dict(block_table=table)
    selected, rows = lists["lists"], lists["rows"]
    queries, given = q, selected
    if packed:
        queries = q.reshape(-1, HQ, D)
        options |= dict(cu_seqlens_q=np.array([0, count, 2 * count], np.int32), max_seqlen_q=count)
        given = np.zeros((selected.shape[1], B * count // rows + B, selected.shape[-1]), np.int32)
        for b in range(B):
            given[:, b * count // rows + b :][:, : selected.shape[2]] = selected[b]
    modified = {"score_mod": lambda s, b, h, i, j: s * 0.5 + (i - j) * 0.01 + h} if mods else {}
    out = cupy_flash.attention_with_kv_cache(
        queries, *caches, selected=given, selected_block=lists["block"], selected_rows=rows, **options, **modified
    ).reshape(B, count, HQ, DV)
    for b, length in enumerate(LENGTHS):
        seen = np.ones((1, 1, count, length), bool)
        if masked:
            seen[..., -6:] = mask[b]
        own = np.where(selected[b : b + 1] >= -(-length // lists["block"]), -1, selected[b : b + 1])
        if mods:
            modified["score_mod"] = lambda s, b, h, i, j, at=length - count: s * 0.5 + (i + at - j) * 0.01 + h
        expected, _ = reference.attention(
            q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], causal=True, mask=seen, selected=own,
            selected_block=lists["block"], selected_rows=rows, **made, **modified,
        )  # fmt: skip
        np.testing.assert_allclose(out[b], expected[0], rtol=1e-10, atol=1e-13)


LISTS = np.array([[[[0, 5, 2, -1]]]], np.int32).repeat(SQ, axis=2)
WRONG = {
    "names key 5 twice": dict(selected=np.where(LISTS == 2, 5, LISTS)),
    "names key 43 of 43": dict(selected=np.where(LISTS == 2, SK, LISTS)),
    "names block 6 of 6": dict(selected=np.where(LISTS == 2, 6, LISTS), selected_block=8),
    "selected must be int32, not int64": dict(selected=LISTS.astype(np.int64)),
    "with Hs 1, Hk or Hq, not (1, 3, 19, 4)": dict(selected=LISTS.repeat(3, axis=1)),
    "with Hs 1, Hk or Hq, not (1, 1, 18, 4)": dict(selected=LISTS[:, :, 1:]),
    "selected_block must be 1 or a positive multiple of 8, not 12": dict(selected=LISTS, selected_block=12),
    "selected_rows must be at least 1, not 0": dict(selected=LISTS, selected_rows=0),
    "selected_rows must be a whole number, not 'two'": dict(selected=LISTS, selected_rows="two"),
    "check_selected must be True or False, not 2": dict(selected=LISTS, check_selected=2),
}


@pytest.mark.parametrize("reason", WRONG)
def test_wrong_lists_are_refused(reason):
    with pytest.raises((ValueError, TypeError), match=re.escape(reason)):
        cupy_flash.attention(Q, K, V, **WRONG[reason])


def test_units_without_lists_are_refused_together():
    calls = [
        lambda **o: cupy_flash.attention(Q, K, V, **o),
        lambda **o: cupy_flash.attention_with_kv_cache(Q, K, V, **o),
        lambda **o: cupy_flash.attention_backward(DOUT, Q, K, V, DOUT, np.zeros((B, HQ, SQ)), **o),
        lambda **o: cupy_flash.attention_weights(Q, K, np.zeros((B, HQ, SQ)), **o),
    ]
    for call in calls:
        call(selected_block=1, selected_rows=1)
        with pytest.raises(ValueError, match="requirements are not met") as caught:
            call(selected_block=8, selected_rows=4)
        for name in ("selected_block", "selected_rows"):
            assert f"{name} is for a call with selected" in str(caught.value)


def test_the_backward_does_not_check_lists_again():
    out, lse = cupy_flash.attention(Q, K, V, return_lse=True, selected=LISTS)
    cupy_flash.attention_backward(DOUT, Q, K, V, out, lse, selected=WRONG["names key 5 twice"]["selected"])


REFUSED = {
    "mma: it computes no JVP with selected keys": lambda **o: cupy_flash.attention_jvp(
        *(np.float16(x) for x in (Q, K, V, Q)), backend="simulator", engine="mma", **o
    ),
    "simt: it computes no gradient of statistics with selected keys": lambda **o: cupy_flash.attention_vjp(
        Q, K, V, return_lse=True, statistics=("entropy",), backend="simulator", **o
    )[1](DOUT, None, None, np.zeros((B, HQ, SQ))),
    "it computes no key_importance with selected keys": lambda **o: cupy_flash.key_importance(
        Q, K, np.zeros((B, HQ, SQ)), **o
    ),
    "mma: it takes no selected": lambda **o: cupy_flash.attention(Q, K, V, backend="simulator", engine="mma", **o),
    "simt: it computes no gradient of bias with selected keys": lambda **o: cupy_flash.attention_backward(
        DOUT, Q, K, V, DOUT, np.zeros((B, HQ, SQ)), bias=np.zeros((SQ, SK)), backend="simulator", **o
    ),
    "it computes no pieces of split_size with selected keys": lambda **o: cupy_flash.attention_with_kv_cache(
        Q, K, V, split_size=64, **o
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_engine_computes_is_refused_by_name(reason):
    with pytest.raises(cupy_flash.UnsupportedError, match=reason):
        REFUSED[reason](selected=LISTS)


def test_the_words_of_a_plan():
    text = str(cupy_flash.explain(Q, K, V, selected=LISTS, selected_block=8))
    assert "selected up to 4 blocks of 8 keys for every head and row" in re.sub(r"\s+", " ", text)


def test_bits_do_not_depend_on_threads_or_repetition(monkeypatch):
    rng = np.random.default_rng(8)
    q, dout = rng.normal(size=(2, 1, 300, 2, 16))
    k, v = rng.normal(size=(2, 1, 300, 1, 16))
    lists = lists_of(rng, n=20, batch=1, q_len=300, kv_len=300)

    def bits(threads):
        monkeypatch.setattr(cpu, "worth", lambda work, available: threads)
        plan.plan.cache_clear()
        out, lse = cupy_flash.attention(q, k, v, return_lse=True, selected=lists)
        moved = cupy_flash.attention_jvp(q, k, v, q, k, selected=lists)
        gradients = cupy_flash.attention_backward(dout, q, k, v, out, lse, selected=lists)[:3]
        second = cupy_flash.attention_double_backward(q, k, None, dout, q, k, v, out, lse, selected=lists)[:3]
        return b"".join(x.tobytes() for x in (out, lse, *moved, *gradients, *second))

    assert len({bits(threads) for threads in (1, 2, 3, 3)}) == 1
    monkeypatch.undo()
    plan.plan.cache_clear()


def test_memory_is_linear_in_the_length():
    length = 8192
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((1, length, heads, 16), np.float32) for heads in (2, 1, 1))
    lists = np.sort(rng.integers(0, length // 8, (1, 1, length, 8), np.int32) * 8 + np.arange(8, dtype=np.int32))
    tracemalloc.start()
    out, lse = cupy_flash.attention(q, k, v, return_lse=True, selected=lists)
    cupy_flash.attention_backward(out, q, k, v, out, lse, selected=lists)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < length * length / 4  # a boolean mask would have four times as many bytes


@pytest.mark.parametrize("length, rows, block", [(4096, 4096, 64), (16, 2**24, 2**24)])
def test_memory_does_not_grow_with_the_rows_of_a_list_or_the_keys_of_a_block(length, rows, block):
    """One list of all keys, for all rows; rows and blocks past the last query and key take nothing."""
    q, k = (np.random.default_rng(11).standard_normal((1, length, heads, 8), np.float32) for heads in (2, 1))
    lists = np.arange(-(-length // block), dtype=np.int32)[None, None, None]
    options = dict(selected=lists, selected_block=block, selected_rows=rows)
    tracemalloc.start()
    out, lse = cupy_flash.attention(q, k, k, return_lse=True, **options)
    found = cupy_flash.attention_backward(out, q, k, k, out, lse, **options)
    on_cache = cupy_flash.attention_with_kv_cache(q, k, k, causal=False, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26
    dense = cupy_flash.attention(q, k, k, return_lse=True)
    expected = (*dense, dense[0], *cupy_flash.attention_backward(dense[0], q, k, k, *dense)[:3])
    for x, y in zip((out, lse, on_cache, *found[:3]), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_lists_without_keys():
    """With a bias and a mask whose last dimension is the number of keys, 0."""
    options = dict(bias=np.zeros((1, HQ, 1, 0)), mask=np.ones((1, 1, SQ, 0), bool))
    out, lse, *gradients = results(np.full((1, 1, SQ, 2), -1, np.int32), K[:, :0], V[:, :0], **options)
    assert not out.any() and (lse == -np.inf).all() and not gradients[0].any()


def test_values_inside_keys():
    lists = lists_of(np.random.default_rng(10), heads=HK)
    out, lse, dq, dk, dv = results(lists, K, K[..., :DV])
    options = dict(selected=lists, head_dim_v=DV)
    shared = cupy_flash.attention(Q, K, None, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(DOUT, Q, K, None, *shared, **options)
    dk[..., :DV] += dv
    assert_close((*shared, gradients.dq, gradients.dk), (out, lse, dq, dk))


def at_lists(dense, lists, block, rows, columns):
    """Return the columns of dense weights (B, Hq, Sq, Sk) that the list of each row names, 0 for none."""
    named = np.zeros((*dense.shape[:3], lists.shape[-1], block))
    for b, h, i, e in np.ndindex(named.shape[:4]):
        entry = lists[b % len(lists), h * lists.shape[1] // HQ, i // rows, e]
        if entry >= 0:
            part = dense[b, h, i, entry * block : (entry + 1) * block]
            named[b, h, i, e, : len(part)] = part
    return named.reshape(*named.shape[:3], columns)


@pytest.mark.parametrize("heads, block, rows", [(1, 1, 1), (HK, 8, 4), (HQ, 64, 3)])
def test_weights_at_the_lists_have_the_lse_of_the_whole_row(heads, block, rows):
    options = dict(causal=True, softcap=3.0, kv_lengths=np.array([43, 20], np.int32))
    lse = cupy_flash.attention(Q, K, V, return_lse=True, **options)[1]
    lists = lists_of(np.random.default_rng(5), heads=heads, block=block, rows=rows, batch=2)
    expected = at_lists(cupy_flash.attention_weights(Q, K, lse, **options), lists, block, rows, lists.shape[-1] * block)
    options |= dict(selected=lists, selected_block=block, selected_rows=rows)
    k = K.copy()
    k[1, 20:] = np.nan
    np.testing.assert_allclose(cupy_flash.attention_weights(Q, k, lse, **options), expected, rtol=1e-12)
    chosen, size = [7, 8, 3, 18], 4 * 3 * expected[0, 0, 0].nbytes * B
    found = cupy_flash.attention_weights(Q, k, lse, rows=chosen, heads=[2, 0, 2], limit=size, **options)
    np.testing.assert_allclose(found, expected[:, [2, 0, 2]][:, :, chosen], rtol=1e-12)
    if heads == 1:
        mean = cupy_flash.attention_weights(Q, k, lse, heads="mean", **options)
        np.testing.assert_allclose(mean, expected.mean(axis=1), rtol=1e-12)
    else:
        with pytest.raises(ValueError, match=f"lists that all heads share, not those of {heads} heads"):
            cupy_flash.attention_weights(Q, k, lse, heads="mean", **options)


def test_weights_at_the_lists_of_a_packed_batch():
    bounds = np.array([0, 5, 19], np.int32)
    packed = (bounds, bounds, 14, 14)
    q, k = Q[0], K[0, :19]
    lists = np.full((1, 6, 2), -1, np.int32)  # of rows of 4: those of the second sequence begin at 5 // 4 + 1 = 2
    lists[0, :2], lists[0, 2:] = [1, 0], [0, -1]
    lse = cupy_flash.attention_varlen(q, k, k, *packed, return_lse=True)[1]
    dense = cupy_flash.attention_weights_varlen(q, k, lse, *packed)
    found = cupy_flash.attention_weights_varlen(q, k, lse, *packed, selected=lists, selected_block=8, selected_rows=4)
    assert not found[:, :5, :8].any() and not found[:, 5:, 8:].any()  # block 1 of 5 keys, and entries below 0
    np.testing.assert_allclose(found[:, :5, 8:13], dense[:, :5, :5], rtol=1e-12)
    np.testing.assert_allclose(found[:, 5:, :8], dense[:, 5:, :8], rtol=1e-12)


@pytest.mark.parametrize("keys, entries", [(0, 2), (SK, 0)])
@pytest.mark.parametrize("heads", ["each", "mean"])
def test_weights_without_keys_or_entries_are_zeros(keys, entries, heads):
    lists, lse = np.full((1, 1, SQ, entries), -1, np.int32), np.full((B, HQ, SQ), -np.inf)
    found = cupy_flash.attention_weights(Q, K[:, :keys], lse, heads=heads, selected=lists)
    assert found.shape == (B, *(HQ,)[: heads == "each"], SQ, entries) and not found.any()


def test_what_lists_do_not_serve_of_weights_is_refused_by_name():
    lists, lse = lists_of(np.random.default_rng(6)), np.zeros((B, HQ, SQ))
    weights, vjp = cupy_flash.attention_weights_vjp(Q, K, lse, selected=lists)
    with pytest.raises(cupy_flash.UnsupportedError, match="no gradients of attention_weights with selected keys"):
        vjp(weights)
    with pytest.raises(cupy_flash.UnsupportedError, match="no top_weights with selected keys"):
        cupy_flash.top_weights(Q, K, lse, 2, selected=lists)
    with pytest.raises(cupy_flash.UnsupportedError, match="no key_importance with selected keys"):
        cupy_flash.key_importance(Q, K, lse, selected=lists)
