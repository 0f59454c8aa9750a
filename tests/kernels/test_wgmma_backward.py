"""The wgmma backward on the simulator: every option, head dimensions, tiles, orders, planted bugs."""

import functools
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cases import Case, Result, assert_bitwise_equal, check, outcome, planned, run_kernels
from planting import after, before, change, never, planted, skip
from tiers import exhaustive, in_tiers
from wgmma_cases import BY_DEFAULT, LONG, OPTIONS

from cupy_flash import device, dispatch
from cupy_flash.arrays import Array
from cupy_flash.engines import wgmma
from cupy_flash.engines.wgmma.backward import Tile
from cupy_flash.gpu import ahead, run_plan
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.problem.records import Gradients, Saved
from cupy_flash.simulator import errors
from cupy_flash.simulator import run as simulator
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Each warpgroup has 64 keys, or two warpgroups share 64 keys; each tile accumulates dQ in another way.
TILES = {
    "keys": Tile(block_q=64, block_kv=128, stages=2, dq_in_bulk=False),
    "shared keys": Tile(block_q=64, block_kv=64, stages=2, dq_in_bulk=True),
}
GRADIENTS = Gradients._fields
LENGTHS = Case(**LONG | dict(batch=2, q_lengths=(150, 61), kv_lengths=(100, 210)))


def run(case, tile=None, start=start, **how):
    """Return results with the gradients of this tile, from `out` and `lse` of the CPU."""
    call, of_cpu = case.call(), outcome(case, "cpu")
    saved = Saved(call.dout, of_cpu.out, of_cpu.lse, call.dlse)
    chosen, operands = planned(case, saved, "sm_90a", tile, call, engine="wgmma", **how)
    return Result(of_cpu.out, of_cpu.lse, *run_plan.backward(chosen, operands, start).map(Array.numpy))


def backward_tile(tile):
    return lambda chosen: tile if chosen.problem.backward else None


def check_gradients(case, result):
    check(case, result, only=GRADIENTS)


BIASES = {"bias-gradient": dict(bias="1hqk", causal=True), "bias-per-key": dict(bias="b11k", sink=True)}


# Options that have a code path of their own if warpgroups share keys.
SHARED_KEYS_OPTIONS = (
    "causal",
    "window-empty-tiles",
    "softcap",
    "dropout",
    "all",
    "packed-causal",
    "grouped",
    "wide-values",
)
SHARED_KEYS = in_tiers(
    {name: OPTIONS[name] for name in SHARED_KEYS_OPTIONS}, ["causal", "dropout", "all", "packed-causal"]
)


@pytest.mark.parametrize("options", in_tiers(OPTIONS | BIASES, BY_DEFAULT | BIASES.keys()))
def test_option(options):
    case = Case(**LONG | options)
    check_gradients(case, run(case, TILES["keys"]))


def test_gradients_of_its_own_forward():
    case = Case(**LONG | OPTIONS["all"])
    check(case, run_kernels(case, arch="sm_90a", engine="wgmma", tile=backward_tile(TILES["keys"])))


@pytest.mark.parametrize("options", SHARED_KEYS)
def test_option_with_shared_keys(options):
    case = Case(**LONG | options)
    check_gradients(case, run(case, TILES["shared keys"]))


# In these tiles the exponentials of unmasked tiles precede the wait for dP, and those of masked tiles follow it. With
# dQ in bulk, S of the next tile is issued before dQ is added.
MANY_QUERIES = Tile(block_q=128, block_kv=128, stages=2, dq_in_bulk=False)
S_AHEAD = MANY_QUERIES._replace(dq_in_bulk=True)
MASKS = {"full": Case(**LONG | dict(heads=1)), "causal": Case(**LONG | dict(heads=1, causal=True))}


@pytest.mark.parametrize(
    ("mask", "tile"),
    [("causal", MANY_QUERIES), exhaustive("full", MANY_QUERIES), ("full", S_AHEAD), exhaustive("causal", S_AHEAD)],
)
def test_many_queries(mask, tile):
    check_gradients(MASKS[mask], run(MASKS[mask], tile))


@pytest.mark.parametrize(
    "bug", [skip("wait-dP-of-full-tile"), skip("wait-dP-of-masked-tile")], ids=["full tile", "masked tile"]
)
def test_many_queries_wait_for_products(bug, monkeypatch):
    with planted(monkeypatch, bug), pytest.raises(errors.PendingRegister):
        run(MASKS["full"], MANY_QUERIES)


