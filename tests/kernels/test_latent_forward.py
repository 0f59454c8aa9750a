"""Forwards of wide values inside keys (mma/latent_forward.cu): one load of a tile serves both products."""

from dataclasses import replace

import numpy as np
import pytest
from cache_cases import CacheCase
from cache_cases import check as check_on_cache
from cache_cases import posed as posed_on_cache
from cache_cases import run_kernels as run_on_cache
from cases import Case, Result, check, planned
from planting import change, planted, skip
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash import device
from cupy_flash.engines import mma
from cupy_flash.gpu import run_plan
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDE = Case(9, 75, 2, 8, 1, 288, 272, dtype="float16", shared=True, causal=True)
CASES = {
    "everything": replace(
        WIDE, window=(50, None), softcap=1.5, alibi="bh", bias="bhqk", mask="bhqk", sink=True, scale=0.5,
        q_lengths=(4, 9), kv_lengths=(40, 75),
    ),
    "packed": replace(WIDE, packed=True, q_lengths=(9, 3), kv_lengths=(33, 75), dtype="bfloat16", sink=True),
    "mods": replace(WIDE, causal=False, score_mod="relative", mask_mod="document", kv_heads=2, layout="bhsd"),
    "odd": replace(WIDE, head_dim=293, head_dim_v=265, batch=1, causal=False),
    "no-keys": replace(WIDE, q_len=5, kv_len=3, causal=True, sink=True),
    "all-columns": replace(WIDE, q_len=3, batch=1, head_dim=576, head_dim_v=576),
}  # fmt: skip


def forward(case, start=start, **how):
    """Return the plan of a case, and its results."""
    chosen, operands = planned(case, **how)
    out, lse = (array.numpy() for array in run_plan.forward(chosen, operands, start)[:2])
    return chosen, Result(out, lse, *[None] * 5)


def check_forward(case, **how):
    chosen, result = forward(case, **how)
    assert [launch.kernel for launch in chosen.launches if "forward" in launch.kernel] == ["mma/latent_forward"]
    check(case, result, only=("out", "lse"))


@pytest.mark.parametrize("case", in_tiers(CASES, ("everything", "packed")))
def test_the_formula(case):
    check_forward(case, engine="mma")


@pytest.mark.parametrize("arch", [exhaustive(x) for x in ("sm_75", "sm_86", "sm_90a")])
def test_any_gpu(arch):
    check_forward(replace(WIDE, batch=1, head_dim=576, head_dim_v=512), arch=arch, engine="mma")


def test_statistics_of_rows():
    """Those of rows past the length are of rows without a key."""
    case = replace(WIDE, q_lengths=(9, 5), causal=False)
    call = case.call()
    options = call.options | dict(return_lse=True, statistics=("max", "argmax", "entropy"))
    results = [cupy_flash.attention(*call[:3], **options, **on) for on in (dict(backend="simulator", engine="mma"), {})]
    (_, _, tensor_cores), (_, _, cpu) = results
    assert (tensor_cores.argmax == cpu.argmax).all() and (tensor_cores.argmax[1, :, 5:] == -1).all()
    np.testing.assert_allclose(tensor_cores.max, cpu.max, rtol=1e-3)
    np.testing.assert_allclose(tensor_cores.entropy, cpu.entropy, atol=2e-3)


PREFILL = CacheCase(
    lengths=(5, 90), capacity=112, page=16, heads=8, kv_heads=1, head_dim=288, head_dim_v=272, q_len=11, appended=11,
    dtype="float16", shared=True, sink=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [PREFILL, exhaustive(replace(PREFILL, page=None, rotary=(8, False), leftpad=(2, 3), window=(20, None)))]
)
def test_a_prefill_on_a_cache(case):
    """Rows are appended, and their queries see the causal band of the cache."""
    call = case.call()
    check_on_cache(case, run_on_cache(call, engine="mma"), call=call)


def test_each_tile_reads_a_key_once():
    """At the sizes of multi-head latent attention a block reads its rows, and 1152 bytes for each key that it sees."""
    case = replace(WIDE, q_len=8, kv_len=100, batch=1, head_dim=576, head_dim_v=512)
    counters = []
    forward(case, lambda work: counters.extend(start(work)))
    rows = 8 * 8
    assert [each.global_bytes_read for each in counters] == [2 * 576 * (rows + 100)]


def test_blocks_of_early_queries_read_fewer_keys():
    case = replace(WIDE, q_len=128, kv_len=128, batch=1)
    counters = []
    chosen, _ = forward(case, lambda work: counters.extend(start(work)))
    tiles = chosen.launches[-1].grid[0]
    seen = sum((n + 1) * 128 // tiles for n in range(tiles))
    assert counters[0].global_bytes_read == 2 * 288 * (128 * 8 + seen)


BUGS = {
    "values-of-another-slot": (change("values-of-tile", "K_smem", "stages.slots.start"), SimulationError),
    "slot-reloaded-while-read": (skip("barrier-after-loads"), SimulationError),
    "slot-reloaded-before-values": (change("turn-of-values", "__syncthreads()", ""), SimulationError),
    "keys-of-the-first-query": (
        change("keys-of-rows", "band.kv_end(queries.end)", "band.kv_end(queries.begin + 1)"),
        AssertionError,
    ),
    "columns-of-the-neighbour": (change("columns-of-warp", "2 * SLICES * n", "2 * SLICES * n + 2"), AssertionError),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS, ("values-of-another-slot", "slot-reloaded-before-values")))
def test_planted_bugs_are_found(bug, monkeypatch):
    plant, error = bug
    with planted(monkeypatch, plant), pytest.raises(error):
        check_forward(replace(WIDE, kv_len=140, batch=1))


def test_plans_choose_it_for_many_queries():
    """A decode divides the keys of few queries; a prefill has a block for each tile of rows."""
    case = CacheCase(
        lengths=(4096,), capacity=4096, page=64, heads=128, kv_heads=1, head_dim=576, head_dim_v=512, q_len=1,
        dtype="float16", shared=True,
    )  # fmt: skip
    problem = posed_on_cache(case.call())[0]
    for arch in ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"):
        gpu = device.named(arch, "cuda")
        engines = {n: plan(problem._replace(device="cuda:0", q_len=n), gpu).engine for n in (1, 16, 4096)}
        assert engines == {1: "mma_decode", 16: "mma_decode", 4096: "mma"}
        (tile,) = mma.tiles(problem, gpu)
        assert tile.q_tile.rows == {"sm_75": 16, "sm_86": 32, "sm_120": 32}.get(arch, 64)


def test_others_read_two_tiles():
    """Dropout, and values that one warp accumulates, have the ordinary forward."""
    for case in (replace(WIDE, dropout=0.1), replace(WIDE, head_dim_v=256)):
        assert [launch.kernel for launch in planned(case, engine="mma")[0].launches] == ["mma/forward"]
