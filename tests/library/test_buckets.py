"""Buckets of lengths: all lengths in a bucket share its engine and tile, in any order of calls.

Launches and workspaces follow the exact lengths.
"""

import random
from collections import defaultdict
from contextlib import contextmanager
from itertools import pairwise, product

import numpy as np
import pytest
from cases import DTYPES, Case, posed
from forget import forget_plans

import cupy_flash
from cupy_flash.device import Device, named
from cupy_flash.engines import MODULES, wgmma
from cupy_flash.gpu import ahead
from cupy_flash.plan import plan as module
from cupy_flash.plan.plan import BUCKETS, bucket_of, last_of_bucket, plan
from cupy_flash.plan.refusals import engine_refusals
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.records import LONGEST

CPU, AMPERE, HOPPER = Device("cpu", "x86_64", 8, torch_flash=""), named("sm_80"), named("sm_90a")
GPUS = {"simt": HOPPER, "mma": AMPERE, "wgmma": HOPPER, "tcgen05": named("sm_100a")}  # a GPU of each engine
PROBLEM = posed(Case(heads=8, causal=True))[0].problem
ORDERS = 6


def test_buckets_partition_the_lengths():
    """Every octave has BUCKETS buckets, and the last one ends at the power of two; each short length is its own
    bucket.
    """
    buckets = sorted({bucket_of(length) for length in range(5000)})
    assert all(last + 1 == first for (_, last), (first, _) in pairwise(buckets))
    for length in (*range(2 * BUCKETS + 1), *(2**n for n in range(32))):
        assert bucket_of(length)[1] == length
    for exponent in range(3, 12):
        assert sum(2**exponent < last <= 2 ** (exponent + 1) for _, last in buckets) == BUCKETS
    for length in (0, 1, 9, 1000, LONGEST):
        first, last = bucket_of(length)
        assert first <= length <= last and bucket_of(first) == bucket_of(last) == (first, last)


def test_the_lengths_in_shapes_are_in_the_bucket():
    """A broadcast bias or dense mask has the lengths of q and k in its shape, and last_of_bucket replaces them there
    too.
    """
    problem = PROBLEM._replace(q_len=1000, kv_len=1300, bias=(2, 1, 1000, 1300), dense_mask=(1300,))
    other = problem._replace(q_len=1024, kv_len=1536, bias=(2, 1, 1024, 1536), dense_mask=(1536,))
    assert last_of_bucket(problem) == last_of_bucket(other) == other
    shared = problem._replace(bias=(1, 1))
    assert last_of_bucket(shared).bias == (1, 1) and last_of_bucket(shared) != other


def problems(engine, backward):
    """Return a problem that selects this engine, and a device on which it runs."""
    if "cpu" in MODULES[engine].BACKENDS:
        return PROBLEM._replace(backward=backward, engine=engine, equal_lengths=True), CPU
    if engine == "mma_decode":
        first, *_ = ahead.problems(dtype="bfloat16", head_dim=64, cache=True, engine=engine)
        return first._replace(batch=2, heads=8, kv_heads=8, whole_heads=8), AMPERE._replace(backend="cuda")
    dtype = "float32" if engine == "simt" else "bfloat16"
    problem = ahead.problems(dtype=dtype, head_dim=64, causal=True, engine=engine, backward=backward)[-1]
    problem = problem._replace(batch=2, heads=8, kv_heads=8, whole_heads=8)
    return problem, GPUS[engine]._replace(backend="cuda")


@pytest.mark.parametrize(
    ("engine", "backward"),
    [
        pytest.param(engine, backward, id=f"{engine}-{'backward' if backward else 'forward'}")
        for engine, backward in product(MODULES, (False, True))
        if "decode" not in engine
    ],
)
def test_a_bucket_shares_its_tile(engine, backward):
    """Tile, threads and refusals are those of the bucket's last lengths; launches are those of the exact lengths."""
    check_buckets(engine, backward, (1, 100, 1100))


@pytest.mark.parametrize("engine", ["cpu_decode", "mma_decode"])
def test_a_bucket_of_few_queries_shares_its_tile(engine):
    check_buckets(engine, False, (1, 3, 8), (65, 137, 2100))


def check_buckets(engine, backward, q_lengths, kv_lengths=(7, 137, 2100)):
    problem, device = problems(engine, backward)
    for q_length, kv_length in product(q_lengths, kv_lengths):
        lasts = (bucket_of(q_length)[1], bucket_of(kv_length)[1])
        last = plan(problem._replace(q_len=lasts[0], kv_len=lasts[1]), device)
        shared = (last.engine, last.tile, last.threads, last.cost, last.refused)
        for q_len, kv_len in product(*({*bucket_of(length), length} for length in (q_length, kv_length))):
            exact = problem._replace(q_len=q_len, kv_len=kv_len)
            chosen = plan(exact, device)
            assert (chosen.engine, chosen.tile, chosen.threads, chosen.cost, chosen.refused) == shared
            assert chosen.problem == exact and chosen.tile in MODULES[engine].tiles(exact, device)
            assert chosen.launches == MODULES[engine].launches(exact, device, chosen.tile)