# name -> (bug, errors)
AHEAD_PLANTED = {
    "no wait for the first S": (skip("ahead.wait-first-S"), errors.PendingRegister),
    "no wait for S": (skip("ahead.wait-S"), errors.PendingRegister),
    "no wait for dK": (skip("ahead.wait-dK"), errors.PendingRegister),
    "Q kept": (skip("ahead.release-Q"), errors.Deadlock),
}
# Three tiles of queries of two heads of a group: the slots of Q are filled again.
AHEAD = Case(**LONG | dict(q_len=140, kv_len=100, head_dim=16, head_dim_v=16))


@pytest.mark.parametrize("bug", in_tiers(AHEAD_PLANTED, ["no wait for S", "Q kept"]))
def test_planted_bug_of_S_ahead_is_found(bug, monkeypatch):
    bug, error = bug
    with planted(monkeypatch, bug), pytest.raises(error):
        run(AHEAD, S_AHEAD)


DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


def posed_backwards(dims, **words):
    """Return the backward problems of these head dimensions."""
    words = dict(head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16", engine="wgmma") | words
    return [problem for problem in ahead.problems(**words) if problem.backward]


@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (256, 256), exhaustive((96, 96)), exhaustive((160, 192))], ids=str
)
def test_every_tile(dims):
    """The test runs every tile that a plan may choose; the last tile of queries and of keys is partial."""
    dim, dim_v = dims
    case = Case(**LONG | dict(heads=1, q_len=141, head_dim=dim, head_dim_v=dim_v, dtype="bfloat16", causal=True))
    hopper = device.named("sm_90a", "cuda")
    legal_tiles = {tile for problem in posed_backwards(dims) for tile in wgmma.backward.tiles(problem, hopper)}
    assert {tile.dq_in_bulk for tile in legal_tiles} == ({False, True} if dim < 256 else {False})
    assert {tile.shares for tile in legal_tiles} == {1 if dim + dim_v <= 256 else 2}
    for tile in legal_tiles:
        check_gradients(case, run(case, tile))


ORDERS = [dict(order="early"), dict(order="late"), *(dict(order="random", seed=seed) for seed in range(2))]
IN_ORDER = Case(**LONG | dict(q_len=100, kv_len=290, heads=1, window=(200, 100)))
ONE_TURN = Case(**LONG | dict(q_len=60, kv_len=200, heads=1))  # two blocks, one query tile


@pytest.mark.parametrize("tile", TILES)
def test_bitwise_equal_in_any_order(tile):
    """No bit depends on the order of blocks, warps, copies and wgmmas, because dQ is added in order."""
    how = dict(tile=TILES[tile]._replace(dq_in_bulk=False), deterministic=True)
    first = run(IN_ORDER, **how)
    check_gradients(IN_ORDER, first)
    for order in ORDERS:
        assert_bitwise_equal(run(IN_ORDER, start=functools.partial(start, **order), **how), first, IN_ORDER)


def few_resident(work, blocks, most=100_000, **order):
    """Run launches with at most this many blocks of the backward resident, and `most` basic blocks."""
    with pytest.MonkeyPatch.context() as patch:
        few = functools.partial(simulator.launch, resident_lanes=3 * 128 * blocks, most_basic_blocks=most)
        patch.setattr(simulator, "launch", few)
        return start(work, **order)


# A causal mask and more keys than queries: blocks of higher keys start at higher queries.
CAUSAL = Case(**LONG | dict(q_len=100, kv_len=290, heads=1, causal=True))


@pytest.mark.parametrize("blocks", [1, exhaustive(2)])
@pytest.mark.parametrize("case", [CAUSAL, exhaustive(IN_ORDER)], ids=["causal", "window"])
def test_no_deadlock_in_any_order_of_blocks(case, blocks):
    """No block waits for one that has not started, in any order of starts and with any number of resident blocks."""
    how = dict(tile=TILES["keys"], deterministic=True)
    first = run(case, **how)
    for seed in range(2):
        starts = functools.partial(few_resident, blocks=blocks, order="random", seed=seed)
        assert_bitwise_equal(run(case, start=starts, **how), first, case)


@pytest.mark.parametrize(
    "plant",
    [
        never("draw-number"),
        change("first-keys-of-block", "(tiles - 1 - tile * per_block)", "tile * per_block"),
    ],
    ids=["not drawn", "lowest keys first"],
)
def test_planted_deadlock_is_found(plant, monkeypatch):
    starts = functools.partial(few_resident, blocks=1, most=5000, order="random", seed=1)
    with planted(monkeypatch, plant), pytest.raises(errors.Deadlock):
        run(CAUSAL, TILES["keys"], deterministic=True, start=starts)


