"""The wgmma forward on the simulator: every option, head dimensions, tiles, orders of asynchronous work, planted bugs,
refusals, and the tensor maps of its launches.
"""

import functools
from itertools import cycle, product

import ml_dtypes
import numpy as np
import pytest
from cases import Case, Result, check, planned, posed
from planting import after, always, before, change, never, planted, skip
from tiers import exhaustive, in_tiers
from wgmma_cases import BY_DEFAULT, LONG, OPTIONS

import cupy_flash
from cupy_flash import device
from cupy_flash.arrays import as_array
from cupy_flash.engines import wgmma
from cupy_flash.engines.launch import Box
from cupy_flash.gpu import ahead, run_plan
from cupy_flash.gpu.params import pack_maps
from cupy_flash.gpu.tensor_map import decode, encode_for_simulator
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.plan.plan import plan
from cupy_flash.plan.refusals import engine_refusals
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options, UnsupportedError
from cupy_flash.simulator import errors
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TILE = wgmma.forward.Tile(block_q=128, block_kv=64, stages=2, persistent=False, takes_turns=False, paired=False)
DRAWING, PAIRED = TILE._replace(persistent=True, takes_turns=True), TILE._replace(paired=True, takes_turns=True)
BUFFERED = DRAWING._replace(o_buffer=True)
# With more than 64 columns of V and 80 keys, PV is issued in two parts.
IN_PARTS = TILE._replace(block_kv=96)
PLAIN = Case(**LONG)
WIDE = Case(**LONG | dict(heads=1, head_dim=32, head_dim_v=96, causal=True))
LENGTHS = Case(**LONG | dict(batch=2, heads=1, q_lengths=(150, 61), kv_lengths=(100, 210)))
PACKED_LENGTHS = Case(**LONG | dict(batch=3, q_lengths=(30, 70, 61), kv_lengths=(100, 30, 190), packed=True))


def forward(case, tile=TILE, blocks=None, start=start, call=None):
    """Return (out, lse) of a case in a tile (None: the planned one); a persistent grid has `blocks` blocks."""
    chosen, operands = planned(case, None, "sm_90a", tile, call, engine="wgmma")
    if blocks is not None:
        *others, step = chosen.launches
        chosen = chosen._replace(launches=(*others, step._replace(grid=(blocks, 1, 1))))
    out, lse = (array.numpy() for array in run_plan.forward(chosen, operands, start))
    return Result(out, lse, *[None] * 5)


def check_forward(case, result=None):
    check(case, forward(case) if result is None else result, only=("out", "lse"))


@pytest.mark.parametrize("options", in_tiers(OPTIONS, BY_DEFAULT))
def test_option(options):
    check_forward(Case(**LONG | options))


# Cases in which one tile could leak state into the next tile of its block: sequence lengths, options per head, phases
# of the mbarriers.
DRAWN_CASES = {name: OPTIONS[name] for name in ("lengths-zero", "packed", "packed-causal", "all")} | {
    "bias": dict(bias="bhqk", batch=2),
    "heads-of-a-cache": dict(heads=5, kv_heads=5, causal=True),
}


@pytest.mark.parametrize(("options", "tile"), [*zip(DRAWN_CASES.values(), cycle([DRAWING, BUFFERED]))], ids=DRAWN_CASES)
def test_blocks_draw_tiles(options, tile, monkeypatch):
    """The tile scheduler must hand out each tile exactly once.

    L2 is planted to hold the keys of two heads, so that the last of five heads is in a group of its own.
    """
    case = Case(**LONG | options)
    with planted(monkeypatch, change("L2-bytes", "32 << 20", f"2 * 256 * {LONG['kv_len']}")):
        result = forward(case, tile, blocks=3)
    check_forward(case, result)


