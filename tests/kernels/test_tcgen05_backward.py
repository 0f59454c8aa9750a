"""The tcgen05 backward on the simulator: every option, head dimensions, orders of asynchronous work, planted bugs."""

import functools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cases import Case, Result, assert_bitwise_equal, check, outcome, planned
from mods import MASK_MODS, SCORE_MODS
from planting import after, change, never, planted, skip
from tiers import exhaustive, in_tiers
from wgmma_cases import LONG, OPTIONS

import cupy_flash
from cupy_flash import device
from cupy_flash.arrays import Array
from cupy_flash.engines import tcgen05
from cupy_flash.gpu import ahead, run_plan
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.measure.checks import calls
from cupy_flash.plan.plan import candidates
from cupy_flash.plan.refusals import engine_refusals
from cupy_flash.problem.build import pose
from cupy_flash.problem.recorded_call import Trial
from cupy_flash.problem.records import Gradients, Options, Saved
from cupy_flash.simulator import errors
from cupy_flash.simulator import run as simulator
from cupy_flash.simulator.asynchrony.tcgen05 import Tcgen05Queue
from cupy_flash.simulator.asynchrony.tensor_memory import TensorMemory
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHORT = LONG | dict(heads=1)
PLAIN = Case(**SHORT)
WIDE = dict(head_dim=128, head_dim_v=128)  # dQ lies over dP
FEW_SLOTS = tcgen05.Tile(block_q=128, block_kv=128, stages=2)


def backward(case, tile=None, blocks=None, start=start, arch="sm_100a", **how):
    """Return the results with the gradients of the engine, from `out` and `lse` of the CPU.

    `blocks` is the number of blocks per key/value head, None for one per tile of keys.
    """
    call, of_cpu = case.call(), outcome(case, "cpu")
    saved = Saved(call.dout, of_cpu.out, of_cpu.lse, call.dlse)
    chosen, operands = planned(case, saved, arch, tile, call, engine="tcgen05", **how)
    if blocks is not None:
        launches = (
            step._replace(grid=(blocks, *step.grid[1:])) if step.kernel == "tcgen05/backward" else step
            for step in chosen.launches
        )
        chosen = chosen._replace(launches=tuple(launches))
    return Result(of_cpu.out, of_cpu.lse, *run_plan.backward(chosen, operands, start).map(Array.numpy))


def check_gradients(case, result=None):
    check(case, backward(case) if result is None else result, only=Gradients._fields)


BIASES = {"bias-gradient": dict(bias="1hqk", causal=True), "bias-per-key": dict(bias="b11k", sink=True)}
BY_DEFAULT = ("all", "packed-causal")


@pytest.mark.parametrize("options", in_tiers(OPTIONS | BIASES, BY_DEFAULT))
def test_option(options):
    check_gradients(Case(**SHORT | options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.exhaustive
def test_option_in_one_block(options):
    """A single block computes all tiles of keys with few slots, so that every slot and every column is used again."""
    case = Case(**LONG | options)
    check_gradients(case, backward(case, FEW_SLOTS, blocks=1))


MODS = {name: dict(score_mod=name) for name in SCORE_MODS} | {f"mask-{name}": dict(mask_mod=name) for name in MASK_MODS}
MODS |= {
    "both": dict(score_mod="relative", mask_mod="gaps"),
    "both-packed": dict(mask_mod="document", score_mod="key-bias", causal=True)
    | dict(batch=3, q_lengths=(31, 150, 0), kv_lengths=(100, 210, 7), packed=True),
}


@pytest.mark.parametrize("options", in_tiers(MODS, []))
def test_mods(options):
    """Every warp classifies the tiles for itself, and all of them must visit the same ones."""
    case = Case(**LONG | options)
    check_gradients(case, backward(case, blocks=1))


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((128, 128), dict(dtype="bfloat16", causal=True)),
        exhaustive((128, 128), OPTIONS["all"]),
        exhaustive((128, 128), dict(dropout=0.3)),
        exhaustive((128, 128), OPTIONS["packed-causal"]),
        exhaustive((128, 128), dict(score_mod="relative", mask_mod="gaps")),
        exhaustive((96, 96), dict(causal=True)),
        exhaustive((72, 112), dict(dtype="bfloat16")),
        exhaustive((128, 16), {}),
        exhaustive((16, 128), {}),
    ],
    ids=str,
)
def test_head_dimension(dims, options):
    check_gradients(Case(**SHORT | dict(head_dim=dims[0], head_dim_v=dims[1]) | options))