def test_groups_of_heads_add_in_order(monkeypatch):
    """The first group has two heads of three key tiles each, the second group the third head."""
    case, how = replace(CAUSAL, heads=3, kv_heads=3, batch=1), dict(tile=TILES["keys"], deterministic=True)
    together = run(case, **how)
    check_gradients(case, together)
    starts = functools.partial(few_resident, blocks=1, order="random", seed=1)
    with planted(monkeypatch, change("GROUP_BLOCKS", "256", "7")):
        assert_bitwise_equal(run(case, start=starts, **how), together, case)


UNEQUAL = dict(batch=4, q_lengths=(31, 70, 0, 20), kv_lengths=(100, 150, 7, 0), packed=True)


def test_packed_sequences_add_in_order():
    """Sequences of unequal lengths, some of them empty, each have their own order of additions, whichever blocks start
    first.
    """
    case = Case(**LONG | UNEQUAL | dict(heads=1, head_dim=16, head_dim_v=16))
    starts = functools.partial(few_resident, blocks=1, order="random", seed=1)
    check_gradients(case, run(case, TILES["keys"], deterministic=True, start=starts))


def test_a_short_grid_adds_in_order():
    """Blocks of a grid with fewer blocks than tiles of keys take several consecutive tiles each."""
    how = dict(tile=TILES["keys"], deterministic=True)

    def short(work, **order):
        launches = tuple(
            step._replace(grid=(2, *step.grid[1:])) if step.function == "backward" else step for step in work.launches
        )
        return few_resident(work._replace(launches=launches), 1, order="random", **order)

    assert_bitwise_equal(run(CAUSAL, start=short, **how), run(CAUSAL, **how), CAUSAL)


# name -> (bug, error message)
SUM = "floating-point additions, whose sum depends on their order, of byte .* of 'dq_sums' without "
SCOPES = SUM + "a release and an acquire whose scopes include both blocks"
TURNS_PLANTED = {
    "no wait": (skip("wait-turn"), SCOPES),
    "no wait for the blocks before": (skip("wait-blocks-before"), SCOPES),
    "passed before the consumers have added": (skip("wait-added-dQ"), SUM),
    "released relaxed": (change("release-turn", "st.release", "st.relaxed"), SCOPES),
    "acquired relaxed": (change("acquire-turn", "ld.acquire", "ld.relaxed"), SCOPES),
    "acquired from the block": (change("acquire-turn", "gpu", "cta"), SCOPES),
    "one lane signals for all": (skip("added-dQ"), SUM),
}


@pytest.mark.parametrize(
    "bug", in_tiers(TURNS_PLANTED, ["no wait", "acquired from the block", "one lane signals for all"])
)
def test_planted_bug_of_turns_is_found(bug, monkeypatch):
    """The race is found even if the additions happen to be in order, because only release and acquire order them on a
    GPU.
    """
    bug, message = bug
    with planted(monkeypatch, bug), pytest.raises(errors.Race, match=message):
        run(ONE_TURN, TILES["keys"], deterministic=True)


@pytest.mark.parametrize("tile", TILES)
def test_dq_is_added_in_any_order(tile):
    """Only the rounding of dQ depends on the order."""
    case = replace(LENGTHS, heads=1)
    first = run(case, TILES[tile])
    for order in ORDERS:
        other = run(case, TILES[tile], start=functools.partial(start, **order))
        check_gradients(case, other)
        assert_bitwise_equal(other._replace(dq=first.dq), first, case)


@pytest.mark.parametrize(("tile", "dim"), [("keys", 64), ("keys", 96), ("shared keys", 64)])
def test_bytes_and_conflicts(tile, dim, watch):
    """K and V are read once in total, Q and dO once per block; there are no bank conflicts."""
    case = Case(**LONG | dict(q_len=256, kv_len=256, heads=1, head_dim=dim, head_dim_v=dim))
    run(case, TILES[tile], start=watch.start)
    count, blocks = watch.counters["backward"], 256 // TILES[tile].block_kv
    tensor, numbers = 256 * 2 * case.head_dim, 256 * 4
    assert count.global_bytes_read == 2 * tensor + blocks * (2 * tensor + 2 * numbers)
    assert count.global_bytes_written == 2 * tensor + blocks * 2 * tensor
    assert count.bank_conflicts == 0


