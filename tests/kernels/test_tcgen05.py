"""The tcgen05 forward on the simulator: every option, head dimensions, tiles, orders of asynchronous work, planted bugs
and refusals.
"""

import functools
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from cases import Case, Result, check, planned
from mods import MASK_MODS, SCORE_MODS
from planting import after, before, change, never, planted, skip
from tiers import exhaustive, in_tiers
from wgmma_cases import LONG, OPTIONS

import cupy_flash
from cupy_flash import device
from cupy_flash.engines import tcgen05
from cupy_flash.gpu import ahead, run_plan
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.measure.checks import calls
from cupy_flash.plan.plan import candidates
from cupy_flash.plan.refusals import engine_refusals
from cupy_flash.problem.build import pose
from cupy_flash.problem.recorded_call import Trial
from cupy_flash.problem.records import Options
from cupy_flash.simulator import errors
from cupy_flash.simulator.asynchrony.tensor_memory import TensorMemory
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ONE, TWO = (tcgen05.Tile(block_q, block_kv=128, stages=4) for block_q in (128, 256))
SINGLE, STRICT = TWO._replace(stages=2), TWO._replace(strict=True)
BLACKWELL = device.named("sm_100a", "cuda")
PLAIN = Case(**LONG)
LENGTHS = Case(**LONG | dict(batch=2, heads=1, q_lengths=(150, 61), kv_lengths=(100, 210)))


def forward(case, tile=TWO, blocks=None, start=start, arch="sm_100a"):
    """Return (out, lse) of a case in a tile (None: the planned one), computed by so many blocks (None: as planned)."""
    chosen, operands = planned(case, None, arch, tile, engine="tcgen05")
    if blocks is not None:
        *classes, step = chosen.launches
        chosen = chosen._replace(launches=(*classes, step._replace(grid=(blocks, 1, 1))))
    out, lse = (array.numpy() for array in run_plan.forward(chosen, operands, start))
    return Result(out, lse, *[None] * 5)


def check_forward(case, result=None):
    check(case, forward(case) if result is None else result, only=("out", "lse"))


BY_DEFAULT = (
    "plain", "causal", "window", "softcap", "bias-hides", "dropout", "all", "lengths-zero", "packed-causal",
    "bfloat16",
)  # fmt: skip
ROWS = dict(zip(OPTIONS, zip(OPTIONS.values(), cycle([ONE, TWO])), strict=True))


@pytest.mark.parametrize("row", in_tiers(ROWS, BY_DEFAULT))
def test_option(row):
    options, tile = row
    case = Case(**LONG | options)
    check_forward(case, forward(case, tile))