LENGTHS = Case(**SHORT | dict(batch=2, q_lengths=(150, 61), kv_lengths=(100, 210)))
ORDERS = (dict(order="random", seed=0), dict(order="early"), dict(order="random", seed=1))


@pytest.mark.parametrize(
    "case",
    [replace(PLAIN, q_len=290, kv_len=128), *map(exhaustive, (LENGTHS, replace(LENGTHS, **WIDE)))],
    ids=["plain", "lengths", "wide"],
)
def test_every_order(case):
    """Copies and mma complete early, late or at random; only the rounding of dQ depends on the order of its blocks."""
    first = backward(case, FEW_SLOTS)
    check_gradients(case, first)
    for order in ORDERS[: None if case.batch > 1 else 1]:
        other = backward(case, FEW_SLOTS, start=functools.partial(start, **order))
        check_gradients(case, other)
        assert_bitwise_equal(other._replace(dq=first.dq), first, case)


def few_resident(work, **order):
    """Run launches with one block of the backward resident."""
    with pytest.MonkeyPatch.context() as patch:
        few = functools.partial(simulator.launch, resident_lanes=tcgen05.THREADS, most_basic_blocks=100_000)
        patch.setattr(simulator, "launch", few)
        return start(work, **order)


IN_ORDER = Case(**SHORT | dict(q_len=100, kv_len=290, window=(200, 100)))


@pytest.mark.parametrize(
    "case",
    [exhaustive(IN_ORDER), exhaustive(replace(LENGTHS, causal=True)), exhaustive(replace(IN_ORDER, **WIDE))],
    ids=["window", "lengths", "wide"],
)
def test_deterministic_in_any_order(case):
    """No bit depends on the order of blocks, warps, copies and mma, and no block waits for one that has not started."""
    first = backward(case, deterministic=True)
    check_gradients(case, first)
    for order in ORDERS:
        for starts in (start, few_resident):
            other = backward(case, deterministic=True, start=functools.partial(starts, **order))
            assert_bitwise_equal(other, first, case)


def test_deterministic():
    case = Case(**SHORT | dict(q_len=60, kv_len=200))
    check_gradients(case, backward(case, deterministic=True))


STRICT = FEW_SLOTS._replace(strict=True)
TWO_STEPS = Case(**SHORT | dict(q_len=256, kv_len=40))


@pytest.mark.parametrize("dims", [{}, exhaustive(WIDE)], ids=["apart", "over-dP"])
def test_a_strict_order_waits_for_products(dims, monkeypatch):
    """Only a strict order holds if mma of different accumulators are not in order; both give the same bits."""
    case = replace(TWO_STEPS, **dims)
    first = backward(case, FEW_SLOTS)
    monkeypatch.setattr(TensorMemory, "IN_ORDER", False)
    assert_bitwise_equal(backward(case, STRICT), first, case)
    with pytest.raises(errors.PendingCopy):
        backward(case, FEW_SLOTS)
    for wait in ("wait-dV", "wait-dK"):
        with planted(monkeypatch, skip(wait)), pytest.raises(errors.PendingCopy):
            backward(case, STRICT)


def test_a_check_and_a_tune_run_both_orders(monkeypatch):
    call = PLAIN.call()
    saved = Saved(call.dout, call.dout, call.dlse, None)
    chosen, _ = planned(PLAIN, saved, "sm_100a", call=call, engine="tcgen05")
    assert {tile.strict for tile, _ in candidates(chosen, "tcgen05")} == {False, True} and not chosen.tile.strict
    task = calls.Task("call", "simulator:sm_100a", "tcgen05", Trial(q_len=20, kv_len=30, heads=1))
    with planted(monkeypatch, after("wait-products", "products_complete.wait();")), pytest.raises(errors.Deadlock):
        calls.work(task, lambda *_: None)