@pytest.mark.parametrize("engine", MODULES)
def test_an_engine_serves_a_bucket_or_refuses_it(engine):
    """An engine must not limit lengths inside a bucket, or it would refuse lengths that it serves."""
    problem, device = problems(engine, backward=False)
    for q_len, kv_len in product((*range(20), 33, 100), repeat=2):
        exact = problem._replace(q_len=q_len, kv_len=kv_len, engine=engine)
        exact_reasons, bucket_reasons = (
            engine_refusals(engine, each, device) for each in (exact, last_of_bucket(exact))
        )
        assert bool(exact_reasons) == bool(bucket_reasons), (q_len, kv_len, exact_reasons, bucket_reasons)


def test_a_growing_cache_of_keys_plans_once_per_bucket():
    """The number of keys grows by one in each decode step."""
    problem, device = problems("mma", backward=False)
    with cold():
        for kv_len in range(1025, 2049):
            plan(problem._replace(q_len=1, kv_len=kv_len), device)
        assert module._choice.cache_info().misses == BUCKETS
        assert plan.cache_info().misses == 1024


# If engine cpu chose tiles by the exact lengths, they would differ within a bucket: (128, 128) would have a tile of its
# own, and the bucket (129 .. 160, 129 .. 160) several tiles.
LENGTHS = [*product((129, 144, 160), (129, 150, 160)), (128, 128), (113, 120), (120, 113), (1, 129), (1, 160)]


@contextmanager
def cold(*, planted=False):
    """Clear the caches of plans before and after; `planted` plans for the first problem of a bucket instead of its
    last.
    """
    representatives, last = {}, module.last_of_bucket
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(module, "last_of_bucket", lambda problem: representatives.setdefault(last(problem), problem))
        try:
            forget_plans()
            yield
        finally:
            forget_plans()


def changed_by_order(run, *, planted):
    """Return the lengths for which run(q_len, kv_len) depends on the order of calls after the caches were emptied."""
    results = defaultdict(set)
    for seed in range(ORDERS):
        with cold(planted=planted):
            for lengths in random.Random(seed).sample(LENGTHS, len(LENGTHS)):
                results[lengths].add(run(*lengths))
    return {lengths for lengths, distinct in results.items() if len(distinct) > 1}


def run_on_cpu(q_len, kv_len):
    """Return the bytes of the results of a forward and a backward by the public functions."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, length, 2, 16)).astype(np.float32) for length in (q_len, kv_len, kv_len))
    out, vjp = cupy_flash.attention_vjp(q, k, v, causal=True)
    return tuple(x.tobytes() for x in (out, *vjp(out)[:3]))


def plan_on(dtype, device, mask):
    def planned(q_len, kv_len):
        sizes = dict(batch=4, q_len=q_len, kv_len=kv_len, dtype=DTYPES[dtype], mask=mask)
        return tuple(plan(PROBLEM._replace(backward=backward, **sizes), device) for backward in (False, True))

    return planned


RUNS = {
    "results-cpu": run_on_cpu,
    "plans-cpu": plan_on("float32", CPU, Mask(right=0)),
    "plans-simt": plan_on("float32", AMPERE._replace(units=8), Mask(right=0)),
    "plans-mma": plan_on("bfloat16", AMPERE, Mask(right=0)),
}


@pytest.mark.parametrize("planted", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_no_call_changes_a_later_one(run, planted):
    """Plans, and the bits of results, do not depend on the order of calls.

    With the planted bug, which plans for the first problem of a bucket, they do.
    """
    assert bool(changed_by_order(run, planted=planted)) == planted


def test_kv_multicast_needs_an_even_number_of_query_tiles():
    """KV multicast needs an even number of query tiles; for an odd number the bucket's tile runs without it."""
    (problem,) = ahead.problems(dtype="bfloat16", head_dim=64, engine="wgmma", backward=False)
    problem = problem._replace(kv_len=512)
    device = HOPPER._replace(backend="cuda")
    tile = wgmma.forward.Tile(128, 64, stages=2, persistent=False, takes_turns=False, paired=True)
    for q_len, multicasts in ((512, True), (500, True), (384, False), (300, False)):
        (launch,) = plan(problem._replace(q_len=q_len), device, tile).launches
        assert dict(launch.constants)["KV_MULTICAST"] == multicasts
        assert [box.rows for box in launch.boxes[1:3]] == [32 if multicasts else 64] * 2
        assert not multicasts or launch.grid[0] % 2 == 0
    (alone,) = plan(problem._replace(q_len=300), device, tile._replace(paired=False)).launches
    assert launch == alone


def test_explain_says_which_bucket():
    q, k = np.zeros((1, 1, 2, 16), np.float32), np.zeros((1, 1100, 2, 16), np.float32)
    text = cupy_flash.explain(q, k, k)
    assert "bucket     1 queries x 1025 to 1280 keys" in text and "1 queries x 1100 keys" in text
    assert "takes at most 8 queries, not 1100" in cupy_flash.explain(k, k, k)  # refusals are those of the exact lengths