def test_dout_that_tma_cannot_load_is_copied():
    """dout is copied first if its strides are 0, as for the gradient of a sum, or its address is not aligned."""
    case, how = Case(**LONG), dict(arch="sm_90a", engine="wgmma", tile=backward_tile(TILES["keys"]))
    call = case.call()
    same = np.broadcast_to(np.ones((), call.dout.dtype), call.dout.shape)
    odd = np.ones(call.dout.size + 1, call.dout.dtype)[1:].reshape(call.dout.shape)
    saved = [
        Saved(
            dout,
            *(array.numpy() for array in dispatch.run_forward(*planned(case, **how))),
            None,
        )
        for dout in (same.copy(), same, odd)
    ]
    expected, *results = (dispatch.run_backward(*planned(case, each, **how)) for each in saved)
    for result, name in product(results, ("dk", "dv")):
        assert getattr(result, name).numpy().tobytes() == getattr(expected, name).numpy().tobytes()


# Whole tiles, whose rows are not cleared.
FULL = Case(**LONG | dict(q_len=128, kv_len=128, heads=1))
# name -> (tile, or "full" for FULL in the tile "keys"; bug, errors; AssertionError if only the result shows the bug)
PLANTED = {
    "no wait for K": ("keys", change("wait-K-V", "rings.K.wait(),", ""), errors.PendingCopy),
    "no wait for V": ("keys", change("wait-K-V", ", rings.V.wait()", ""), errors.PendingCopy),
    "no wait for Q": ("keys", skip("backward.wait-Q"), errors.PendingCopy),
    "no wait for dO": ("full", skip("wait-dO"), errors.PendingCopy),
    "no wait for dO before its rows are cleared": (
        "shared keys",
        change("wait-rows-dO-to-clear", ", rings.dO.wait()", ""),
        errors.PendingCopy,
    ),
    "no wait for rows": ("full", skip("wait-rows"), (errors.Uninitialised, errors.Race)),
    "no wait for the rows that say what to clear": (
        "keys",
        change("wait-rows-dO-to-clear", "rings.rows.wait(),", ""),
        (errors.Uninitialised, errors.Race),
    ),
    "rows released by one lane for all": ("keys", skip("read-rows"), errors.Race),
    "rows do not wait for a place": ("keys", skip("acquire-rows"), (errors.Race, errors.Deadlock)),
    "rows of another head": ("keys", change("load-rows", "q_tiles.head", "0"), AssertionError),
    "first scores not waited for": ("full", change("wait-first-S", "<0>", "<1>"), errors.PendingRegister),
    "next scores not waited for": ("full", change("deferred.wait-S", "<0>", "<1>"), errors.PendingRegister),
    "scores not waited for": ("shared keys", change("backward.wait-S", "<1>", "<2>"), errors.PendingRegister),
    "gradients not waited for": ("keys", skip("wait-dP"), errors.PendingRegister),
    "dQ not waited for": ("keys", change("wait-dQ", "<1>", "<2>"), errors.PendingRegister),
    "no fence of dS": ("keys", skip("fence-dS"), errors.MissingFence),
    "dS fenced by one lane": ("keys", before("fence-dS", "if (lane_id() == 0)"), errors.MissingFence),
    "no barrier after dS": ("keys", skip("barrier-after-dS"), (errors.Race, errors.MissingFence, errors.Uninitialised)),
    "dV not waited for": (
        "keys",
        change("wait-dV", "1 : 2", "2 : 2"),
        (errors.PendingCopy, errors.PendingRegister),
    ),
    "dK not waited for": ("full", change("wait-dK", "<0>", "<1>"), errors.PendingRegister),
    "dK of no tile": (
        "full",
        change("no-tile-before", "dS_smem > 0", "true"),
        (errors.SimulationError, AssertionError),
    ),
    "one place for dS": ("keys", change("dS-buffer", "dS_index % 2", "0"), errors.PendingCopy),
    "one place for P": ("shared keys", change("dS-buffer", "dS_index % 2", "0"), errors.PendingCopy),
    "P not shared": (
        "shared keys",
        before("store-A", "if (consumer.share == 0)"),
        (errors.Uninitialised, AssertionError),
    ),
    "P read before the other consumer has stored it": (
        "shared keys",
        skip("barrier-after-dS") + after("issue-stored-dV", "named_barrier_sync(COMMON_BARRIER, CONSUMERS);"),
        (errors.Race, errors.MissingFence, errors.Uninitialised),
    ),
    "gradients not fenced": ("keys", skip("fence-gradients"), errors.MissingFence),
    "columns of the other share": (
        "shared keys",
        change("K-columns-of-share", "share.K", "8 - share.K"),
        AssertionError,
    ),
    "keys of the other share": (
        "keys",
        change("K-rows-of-consumer", "K_smem + consumer.keys", "K_smem + 64 * PANEL_ROW - consumer.keys"),
        AssertionError,
    ),
    "Q released before dK": (
        "shared keys",
        before("wait-dK-of-tile", "rings.Q.release();") + skip("release-Q"),
        errors.PendingCopy,
    ),
    "Q of the tile before released before dK": (
        "keys",
        change("deferred.release-Q", "wait_dK(dK_rmem), before.release_Q()", "before.release_Q(), wait_dK(dK_rmem)"),
        errors.PendingCopy,
    ),
    "dK leaves while K is read": ("keys", skip("barrier-before-dK"), errors.PendingCopy),
    "rows not cleared": ("keys", never("clear-rows"), AssertionError),
    "keys not cleared": ("keys", never("clear-keys-past-the-last"), AssertionError),
    "past the keys": (
        "keys",
        change("backward.mask-S", "q_tiles.masked(consumer.queries, QUERIES)", "false"),
        AssertionError,
    ),
    "dQ leaves over the last one": ("shared keys", skip("wait-dQ-buffer"), errors.PendingCopy),
    "no fence of dQ": ("shared keys", skip("fence-dQ"), errors.MissingFence),
    "dQ fenced by one lane": ("shared keys", before("fence-dQ", "if (lane_id() == 0)"), errors.MissingFence),
    "dQ leaves before every lane has written": ("shared keys", skip("written-dQ"), errors.Race),
    "one lane waits for the last dQ alone": ("shared keys", skip("waited-dQ-buffer"), errors.PendingCopy),
    "the last dQ not waited for": ("shared keys", skip("wait-last-dQ"), (errors.PendingCopy, errors.SimulationError)),
}