def test_a_commit_need_not_publish_what_its_thread_has_observed(monkeypatch):
    """The computation waits for rows itself, although the mma has waited for them before it issues S."""
    monkeypatch.setattr(Tcgen05Queue, "CUMULATIVE", False)
    check_gradients(TWO_STEPS)
    with planted(monkeypatch, skip("wait-rows-of-queries")), pytest.raises(errors.Race):
        backward(TWO_STEPS)


def test_bytes_conflicts_and_clocks(watch):
    """K and V are read once, Q and dO once per block; there are no bank conflicts."""
    case = Case(**SHORT | dict(q_len=256, kv_len=256))
    backward(case, start=watch.start)
    count, blocks = watch.counters["backward"], 2
    tensor, numbers = 256 * 2 * case.head_dim, 256 * 4
    assert count.global_bytes_read == 2 * tensor + blocks * (2 * tensor + 2 * numbers)
    assert count.global_bytes_written == 2 * tensor + blocks * 2 * tensor
    assert count.bank_conflicts == 0
    # Per tile of 128 x 128 scores 8 mma of 128 columns and 24 of 64, two columns a clock.
    assert count.mma_clocks == 4 * (8 * 64 + 24 * 32)


def test_a_call_by_name():
    """Only a call that names the engine gets it."""
    call = Case(**SHORT | dict(q_len=20, kv_len=30)).call()
    arrays, how = (call.q, call.k, call.v), dict(backend="simulator:sm_100a", engine="tcgen05")
    out, lse = cupy_flash.attention(*arrays, return_lse=True, **how)
    found = cupy_flash.attention_backward(call.dout, *arrays, out, lse, **how)
    expected = cupy_flash.attention_backward(call.dout, *arrays, out, lse, backend="cpu")
    for name in ("dq", "dk", "dv"):
        one, other = (np.asarray(getattr(x, name), np.float32) for x in (found, expected))
        assert np.abs(one - other).max() < 1e-2


