"""The cycle model of a mainloop, on loops with known numbers of clocks, and the speeds predicted from it."""

import json
from statistics import median

import pytest

from bench.__main__ import main
from bench.gpu import Regime
from bench.kernel_development import backward_events, cycles, events, marks, predict, sass, semaphore
from bench.kernel_development.published import FLASH_ATTENTION_3, FLASH_ATTENTION_3_MAINLOOPS, LENGTHS
from bench.kernel_development.roles import segments
from bench.results import ROOT

LOOP = "BRA `(.L_x_1)"
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
EXP = [f"MUFU.EX2 R{n}, R{n}" for n in range(100, 132)]


@pytest.mark.parametrize(
    ("loop", "clocks"),
    [
        # each instruction waits for the result of the previous one
        pytest.param(["FADD R1, R1, R2"] * 100, 4 * 100, id="latency-of-fma"),
        pytest.param([f"FADD R{n}, R{n}, R2" for n in range(3, 103)], 100, id="one-issue-a-clock"),
        pytest.param([f"FMNMX R{n}, R{n}, R2, !PT" for n in range(3, 103)], 2 * 100, id="integer-lanes"),
        pytest.param(EXP, 8 * len(EXP), id="exponentials"),
        pytest.param([PRODUCT] * 8, 8 * 64, id="products"),
        pytest.param([PRODUCT, WAIT, *EXP], 64 + 8 * len(EXP), id="products-before-exponentials"),
        pytest.param([PRODUCT, *EXP, WAIT], 8 * len(EXP), id="products-under-exponentials"),
    ],
)
def test_one_warpgroup(loop, clocks):
    """The prediction may exceed the known clocks by the waits and the branch, at most 40 clocks."""
    assert clocks <= cycles.clocks_of_iteration([*loop, LOOP], 1) <= clocks + 40


def test_warpgroups_overlap():
    """The wgmmas of one warpgroup overlap with the exponentials of the other, unless a named barrier prevents it."""
    loop = [*[PRODUCT] * 4, WAIT, *EXP]  # 256 clocks of wgmma, then 256 clocks of exponentials
    alone = cycles.clocks_of_iteration([*loop, LOOP], 1)
    together = cycles.clocks_of_iteration([*loop, LOOP], 2, stagger=300)
    assert 2 * 256 <= together < 1.15 * alone < 1.15 * 560
    barrier = "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100"
    assert cycles.clocks_of_iteration([barrier, *loop, LOOP], 2) > 1.3 * together


def test_ping_pong_alternates():
    """Ping-pong: BAR.SYNC waits for the turn and BAR.ARV signals it, so that wgmmas of two warpgroups never overlap."""
    loop = ["BAR.SYNC.DEFER_BLOCKING R1, 0x100", PRODUCT, WAIT, "BAR.ARV R2, 0x100", LOOP]
    assert cycles.clocks_of_iteration(loop, 2) > 2 * 64


def test_operands_from_shared_memory_limit_a_product():
    """The tensor cores need 16 clocks for a 64 x 32 x 16 wgmma. With both operands in shared memory that would be 192
    bytes per clock, of which shared memory delivers 128, so it takes 24.
    """
    from_shared = "HGMMA.64x32x16.F32 R24, gdesc[UR4], R24, gsb0"
    from_registers = "HGMMA.64x32x16.F32 R24, R88, gdesc[UR4], R24, gsb0"
    assert [cycles.decode(text).product for text in (from_shared, from_registers)] == [24, 16]
    assert cycles.tensor_clocks([from_shared]) == 16
    assert cycles.shared_bytes("STSM.16.M88.4 [R10], R216") == 4 * 4 * 128


def test_resources_of_a_step():
    step = predict.step([*[PRODUCT] * 4, *EXP, WAIT, LOOP], 2, 128 * 100)
    assert step.resources == {
        "tensor cores": 2 * 4 * 64,
        "shared memory": 100 + 2 * 4 * 128 * 32 / 128,
        "MUFU": 2 * 8 * len(EXP),
        "issue": 2 * 38,
    }
    assert max(step.resources.values()) <= step.overlapping <= step.alone


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_steps_are_the_visited_tiles(causal):
    """A work tile, of 128 queries in the forward and 128 keys in the backward, costs the tiles that it visits plus one
    overhead.
    """
    work = range(8)
    visited = sum(2 * (i + 1) for i in work) if causal else 8 * 16
    for backward, tile in ((False, (128, 64)), (True, (64, 128))):
        regime = Regime("bfloat16", 128, 1024, causal, backward, tokens=1024)
        assert predict.steps(regime, *tile) == 16 * (visited + 8 * predict.TILE_OVERHEAD)


