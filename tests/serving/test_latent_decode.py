"""Decodes of values inside keys on mma_decode (mma/latent.cuh): one load of a tile serves both products."""

from dataclasses import replace

import pytest
from cache_cases import CacheCase, check, in_a_wider_array, posed, run_kernels
from planting import change, planted, skip
from test_invariance import assert_bits, at
from tiers import exhaustive, in_tiers

from cupy_flash import device
from cupy_flash.engines import mma_decode
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import SimulationError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LATENT = CacheCase(
    lengths=(5, 130, 0), capacity=160, page=16, heads=4, kv_heads=1, head_dim=48, head_dim_v=32, q_len=3, appended=3,
    dtype="float16", shared=True,
)  # fmt: skip
CASES = {
    "everything": replace(
        LATENT, rotary=(8, False), window=(100, None), softcap=1.5, alibi="bh", sink=True, mask="bhqs", scale=0.5
    ),
    "packed": replace(
        LATENT, lengths=(4, 90, 11), packed=(0, 5, 1), appended=0, page=8, capacity=100, slots=True, sink=True,
        dtype="bfloat16", head_dim=40, head_dim_v=24,
    ),
    "two-groups": replace(LATENT, page=None, heads=16, lengths=(70,), capacity=80, q_len=3, head_dim=64, head_dim_v=64),
    "odd": replace(LATENT, head_dim=37, head_dim_v=19, page=None, heads=6, kv_heads=2, causal=False),
    "pages-of-48": replace(LATENT, page=48, capacity=192, head_dim=144, head_dim_v=96),
    "split": replace(LATENT, split_size=64, head_dim=128, head_dim_v=128, sink=True),
    "no-queries": replace(LATENT, q_len=0, appended=1),
    "leftpad": replace(LATENT, page=None, leftpad=(2, 3, 0), head_dim=80, head_dim_v=64),
}  # fmt: skip
DEFAULT = ("everything", "packed", "two-groups")


@pytest.mark.parametrize("case", in_tiers(CASES, DEFAULT))
def test_the_formula(case):
    check(case, run_kernels(case.call()))


@pytest.mark.parametrize(
    ("arch", "rows", "sizes"),
    [
        ("sm_80", 64, (576, 512)),
        *(exhaustive(*x) for x in (("sm_75", 16, (576, 512)), ("sm_86", 32, (576, 512)), ("sm_90a", 64, (576, 512)))),
        exhaustive("sm_80", 16, (512, 512)), exhaustive("sm_80", 32, (288, 256)), exhaustive("sm_80", 32, (576, 576)),
    ],
)  # fmt: skip
def test_any_gpu_and_size(arch, rows, sizes):
    case = replace(LATENT, lengths=(70,), capacity=80, heads=8, head_dim=sizes[0], head_dim_v=sizes[1])
    check(case, run_kernels(case.call(), arch=arch, rows=rows))


@pytest.mark.parametrize("rows", [64, exhaustive(32)])
def test_rows_of_a_tile_and_batches_change_no_bit(rows):
    """With split_size a row has the bits that it has in any tile, batch and number of blocks."""
    case = replace(LATENT, lengths=(90, 20), page=None, split_size=64, q_len=5, appended=5, softcap=2.0)
    call = case.call()
    expected = run_kernels(call, rows=16)
    assert_bits(run_kernels(at(call, [1, 0]), rows=rows, blocks=1), expected, [1, 0])


@pytest.mark.exhaustive
def test_unaligned_rows():
    case = replace(LATENT, page=None, appended=None, head_dim=40, head_dim_v=24)
    call = case.call()
    check(case, run_kernels(call._replace(k_cache=in_a_wider_array(call.k_cache, 3))), call=call)