# Three tiles of queries, and two of keys, the last of which are partial.
THREE = Case(**SHORT | dict(q_len=290, kv_len=150))
ORDERING = (errors.Race, errors.PendingCopy, errors.PendingRegister, errors.MissingFence, errors.Deadlock)
EITHER = (*ORDERING, errors.Uninitialised)
RESULT = (AssertionError, errors.SimulationError)
# name -> (bug, errors)
PLANTED = {
    "no wait for Q": (skip("wait-next-Q"), EITHER),
    "no wait for dO": (skip("wait-dO-tile"), EITHER),
    "no wait for cleared rows": (skip("wait-cleared-rows"), (*EITHER, AssertionError)),
    "rows do not wait for a slot": (skip("acquire-row-slot"), EITHER),
    "no wait for S": (skip("wait-S-of-queries"), EITHER),
    "no wait for P": (skip("wait-P-stored"), EITHER),
    "no wait for dP": (skip("wait-dP-ready"), EITHER),
    "no wait for dS": (skip("wait-dS-stored"), EITHER),
    "no wait for dQ": (skip("wait-dQ-ready"), EITHER),
    "dQ over dQ": (skip("wait-dQ-buffer-read"), EITHER),
    "no wait for dK and dV": (skip("wait-gradients"), EITHER),
    "no S": (skip("commit-S-of-queries"), errors.Deadlock),
    "no dP": (skip("commit-dP"), errors.Deadlock),
    "no dQ": (skip("commit-dQ"), errors.Deadlock),
    "no gradients": (skip("commit-gradients"), errors.Deadlock),
    "S in flight": (skip("wait-loaded-scores"), errors.PendingRegister),
    "dP in flight": (skip("wait-loaded"), errors.PendingRegister),
    "P in flight": (skip("wait-stored-P-halves"), ORDERING),
    "dS in flight": (skip("wait-stored-dS"), ORDERING),
    "dQ in flight": (skip("wait-loaded-dQ"), errors.PendingRegister),
    "no fence of dS": (skip("fence-dS-of-key"), errors.MissingFence),
    "one half of P": (change("arrivals-of-P-halves", "COMPUTE_WARPS", "HALF_WARPS"), (*EITHER, errors.BarrierMisuse)),
    "one half of dS": (change("arrivals-of-dS", "COMPUTE_WARPS", "HALF_WARPS"), (*EITHER, errors.BarrierMisuse)),
    "columns of a product": (change("mma-scores", "b + next", "b + (next ^ NEXT_16_COLUMNS)"), AssertionError),
    "halves of P and dS": (change("mma-sum", "* QUERIES", "* 32"), RESULT),
    "a sum not begun": (change("mma-sum", "adds || n > 0", "true"), errors.Uninitialised),
    "rows of dQ": (change("mma-dQ", "K + n", "K + (n ^ 1)"), AssertionError),
    "dS not swizzled": (
        change("chunk-of-dS", "swizzled_offset<BLOCK_KV>(row,", "swizzled_offset<BLOCK_KV>(8,"),
        RESULT,
    ),
    "dQ over dK": (change("columns-of-dQ", "(1 + n)", "n"), RESULT),
    "dQ leaves over the last one": (skip("wait-dQ-part"), errors.PendingCopy),
    "one lane waits for a part of dQ alone": (skip("waited-dQ-part"), errors.PendingCopy),
    "no fence of dQ": (skip("fence-dQ-part"), errors.MissingFence),
    "dQ leaves before every lane has written": (skip("written-dQ-part"), errors.Race),
    "the last dQ not waited for": (skip("wait-last-dQ-part"), (errors.PendingCopy, errors.SimulationError)),
    "rows of dQ past the end": (never("rows-of-dQ"), RESULT),
    "dK and dV read before every lane has written": (skip("written-gradient"), errors.Race),
    "dK not scaled": (skip("scale-gradient"), AssertionError),
    "keys past the end": (never("rows-of-keys"), RESULT),
    "slots released by hand": (change("release-by-commit", "tcgen05_commit(", "mbarrier_arrive("), ORDERING),
    "phases": (skip("signal-parity"), (*ORDERING, errors.BarrierMisuse)),
    "an arrival before all lanes": (skip("accesses-of-all-lanes"), ORDERING),
    "rows cleared by numbers of other lanes": (skip("written-row-numbers"), errors.Race),
    "slots filled again too early": (
        change("arrivals-of-readers", "init(dO, 1, 2)", "init(dO, 1, 1)"),
        (*EITHER, errors.BarrierMisuse),
    ),
    "no wait for the rows to clear": (skip("wait-Q-dO-to-clear"), errors.PendingCopy),
    "no fence of cleared rows": (skip("fence-cleared-queries"), errors.MissingFence),
    "tensor memory kept": (skip("free-tensor-memory"), errors.SimulationError),
    "tensor memory freed early": (skip("end-of-roles"), errors.SimulationError),
    "no fences before": (skip("fence-before-sync"), errors.MissingFence),
    "no fences after": (skip("fence-after-sync"), errors.MissingFence),
}

PLANTED_IN_LENGTHS = {
    "keys not cleared": (never("past-the-keys"), RESULT),
    "rows not cleared": (skip("clear-rows-of-warp"), RESULT),
    "queries not cleared": (never("clear-queries"), RESULT),
    "no fence of cleared keys": (skip("fence-cleared-keys"), errors.MissingFence),
    "no wait for the keys to clear": (skip("wait-K-V-to-clear"), errors.PendingCopy),
}
BUGS = {
    name: (case, *bug)
    for case, bugs in (
        (THREE, PLANTED),
        (replace(THREE, **WIDE), {"dP over dQ": (skip("wait-dQ-over-dP"), EITHER)}),
        (
            replace(THREE, **WIDE),
            {"out of step with the slots": (skip("wait-every-tile"), (*EITHER, errors.BarrierMisuse))},
        ),
        (LENGTHS, PLANTED_IN_LENGTHS),
        (
            Case(**SHORT | dict(causal=True)),
            {
                "queries before the diagonal": (never("visible-queries-begin"), AssertionError),
                "no mask": (change("mask-of-key", "q_tiles.masked(first, QUERIES)", "false"), AssertionError),
            },
        ),
        (
            Case(**SHORT | dict(window=(60, 20))),
            {"queries past the window": (never("visible-queries-end"), AssertionError)},
        ),
        (
            Case(**SHORT | dict(causal="top_left", q_len=100, kv_len=200)),  # no query sees the last tile of keys
            {
                "no wait for K": (change("wait-K-V-tiles", "rings.K.wait(),", ""), EITHER),
                "no wait for V": (change("wait-K-V-tiles", ", rings.V.wait()", ""), EITHER),
            },
        ),
        (Case(**LONG), {"rows of another head": (change("rows-of-head", "q_tiles.head", "0"), AssertionError)}),
        (
            Case(**SHORT | dict(dropout=0.3)),
            {
                "words of another key": (change("words-of-other-key", "8", "4"), AssertionError),
                "the call of a key": (change("call-of-key", "+ number", ""), AssertionError),
                "dropped queries": (change("drop-by-key", "kept >> n", "kept >> (n ^ 1)"), AssertionError),
                "no wait for dP of parts": (skip("wait-dP-of-parts"), EITHER),
                "parts in flight": (skip("wait-stored-parts"), ORDERING),
            },
        ),
    )
    for name, bug in bugs.items()
}
FOUND_BY_DEFAULT = ("no wait for dS", "dP over dQ", "out of step with the slots", "no fence of dS")