@pytest.mark.parametrize("tile", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.exhaustive
def test_option_in_both_tiles(options, tile):
    """A single block computes all tiles, so that every slot and every column of tensor memory is used again."""
    case = Case(**LONG | options)
    check_forward(case, forward(case, tile, blocks=1))


@pytest.mark.parametrize("tile", in_tiers({"one": ONE, "two": TWO}, ["one"]))
def test_rows_of_V_are_cleared_in_their_own_tile(tile):
    """Between the tiles that are cleared lie as many others as there are slots, and more."""
    case = Case(**LONG | dict(heads=1, q_len=2 * tile.block_q - 20, kv_len=400, kv_lengths=(390,), batch=1))
    check_forward(case, forward(case, tile._replace(stages=2), blocks=1))


ALIGNED = Case(**LONG | dict(heads=1, kv_len=208, bias="1hqk", mask="1hqk"))
DENSE = {
    "aligned": dict(heads=1, kv_len=208, bias="1hqk", mask="1hqk"),
    "aligned-tails": dict(kv_len=240, bias="1hqk", mask="b1qk", q_lengths=(140,), kv_lengths=(205,)),
    "aligned-float32": dict(kv_len=212, bias="1hqk", bias_dtype="float32", bias_hides=True),
    "aligned-bfloat16": dict(kv_len=208, bias="1hqk", bias_hides=True, dtype="bfloat16"),
    "float32": dict(kv_len=209, bias="qk", bias_dtype="float32"),
    "float64": dict(heads=1, kv_len=208, bias="qk", bias_dtype="float64", bias_hides=True),
    "keys": dict(batch=2, kv_len=208, bias="h1k", mask="b11k"),
    "queries": dict(bias="hq1", mask="q1"),
    "one": dict(bias="", mask=""),
    "packed": dict(batch=3, q_lengths=(31, 150, 0), kv_lengths=(100, 208, 7), packed=True, bias="bhqk", kv_len=208),
    "score_mod": dict(heads=1, kv_len=208, bias="1hqk", bias_hides=True, mask="qk", score_mod="relative"),
}  # fmt: skip


@pytest.mark.parametrize("options", in_tiers(DENSE, ["aligned", "float64"]))
def test_bias_and_mask(options):
    """Rows that begin at multiples of 16 bytes, others, and broadcast ones; tails of both axes."""
    case = Case(**LONG | options)
    check_forward(case, forward(case, blocks=1))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
        exhaustive(lambda x: np.repeat(x, 2, axis=-1)[..., ::2]),
        exhaustive(lambda x: x[..., ::-1].copy()[..., ::-1]),
        exhaustive(lambda x: np.concatenate([x[..., :1], x], axis=-1)[..., 1:]),
    ],
    ids=["transposed", "every-other", "reversed", "unaligned"],
)
def test_strides_of_bias_and_mask(view):
    call = Case(**LONG | dict(heads=1, q_len=40, kv_len=48, bias="1hqk", mask="1hqk")).call()
    options = {name: view(call.options.pop(name)) for name in ("bias", "mask")}
    arrays = call.q, call.k, call.v
    out = cupy_flash.attention(*arrays, **call.options, **options, backend="simulator:sm_100a", engine="tcgen05")
    expected = cupy_flash.attention(*arrays, **call.options, **options, backend="cpu")
    assert np.abs(out.astype(np.float32) - expected.astype(np.float32)).max() < 2e-3


def test_bias_and_mask_are_read_once(watch):
    """A warp copies 32 rows of a part with as few memory transactions as their bytes need."""
    case = Case(**LONG | dict(heads=1, q_len=128, kv_len=256, bias="qk", mask="qk"))
    forward(case, ONE, start=watch.start)
    count = watch.counters["forward"]
    copied = {n: count.function.instructions[n].modifiers[:2] for n in count.global_}
    assert (
        sum(count.global_[n].sectors for n, form in copied.items() if form == ("async", "cg"))
        == case.q_len * case.kv_len * (2 + 1) // 32
    )
    assert count.bank_conflicts == 0


MODS = {name: dict(score_mod=name) for name in SCORE_MODS} | {f"mask-{name}": dict(mask_mod=name) for name in MASK_MODS}
MODS |= {
    "both": dict(score_mod="relative", mask_mod="gaps"),
    "both-packed": dict(mask_mod="document", score_mod="key-bias", causal=True)
    | dict(batch=3, q_lengths=(31, 150, 0), kv_lengths=(100, 210, 7), packed=True),
}


@pytest.mark.parametrize("options", in_tiers(MODS, ["both"]))
def test_mods(options):
    """Every warp classifies the tiles for itself, and all of them must visit the same ones."""
    case = Case(**LONG | options)
    check_forward(case, forward(case, blocks=1))


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        ((128, 128), "bfloat16"),
        exhaustive((128, 128), "float16"),
        exhaustive((192, 128), "bfloat16"),
        exhaustive((96, 96), "bfloat16"),
        exhaustive((72, 112), "float16"),
        exhaustive((128, 16), "bfloat16"),
    ],
    ids=str,
)
def test_planned_tile(dims, dtype):
    """The planned tile of a head dimension; the last tile of queries and of keys is partial."""
    case = Case(**LONG | dict(heads=1, kv_len=290, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, causal=True))
    check_forward(case, forward(case, tile=None))