LONG = replace(LATENT, lengths=(300,), capacity=320, heads=16, page=None, softcap=2.0)  # two groups, several parts
SHORT = replace(LONG, lengths=(90,), capacity=96, heads=4)  # one group
BUGS = {
    "neighbours-columns": (change("columns-of-warp", "2 * SLICES * n", "2 * SLICES * n + 2"), SHORT, AssertionError),
    "columns-of-values": (change("columns-of-O", "share.slice", "(share.slice ^ 1)"), SHORT, AssertionError),
    "slot-reloaded-while-read": (skip("barrier-after-loads"), SHORT, SimulationError),
    "slot-reloaded-in-the-turn": (change("turn-of-values", "__syncthreads()", ""), LONG, SimulationError),
    "sums-not-waited-for": (change("wait-sums", "share.sync_pair()", ""), SHORT, SimulationError),
    "maxima-not-waited-for": (skip("wait-maxima"), LONG, SimulationError),
    "p-not-waited-for": (skip("wait-P"), LONG, SimulationError),
    "sums-of-rows-not-waited-for": (skip("wait-rows"), LONG, SimulationError),
    "appended-at-the-stride-of-values": (
        change("row-of-keys", "place.row * p.k.row", "place.row * HEAD_DIM_V"),
        replace(SHORT, page=16),
        AssertionError,
    ),
    "keys-of-the-neighbour": (change("keys-of-warp", "8 * share.slice", "0"), SHORT, AssertionError),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS, ("neighbours-columns", "slot-reloaded-while-read")))
def test_planted_bugs_are_found(bug, monkeypatch):
    bug, case, error = bug
    with planted(monkeypatch, bug), pytest.raises(error):
        check(case, run_kernels(case.call(), rows=64 if case is LONG else 16, blocks=2))


def assert_only_the_bug_changes_bits(case, run, bug, monkeypatch):
    """Assert that other rows of a tile, with smaller or larger scores, change the bits of a row with the bug alone."""
    call = case.call()
    beside = call._replace(q=call.q.copy())
    call.q[:, :, 1:] *= 0.01
    beside.q[:, :, 1:] *= 3

    def bits(call):
        return run(call)[0][:, 0, 0].tobytes()

    assert bits(call) == bits(beside)
    with planted(monkeypatch, bug):
        assert bits(call) != bits(beside)


@pytest.mark.exhaustive
def test_a_reference_of_the_warp_changes_bits(monkeypatch):
    """With a reference for all rows of a warp, the other rows would change the bits of a row."""
    case = replace(LONG, lengths=(600,), capacity=640, heads=4, softcap=None, scale=1.0, split_size=640)
    grown = "softmax[m][half].exceeds_reference(largest[m][half], scale_log2)"
    reference_of_the_warp = change("if-row-grows", grown, f"__any_sync(0xFFFFFFFF, {grown})")
    assert_only_the_bug_changes_bits(case, lambda call: run_kernels(call, rows=16), reference_of_the_warp, monkeypatch)


def test_plans_choose_it_for_values_inside_keys():
    """A tile has one load of its keys, up to D 576, on each architecture that has shared memory for it."""
    case = replace(LATENT, head_dim=576, head_dim_v=512, heads=128, q_len=1, capacity=4096)
    problem = posed(case.call())[0]
    rows = {
        arch: [tile.rows for tile in mma_decode.legal_tiles(problem, device.named(arch, "cuda"))]
        for arch in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
    }
    assert rows == {
        "sm_75": [16], **dict.fromkeys(("sm_86", "sm_89", "sm_120"), [16, 32]),
        **dict.fromkeys(("sm_80", "sm_90a", "sm_100a"), [16, 32, 64]),
    }  # fmt: skip
    for arch in rows:
        (tile,) = mma_decode.tiles(problem, device.named(arch, "cuda"))
        decode = next(
            x for x in mma_decode.launches(problem, device.named(arch, "cuda"), tile) if x.function == "decode"
        )
        assert dict(decode.constants)["LATENT"] and tile.rows == rows[arch][-1]
        assert plan(problem._replace(device="cuda:0"), device.named(arch, "cuda")).engine == "mma_decode"
    wide = posed(replace(case, head_dim=584).call())[0]
    assert "head dimension 584 is larger than 576" in mma_decode.refusals(wide, device.named("sm_80"))