@pytest.mark.parametrize("row", in_tiers(BUGS, FOUND_BY_DEFAULT))
def test_planted_bug_is_found(row, monkeypatch):
    """A single block with few slots computes all tiles, so that every slot is used again."""
    case, bug, error = row
    with planted(monkeypatch, bug), pytest.raises(error):
        check_gradients(case, backward(case, FEW_SLOTS, blocks=1))


SUM = "floating-point additions, whose sum depends on their order, of byte .* of 'dq_sums' without "
TURNS = {
    "no wait for the turn": skip("wait-turn-of-dQ"),
    "no wait for the blocks before": skip("wait-blocks-before"),
    "passed before all warps have added": skip("wait-added-dQ"),
    "one lane signals for all": skip("added-dQ-of-warp"),
}


@pytest.mark.parametrize("bug", in_tiers(TURNS, []))
def test_planted_bug_of_turns_is_found(bug, monkeypatch):
    case = Case(**SHORT | dict(q_len=60, kv_len=200))
    with planted(monkeypatch, bug), pytest.raises(errors.Race, match=SUM):
        backward(case, deterministic=True)


BLACKWELL = device.named("sm_100a", "cuda")


@cache
def problems(**words):
    return [x for x in ahead.problems(**dict(dtype="bfloat16", engine="tcgen05") | words) if x.backward]


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (dict(head_dim=128, causal=True), "sm_100a"),
        exhaustive(dict(head_dim=128), "sm_103a"),
        exhaustive(dict(head_dim=64, causal=True, packed=True), "sm_100a"),
        exhaustive(dict(head_dim=64, dropout=0.1), "sm_100a"),
        exhaustive(dict(head_dim=128, causal=True, packed=True), "sm_100a"),
        exhaustive(dict(head_dim=128, causal=True, dropout=0.1, softcap=30.0), "sm_100a"),
    ],
    ids=str,
)
def test_kernel_compiles_without_spills(words, target):
    for problem in problems(**words):
        for tile in tcgen05.tiles(problem, BLACKWELL):
            step = next(x for x in tcgen05.launches(problem, BLACKWELL, tile) if x.kernel == "tcgen05/backward")
            result = nvrtc.compile(assemble(step.kernel, dict(step.constants)), step.kernel, target)
            took = result.resources[step.function]
            assert (took.spill_stores, took.spill_loads, result.warnings) == (0, 0, ()), tile


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(dict(head_dim=192), "192 is larger than 128: dK and dV", id="head-dimension"),
        pytest.param(dict(head_dim_v=60), "rows of dout, 60 numbers each", id="dout"),
        pytest.param(dict(shared_kv=True), "values inside keys", id="shared"),
    ],
)
def test_refusal(how, words):
    call = PLAIN.call()
    problem, _ = pose("case", (call.q, call.k, call.v), Options(**call.options), call.packed)
    problem = problem._replace(backward=True)
    assert engine_refusals("tcgen05", problem, device.named("sm_100a")) == []
    (reason,) = engine_refusals("tcgen05", problem._replace(**how), device.named("sm_100a"))
    assert words in reason