# One for each kind of error and of tile. Each of the others also fails a test without plants that runs by default.
FOUND_BY_DEFAULT = (
    "no wait for V", "no wait for rows", "scores not waited for", "dS fenced by one lane", "dK of no tile",
    "P read before the other consumer has stored it", "Q of the tile before released before dK", "rows not cleared",
    "dQ leaves before every lane has written", "the last dQ not waited for",
)  # fmt: skip


@pytest.mark.parametrize("bug", in_tiers(PLANTED, FOUND_BY_DEFAULT))
def test_planted_bug_is_found(bug, monkeypatch):
    tile, bug, error = bug
    case = LENGTHS
    if tile == "full":
        tile, case = "keys", FULL
    with planted(monkeypatch, bug), pytest.raises(error):
        check_gradients(case, run(case, TILES[tile]))


# D 192 is three panels of 64 columns, which two consumer warpgroups cannot split equally: the first one computes two
# panels of dK, the second one two of dQ.
UNEQUAL_SHARES = Case(**LONG | dict(q_len=64, kv_len=64, heads=1, head_dim=192, head_dim_v=128, dtype="bfloat16"))
UNEQUAL_PLANTED = {
    "dK from the middle": change(
        "first-columns-of-share", "K(consumer.share * (DIM / 8 - N_K))", "K(consumer.share * N_K)"
    ),
    "dQ from the middle": change(
        "first-columns-of-share", "Q(consumer.dQ_share * (DIM / 8 - N_Q))", "Q(consumer.dQ_share * N_Q)"
    ),
    "one share for both": never("second-share"),
}


@pytest.mark.parametrize("bug", in_tiers(UNEQUAL_PLANTED, ["dQ from the middle"]))
def test_planted_bug_of_unequal_shares_is_found(bug, monkeypatch):
    with planted(monkeypatch, bug), pytest.raises((AssertionError, errors.SimulationError)):
        check_gradients(UNEQUAL_SHARES, run(UNEQUAL_SHARES))


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((128, 128), dict(causal=True)),
        ((256, 256), dict(packed=True)),
        *(exhaustive(dims, words) for dims in DIMS for words in (dict(causal=True), dict(packed=True))),
    ],
    ids=str,
)
def test_every_tile_compiles_without_spills(dims, words):
    """The compiler must not warn about spills, serialized wgmma or an ignored setmaxnreg."""
    (problem,) = posed_backwards(dims, **words)
    hopper = device.named("sm_90a", "cuda")
    for tile in wgmma.backward.tiles(problem, hopper):
        step = wgmma.backward.launches(problem, hopper, tile)[1]
        result = nvrtc.compile(assemble(step.kernel, dict(step.constants)), step.kernel, "sm_90a")
        took = result.resources[step.function]
        assert (took.spill_stores, took.spill_loads, result.warnings) == (0, 0, ()), step
