"""The one-launch decode: the blocks of a cluster divide the keys of an output tile and merge its parts in shared
memory.

Tiles, the arithmetic of a part and the order of the merge are those of the two-launch form, so the same parts give the
same bits: if all output tiles have equally many key tiles, as many blocks per output tile divide them in the same way.
"""

import functools
from dataclasses import replace

import pytest
from cache_cases import CacheCase, check, posed, run_kernels
from planting import change, planted, skip
from test_decode_kernels import EVERYTHING, PACKED, WRONG, assert_other_sequences_keep_their_bits
from test_invariance import assert_bits, at
from tiers import exhaustive, in_tiers

from cupy_flash import device
from cupy_flash.engines import mma_decode
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import EarlyExit, Race
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HOPPER = device.named("sm_90a")
FP8 = dict(cache_dtype="float8_e4m3fn", descales=True)
LONG = CacheCase(lengths=(1100, 70, 0), capacity=1200, heads=8, sink=True, dtype="float16", head_dim=64, head_dim_v=64)
CASES = {
    "long": LONG,
    "everything": replace(EVERYTHING, lengths=(700, 530, 0), capacity=768, window=(600, None)),
    "everything-fp8": replace(EVERYTHING, lengths=(700, 530, 0), capacity=768, head_dim=64, head_dim_v=64, **FP8),
    "packed-everything": replace(PACKED, lengths=(4, 590, 300), capacity=600),
    "window": replace(LONG, window=(400, 0), q_len=2),
    "leftpad": replace(LONG, leftpad=(600, 66, 0), dtype="bfloat16"),
    "odd-dims": replace(LONG, head_dim=40, head_dim_v=88),
    "more-rows-than-a-tile": replace(LONG, q_len=9, page=16),
    "widest": replace(LONG, head_dim=256, head_dim_v=256),
    "empty-cache": CacheCase(lengths=(0,), capacity=0, dtype="float16"),
    "no-queries": CacheCase(q_len=0, dtype="float16"),
    "no-batch": CacheCase(lengths=(), dtype="float16"),
}


def in_clusters(call, *, cluster=4, arch="sm_90a", **options):
    return run_kernels(call, arch=arch, cluster=cluster, **options)


@pytest.mark.parametrize("case", in_tiers(CASES, ("everything", "packed-everything", "empty-cache", "no-queries")))
@pytest.mark.parametrize("cluster", [4, exhaustive(8)])
def test_the_formula(case, cluster):
    check(case, in_clusters(case.call(), cluster=cluster))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", mma_decode.WITH_CLUSTERS)
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_any_gpu_with_clusters(arch, rows):
    case = replace(LONG, q_len=9)
    check(case, in_clusters(case.call(), arch=arch, rows=rows))


@pytest.mark.parametrize(
    "lengths", [(0, 1, 15, 16, 17, 63, 64, 65), exhaustive((255, 256, 257)), exhaustive((511, 512, 513, 1025))], ids=str
)
@pytest.mark.parametrize("page", [16, exhaustive(None), exhaustive(1), exhaustive(256)])
def test_lengths_at_the_ends_of_pages_tiles_and_parts(lengths, page):
    """A sequence has no part with keys, one part, fewer parts than blocks, or a part in every block."""
    case = CacheCase(lengths=lengths, page=page, capacity=1280, heads=2, kv_heads=1, q_len=2, appended=2,
                     dtype="float16")  # fmt: skip
    case = replace(case, lengths=tuple(max(length - 2, 0) for length in lengths))
    check(case, in_clusters(case.call()))


EQUAL = {
    "one-unit": (replace(LONG, lengths=(1100,), kv_heads=1), 1),
    "one-unit-fp8": (replace(LONG, lengths=(1100,), kv_heads=1, **FP8), 1),
    "fewer-parts-than-blocks": (replace(LONG, lengths=(600,), kv_heads=1, softcap=2.0), 1),
    "equal-units": (replace(LONG, lengths=(1024, 1024), q_len=2, alibi="h"), 4),
}