def test_overhead_explains_the_published_speeds():
    """The speed of a step and the overhead of a work tile give the published speed at every length."""
    speeds = {
        Regime("bfloat16", 128, seqlen, causal): published
        for causal in (False, True)
        for seqlen, published in zip(LENGTHS, FLASH_ATTENTION_3[False, 128, causal], strict=True)
    }
    per_step = {regime: regime.flops / predict.steps(regime, 128, 128) for regime in speeds}
    scale = median(published / per_step[regime] for regime, published in speeds.items())
    errors = [abs(scale * per_step[regime] / published - 1) for regime, published in speeds.items()]
    assert median(errors) < 0.04 and max(errors) < 0.15


def test_published_speeds_are_a_fraction_of_the_speed_with_overlap():
    """FlashAttention-3's published speeds are about 0.61 (0.54 to 0.72) of what the model finds for its SASS."""
    assert (round(predict.SPEED_OF_OVERLAP, 2), round(predict.ERROR, 2)) == (0.61, 0.05)
    for (fp8, *regime), mainloop in FLASH_ATTENTION_3_MAINLOOPS.items():
        published = None if fp8 else FLASH_ATTENTION_3.get(tuple(regime), [None])[-1]
        assert published in (None, mainloop.published)
        assert mainloop.published is None or 0.54 <= mainloop.published / mainloop.overlapping <= 0.72


LISTING = [
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3",
    "QGMMA.64x96x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0",
    "MUFU.EX2 R1, R1",
    "@P0 BRA `(.L_x_2)",
    "REDG.E.ADD.F32x4 [R6.64], R152",
    WAIT,
    "@P2 BRA `(.L_x_1)",
]


def test_the_steady_path_reduces_and_waits():
    """A branch around additions to global memory is off the steady path; a wait records the instructions issued before
    it.
    """
    labels = {".L_x_1": 0, ".L_x_2": 5}
    steady, longest = (round_(LISTING, labels, 0, 6) for round_ in (sass.shortest_round, sass.longest_round))
    assert steady == longest == LISTING
    mainloop = sass.Mainloop(steady, longest)
    assert [wait[1:] for wait in mainloop.waits()] == [(0, 0), (1, 1)]
    assert mainloop.counts() == dict(
        products=1, ldmatrix=0, copies=0, reductions=1, exp=1, float=0, convert=0, shared=0, rest=4
    )


