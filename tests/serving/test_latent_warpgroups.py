"""Decodes of values inside keys on a simulated Hopper, whose two warpgroups take turns (wgmma/latent.cuh)."""

import functools
from dataclasses import replace

import pytest
from cache_cases import CacheCase, check, in_a_wider_array, posed, run_kernels
from planting import always, change, planted, skip
from test_cache_mod_kernels import documents, windows
from test_cache_mods import with_mods
from test_latent_decode import assert_only_the_bug_changes_bits
from tiers import in_tiers

from cupy_flash import device
from cupy_flash.engines import mma_decode
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HOPPER = device.named("sm_90a")
LATENT = CacheCase(
    lengths=(5, 290, 0), capacity=304, page=16, heads=8, kv_heads=1, head_dim=320, head_dim_v=256, q_len=3, appended=3,
    dtype="float16", shared=True,
)  # fmt: skip
CASES = {
    "everything": replace(
        LATENT, rotary=(8, False), window=(100, None), softcap=1.5, alibi="bh", sink=True, mask="bhqs", scale=0.5
    ),
    "packed": replace(
        LATENT, lengths=(4, 90, 11), packed=(0, 5, 1), appended=0, page=8, capacity=104, slots=True, sink=True,
        dtype="bfloat16", head_dim=288,
    ),
    "contiguous": replace(LATENT, page=None, lengths=(64, 129, 70), leftpad=(2, 66, 0), capacity=140, layout="bhsd"),
    "pages-of-tiles": replace(LATENT, page=128, capacity=384, heads=16, kv_heads=2, causal=False),
    "columns-past-the-rows": replace(LATENT, head_dim=392, head_dim_v=384, pool="own", hole=2**30),
    "no-queries": replace(LATENT, q_len=0, appended=1),
    "fewest-columns": replace(LATENT, head_dim=128, head_dim_v=128, sink=True),
    "largest": replace(
        LATENT, lengths=(200,), capacity=208, head_dim=576, head_dim_v=512, heads=64, q_len=1, appended=1
    ),
}  # fmt: skip


def on_warpgroups(call, **options):
    return run_kernels(call, arch="sm_90a", rows=64, tma=True, **options)


@pytest.mark.parametrize("case", in_tiers(CASES, ("everything", "contiguous")))
def test_the_formula(case):
    check(case, on_warpgroups(case.call(), blocks=3))


def test_caches_of_any_strides():
    call = replace(LATENT, lengths=(70,), capacity=80).call()
    check(LATENT, on_warpgroups(call._replace(k_cache=in_a_wider_array(call.k_cache, 8))), call=call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [None, 8, 16, 64, 256])