@pytest.mark.parametrize("equal", in_tiers(EQUAL, ("one-unit", "equal-units")))
def test_the_bits_of_two_launches_with_the_same_parts(equal):
    case, units = equal
    two_launches = run_kernels(case.call(), arch="sm_90a", blocks=4 * units)
    for a, b in zip(in_clusters(case.call()), two_launches, strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_batch_and_the_capacity_change_no_bit():
    """An output tile is divided by its own length, also in a graph that was captured for another length."""
    case = replace(LONG, lengths=(300, 1100, 0, 700), q_len=2)
    whole = in_clusters(case.call())
    for rows in ([1], [3, 1, 0, 2]):
        assert_bits(in_clusters(at(case.call(), rows)), whole, rows)
    longer = in_clusters(replace(case, capacity=1900).call())
    for a, b in zip(longer[:2], whole[:2], strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [0, 1])
def test_any_order_of_warps_and_blocks(order):
    whole = in_clusters(LONG.call())
    results = in_clusters(LONG.call(), start=functools.partial(start, order="random", seed=order))
    for a, b in zip(results, whole, strict=True):
        assert a.tobytes() == b.tobytes()


# Without the case with split_size: an output tile may then have more pieces than a cluster has blocks.
IN_CLUSTERS = {name: name for name in WRONG if name != "bounds-of-pieces"}


@pytest.mark.parametrize("name", in_tiers(IN_CLUSTERS, ("length-past-the-capacity", "bounds")))
def test_wrong_contents_spoil_their_own_sequence_alone(name):
    assert_other_sequences_keep_their_bits(name, in_clusters, lengths=(600, 533), capacity=640)


@pytest.mark.parametrize("dim", [64, exhaustive(128)])
@pytest.mark.parametrize("fp8", [False, exhaustive(True)])
def test_bytes_and_bank_conflicts(dim, fp8, watch):
    """The bytes read, tables included, exceed those of K and V by at most 2 %, and in fp8 by queries and descales;
    no access has a bank conflict.
    """
    case = CacheCase(lengths=(2048,) * 2, capacity=2048, page=16, heads=8, kv_heads=1, head_dim=dim, head_dim_v=dim,
                     dtype="float16", **(FP8 if fp8 else {}))  # fmt: skip
    in_clusters(case.call(), start=watch.start)
    keys = 2 * 2048 * 2 * dim * (1 if fp8 else 2)
    assert list(watch.counters) == ["decode"]
    others = 8 * (8 * 2 * dim + 128 * 2 * 2 * 4) if fp8 else 0  # as in tests/serving/test_fp8_cache_kernels.py
    assert keys <= watch.counters["decode"].global_bytes_read <= 1.02 * keys + others
    assert not watch.counters["decode"].conflicting()


# Plans


def clusters_of(arch, **options):
    problem, _ = posed(CacheCase(**dict(dtype="float16", capacity=4096) | options).call(), backend=f"simulator:{arch}")
    return {tile.cluster for tile in mma_decode.choices(problem, device.named(arch))}


def test_clusters_are_choices_where_they_exist():
    """With split_size an output tile may have more pieces than a cluster has blocks, so two launches compute it."""
    assert clusters_of("sm_90a") == clusters_of("sm_120") == {0, *mma_decode.CLUSTERS}
    assert clusters_of("sm_89") == clusters_of("sm_90a", split_size=512) == {0}


def test_a_tune_chooses_clusters():
    """Tiles with clusters are candidates with a predicted time, but no plan uses one before it is measured."""
    problem, _ = posed(CacheCase(dtype="float16", capacity=4096).call(), backend="simulator:sm_90a")
    chosen = plan(problem, HOPPER)
    assert not chosen.tile.cluster and "merge" in chosen.explain()
    tile = max(mma_decode.choices(problem, HOPPER), key=lambda x: x.cluster)
    in_one = plan(problem, HOPPER, tile)
    assert [launch.kernel for launch in in_one.launches] == ["mma/decode"] and in_one.workspaces(4, 4) == ()
    assert "in clusters of 8 blocks" in in_one.explain()


# Planted bugs


WRONG_BITS = AssertionError
BUGS = {
    "exit-before-the-others-have-read": (skip("wait-parts-read"), EarlyExit),
    "merge-before-the-parts-are-stored": (skip("wait-parts-stored"), Race),
    "parts-of-other-ranks": (change("part-of-rank", "c)}; }", "c ^ 1)}; }"), WRONG_BITS),
    "runs-of-other-ranks": (change("run-of-rank", "rank * run", "(rank ^ 1) * run"), WRONG_BITS),
    "rows-of-one-rank": (change("rows-of-rank", "+ cluster_ctarank()", ""), WRONG_BITS),
    "part-without-a-weight": (change("weight-of-part", "exp(lse - largest)", "1"), WRONG_BITS),
    "last-part-is-forgotten": (change("sum-parts", "c < count", "c < count - 1"), WRONG_BITS),
    "lse-in-a-column-of-O": (change("LSE_COLUMN", "O_ROW - 1", "0"), WRONG_BITS),
    "runs-by-the-capacity": (change("run-length", "iterations.per_tile", "p.kv_len / ITERATION_KEYS"), WRONG_BITS),
}


@pytest.mark.parametrize(
    "bug", in_tiers(BUGS, ("exit-before-the-others-have-read", "merge-before-the-parts-are-stored"))
)
def test_planted_bugs_are_found(bug, monkeypatch):
    bug, error = bug
    one_unit = replace(LONG, lengths=(600,), kv_heads=1).call()
    expected = run_kernels(one_unit, arch="sm_90a", blocks=4)
    with planted(monkeypatch, bug), pytest.raises(error):
        check(LONG, in_clusters(LONG.call()))
        assert in_clusters(one_unit)[0].tobytes() == expected[0].tobytes()