@pytest.mark.parametrize("case", [PLAIN, exhaustive(LENGTHS)], ids=["plain", "lengths"])
def test_every_order_gives_the_same_bits(case):
    """Copies and mma complete early, late or at random; the grid has one block, two, or a block per tile."""
    results = [
        forward(case, tile, blocks, functools.partial(start, order=order, seed=seed))
        for order, seed, tile, blocks in (
            ("early", 0, TWO, None), ("late", 0, SINGLE, 1), ("random", 1, ONE, 2), ("random", 2, STRICT, 1),
        )
    ]  # fmt: skip
    check_forward(case, results[0])
    for result in results[1:]:
        assert result.out.tobytes() == results[0].out.tobytes() and result.lse.tobytes() == results[0].lse.tobytes()


@pytest.mark.parametrize(
    "dims",
    [{}, exhaustive(dict(head_dim=192, head_dim_v=128)), exhaustive(dict(head_dim=128, head_dim_v=64))],
    ids=["whole-tiles", "V-wraps-around", "K-wraps-around"],
)
def test_K_and_V_take_turns(dims, monkeypatch):
    """In the memory of three slots each takes the place of the other; some K or V of two panels wrap around its end."""
    case, tile = Case(**LONG | dict(kv_len=420) | dims), TWO._replace(stages=3)
    check_forward(case, forward(case, tile, 1, functools.partial(start, order="early")))
    check_forward(case, forward(case, tile, 1))
    with planted(monkeypatch, skip("wait-tile-before")), pytest.raises(ORDERING):
        forward(case, tile, 1)
    if case.head_dim_v == 128:
        with planted(monkeypatch, change("panel-of-turn", "n ^ 1", "n")), pytest.raises(errors.OutOfBounds):
            forward(case, tile, 1)


LAYOUTS = {
    "two": (dict(head_dim=64), 256, False),
    "V-of-64": (dict(head_dim=128, head_dim_v=64), 256, False),
    "one-of-128": (dict(head_dim=128), 128, False),
    "two-of-128": (dict(head_dim=128), 256, True),
    "stored-S": (dict(head_dim=64, bias=True), 256, True),
}


@pytest.mark.parametrize(("words", "block_q", "over"), LAYOUTS.values(), ids=LAYOUTS)
def test_tiles_whose_P_lies_over_S(words, block_q, over):
    """The engine reads the layout of tensor memory in the kernel, as the compiler does, and has strict tiles for it."""
    (problem,) = ahead.problems(dtype="bfloat16", engine="tcgen05", backward=False, **words)
    (tile,) = (each for each in tcgen05.tiles(problem, BLACKWELL) if each.block_q == block_q)
    assert (tile._replace(strict=True) in tcgen05.choices(problem, BLACKWELL)) == over
    assert bool(tcgen05.forms(problem, BLACKWELL, tile)) == over
    (step,) = tcgen05.launches(problem, BLACKWELL, tile)
    declarations, _ = assemble(step.kernel, dict(step.constants)).split('extern "C"', 1)
    nvrtc.compile(f'{declarations}static_assert(P_OVER_S == {over:d}, "");', step.kernel, "compute_100a")


@pytest.mark.parametrize("tile", in_tiers({"one": ONE, "two": TWO}, ["one"]))
def test_P_in_columns_of_its_own_relies_on_no_order(tile, monkeypatch):
    case = Case(**LONG | dict(q_len=40, heads=1))
    in_order = forward(case, tile, 1)
    monkeypatch.setattr(TensorMemory, "IN_ORDER", False)
    result = forward(case, tile, 1)
    assert result.out.tobytes() == in_order.out.tobytes() and result.lse.tobytes() == in_order.lse.tobytes()


OVER_S = dict(softcap=5.0)  # S is stored again, and P over it