def test_a_regime_is_predicted():
    """The forward at D 128 lies between its two hypotheses, and is at best bound by the tensor cores."""
    regime = Regime("bfloat16", 128, 16384, False)
    (prediction,) = predict.predict([regime], lambda _: None)
    low, high = prediction.r_mm
    assert 0.7 < low < high < 1070 / predict.MATMUL_TFLOPS * 1.02
    assert prediction.binding[0] == "one warpgroup's chain"
    assert prediction.tensor_clocks == 2 * prediction.tile[0] * prediction.tile[1] * 128 / predict.MULTIPLY_ADDS
    # The exponentials of a tile precede the wait for PV of the previous tile, so the two overlap. Half of PV is issued
    # before the wait for S, and the other half after the row max.
    waits = [wait for wait in prediction.waits if "WARPGROUP" in wait.instruction]
    assert [wait.exps for wait in waits] == [0, prediction.exps]
    assert [wait.products for wait in waits] == [8 + 4, 8 + prediction.tile[1] // 16]
    (row,) = predict.table([prediction._asdict()]).rows
    fraction, error = predict.SPEED_OF_OVERLAP * high, predict.ERROR * high
    assert row[:4] == [regime.name, "{}x{}".format(*prediction.tile), f"{fraction:.2f} ± {error:.2f}", "0.92"]
    assert row[4] == f"{790 * low:.0f} / {790 * high:.0f}"
    assert row[5:8] == ["646 / 1044", "648", "128x176"]  # FlashAttention-3's


def test_stale_predictions_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(marks, "MARKS", {Regime("bfloat16", 128, 512 * 2**n, False): None for n in range(3)})
    launches = {regime.name: predict.launch_of(regime) for regime in marks.MARKS}
    rows = [{"regime": name, "fingerprint": predict.fingerprint(launch)} for name, launch in launches.items()]
    monkeypatch.setattr(events, "DIMS", ((64, 64),))
    of_blackwell = [
        {"arch": arch, "dims": (64, 64), "fingerprint": predict.fingerprint(events.launch_of((64, 64), arch))}
        for arch in events.ARCHS
    ]
    monkeypatch.setattr(backward_events, "CASES", [("sm_100a", 64), ("sm_103a", 64)])
    of_backward = [
        {"arch": arch, "dim": 64, "fingerprint": predict.fingerprint(backward_events.launch_of(64, arch))}
        for arch, _ in backward_events.CASES
    ]
    command = ["predict", "--check", "--out", str(tmp_path)]

    stored = {"tcgen05": of_blackwell, "tcgen05_backward": of_backward}

    def status(rows):
        (tmp_path / "predict.json").write_text(json.dumps(stored | {"predict": rows}))
        return main(command)

    assert status(rows) == 0
    of_blackwell[1]["fingerprint"] = rows[0]["fingerprint"] = "of another kernel"
    of_backward.pop()
    assert status([*rows[:2], {"regime": "without a mark", "fingerprint": ""}]) == 1
    output = capsys.readouterr().out
    named = [line.removeprefix("stale: ") for line in output.splitlines() if line.startswith("stale: ")]
    assert named == [
        *(rows[0]["regime"], rows[2]["regime"], "without a mark"),
        *("tcgen05, sm_103a, D 64/64", "tcgen05/backward, sm_103a, D 64"),
    ]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_turns_of_one_head(causal):
    """One head has 4 tiles of keys and 4 of queries, and each block runs on an SM of its own.

    Under a full mask a block waits until the block of the next higher keys has added to a tile of dQ. Under a causal
    mask that block starts at a later query and so is always ahead: no block waits.
    """
    step, regime = 3000.0, Regime("bfloat16", 2048, 512, causal, backward=True, tokens=512)
    waited = 0.0 if causal else 3 * (semaphore.WAIT + semaphore.PASS)
    assert regime.batch * regime.heads == 1
    efficiency = semaphore.efficiency(regime, 128, 128, step, overhead=1, units=4)
    assert efficiency == pytest.approx(5 * step / (5 * step + waited))
    # One SM runs one block after the other, so a block finds that the previous one has added to every tile already.
    assert semaphore.efficiency(regime, 128, 128, step, overhead=1, units=1) == pytest.approx(1)


def blackwell(dims=(128, 128), slots=4, exponentials=128, mufu=8, **changed):
    """Return a schedule whose softmax has nothing but exponentials."""
    parts = (0, exponentials * 3 // 4, exponentials // 4)
    softmax = events.Softmax(tuple(events.Counter({"MUFU": n}) for n in parts))
    return events.Schedule(dims, slots, softmax, issue=1, mufu=mufu, factors=events.SIGNAL)._replace(**changed)


@pytest.mark.parametrize(
    ("schedule", "clocks"),
    [
        pytest.param(blackwell(exponentials=8), 8 * 80 + 8 * 0.92 * 80, id="tensor-cores"),
        pytest.param(blackwell((64, 64), 8, exponentials=256), 8 * 256, id="exponentials"),
        pytest.param(blackwell((64, 64), 8, exponentials=512, mufu=4), 4 * 512, id="of-sm_103a"),
    ],
)
def test_the_slowest_unit_bounds_a_step_of_blackwell(schedule, clocks):
    """One step more takes what the unit needs for two tiles of queries: no role waits for long."""
    short, long = (events.Block(schedule, steps).run() for steps in (4, 12))
    assert 2 * clocks <= (long - short) / 8 + 1e-6 <= 2.06 * clocks


def test_P_in_columns_of_its_own():
    """S of the next keys and PV run under the softmax of the same tile of queries, which otherwise waits for both."""
    over = blackwell((64, 64), 8, exponentials=104)
    first, *parts = over.softmax.segments
    apart = over._replace(softmax=events.Softmax((first, events.Counter(), *parts)), p_over_s=False)
    clocks = [events.Block(each, steps).run() for each in (over, apart) for steps in (4, 12)]
    exponentials = 2 * 8 * 104
    assert (clocks[1] - clocks[0]) / 8 > 1.05 * exponentials
    assert exponentials <= (clocks[3] - clocks[2]) / 8 + 1e-6 <= 1.01 * exponentials


def test_slots_and_polynomials_of_blackwell():
    """With one slot of V the tensor cores wait for copies, unless K and V take turns in the memory of three slots.

    A polynomial replaces its share of exponentials.
    """
    two, by_turns, four = (events.Block(blackwell((192, 128), slots, 8), 8).run() for slots in (2, 3, 4))
    assert two > 1.6 * by_turns and four < by_turns < 1.03 * four
    assert by_turns == events.Block(blackwell((192, 128), 3, 8), 8).run()
    softmax = blackwell().softmax.emulating(1 / 8)
    assert [segment["MUFU"] for segment in softmax.segments] == [0, 84, 28]
    assert sum(segment["FFMA2"] for segment in softmax.segments) == 8 * events.POLYNOMIAL["FFMA2"]


ROW_LOOP = [
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3",
    "LDTM.x32 R4, tmem[UR8]",
    *EXP[:16],
    "@P1 BRA `(.L_x_2)",
    "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR10], RZ",
    "@P2 BRA `(.L_x_1)",
]


def test_parts_of_a_row_are_repeated(monkeypatch):
    """The loop over parts of 32 columns of a row is executed four times for 128 columns."""
    monkeypatch.setattr(sass, "disassemble", lambda _: (ROW_LOOP, {".L_x_1": 0, ".L_x_2": 1}))
    loop = sass.row_loop(b"", 128)
    assert loop.counts()["exp"] == 4 * 16 and sum("LDTM" in each for each in loop.steady) == 4
    assert len(loop.steady) == 4 * 18 + 3 and [wait.exps for wait in loop.waits()] == [0]


def test_predictions_of_blackwell_are_stored():
    """The first marks are reached as planned; shares are the best of the model."""
    rows = json.loads((ROOT / "bench" / "results" / "predict.json").read_text())["tcgen05"]
    assert [(row["arch"], tuple(row["dims"])) for row in rows] == [(a, d) for a in events.ARCHS for d in events.DIMS]
    for row in rows:
        planned = row["fractions"][events.SHARES.index(row["planned"])]
        assert planned > max(row["fractions"]) - 0.04  # the model's own scatter: roles fall in and out of step
        assert row["strict"] is None if row["dims"] == [64, 64] else planned - 0.05 < row["strict"] < planned + 0.01
        assert planned >= events.FIRST_MARKS.get(tuple(row["dims"]), 0)
        assert row["pair"] is None if row["dims"][1] < 128 else row["pair"] > planned


def backward(dim=128, exponentials=8, stores=0, mufu=8, dq_buffers=2, slots=4):
    """Return a schedule whose computation has nothing but exponentials in P and stores in dS."""
    compute = events.Counter({"MUFU": exponentials}), events.Counter({"STS": stores})
    add = events.Counter(), events.Counter({"UBLKRED": dim // 32})
    return backward_events.Schedule(dim, slots, dq_buffers, compute, add, issue=1, mufu=mufu)


def clocks_of_a_step(schedule):
    """Return the clocks that a block with one step more takes longer."""
    short, long = (backward_events.Block(schedule, steps).run() for steps in (4, 12))
    return (long - short) / 8


DV, S = 0.92 * 8 * 63, 4 * 80


@pytest.mark.parametrize(
    ("schedule", "clocks", "waits"),
    [
        # operands, reductions, loads, and stores of 16 bytes of each lane
        pytest.param(backward(stores=64), 2048 + 512 + 512 + 2 * 4 * 64 * 4, 300, id="shared-memory"),
        pytest.param(backward(64), 8 * 80 + 8 * (1 + 2 * 0.92) * 63, 5, id="tensor-cores"),
        # The next S is written over P, once dV has read it.
        pytest.param(backward(64, exponentials=256), 2 * 8 * 256 + DV + S, 190, id="exponentials"),
        pytest.param(backward(64, exponentials=512, mufu=4), 2 * 4 * 512 + DV + S, 190, id="of-sm_103a"),
    ],
)
def test_the_slowest_unit_bounds_a_step_of_a_backward(schedule, clocks, waits):
    assert clocks <= clocks_of_a_step(schedule) + 1e-6 <= clocks + waits
    units = backward_events.resources(schedule)
    assert max(units.values()) == pytest.approx(clocks - (DV + S) * (units["MUFU"] > 4000))


def test_dq_over_dp_and_slots_of_a_backward():
    """The tensor cores wait until dQ has been loaded if it lies over dP, and for copies if there is one slot of dO."""
    apart, over, few = map(clocks_of_a_step, (backward(64), backward(64, dq_buffers=0), backward(64, slots=2)))
    assert over - apart == pytest.approx(2 * events.SIGNAL + events.LOADED) and few > 1.1 * apart


def test_a_strict_order_of_blackwell():
    """It costs the latency of two waits where the tensor cores bind a step, and nothing where shared memory does."""

    def added(schedule, block):
        clocks = [block(schedule._replace(strict=strict), steps).run() for strict in (False, True) for steps in (4, 12)]
        return (clocks[3] - clocks[2] - clocks[1] + clocks[0]) / 8

    waits = 2 * (events.SIGNAL + events.ISSUED)
    assert added(blackwell(exponentials=8), events.Block) == pytest.approx(waits)
    assert added(backward(64), backward_events.Block) == pytest.approx(waits)
    assert added(backward(stores=64), backward_events.Block) <= 0


def test_a_pair_of_ctas(monkeypatch):
    """Its mma take fewer clocks, each CTA copies half of K and V, and dQ waits for an exchange of dS."""
    at_70 = 2 * (1 + 0.92) * 8 * 70

    def of_forward(**changed):
        short, long = (events.Block(blackwell(exponentials=8, **changed), steps).run() for steps in (4, 12))
        return (long - short) / 8

    assert of_forward(pair=True) == of_forward(pair=True, slots=2) == pytest.approx(at_70)
    assert of_forward(slots=2) > 2 * at_70
    monkeypatch.setattr(events, "COPIED_BYTES", 8.0)
    copies = 2 * 128 * (128 + 128) / 8
    assert copies / 2 <= of_forward(pair=True) + 1e-6 < 1.02 * copies / 2 and of_forward() + 1e-6 >= copies
    pair = backward(stores=64)._replace(pair=True)
    # operands, half of the reductions, loads, the exchange, and stores of 16 bytes of each lane
    shared = 1536 + 256 + 512 + 384 + 2 * 4 * 64 * 4
    early = clocks_of_a_step(pair)
    assert shared <= early < shared + 600
    monkeypatch.setattr(backward_events, "EXCHANGED", backward_events.EXCHANGED + 1000)
    assert clocks_of_a_step(pair) > early + 500


@pytest.mark.parametrize(
    "reduction",
    ["UBLKRED.G.S.ADD.F32.RN [UR12], [UR7], UR4", "REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR14][R4.64], R8"],
    ids=["bulk", "in-order"],
)
def test_the_loop_of_reductions(monkeypatch, reduction):
    """The innermost loop that waits and reduces, up to each arrival; not one inside it, or of another role."""
    wait, loaded, arrival = ROW_LOOP[0], "LDTM.x32 R4, tmem[UR8]", ROW_LOOP[-2]
    role = [wait, loaded, arrival, reduction, "@P2 BRA `(.L_x_3)", "@P2 BRA `(.L_x_2)"]
    listing = [wait, loaded, ROW_LOOP[-1], *role]
    monkeypatch.setattr(sass, "disassemble", lambda _: (listing, {".L_x_1": 0, ".L_x_2": 3, ".L_x_3": 6}))
    loop = sass.reduction_loop(b"")
    assert loop.steady == role
    assert [part.total() for part in segments(loop.steady)] == [3, 3]


def test_predictions_of_the_backward_are_stored():
    """The first marks are reached; shared memory binds, so that bench/NOTES.md says why the goals are not."""
    rows = json.loads((ROOT / "bench" / "results" / "predict.json").read_text())["tcgen05_backward"]
    assert [(row["arch"], row["dim"]) for row in rows] == backward_events.CASES
    for row, cells in zip(rows, backward_events.table(rows).rows, strict=True):
        first, goal = backward_events.MARKS[row["dim"]]
        assert first <= row["fraction"] < goal and row["fraction"] - 0.02 < row["strict"] < row["fraction"] + 0.01
        assert row["pair"] is None if row["dim"] < 128 else row["fraction"] < row["pair"] < goal
        assert cells[:3] == [str(row["dim"]), row["arch"], f"{row['fraction']:.2f}"] and cells[7] == "shared memory"