@pytest.mark.parametrize("dtype", [exhaustive("float16"), "bfloat16"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_planned_tile(dims, dtype):
    """The planned tile of each head dimension; the last tile of queries and of keys is partial."""
    dim, dim_v = dims
    case = Case(**LONG | dict(heads=1, kv_len=290, head_dim=dim, head_dim_v=dim_v, dtype=dtype, causal=True))
    check_forward(case, forward(case, tile=None))


@pytest.mark.parametrize(("case", "other"), [(PLAIN, PAIRED), (LENGTHS, DRAWING)], ids=["plain", "lengths"])
def test_every_order_gives_the_same_bits(case, other):
    """Copies and wgmmas complete early, late or at random; the grid has one block, several, multicast pairs, or a block
    per tile.
    """
    results = []
    for order, seed, *how in (
        ("early", 0),
        ("early", 0, other),
        ("late", 0, DRAWING, 1),
        ("late", 0, other),
        ("random", 1, other),
        ("random", 2, DRAWING, 2),
        ("late", 0, BUFFERED, 1),
        ("random", 3, BUFFERED, 2),
    ):
        results.append(forward(case, *how, start=functools.partial(start, order=order, seed=seed)))
    check_forward(case, results[0])
    for result in results[1:]:
        assert result.out.tobytes() == results[0].out.tobytes() and result.lse.tobytes() == results[0].lse.tobytes()


@pytest.mark.parametrize(("order", "block_kv"), [("early", 144), ("late", 96), ("random", 112)])
def test_products_in_parts(order, block_kv):
    tile = IN_PARTS._replace(block_kv=block_kv)
    check_forward(WIDE, forward(WIDE, tile, start=functools.partial(start, order=order)))


@pytest.mark.parametrize("how", [(TILE,), (DRAWING, 1), (PAIRED,)], ids=["grid", "draws", "pairs"])
def test_bytes_and_conflicts(how, watch):
    """Each query tile loads its keys once, also in a persistent grid or with KV multicast; there are no bank conflicts.

    Tiles of equal cost are assigned without a counter in global memory.
    """
    case = Case(**LONG | dict(q_len=256, kv_len=192, heads=1))
    forward(case, *how, start=watch.start)
    count, row = watch.counters["forward"], 2 * case.head_dim
    assert count.global_bytes_read == case.q_len * row + 2 * 2 * case.kv_len * row
    assert count.global_bytes_written == case.q_len * (row + 4)
    assert count.bank_conflicts == 0


RELEASE_Q_EARLY = "if (lane_id() == 0) mbarrier_arrive(rings.Q.empty());"
# name -> (bug, errors), in a padded batch
PLANTED = {
    "no wait for Q": (skip("wait-Q"), errors.Uninitialised),
    "no wait for K": (skip("wait-K"), errors.PendingCopy),
    "no wait for V": (skip("wait-V"), errors.PendingCopy),
    "no wait for an empty place": (skip("wait-empty-slot"), (errors.BarrierMisuse, errors.PendingCopy, errors.Race)),
    "too few bytes": (
        change("expect-bytes", "TILE_BYTES", "TILE_BYTES / 2"),
        (errors.BarrierMisuse, errors.PendingCopy, errors.Deadlock),
    ),
    "too many bytes": (change("expect-bytes", "TILE_BYTES", "TILE_BYTES + 16"), errors.Deadlock),
    "parity of a full place": (
        change("wait-full-slot", "parity()", "parity() ^ 1"),
        (errors.PendingCopy, errors.Deadlock, errors.Uninitialised),
    ),
    "parity of the round": (
        change("slot-parity", "index / SLOTS % 2", "0"),
        (errors.PendingCopy, errors.Deadlock, errors.BarrierMisuse),
    ),
    "arrivals": (change("init-empty-slot", "WARP", "WARP + 1"), errors.Deadlock),
    "no release": (skip("release-slot"), errors.Deadlock),
    "no fence of the mbarriers": (skip("fence-mbarriers"), errors.MissingFence),
    "no barrier after the mbarriers": (skip("barrier-after-mbarriers"), (errors.Race, errors.Uninitialised)),
    "no fence of registers": (skip("fence-S"), errors.MissingFence),
    "scores not waited for": (change("wait-S", "<1>", "<2>"), errors.PendingRegister),
    "sums not waited for": (skip("wait-O"), (errors.PendingRegister, errors.PendingCopy)),
    "sums not ended": (skip("commit-PV"), (errors.PendingRegister, errors.PendingCopy)),
    "no fence before O is stored": (skip("fence-O"), errors.MissingFence),
    "O fenced by one lane": (before("fence-O", "if (lane_id() == 0)"), errors.MissingFence),
    "O stored before every lane has written": (skip("written-O"), errors.Race),
    "stores not waited for": (skip("wait-stored-O"), (errors.PendingCopy, errors.Race)),
    "stores not ended": (skip("commit-O"), (errors.PendingCopy, errors.Race)),
    "Q released before O has left": (
        before("store-O", RELEASE_Q_EARLY),
        (errors.BarrierMisuse, errors.Race, errors.PendingCopy, errors.Deadlock),
    ),
    "nothing cleared": (skip("clear-tile-counter"), errors.Uninitialised),
    "the end not told": (skip("tell-end"), errors.Deadlock),
    "work told before the last is done": (skip("wait-tile-read"), errors.Race),
    "the first turn": (skip("first-turn"), errors.Deadlock),
    "a turn not passed": (skip("pass-turn"), errors.Deadlock),
    "a turn kept": (change("signal-turn", "(warpgroup + 1)", "warpgroup"), (errors.BarrierMisuse, errors.Deadlock)),
    "halves of O": (change("lane-of-16-bytes", "lane_id() / 16", "1 - lane_id() / 16"), AssertionError),
    "no fence after rows are cleared": (skip("fence-cleared-rows"), errors.MissingFence),
    "no barrier after rows are cleared": (skip("barrier-after-cleared-rows"), (errors.Race, errors.MissingFence)),
    "rows not cleared": (never("clear-rows-past-keys"), AssertionError),
    # Hardware ignores the leading offset of K-major matrices, the named check kmajor-lbo does not.
    "LBO of K-major": (change("K-major-LBO", "16", "64 * 128"), errors.BadDescriptor),
    "another swizzle": (change("descriptor-swizzle", "128", "256"), (AssertionError, errors.PendingCopy)),
    "panels": (change("S-panel", "k % 4 * NEXT_16_COLUMNS, k", "(k + 1) % 4 * NEXT_16_COLUMNS, k"), AssertionError),
    "past the keys": (change("mask-S", "kv_tiles.masked()", "false"), AssertionError),
}
# name -> (bug, errors), in a packed batch
PLANTED_IN_ROWS = {
    "no fence before Q is copied": (skip("fence-rows-of-O"), errors.MissingFence),
    "Q released before rows of O have left": (
        before("store-O", RELEASE_Q_EARLY),
        (errors.BarrierMisuse, errors.Race, errors.PendingCopy, errors.Deadlock),
    ),
    "places without a tile": (always("has-tile"), AssertionError),
    "where a sequence begins": (change("sequence-of-slot", "<=", "<"), AssertionError),
    "rows of the next sequence": (
        change("rows-of-sequence", "first + r >= end ||", ""),
        (AssertionError, errors.SimulationError),
    ),
}
# name -> (bug, errors), with KV multicast
PLANTED_IN_PAIRS = {
    "the other block not told": (
        change("release-slot-of-cluster", "lane_id() < CLUSTER_SIZE", "lane_id() < 1"),
        errors.Deadlock,
    ),
    "the other block not waited for": (
        change("init-empty-slot", "CLUSTER_SIZE *", ""),
        (errors.BarrierMisuse, errors.PendingCopy, errors.Race),
    ),
    "half of the keys twice": (change("load-half", "row + half", "row"), AssertionError),
    "halves in one place": (change("load-half", "panel + half * ROW", "panel"), errors.SimulationError),
    "exit before the other block": (skip("wait-cluster-exit"), errors.EarlyExit),
}
# name -> (bug, errors), with PV in two parts
PLANTED_IN_PARTS = {
    "the other part not issued": (skip("issue-late-PV"), AssertionError),
    "a part begins too late": (change("issue-late-PV", "<EARLY_PV,", "<EARLY_PV + 1,"), AssertionError),
    "the other part not waited for": (change("wait-O", "<0>", "<1>"), (errors.PendingRegister, errors.PendingCopy)),
    "V of the other part": (skip("wait-V"), errors.PendingCopy),
}
# name -> (bug, errors), with a buffer for O
PLANTED_IN_BUFFERS = {
    "O over the last one": (skip("wait-O-buffer"), (errors.PendingCopy, errors.Race)),
    "the last O not waited for": (skip("wait-last-O"), (errors.PendingCopy, errors.SimulationError)),
    "one lane waits for O alone": (skip("waited-O-buffer"), (errors.PendingCopy, errors.Race)),
    "Q kept": (skip("release-Q"), errors.Deadlock),
    "Q released before its last scores": (
        after("wait-Q", RELEASE_Q_EARLY),
        (errors.BarrierMisuse, errors.PendingCopy, errors.Race, errors.Deadlock),
    ),
    "the record read after Q is released": (skip("read-tile"), errors.Race),
}
NO_KEYS = Case(**LONG | dict(batch=3, heads=1, q_lengths=(60, 150, 20), kv_lengths=(70, 0, 64)))
BUGS = {
    name: (case, how, *bug)
    for case, how, bugs in (
        (LENGTHS, (DRAWING, 1), PLANTED),
        (PACKED_LENGTHS, (DRAWING, 1), PLANTED_IN_ROWS),
        (PLAIN, (PAIRED,), PLANTED_IN_PAIRS),
        (WIDE, (IN_PARTS,), PLANTED_IN_PARTS),
        (NO_KEYS, (BUFFERED, 1), PLANTED_IN_BUFFERS),
        (PLAIN, (DRAWING, 2), {"every other tile": (change("next-tile", "gridDim", "2 * gridDim"), AssertionError)}),
    )
    for name, bug in bugs.items()
}


# One for each kind of error and of tile. Each of the others also fails a test without plants that runs by default.
FOUND_BY_DEFAULT = (
    "no wait for K", "no wait for an empty place", "parity of the round", "no fence of registers",
    "scores not waited for", "O stored before every lane has written", "nothing cleared", "a turn kept",
    "LBO of K-major", "past the keys", "places without a tile", "the other block not waited for",
    "exit before the other block", "V of the other part", "one lane waits for O alone",
    "every other tile",
)  # fmt: skip


@pytest.mark.parametrize("row", in_tiers(BUGS, FOUND_BY_DEFAULT))
def test_planted_bug_is_found(row, monkeypatch):
    """A single persistent block computes all tiles, so that every slot is reused; KV multicast needs two blocks."""
    case, how, bug, error = row
    with planted(monkeypatch, bug), pytest.raises(error):
        check_forward(case, forward(case, *how))


@pytest.mark.parametrize("seed", range(2))
def test_a_wait_without_a_loop_is_found(seed, monkeypatch):
    """A single try_wait may return before the phase is complete."""
    in_order = functools.partial(start, order="random", seed=seed)
    with planted(monkeypatch, change("try-wait-again", '"bra AGAIN;"', "")), pytest.raises(errors.SimulationError):
        forward(PLAIN, start=in_order)


HOPPER = device.named("sm_90a", "cuda")


def posed_forward(**words):
    """Return the forward problem of these options of `cupy_flash.compile`."""
    (problem,) = ahead.problems(**dict(dtype="bfloat16", engine="wgmma", backward=False) | words)
    return problem


@pytest.mark.parametrize(
    "words", [dict(head_dim=128), exhaustive(dict(head_dim=64, causal=True, packed=True))], ids=str
)
def test_the_largest_tiles_compile_without_spills(words):
    """The compiler must not warn about spills, serialized wgmma or an ignored setmaxnreg.

    `python -m bench static` compiles every tile that a plan may choose.
    """
    largest_of = {
        (tile.block_q, tile.persistent): tile
        for tile in sorted(wgmma.tiles(posed_forward(**words), HOPPER))
        if tile.persistent == tile.takes_turns and not tile.paired
    }
    assert len(largest_of) >= 3
    for largest in largest_of.values():
        step = wgmma.launches(posed_forward(**words), HOPPER, largest)[-1]
        result = nvrtc.compile(assemble(step.kernel, dict(step.constants)), step.kernel, "sm_90a")
        took = result.resources[step.function]
        assert (took.spill_stores, took.spill_loads, result.warnings) == (0, 0, ()), largest


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_switches_of_the_tiles(dims):
    """Every head dimension has tiles with and without each switch (fields 3 to 5 of a tile).

    KV multicast is legal only if neighbouring query tiles visit the same keys, and a persistent grid is planned only
    for many unequal tiles.
    """
    problem = posed_forward(head_dim=dims[0], head_dim_v=dims[1], causal=True)
    ways = {(*way, False) for way in product((False, True), repeat=2)}
    pairs = {(False, True, True), (False, False, True)}
    full = posed_forward(head_dim=dims[0], head_dim_v=dims[1])._replace(q_len=4096)
    for each, expected in ((problem, ways), (full, ways | pairs), (full._replace(q_len=100), ways)):
        assert {tile[3:6] for tile in wgmma.tiles(each, HOPPER)} == expected
    few = plan(problem._replace(q_len=1000, kv_len=1000, heads=2, kv_heads=2), HOPPER)
    many = plan(problem._replace(q_len=4096, kv_len=4096, heads=16, kv_heads=16), HOPPER)
    assert [step.function for step in few.launches] == ["forward"] and few.workspaces(1000, 1000) == ()
    assert [step.function for step in many.launches] == ["clear", "forward"]
    assert [workspace.name for workspace in many.workspaces(4096, 4096)] == ["tile_counter"]
    assert [step.grid for step in many.launches] == [(1, 1, 1), (HOPPER.units, 1, 1)]
    # Tiles of equal cost are assigned round-robin, without a counter.
    dealt = plan(full, HOPPER, next(tile for tile in wgmma.tiles(full, HOPPER) if tile.persistent))
    assert [step.function for step in dealt.launches] == ["forward"] and dealt.workspaces(4096, 4096) == ()


# Refusals


def refused(case=None, arch="sm_90a", call=None, **changes):
    """Return the reasons for which wgmma refuses a problem."""
    case = Case(**LONG) if case is None else case
    call = case.call() if call is None else call
    problem, _ = pose("case", (call.q, call.k, call.v), Options(**call.options), call.packed)
    return engine_refusals("wgmma", problem._replace(**dict(engine="wgmma") | changes), device.named(arch))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(dict(arch="sm_80"), "sm_80 lacks the instructions of sm_90a", id="arch"),
        pytest.param(dict(arch="sm_100"), "sm_100 lacks", id="newer-arch"),
        pytest.param(dict(dtype=np.dtype("float32")), "float32 is not float16 or bfloat16", id="dtype"),
        pytest.param(dict(kv_len=0), "without elements", id="no-keys"),
        pytest.param(dict(empty=True), "without elements", id="no-rows"),
        pytest.param(dict(aligned=False), "multiple of 16 bytes, or rows are repeated or reversed", id="alignment"),
        pytest.param(dict(head_dim_v=264), "head dimension 264 is larger than 256", id="head-dimension"),
        pytest.param(dict(batch=65536), "65536 sequences", id="grid"),
    ],
)
def test_refusal(how, words):
    assert refused() == []
    (reason,) = refused(**how)
    assert words in reason