@pytest.mark.parametrize("sizes", [dict(heads=1), dict(kv_len=60)], ids=["next-keys", "next-queries"])
def test_a_strict_order_waits_for_products(sizes, monkeypatch):
    """Only a strict order holds if mma of different accumulators are not in order; both give the same bits.

    S of the next keys takes the place of P; behind the last keys, S of the block's next queries does.
    """
    case = Case(**LONG | dict(q_len=40) | OVER_S | sizes)
    plain = forward(case, ONE, 1)
    monkeypatch.setattr(TensorMemory, "IN_ORDER", False)
    strict = forward(case, ONE._replace(strict=True), 1)
    assert strict.out.tobytes() == plain.out.tobytes() and strict.lse.tobytes() == plain.lse.tobytes()
    with pytest.raises(errors.PendingCopy):
        forward(case, ONE, 1)
    with planted(monkeypatch, skip("wait-PV")), pytest.raises(errors.PendingCopy):
        forward(case, ONE._replace(strict=True), 1)


def test_a_check_and_a_tune_run_both_orders(monkeypatch):
    chosen, _ = planned(Case(**LONG | OVER_S), None, "sm_100a", engine="tcgen05")
    assert not chosen.tile.strict
    assert {tile.strict for tile, _ in candidates(chosen, "tcgen05")} == {False, True}
    trial = Trial(q_len=20, kv_len=140, heads=1, backward=False, options=tuple(OVER_S))
    task = calls.Task("call", "simulator:sm_100a", "tcgen05", trial)
    assert calls.work(task, lambda *_: None) is None
    with planted(monkeypatch, after("wait-PV", "PV_complete[t].wait();")), pytest.raises(errors.Deadlock):
        calls.work(task, lambda *_: None)


def test_a_call_by_name():
    """Only a call that names the engine gets it."""
    call = Case(**LONG | dict(q_len=20, kv_len=30)).call()
    arrays, how = (call.q, call.k, call.v), dict(backend="simulator:sm_100a", engine="tcgen05")
    out = cupy_flash.attention(*arrays, **how)
    expected = cupy_flash.attention(*arrays, backend="cpu")
    assert np.abs(out.astype(np.float32) - expected.astype(np.float32)).max() < 2e-3
    told = " ".join(cupy_flash.explain(*arrays, backend="simulator:sm_100a").split())
    assert "engine mma" in told and 'runs only on request: engine="tcgen05"' in told


def test_bytes_conflicts_and_clocks(watch):
    """A block loads its keys once for both tiles of queries; there are no bank conflicts."""
    case = Case(**LONG | dict(q_len=256, kv_len=256, heads=1))
    forward(case, start=watch.start)
    count, row = watch.counters["forward"], 2 * case.head_dim
    assert count.global_bytes_read == case.q_len * row + 2 * case.kv_len * row
    assert count.global_bytes_written == case.q_len * (row + 4)
    assert count.bank_conflicts == 0
    # Per tile of 128 x 128 scores four mma of 128 columns and eight of 64, two columns a clock.
    assert count.mma_clocks == 4 * (4 * 64 + 8 * 32)


