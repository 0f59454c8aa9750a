"""Mods in the wgmma kernels on the simulator: the dense formula, orders of asynchronous work, planted bugs."""

import functools
from dataclasses import replace

import pytest
from cases import Case, Result, assert_bitwise_equal, check, compare, planned, run_kernels
from fp8_cases import quantised, references
from mods import MASK_MODS, SCORE_MODS
from planting import always, change, planted, skip
from test_mod_attention import BESIDE
from test_mod_kernels import check_captured
from tiers import in_tiers
from wgmma_cases import LONG

from cupy_flash import dispatch
from cupy_flash.engines import wgmma
from cupy_flash.gpu import run_plan
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options
from cupy_flash.simulator import errors
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TILE = wgmma.forward.Tile(block_q=128, block_kv=64, stages=2, persistent=False, takes_turns=False, paired=False)
DRAWING = TILE._replace(persistent=True, takes_turns=True)
FP8_TILE = wgmma.forward_fp8.Tile(block_q=128, block_kv=64, stages=2, sum_columns=64)

EACH = {name: dict(score_mod=name) for name in SCORE_MODS} | {f"mask-{name}": dict(mask_mod=name) for name in MASK_MODS}
OPTIONS = {
    name: dict(score_mod="relative", mask_mod="document", **beside)
    for name, beside in BESIDE.items()
    if beside.get("dtype") not in ("float16", "float64")
}


def long_case(options):
    """Return a case with these options and several tiles; lengths are replaced by ones that fit it."""
    lengths = {name: (30, 141) if name == "q_lengths" else (199, 70) for name in options if name.endswith("lengths")}
    return Case(**LONG | dict(batch=2 if lengths else 1) | options | lengths)


def forward(case, tile=TILE, blocks=None, start=start):
    """Return (out, lse) of a case in a tile; a persistent grid has `blocks` blocks."""
    chosen, operands = planned(case, None, "sm_90a", tile, engine="wgmma")
    grids = {"forward": (blocks, 1, 1)} if blocks is not None else {}
    launches = tuple(each._replace(grid=grids.get(each.function, each.grid)) for each in chosen.launches)
    out, lse = (array.numpy() for array in run_plan.forward(chosen._replace(launches=launches), operands, start))
    return Result(out, lse, *[None] * 5)


def check_forward(case, result):
    check(case, result, only=("out", "lse"))


@pytest.mark.parametrize("options", in_tiers(EACH, ["learned-twice", "mask-document", "hides-by-score"]))
def test_forward_of_every_mod(options):
    case = long_case(options)
    check_forward(case, forward(case))


@pytest.mark.parametrize("options", in_tiers(OPTIONS, ["packed", "causal"]))
def test_forward_with_every_option(options):
    case = long_case(options)
    check_forward(case, forward(case, DRAWING, blocks=3))


WIDE = {"document": dict(mask_mod="document"), "row-bias": dict(score_mod="row-bias", mask_mod="document")}


@pytest.mark.exhaustive
def test_blocks_of_a_cluster_stage_their_own_values():
    """Each of two blocks loads half of K and V for both, and stages the values of all keys for itself."""
    case = long_case(dict(score_mod="row-bias"))
    check_forward(case, forward(case, TILE._replace(paired=True)))


@pytest.mark.parametrize("options", in_tiers(WIDE, []))
def test_the_largest_head_dimension_with_values_by_key(options):
    """At the largest head dimension a plan of wgmma exists, and matches the dense result."""
    case = long_case(options | dict(head_dim=256, head_dim_v=256))
    check_forward(case, forward(case, None))


FP8 = {
    "mods": dict(score_mod="relative", mask_mod="document"),
    "packed": OPTIONS["packed"],
    "sliding": EACH["mask-sliding"],
}


@pytest.mark.parametrize("options", in_tiers(FP8, ["mods"]))
def test_fp8(options):
    case = long_case(options | dict(dtype="bfloat16"))
    call = quantised(case)
    options = Options(**call.options, backend="simulator:sm_90a")
    problem, operands = pose("case", call[:3], options, call.packed)
    chosen = plan(problem, dispatch.device_of(problem), FP8_TILE)
    out, lse = (array.numpy() for array in run_plan.forward(chosen, operands, start))
    compare(case, Result(out, lse, *[None] * 5), *references(call), only=("out", "lse"))


BACKWARD = {
    "keys": wgmma.backward.Tile(block_q=64, block_kv=128, stages=2, dq_in_bulk=False),
    "shared keys": wgmma.backward.Tile(block_q=64, block_kv=64, stages=2, dq_in_bulk=True),
}


def run(case, tile="keys", **how):
    """Return all results of a case, with one of the BACKWARD tiles."""
    backward_tile = lambda chosen: BACKWARD[tile] if chosen.problem.backward else None  # noqa: E731
    return run_kernels(case, arch="sm_90a", engine="wgmma", tile=backward_tile, **how)


@pytest.mark.parametrize("options", in_tiers(EACH, ["mask-document"]))
def test_gradients_of_every_mod(options):
    case = long_case(options)
    result = run(case)
    check(case, result, only=("dq", "dk", "dv"))
    check_captured(case, result)


@pytest.mark.parametrize("tile", in_tiers({name: name for name in BACKWARD}, ["shared keys"]))
@pytest.mark.parametrize("options", in_tiers(OPTIONS, ["packed"]))
def test_gradients_with_every_option(options, tile):
    case = long_case(options)
    check(case, run(case, tile))