def test_strides_and_addresses_that_tma_cannot_load():
    """TMA refuses some strides and addresses; unless the engine is requested, another one runs, and explain says
    why.
    """
    case = Case(**LONG)
    call = case.call()

    def shifted(x, by):
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + 8), x.dtype)
        wide[..., by : by + x.shape[-1]] = x
        return wide[..., by : by + x.shape[-1]]

    repeated = np.broadcast_to(call.k[:, :1], call.k.shape)
    columns = np.asfortranarray(call.v)  # a call copies such a V to contiguous rows before the launch
    for arrays, aligned in (
        (dict(q=shifted(call.q, 8)), True),
        (dict(q=shifted(call.q, 1)), False),
        (dict(k=repeated), False),
        (dict(k=call.k[:, ::-1]), False),
        (dict(v=columns), True),
        (dict(q=call.q[..., :60], k=call.k[..., :60]), True),
        (dict(q=np.ascontiguousarray(call.q[..., :60]), k=call.k[..., :60]), False),
    ):
        reasons = refused(call=call._replace(**arrays))
        assert (reasons == []) == aligned, arrays.keys()
    odd = call._replace(q=shifted(call.q, 1))
    with pytest.raises(UnsupportedError, match="wgmma: not every row of q, k and v starts at a multiple of 16 bytes"):
        cupy_flash.attention(*odd[:3], backend="simulator:sm_90a", engine="wgmma")
    assert "not wgmma  not every row" in cupy_flash.explain(*odd[:3], backend="simulator:sm_90a")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("q_rows", "kv_rows"), [(0, 5), (5, 0)])