FIRST_TILE = change("columns-of-S", "t * BLOCK_KV", "0 * t")
P_OF_FIRST_TILE = change("columns-of-P", "t * P_COLUMNS", "0 * t")
RELEASED_BY_HAND = change("release-by-commit", "tcgen05_commit(", "mbarrier_arrive(")
ORDERING = (errors.Race, errors.PendingCopy, errors.PendingRegister, errors.MissingFence, errors.Deadlock)
# name -> (bug, errors)
PLANTED = {
    "no wait for the first K": (skip("wait-first-K"), errors.PendingCopy),
    "no wait for K": (skip("wait-K"), errors.PendingCopy),
    "no wait for Q": (skip("wait-Q"), (errors.PendingCopy, errors.Uninitialised)),
    "no wait for V": (skip("wait-V"), (errors.PendingCopy, errors.Uninitialised)),
    "no wait for S": (skip("wait-S-ready"), (*ORDERING, errors.Uninitialised)),
    "no wait for P": (skip("wait-P"), ORDERING),
    "no wait for the last part of P": (skip("wait-complete-P-stored"), ORDERING),
    "no wait for O": (skip("wait-O-ready"), (*ORDERING, errors.Uninitialised)),
    "no wait for a factor": (skip("wait-factor"), (*ORDERING, errors.Uninitialised)),
    "no factor": (skip("send-factor"), errors.Uninitialised),
    "a factor overwritten": (skip("wait-factor-read"), ORDERING),
    "S overwritten before the softmax reads it": (skip("wait-S-read"), ORDERING),
    "S read by one warp": (change("arrivals-of-S-read", "SOFTMAX_WARPS", "1"), (*ORDERING, errors.BarrierMisuse)),
    "S never read": (skip("arrive-S-read"), errors.Deadlock),
    "P overwritten before PV reads it": (skip("wait-P-read"), ORDERING),
    "PV of the last keys alone": (change("signal-PV", "SIGNALS_PV ||", ""), errors.Deadlock),
    "PV before not waited for": (skip("wait-O-at-rest"), ORDERING),
    "P in flight": (skip("wait-stored-P"), ORDERING),
    "the last part of P in flight": (skip("wait-complete-P"), errors.PendingRegister),
    "S in flight": (skip("wait-loaded-S"), errors.PendingRegister),
    "no fences before": (skip("fence-before-sync"), errors.MissingFence),
    "no fences after": (skip("fence-after-sync"), errors.MissingFence),
    "an arrival before all lanes": (skip("accesses-of-all-lanes"), ORDERING),
    "no fence of the mbarriers": (skip("fence-mbarriers"), errors.MissingFence),
    "no barrier after the mbarriers": (skip("barrier-after-mbarriers"), (errors.Race, errors.Uninitialised)),
    "tensor memory kept": (skip("free-tensor-memory"), errors.SimulationError),
    "tensor memory freed early": (skip("end-of-roles"), errors.SimulationError),
    "lanes of another warp": (change("lanes-of-warp", "% 4", "/ 2 % 4"), errors.OutOfBounds),
    "no fence before O is stored": (skip("fence-O"), errors.MissingFence),
    "O stored before every lane has written": (skip("written-O"), errors.Race),
    "O over the last one": (skip("wait-O-buffer"), (errors.PendingCopy, errors.Race)),
    "O stored without a group": (skip("commit-O-store"), (errors.PendingCopy, errors.Race)),
    "one lane waits for O alone": (skip("waited-O-buffer"), (errors.PendingCopy, errors.Race)),
    "both S in the same columns": (FIRST_TILE, ORDERING),
    "both P in the same columns": (P_OF_FIRST_TILE, ORDERING),
    "P over O": (change("columns-of-P", "O(TILES)", "O(0)"), (*ORDERING, AssertionError)),
    "Hopper's descriptor": (change("tcgen05-version", "46", "45"), errors.BadDescriptor),
    "V not transposed": (change("major-of-V", "MN_MAJOR", "K_MAJOR"), (AssertionError, errors.SimulationError)),
    "half of the rows": (change("instruction-descriptor", "128u", "64u"), (AssertionError, errors.SimulationError)),
    "columns of Q and K": (change("mma-S", "k + n % 4", "k + (n + 1) % 4"), AssertionError),
    "columns of P": (change("mma-PV", "8 * n", "8 * (n ^ 1)"), AssertionError),
    "O not begun": (change("mma-PV", "adds || n > 0", "true"), errors.Uninitialised),
    "the block ends before its last slots are empty": (skip("drain-slots"), errors.PendingCopy),
    "the block ends before its last Q are released": (skip("drain-Q"), errors.PendingCopy),
    "slots released by hand": (RELEASED_BY_HAND, ORDERING),
    "correction not waited for": (change("arrivals-of-P", "2 *", ""), (*ORDERING, errors.BarrierMisuse)),
    "phases": (skip("signal-parity"), (*ORDERING, errors.Deadlock, errors.BarrierMisuse)),
    "Q released early": (after("wait-Q", "Q[t].release();"), (*ORDERING, errors.BarrierMisuse, errors.Deadlock)),
    "Q kept": (skip("release-Q"), errors.Deadlock),
    "no S": (skip("commit-S"), errors.Deadlock),
    "past the keys": (never("mask-row"), AssertionError),
    "visible keys": (change("visible-end", "keys.end - kv_start", "keys.end - 1 - kv_start"), AssertionError),
    "keys past the end": (never("visible-end"), AssertionError),
    "the wrong coefficients": (change("polynomial", "COEFFICIENTS[n],", "COEFFICIENTS[n + 1],"), AssertionError),
}  # fmt: skip
# name -> (bug, errors), with row maxima that grow from step to step
PLANTED_IN_RESCALING = {
    "O in flight": (skip("wait-loaded"), errors.PendingRegister),
    "rescaled O in flight": (skip("wait-rescaled-O"), errors.PendingRegister),
    "no rescaling": (never("rescales-O"), AssertionError),
    "the row max kept": (before("update-row-max", "if (softmax.m > -infinity()) return 1;"), AssertionError),
}
# name -> (bug, errors), with lengths
PLANTED_IN_LENGTHS = {
    "rows of V not cleared": (change("V-past-keys", "CLEARS_V", "false"), AssertionError),
    "the wrong rows cleared": (skip("clear-V"), AssertionError),
    "no fence after rows are cleared": (skip("fence-cleared-V"), errors.MissingFence),
    "cleared rows not waited for": (skip("wait-cleared-V"), (*ORDERING, AssertionError)),
    "rows cleared before they are loaded": (skip("wait-V-to-clear"), (*ORDERING, AssertionError)),
}
DROPPED = Case(**LONG | dict(heads=1, dropout=0.3))
PLANTED_IN_DROPOUT = {
    "words of another lane": (change("words-of-other-lane", "8", "4"), AssertionError),
    "the call of a lane": (change("call-of-lane", "2 : 0", "0 : 2"), AssertionError),
}
OUTSIDE = (errors.OutOfBounds, errors.Uninitialised)
PLANTED_IN_DENSE = {
    "a part in flight": (skip("wait-part"), (errors.PendingCopy, errors.Race, errors.Uninitialised)),
    "a part read before every lane has copied": (skip("copied-part"), ORDERING),
    "the next part not copied": (skip("next-part"), AssertionError),
    "rows of a part that do not exist": (change("rows-of-part", "lane_row + r < rows ? bytes : 0", "bytes"), OUTSIDE),
    "keys of a part that do not exist": (
        change("keys-of-chunk", "min(max(existing, 0) * BYTES, 16)", "16"),
        OUTSIDE,
    ),
}
BUGS = {
    name: (case, *bug)
    for case, bugs in (
        (PLAIN, PLANTED),
        (Case(**LONG | dict(scores="falling")), PLANTED_IN_RESCALING),
        (LENGTHS, PLANTED_IN_LENGTHS),
        (DROPPED, PLANTED_IN_DROPOUT),
        (
            Case(**LONG | dict(heads=1, window=(60, 20))),
            {"keys before the window": (never("visible-begin"), AssertionError)},
        ),
        (
            Case(**LONG | dict(heads=1, mask="b1qk", bias="qk")),
            {
                "bias and mask read past their rows": (change("copied-one-by-one", "r < rows &&", ""), OUTSIDE),
                "unaligned rows copied in chunks": (
                    change("aligned-rows", "column == 1 &&", "true ||"),
                    errors.SimulationError,
                ),
            },
        ),
        (ALIGNED, PLANTED_IN_DENSE),
        (
            replace(ALIGNED, dtype="bfloat16"),
            {"the other half of a word": (change("half-of-word", "n % 2 ?", "n % 2 == 0 ?"), AssertionError)},
        ),
        (Case(**LONG | dict(heads=1, softcap=5.0)), {"modified S in flight": (skip("wait-stored-S"), ORDERING)}),
        (
            Case(**LONG | dict(batch=2, q_lengths=(60, 61), kv_lengths=(100, 30), packed=True)),
            {"rows of the next sequence": (never("rows-of-O"), AssertionError)},
        ),
    )
    for name, bug in bugs.items()
}
FOUND_BY_DEFAULT = (
    "no wait for S", "no wait for P", "P in flight", "no fences after", "correction not waited for", "phases",
    "S overwritten before the softmax reads it", "P overwritten before PV reads it", "both P in the same columns",
    "cleared rows not waited for", "words of another lane",
)  # fmt: skip


