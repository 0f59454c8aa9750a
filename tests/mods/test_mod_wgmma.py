"""Mods in the kernels of wgmma, in the simulator: results against the dense formula, orders of work, planted bugs."""

import pytest
from cases import Case, Result, check, compare, planned, run_kernels
from fp8_cases import quantised, references
from mods import MASK_MODS, SCORE_MODS
from test_mod_attention import BESIDE
from test_mod_kernels import check_captured
from tiers import in_tiers
from wgmma_cases import LONG

from cupy_flash import backends
from cupy_flash.backends import kernels
from cupy_flash.backends.simulator.run import start
from cupy_flash.engines import wgmma
from cupy_flash.plan import plan
from cupy_flash.pose import pose
from cupy_flash.problem import Options

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
    """A case of several tiles with these options, whose lengths are scaled to it."""
    lengths = {name: (30, 141) if name == "q_lengths" else (199, 70) for name in options if name.endswith("lengths")}
    return Case(**LONG | dict(batch=2 if lengths else 1) | options | lengths)


def forward(case, tile=TILE, blocks=None, start=start):
    """(out, lse) of a case in a tile; a persistent grid has `blocks` blocks."""
    chosen, operands = planned(case, None, "sm_90a", tile, engine="wgmma")
    grids = {"forward": (blocks, 1, 1)} if blocks is not None else {}
    launches = tuple(each._replace(grid=grids.get(each.function, each.grid)) for each in chosen.launches)
    out, lse = (array.numpy() for array in kernels.forward(chosen._replace(launches=launches), operands, start))
    return Result(out, lse, *[None] * 5)


def check_forward(case, result):
    check(case, result, only=("out", "lse"))


@pytest.mark.parametrize("options", in_tiers(EACH, ["learned-twice", "mask-document"]))
def test_forward_of_every_mod(options):
    case = long_case(options)
    check_forward(case, forward(case))


@pytest.mark.parametrize("options", in_tiers(OPTIONS, ["packed", "causal"]))
def test_forward_beside_every_option(options):
    case = long_case(options)
    check_forward(case, forward(case, DRAWING, blocks=3))


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
    chosen = plan(problem, backends.device_of(problem), FP8_TILE)
    out, lse = (array.numpy() for array in kernels.forward(chosen, operands, start))
    compare(case, Result(out, lse, *[None] * 5), *references(call), only=("out", "lse"))


BACKWARD = {
    "keys": wgmma.backward.Tile(block_q=64, block_kv=128, stages=2, dq_in_bulk=False),
    "shared keys": wgmma.backward.Tile(block_q=64, block_kv=64, stages=2, dq_in_bulk=True),
}


def run(case, tile="keys", **how):
    """All results of a case, with a tile of the backward."""
    of_backward = lambda chosen: BACKWARD[tile] if chosen.problem.backward else None  # noqa: E731
    return run_kernels(case, arch="sm_90a", engine="wgmma", tile=of_backward, **how)


@pytest.mark.parametrize("options", in_tiers(EACH, ["row-bias", "mask-document"]))
def test_gradients_of_every_mod(options):
    case = long_case(options)
    result = run(case)
    check(case, result, only=("dq", "dk", "dv"))
    check_captured(case, result)


@pytest.mark.parametrize("tile", in_tiers({name: name for name in BACKWARD}, ["shared keys"]))
@pytest.mark.parametrize("options", in_tiers(OPTIONS, ["packed"]))
def test_gradients_beside_every_option(options, tile):
    case = long_case(options)
    check(case, run(case, tile))