def test_hidden_tiles_between_visible_ones():
    case = long_case(dict(mask_mod="gaps", heads=1))
    check(case, run(case, deterministic=True))


SPARSE = Case(**LONG | dict(q_len=260, kv_len=260), mask_mod="sliding")


@pytest.mark.exhaustive
def test_hidden_tiles_are_not_loaded(watch):
    """A sliding mask_mod hides more than half of the tiles."""
    read = {}
    for case in (SPARSE, replace(SPARSE, mask_mod=None)):
        run(case, "shared keys", start=watch.start)
        read[case.mask_mod] = [watch.counters[kernel].global_bytes_read for kernel in ("forward", "backward")]
    assert all(some <= 0.75 * every for some, every in zip(read["sliding"], read[None], strict=True)), read


ORDERS = {
    "early": dict(order="early"),
    "late": dict(order="late"),
    "random": dict(order="random", seed=1),
}


@pytest.mark.parametrize("order", in_tiers(ORDERS, []))
def test_every_order_gives_the_same_bits(order):
    """In a deterministic backward the turns of hidden tiles are passed on, in any order of asynchronous work."""
    case, starts = Case(**LONG | dict(q_len=150), mask_mod="document"), functools.partial(start, **order)
    expected = run(case, deterministic=True)
    check(case, expected)
    result = run(case, deterministic=True, start=starts)
    assert_bitwise_equal(result, expected, case)
    drawn = forward(case, DRAWING, blocks=1, start=starts)
    check_forward(case, drawn)


# name -> (bug, errors); the forward runs in one block that draws its tiles
PLANTED = {
    "cut tiles count as full": (change("record-of-keys", "(kv_tiles.may_hide & 1 ? CUT : 0)", "0"), AssertionError),
    "a visible tile is skipped": (
        change("first-visible-tile", "__ffs(may_see) - 1", "31 - __clz(may_see)"),
        AssertionError,
    ),
    "records not waited for": (skip("wait-record-of-keys"), (errors.Race, errors.Uninitialised)),
    "record of another stage": (change("record-of-stage", "K.index %", "K.index / STAGES %"), errors.Race),
    "records written before the stage is empty": (skip("acquire-record-of-keys"), errors.Race),
    "the end not published": (skip("write-end-of-keys") + skip("publish-end-of-keys"), errors.Deadlock),
    "the end not released": (skip("release-end-of-keys"), (errors.Deadlock, errors.PendingCopy, errors.BarrierMisuse)),
    "every lane draws": (always("draw-tile"), (AssertionError, errors.Uninitialised)),
}


@pytest.mark.parametrize("plant", in_tiers(PLANTED, ["cut tiles count as full", "record of another stage"]))
def test_planted_bug_of_the_forward_is_found(plant, monkeypatch):
    bug, error = plant
    with planted(monkeypatch, bug), pytest.raises(error):
        check_forward(SPARSE, forward(SPARSE, DRAWING, blocks=1))


# name -> (bug, errors), for values that are staged by key
PLANTED_STAGING = {
    "values of another slot": (
        change("read-staged-keys", "(K.index - 1)", "K.index"),
        (errors.Race, errors.Uninitialised),
    ),
    "as many slots as K has": (change("KEY_SLOTS", "STAGES + 1", "STAGES"), errors.Race),
    "written before the slot is free": (skip("acquire-key-values"), errors.Race),
    "published before they are written": (skip("written-key-values"), errors.Race),
    "another column": (change("key-in-bounds", "column_of(n, e)", "column_of(n, e ^ 1)"), AssertionError),
    "keys past the last read": (
        change("stage-key-values", "band.key(kv_start + n)", "kv_start + n"),
        errors.OutOfBounds,
    ),
}


@pytest.mark.parametrize("plant", in_tiers(PLANTED_STAGING, ["as many slots as K has"]))
def test_planted_bug_of_staged_values_is_found(plant, monkeypatch):
    case, (bug, error) = long_case(dict(score_mod="row-bias", mask_mod="document")), plant
    with planted(monkeypatch, bug), pytest.raises(error):
        check_forward(case, forward(case, DRAWING, blocks=1))


# name -> (bug, errors), for the deterministic backward
PLANTED_BACKWARD = {
    "cut tiles count as full": (change("record-of-queries", "(q_tiles.may_hide & 1 ? CUT : 0)", "0"), AssertionError),
    "records not waited for": (skip("wait-record-of-queries"), errors.Race),
    "the end not published": (skip("publish-end-of-queries"), (errors.Race, errors.Deadlock, errors.Uninitialised)),
    "another head": (change("head-of-record", "head", "0"), AssertionError),
    "turns of hidden tiles passed early": (
        change("wait-blocks-before", "lane_id() == 0", "lane_id() == 0 && q_tiles.start == q_start"),
        errors.Race,
    ),
}


@pytest.mark.parametrize("plant", in_tiers(PLANTED_BACKWARD, ["turns of hidden tiles passed early"]))
def test_planted_bug_of_the_backward_is_found(plant, monkeypatch):
    bug, error = plant
    with planted(monkeypatch, bug), pytest.raises(error):
        # This bug makes a deterministic backward wait forever for the turn of another head, which no check detects.
        deterministic = plant is not PLANTED_BACKWARD["another head"]
        check(SPARSE, run(SPARSE, deterministic=deterministic), only=("dq", "dk", "dv"))