@pytest.mark.parametrize("row", in_tiers(BUGS, FOUND_BY_DEFAULT))
def test_planted_bug_is_found(row, monkeypatch):
    """A single block with one slot for K and one for V computes all tiles, so that every slot is used again."""
    case, bug, error = row
    with planted(monkeypatch, bug), pytest.raises(error):
        check_forward(case, forward(case, SINGLE, blocks=1))


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (dict(head_dim=128), "sm_100a"),
        exhaustive(dict(head_dim=128), "sm_103a"),
        exhaustive(dict(head_dim=64, causal=True, packed=True), "sm_100a"),
        exhaustive(dict(head_dim=64, causal=True, dropout=0.1, softcap=30.0), "sm_100a"),
    ],
    ids=str,
)
def test_kernels_compile_without_spills(words, target):
    (problem,) = ahead.problems(**dict(dtype="bfloat16", engine="tcgen05", backward=False) | words)
    for tile in tcgen05.tiles(problem, BLACKWELL):
        (step,) = tcgen05.launches(problem, BLACKWELL, tile)
        result = nvrtc.compile(assemble(step.kernel, dict(step.constants)), step.kernel, target)
        took = result.resources[step.function]
        assert (took.spill_stores, took.spill_loads, result.warnings) == (0, 0, ()), tile