def test_packed_batches_without_rows_are_refused(q_rows, kv_rows, dtype):
    """max_seqlen allows rows but the arrays have none: the call is refused before a tensor map is encoded."""
    q, k = (np.zeros((rows, 2, 64), np.dtype(getattr(ml_dtypes, dtype))) for rows in (q_rows, kv_rows))
    bounds = [np.array([0, rows], np.int32) for rows in (q_rows, kv_rows)]
    how = dict(backend="simulator:sm_90a", engine="wgmma")
    with pytest.raises(UnsupportedError, match="wgmma: TMA cannot load from a tensor without elements"):
        cupy_flash.attention_varlen(q, k, k, *bounds, 5, 5, **how)
    if dtype == "bfloat16":
        lse = np.full((2, q_rows), -np.inf, np.float32)
        with pytest.raises(UnsupportedError, match="wgmma: TMA cannot load from a tensor without elements"):
            cupy_flash.attention_varlen_backward(q, q, k, k, q, lse, *bounds, 5, 5, **how)


@pytest.mark.parametrize("head_dim_v", [64, 60])
def test_rows_that_tma_can_load_but_not_store(head_dim_v):
    """TMA loads rows of 60 elements with a stride of 64 but cannot store them; V in column-major order is copied
    first.
    """
    case = Case(**LONG | dict(head_dim=60, head_dim_v=head_dim_v, kv_heads=2))
    call = case.call()

    def in_rows_of_64(x):
        wide = np.full((*x.shape[:-1], 64), np.nan, x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    v = np.asfortranarray(call.v) if head_dim_v == 64 else in_rows_of_64(call.v)
    call = call._replace(q=in_rows_of_64(call.q), k=in_rows_of_64(call.k), v=v)
    check_forward(case, forward(case, call=call))


# Tensor maps


def test_maps_of_every_layout():
    """Shapes are (column, row, head, batch); strides are in bytes."""
    expected = {"bshd": (2 * 6 * 64, 2 * 64, 2 * 6 * 64 * 50), "bhsd": (2 * 64, 2 * 64 * 50, 2 * 6 * 64 * 50)}
    for layout in ("bshd", "bhsd"):
        case = Case(**LONG | dict(q_len=50, heads=6, batch=3, layout=layout))
        _, operands = posed(case)
        maps = pack_maps((Box("q", 32, 64),), {"q": operands.q}, layout, lambda _: 4096, encode_for_simulator)
        tensor_map = decode(maps.tobytes())
        assert (tensor_map.address, tensor_map.shape, tensor_map.box) == (4096, (64, 50, 6, 3), (64, 32, 1, 1))
        assert (tensor_map.strides, tensor_map.swizzle, tensor_map.item_bytes) == (expected[layout], 128, 2)


def test_map_of_memory_that_another_array_has_had():
    """Arrays at one address have different tensor maps if their shapes, strides or boxes differ."""
    q = np.zeros((2, 8, 4, 64), np.float16)
    arrays = [as_array(x, "q") for x in (q, q.reshape(2, 4, 8, 64), q[:, ::2], q[:1], q.reshape(2, 8, 2, 128))]
    boxes = [(Box("q", rows, 64),) for rows in (8, 16)]
    maps = {
        pack_maps(box, {"q": x}, layout, lambda x: x.pointer, encode_for_simulator).tobytes()
        for x in arrays
        for box in boxes
        for layout in ("bshd", "bhsd")
    }
    assert len({x.pointer for x in arrays}) == 1 and len(maps) == len(arrays) * 4


def test_map_of_a_packed_batch():
    """All sequences form one batch entry; the stride of a single head may be any legal value."""
    _, operands = posed(Case(**LONG | dict(batch=2, q_lengths=(9, 8), kv_lengths=(7, 7), packed=True)))
    boxes = (Box("q", 128, 64), Box("k", 64, 64))
    maps = pack_maps(boxes, operands.arrays(), "thd", lambda _: 256, encode_for_simulator).tobytes()
    q, k = decode(maps[:128]), decode(maps[128:])
    assert (q.shape, q.strides) == ((64, 20, 2, 1), (2 * 2 * 64, 2 * 64, 128))
    assert (k.shape, k.strides) == ((64, 17, 1, 1), (2 * 64, 128, 128))