@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 4, 5])
def test_any_number_of_tiles(tiles, page):
    """Either warpgroup may have the last tile, and a part may have none."""
    case = replace(LATENT, lengths=(64 * tiles,), capacity=512, page=page, appended=None, q_len=1, causal=False)
    check(case, on_warpgroups(case.call(), blocks=1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("blocks", [1, 3, 7])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_any_number_of_blocks_in_any_order(blocks, order):
    """The producer runs ahead into the next part, whatever the order of warps."""
    case = replace(LATENT, lengths=(300, 0, 64, 1, 700), capacity=704, heads=32, sink=True)
    check(case, on_warpgroups(case.call(), blocks=blocks, start=functools.partial(start, order="random", seed=order)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", [documents, windows])
def test_masks_with_hidden_tiles(mask):
    """The producer and both warpgroups skip the same tiles, so that each takes its turns."""
    case = replace(LATENT, lengths=(490, 300, 64, 0), q_len=9, appended=9, capacity=512, heads=4, causal=False)
    call = with_mods(case, mask_mod=mask)
    check(case, on_warpgroups(call, blocks=3), call=call)


@pytest.mark.exhaustive
def test_a_row_keeps_its_bits_beside_any_others(monkeypatch):
    """A row's reference depends on its own scores: with one for all rows of a warp, others would change its bits."""
    case = replace(LATENT, lengths=(600,), capacity=608, heads=4, scale=1.0)
    grown = "softmax[0][half].exceeds_reference(largest[half], scale_log2)"
    reference_of_the_warp = change("if-row-of-warp-grows", grown, f"__any_sync(0xFFFFFFFF, {grown})")
    run = functools.partial(on_warpgroups, blocks=1)
    assert_only_the_bug_changes_bits(case, run, reference_of_the_warp, monkeypatch)


def test_both_products_read_a_key_once(watch):
    """64 more keys are 64 rows of 576 numbers more, and no lane of shared memory waits for another."""
    read = []
    for length in (64, 128):
        case = replace(CASES["largest"], lengths=(length,), capacity=128, appended=None, causal=False)
        on_warpgroups(case.call(), start=watch.start)
        counters = watch.counters.pop("latent_decode")
        assert not counters.conflicting()
        read.append(counters.global_bytes_read)
    assert 64 * 1152 <= read[1] - read[0] < 1.01 * 64 * 1152


# Plans


UNSERVED = {
    "another-gpu": (LATENT, "sm_80"),
    "small-pages": (replace(LATENT, page=4), "sm_90a"),
    "pages-of-48": (replace(LATENT, page=48, capacity=336), "sm_90a"),
    "halves-of-panels": (replace(LATENT, head_dim_v=192), "sm_90a"),
    "too-many-columns": (replace(LATENT, head_dim=576, head_dim_v=576), "sm_90a"),
    "unaligned-rows": (replace(LATENT, head_dim=321), "sm_90a"),
    "modified-scores-of-many-columns": (replace(LATENT, head_dim=576, head_dim_v=512, softcap=1.5), "sm_90a"),
    "split-size": (replace(LATENT, split_size=64), "sm_90a"),
    "empty-cache": (replace(LATENT, lengths=(0,), capacity=0, page=None, appended=None), "sm_90a"),
}


@pytest.mark.parametrize(("case", "arch"), UNSERVED.values(), ids=UNSERVED)
def test_what_it_cannot_compute_is_no_choice(case, arch):
    problem, _ = posed(case.call(), backend=f"simulator:{arch}")
    assert not any(tile.tma for tile in mma_decode.choices(problem, device.named(arch)))


def test_a_tune_chooses_it():
    """It is a candidate with a predicted time, but no plan uses it before it is measured."""
    case = replace(LATENT, head_dim=576, head_dim_v=512, heads=128, q_len=1, appended=None, capacity=65536)
    problem, _ = posed(case.call(), backend="simulator:sm_90a")
    planned = plan(problem, HOPPER)
    assert not planned.tile.tma
    (tile,) = (x for x in mma_decode.choices(problem, HOPPER) if x.tma)
    chosen = plan(problem, HOPPER, tile)
    decode = next(x for x in chosen.launches if x.function == "latent_decode")
    assert (decode.threads, tile.stages, tile.form) == (384, 2, "producer warp")
    assert [box.operand for box in decode.boxes] == ["k"]
    assert chosen.cost < planned.cost / 1.5


def test_statistics_have_the_form_of_mma():
    problem, _ = posed(LATENT.call(), backend="simulator:sm_90a", statistics=("max",), return_lse=True)
    assert not any(tile.tma for tile in mma_decode.choices(problem, HOPPER))


# Planted bugs


LONG = replace(LATENT, lengths=(300,), scale=1.0)  # several tiles, and row maxima that grow
SHORT = replace(LATENT, lengths=(70,), capacity=80)
BUGS = {
    "no-wait-for-an-empty-panel": (skip("acquire-panel"), LONG),
    "no-wait-for-a-full-panel": (skip("wait-panel"), LONG),
    "panels-released-before-values-are-read": (
        change("release-panels", "(n / HALF == of) == values", "!values"), LONG
    ),
    "panels-of-another-page": (change("load-panel", "current", "block"), LONG),
    "nan-past-the-length": (always("clear-hidden-values"), SHORT),
    "zeros-are-not-fenced": (skip("fence-zeros"), SHORT),
    "q-is-not-fenced": (skip("fence-Q"), SHORT),
    "q-not-waited-for": (skip("wait-Q"), SHORT),
    "p-not-waited-for": (skip("wait-P"), LONG),
    "p-not-passed": (skip("pass-P"), LONG),
    "maxima-not-passed": (skip("pass-maxima"), LONG),
    "own-values-not-rescaled": (skip("rescale-own"), LONG),
    "passed-values-not-rescaled": (change("rescale-passed", "rescale(O, factors)", ""), LONG),
    "values-not-waited-for": (skip("wait-values"), LONG),
    "s-not-waited-for": (skip("wait-S"), LONG),
    "columns-of-the-other-warpgroup": (change("columns-of-warpgroup", "warpgroup.number * HALF", "0"), SHORT),
    "columns-stored-by-the-other": (change("columns-of-result", "warpgroup.number", "warpgroup.other()"), SHORT),
    "sums-not-waited-for": (skip("wait-sums-of-warpgroups"), LONG),
    "unread-panels-not-released": (skip("release-unread"), LONG),
}  # fmt: skip


@pytest.mark.parametrize("bug", in_tiers(BUGS, ("no-wait-for-an-empty-panel", "passed-values-not-rescaled")))
def test_planted_bugs_are_found(bug, monkeypatch):
    bug, case = bug
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        check(case, on_warpgroups(case.call(), blocks=1))