@pytest.mark.exhaustive
def test_kernels_compile_with_checks_of_tensor_memory(monkeypatch):
    chosen, _ = planned(PLAIN, None, "sm_100a", engine="tcgen05")
    (step,) = chosen.launches
    text = assemble(step.kernel, dict(step.constants))
    plain = nvrtc.compile(text, step.kernel, "sm_100a")
    monkeypatch.setattr(nvrtc, "checks_tensor_memory", True)
    checked = nvrtc.compile(text, step.kernel, "sm_100a")
    assert len(checked.code) > 1.2 * len(plain.code) and not checked.warnings


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(dict(arch="sm_90a"), "sm_90a lacks the instructions of sm_100a, sm_103a", id="arch"),
        pytest.param(dict(arch="sm_120"), "sm_120 lacks", id="consumer"),
        pytest.param(dict(dtype=np.dtype("float32")), "float32 is not float16 or bfloat16", id="dtype"),
        pytest.param(dict(kv_len=0), "without elements", id="no-keys"),
        pytest.param(dict(aligned=False), "multiple of 16 bytes, or rows are repeated or reversed", id="alignment"),
        pytest.param(dict(head_dim_v=136), "head dimension 136 of v is larger than 128", id="head-dimension"),
    ],
)
def test_refusal(how, words):
    call = Case(**LONG).call()
    problem, _ = pose("case", (call.q, call.k, call.v), Options(**call.options), call.packed)
    how, arch = {name: x for name, x in how.items() if name != "arch"}, how.get("arch", "sm_100a")
    assert engine_refusals("tcgen05", problem, device.named("sm_100a")) == []
    (reason,) = engine_refusals("tcgen05", problem._replace(**how), device.named(arch))
    assert words in reason
