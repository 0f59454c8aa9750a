"""With split_size, the bits of a sequence depend on that sequence alone; every call has at least three pieces."""

import numpy as np
import pytest
from cache_cases import CacheCall, CacheCase, run
from forget import forget_plans

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.cpu.decode.keys import Keys
from cupy_flash.cpu.decode.sequences import Sequence, row_tiles
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions

OPTIONS = {
    "plain": {},
    "bfloat16": dict(dtype="bfloat16"),
    "multi-head": dict(kv_heads=4),
    "group-of-3": dict(heads=6),
    "window-alibi-sink": dict(window=(300, None), alibi="h", sink=True),
    "wide": dict(head_dim=128, head_dim_v=128),
    "values-inside-keys": dict(kv_heads=1, head_dim=48, head_dim_v=32, shared=True),
}
LENGTHS = (430, 1030, 7, 700)


def case_with(options, **changes):
    sizes = dict(lengths=LENGTHS, capacity=1100, q_len=2, appended=2, split_size=256, head_dim=32, head_dim_v=32)
    return CacheCase(**sizes | options | changes)


def at(call, rows):
    """Return the call with only the sequences `rows`; caches are contiguous."""
    own = ("k", "v", "cache_seqlens", "k_descale", "v_descale")
    options = {name: x[rows] if name in own else x for name, x in call.options.items()}
    return CacheCall(*(None if x is None else x[rows] for x in call[:3]), options)


def assert_bits(actual, expected, rows):
    """Assert that out and lse are bitwise those of the sequences `rows` of a larger call."""
    for a, b in zip(actual[:2], expected[:2], strict=True):
        assert a.tobytes() == b[rows].tobytes()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_batch_changes_no_bit(options):
    """A sequence gives the same bits alone, permuted, and with other sequences."""
    call = case_with(options).call()
    whole = run(call)
    for rows in ([1], [3, 1, 0, 2], [0, 0, 3], [2, 1]):
        assert_bits(run(at(call, rows)), whole, rows)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_pages_change_no_bit(options):
    """Page numbers, padding of the block table and the size of the pool change no bit."""
    one = run(case_with(options, page=64, capacity=1088).call())
    call = case_with(options, page=64, capacity=1088).call()
    shuffle = np.random.default_rng(3).permutation(len(call.k_cache) + 5)
    pools = []
    for cache in call[1:3]:
        if cache is None:
            pools.append(None)
            continue
        pool = np.full((len(shuffle), *cache.shape[1:]), np.nan, cache.dtype)
        pool[shuffle[: len(cache)]] = cache
        pools.append(pool)
    table = call.options["block_table"]
    table = np.where(table < 0, -1, shuffle[np.maximum(table, 0)]).astype(np.int32)
    table = np.concatenate([table, np.full((len(table), 7), -1, np.int32)], axis=1)
    other = run(CacheCall(call.q, *pools, call.options | {"block_table": table}))
    assert_bits(other, one, slice(None))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("steps", [(700,), (256, 300, 144), (1, 5, 690, 3, 1)], ids=str)
def test_chunks_of_a_prefill_change_no_bit(options, steps):
    """A query gives the bits that it has in a call of its own, however many queries are in its chunk."""
    sizes = dict(heads=4, kv_heads=2, head_dim=32, head_dim_v=32, dtype="float32") | options
    sample = CacheCase(**{**sizes, "lengths": (0,), "q_len": 700, "appended": 700, "capacity": 704}).call()
    q, caches, rest = sample.q, sample.copied()[1:3], dict(sample.options, split_size=128)
    new = {name: rest.pop(name) for name in ("k", "v") if name in rest}
    outs, done = [], 0
    for step in steps:
        here = slice(done, done + step)
        rest["cache_seqlens"] = done
        rows = {name: x[:, here] for name, x in new.items()}
        outs.append(cupy_flash.attention_with_kv_cache(q[:, here], *caches, **rows, **rest, return_lse=True))
        done += step
    for i in (0, 1, 5, 127, 128, 300, 695, 699):  # a decode step of one query
        rest["cache_seqlens"] = i + 1
        out, lse = cupy_flash.attention_with_kv_cache(q[:, i : i + 1], *caches, **rest, return_lse=True)
        assert np.concatenate([x[0] for x in outs], axis=1)[:, i].tobytes() == out[:, 0].tobytes()
        assert np.concatenate([x[1] for x in outs], axis=2)[:, :, i].tobytes() == lse[:, :, 0].tobytes()


@pytest.mark.parametrize("kind", [np.int64, np.int16, np.array], ids=["int64", "int16", "array"])
def test_a_split_size_may_be_any_whole_number(kind):
    """A NumPy integer is not an int, but must not be ignored, because the bits depend on it."""
    call = case_with({}).call()
    size = kind(call.options["split_size"])
    problem, _ = pose_with_cache(*call[:3], CacheOptions.of("test", call.options | {"split_size": size}))
    assert type(problem.cache.split_size) is int and problem.cache.split_size == call.options["split_size"]


def test_without_split_size_threads_change_no_bit(monkeypatch):
    """Without split_size the pieces depend on the lengths, and not on the number of threads."""
    call = case_with({}, split_size=None).call()
    expected = run(call)
    monkeypatch.setattr("cupy_flash.engines.cpu_decode.threads", lambda device, tile, cost: 3)
    forget_plans()
    assert_bits(run(call), expected, slice(None))
    forget_plans()


@pytest.mark.parametrize("group", [1, 3, 8, 24])
def test_a_query_has_a_fixed_row_in_its_tile(group):
    """With split_size a query's row in its tile, and the tile's number of rows, depend only on its position.

    BLAS does not promise that a row's bits are independent of its place in a matrix, so the place is fixed.
    """
    call = CacheCase(heads=group, kv_heads=1, q_len=40, lengths=(60,), capacity=64, split_size=64).call()
    problem, operands = pose_with_cache(*call[:3], CacheOptions(**call.options))
    chosen = dispatch.plan_for(problem)
    rows = {}
    for q_len in (40, 13, 1):
        first = 60 - q_len
        keys = Keys(call.k_cache, call.v_cache, (0, 0), 0, 60, np.dtype(np.float32))
        q = call.q[0, -q_len:]
        sequence = Sequence(0, q, q, np.empty((group, q_len)), keys, first, None, 0)
        seen = []
        for tile in row_tiles(chosen, sequence):
            for query in range(*tile.queries.indices(q_len)):
                row = (first + query - tile.position) * group
                assert 0 <= row <= tile.rows - group
                assert rows.setdefault(first + query, (row, tile.rows)) == (row, tile.rows)
                seen.append(query)
        assert seen == list(range(q_len)) and operands.q.shape[1] == 40
