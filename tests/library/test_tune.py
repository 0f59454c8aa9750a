"""cupy_flash tune: measurements, tiles that are left out, resuming, storing, and the plans that follow."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forget import forget_plans
from processes import processes
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash.__main__ import main
from cupy_flash.arrays import named_dtype
from cupy_flash.commands import tune as command
from cupy_flash.device import Device, named
from cupy_flash.engines import mma_decode, simt
from cupy_flash.measure import other_libraries, tuning
from cupy_flash.measure.tuning import recorded, run_tune
from cupy_flash.measure.worker_process import Lost
from cupy_flash.plan import measurements
from cupy_flash.plan.measurements import CHECK_COMMAND, Measured
from cupy_flash.plan.plan import plan, predicted, tune_key
from cupy_flash.problem.build import pose, pose_with_cache
from cupy_flash.problem.recorded_call import CacheTrial, Trial, recorded_line
from cupy_flash.problem.records import FP8, CacheOptions, Options, Packed, Saved

AMPERE = named("sm_80")
WORK = tuning.work
CALL = Trial("float32", 16, q_len=24, kv_len=24, heads=1, backward=False)
ALL_TILES = simt.tiles
TILES = [simt.Tile(16, 16, 64), simt.Tile(8, 16, 64), simt.Tile(32, 16, 64)]


@pytest.fixture(autouse=True)
def own_evidence(tmp_path, monkeypatch):
    """Use a new evidence folder, the shared kernel cache, three tiles of simt, and no worker process."""
    monkeypatch.setattr(
        measurements, "FOLDER", os.path.relpath(tmp_path / "evidence", os.environ["CUPY_FLASH_CACHE_DIR"])
    )
    monkeypatch.setattr(simt, "tiles", lambda problem, device: TILES)
    monkeypatch.setattr(tuning, "Worker", WorkerInThisProcess)
    tuning._default.cache_clear()
    forget_plans()
    yield
    monkeypatch.undo()
    tuning._default.cache_clear()
    forget_plans()


class WorkerInThisProcess:
    """Replaces the worker process: it does the work in this process."""

    def __init__(self, work):
        self.work = work

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __call__(self, task, until):
        return self.work(task, lambda step, seconds: None)


class Clock:
    """A clock that only measurements advance."""

    now = 1000.0

    def __call__(self):
        return self.now


class Card:
    """The work of a tune with given times per tile; each measurement advances the clock by 10 s."""

    def __init__(self, clock=None, amounts=(3.0, 1.0, 2.0)):
        self.clock, self.calls = clock or Clock(), []
        self.amounts = {repr(tile): amount for tile, amount in zip(TILES, amounts, strict=True)}

    def __call__(self, task, announce):
        if task.kind != "tile":
            return WORK(task, announce)
        self.calls.append(task.tile)
        self.clock.now += 10
        amount = self.amounts[task.tile]
        if isinstance(amount, BaseException):
            raise amount
        return amount


def run(card, trials=(CALL,), minutes=None, report=lambda line: None):
    return run_tune(list(trials), "simulator", minutes, report, card, card.clock)


def explained(length=24):
    x = np.zeros((1, length, 1, 16), np.float32)
    return cupy_flash.explain(x, x, x, backend="simulator")


def names(result):
    return [each.tile for each in result.tune.measured]


def test_the_fastest_tile_is_stored_and_planned():
    default = predicted_tile()
    lines = []
    results = run(Card(), report=lines.append)
    (result,) = results.results
    assert results.complete and names(result) == [repr(TILES[i]) for i in (1, 2, 0)]
    assert result.gain == {0: 3.0, 1: 1.0, 2: 2.0}[TILES.index(default)]
    assert f"fastest  simt {TILES[1]}: 1 warp instructions" in str(results)
    assert f"gain {result.gain:.2f}x" in str(results)
    chosen = plan_of(24)
    assert (
        chosen.tile == TILES[1]
        and f"measured the fastest of 3 tiles in this bucket, 1 {result.tune.unit}" in explained()
    )
    assert plan_of(40).tile != TILES[1] or "measured   not yet" in explained(40)
    assert lines[0] == "1/1 forward float32, D 16, 1 x 1 heads, 24 x 24"
    assert lines[1].endswith("warp instructions") and lines[3].endswith("warp instructions, about 10 s left")


def predicted_tile():
    return predicted(plan_of(24).problem, AMPERE).tile


def plan_of(length):
    chosen, _ = tuning._posed("simulator", replace(CALL, q_len=length, kv_len=length), None)
    return plan(chosen.problem, AMPERE)


def test_a_tune_out_of_time_resumes():
    card = Card()
    other = replace(CALL, q_len=100, kv_len=100)
    first = run(card, [CALL, other], minutes=15 / 60)
    assert not first.complete and first.left == 1 and len(card.calls) == 2
    assert "not all tiles are measured yet: run again to resume" in str(first) and "1 of 2 calls left" in str(first)
    assert plan_of(24).measured  # plans use the measurements of an unfinished tune
    again = run(card, [CALL, other])
    assert again.complete and len(card.calls) == 6 and set(card.calls[:3]) == set(map(repr, TILES))
    lines = []
    assert run(card, [CALL, other], report=lines.append).complete and len(card.calls) == 6
    assert "measured before: " in lines[1]


def test_an_interrupted_tune_keeps_its_measurements():
    card = Card()
    _, second, third = tuning.find_candidates(tuning.Task("candidates", "simulator", trial=CALL)).tiles
    card.amounts[third[1]] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(card)
    (stored,) = measurements.tunes(AMPERE)
    assert not stored.complete and len(stored.measured) == 2 and second[1] in {each.tile for each in stored.measured}


def test_a_new_default_is_measured_again(monkeypatch):
    card = Card()
    run(card)
    monkeypatch.setattr(simt, "seconds", lambda problem, pairs, device, tile: 1.0 + (tile != TILES[2]))
    forget_plans()
    (result,) = run(card).results
    assert len(card.calls) == 6 and result.tune.default == ("simt", repr(TILES[2]))


def test_a_change_of_the_cost_model_renews_the_predictions_alone(monkeypatch):
    card = Card()
    with monkeypatch.context() as earlier:
        earlier.setattr(measurements, "costs_text", lambda: "0" * 64)
        run(card)
    assert [tune.predicted for tune in measurements.tunes(AMPERE)] == [{}]
    assert run(card).complete and len(card.calls) == 3  # no tile is measured again
    (tune,) = measurements.tunes(AMPERE)
    assert tune.complete and tune.predicted == {"simt": predicted(plan_of(24).problem, AMPERE).cost}


def test_tiles_that_are_wrong_or_lost_are_left_out():
    default = TILES.index(predicted_tile())
    amounts = [3.0, 3.0, 3.0]
    others = [number for number in range(3) if number != default]
    amounts[others[0]], amounts[others[1]] = "its results differ", Lost("x", "timed out after 20 s")
    results = run(Card(amounts=amounts))
    (result,) = results.results
    assert results.complete and names(result) == [repr(TILES[default])] and result.gain == 1
    assert result.left_out == {
        f"simt {TILES[others[0]]}": "its results differ",
        f"simt {TILES[others[1]]}": "timed out after 20 s",
    }
    assert plan_of(24).tile == TILES[default]


def test_a_default_that_cannot_be_measured_stores_nothing():
    results = run(Card(amounts=[Lost("x", "crashed")] * 3))
    assert not results.complete and results.results[0].tune is None and "nothing was measured" in str(results)
    assert measurements.tunes(AMPERE) == [] and "measured   not yet" in explained()


def test_a_call_that_no_engine_serves_lists_their_reasons():
    results = run(Card(), [replace(CALL, cache=CacheTrial(), head_dim=640)])
    (result,) = results.results
    assert not results.complete and result.tune is None
    assert set(result.left_out) == {"simt", "mma", "mma_decode", "wgmma", "tcgen05"}
    assert (
        "left out simt: head dimension 640 is larger" in str(results)
        and "float32 is not" in result.left_out["mma_decode"]
    )


def test_an_engine_that_loses_two_workers_is_not_measured_further(monkeypatch):
    more = [simt.Tile(8, 8, 64), simt.Tile(16, 8, 64)]
    monkeypatch.setattr(simt, "tiles", lambda problem, device: TILES + more)
    forget_plans()
    card = Card()
    default = repr(predicted_tile())
    card.amounts = {repr(tile): Lost("x", "crashed") for tile in TILES + more} | {default: 1.0}
    (result,) = run(card).results
    assert len(card.calls) == 3 and sorted(result.left_out.values())[-1].startswith("not run: 2 tiles of this engine")


def test_engines_that_no_check_has_passed_are_left_out():
    hopper = named("sm_90a")
    half = replace(CALL, dtype="bfloat16", head_dim=64)

    def engines():
        task_candidates = tuning.find_candidates(tuning.Task("candidates", "simulator:sm_90a", trial=half))
        return {engine for engine, _ in task_candidates.tiles}, task_candidates.left_out

    assert engines() == ({"simt", "mma"}, {"wgmma": f"no check has passed it on this card: {CHECK_COMMAND}"})
    measurements.store_checks(hopper, {"wgmma": (None, []), "simt": ("wrong", [])})
    forget_plans()
    assert engines() == ({"wgmma", "mma"}, {"simt": "its check failed: wrong"})


# ---- real measurements


@pytest.mark.parametrize("backward", in_tiers({"forward": False, "backward": True}, default=["forward"]))
def test_the_simulator_counts_instructions_and_plans_follow(backward):
    """On the simulator a tune counts warp instructions instead of seconds; the results of the tiles are compared."""
    trial = replace(CALL, q_len=8, kv_len=8, backward=backward)
    results = run_tune([trial], "simulator:sm_80", None, lambda line: None, tuning.work)
    (result,) = results.results
    amounts = [each.amount for each in result.tune.measured]
    assert len(amounts) == 3 and amounts == sorted(amounts) and amounts[0] > 100
    assert result.left_out == {} and result.tune.unit == "warp instructions"


def test_a_tile_with_other_results_is_left_out(monkeypatch):
    default = predicted(plan_of(8).problem, AMPERE).tile
    run_forward = tuning.dispatch.run_forward

    def wrong(chosen, operands):
        out, lse = run_forward(chosen, operands)
        if chosen.tile != default:
            out.owner[...] *= 1.1
        return out, lse

    monkeypatch.setattr(tuning.dispatch, "run_forward", wrong)
    (result,) = run_tune([replace(CALL, q_len=8, kv_len=8)], "simulator", None, lambda line: None, tuning.work).results
    assert names(result) == [repr(default)]
    assert set(result.left_out.values()) == {"its results differ from those of the default tile"}


def peer_of(task):
    """Return the time of a peer that beats every tile; the other peers crash or refuse the call."""
    if task.tile == "SDPA flash":
        return 1e-9
    raise Lost("x", "crashed" if task.tile == "SDPA cuDNN" else "RuntimeError: no available kernel")


class FourTimesAsFast:
    """A card on which every tile takes the predicted time, but tiles of simt a quarter of it."""

    device = Device("cuda", "sm_80", 108, 166912, "NVIDIA A100", "12.8")
    answers = {"device": device, "peers": ""}
    clock = Clock()

    def __call__(self, task, announce):
        if task.kind in self.answers:
            return self.answers[task.kind]
        if task.kind == "peer":
            return peer_of(task)
        simulated = task._replace(backend="simulator:sm_80")
        if task.kind == "candidates":
            return WORK(simulated, announce)
        chosen, _ = tuning._posed("simulator", task.trial, None)
        costs = {repr(tile): each.cost for tile, each in tuning.candidates(chosen, task.engine)}
        return costs[task.tile] * (0.25 if task.engine == "simt" else 1.0)


def test_an_engine_measured_four_times_as_fast_wins_in_other_buckets(monkeypatch):
    monkeypatch.setattr(simt, "tiles", ALL_TILES)
    half = Trial("float16", 64, q_len=64, kv_len=64, heads=8, kv_heads=8, backward=False)
    longer, _ = tuning._posed("simulator", replace(half, q_len=100, kv_len=100), None)
    problem = longer.problem._replace(device="cuda:0", backend=None)
    card = FourTimesAsFast()
    before = plan(problem, card.device)
    (result,) = run_tune([half], "cuda", None, lambda line: None, card, card.clock).results
    after = plan(problem, card.device)
    assert (before.engine, after.engine) == ("mma", "simt") and not after.measured
    assert result.gain > 1 and "simt x 0.25 (1 bucket), mma x 1 (1 bucket)" in after.explain()


# ---- peers


def test_peers_are_reported_and_never_chosen(monkeypatch):
    monkeypatch.setattr(
        other_libraries.importlib.util, "find_spec", lambda name: None
    )  # as if flash-attn were not installed
    half = Trial("float16", 64, q_len=64, kv_len=64, heads=8, kv_heads=8, causal=True, backward=False)
    card = FourTimesAsFast()
    results = run_tune([half], "cuda", None, lambda line: None, card, card.clock)
    (result,) = results.results
    assert result.peers == {
        "SDPA flash": 1e-9, "SDPA cuDNN": "crashed", "SDPA efficient": "RuntimeError: no available kernel"
    }  # fmt: skip
    assert "peer     SDPA flash: 1e-06 ms" in str(results) and "peer     SDPA cuDNN: crashed" in str(results)
    assert results.as_json()["calls"][0]["peers"] == result.peers and results.no_peers == ""
    assert {each.engine for each in result.tune.measured} == {
        "simt",
        "mma",
    } and "SDPA" not in result.tune.path.read_text()


def test_without_peers_the_reason_is_reported(monkeypatch):
    results = run(Card())
    assert "no peers were measured for comparison: a simulator runs none" in str(results)
    assert results.as_json()["no_peers"] == "a simulator runs none" and results.results[0].peers == {}
    monkeypatch.setattr(other_libraries.importlib.util, "find_spec", lambda name: None)
    assert tuning.work(tuning.Task("peers", "cuda"), lambda step, seconds: None) == "torch is not installed"
    monkeypatch.setitem(FourTimesAsFast.answers, "peers", "torch finds no GPU")
    card = FourTimesAsFast()
    results = run_tune([replace(CALL, dtype="float16")], "cuda", None, lambda line: None, card, card.clock)
    assert results.results[0].peers == {} and results.no_peers == "torch finds no GPU"


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        (dict(dtype="bfloat16"), 3), (dict(dtype="float32"), 1), (dict(dtype="float64"), 0), (dict(dtype="float16"), 3),
        (dict(dtype="bfloat16", causal=True), 3), (dict(dtype="bfloat16", causal=True, q_len=9), 0),
        (dict(dtype="bfloat16", q_len=9), 3), (dict(dtype="bfloat16", window=(5, 0)), 0),
        (dict(dtype="bfloat16", options=("sink",)), 0), (dict(dtype="bfloat16", cache=CacheTrial()), 0),
        (dict(dtype="bfloat16", head_dim_v=16, shared_kv=True), 0),
    ],
)  # fmt: skip
def test_the_peers_of_a_call(changes, count, monkeypatch):
    monkeypatch.setattr(other_libraries.importlib.util, "find_spec", lambda name: None)
    assert len(other_libraries.names(replace(CALL, **changes))) == count


@pytest.mark.exhaustive
@pytest.mark.parametrize("backward", [False, True])
def test_a_peer_computes_the_call(backward):
    """The peers run on the CPU, where torch has a flash kernel as well."""
    trial = Trial("float32", 16, 24, 2, 9, 9, heads=4, kv_heads=2, causal=True, backward=backward)
    call = other_libraries.peer("SDPA flash", replace(trial, head_dim_v=16), "cpu")
    shapes = [tuple(x.shape) for x in (call() if backward else [call()])]
    assert shapes == ([(2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16)] if backward else [(2, 4, 9, 16)])


# ---- several processes


TWO = """
import sys
from dataclasses import replace
import pytest
import test_tune
from cupy_flash.measure import tuning
from cupy_flash.plan import measurements
from cupy_flash.engines import simt
measurements.FOLDER, tuning.Worker = sys.argv[1], test_tune.WorkerInThisProcess
simt.tiles = lambda problem, device: test_tune.TILES
lengths = [24, *((100, 200, 400) if sys.argv[2] == "first" else (800, 1600, 3200))]
trials = [replace(test_tune.CALL, q_len=length, kv_len=length) for length in lengths]
assert test_tune.run(test_tune.Card(), trials).complete
"""


def test_two_processes_tune_at_once():
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "helpers", Path(cupy_flash.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", TWO, measurements.FOLDER]
    with processes(*([*command, name] for name in ("first", "second")), env=environment) as both:
        assert [each.wait() for each in both] == [0, 0]
    tunes = measurements.tunes(AMPERE)
    assert len(tunes) == 7 and all(tune.complete and len(tune.measured) == 3 for tune in tunes)
    assert measurements.ignored == {} and plan_of(24).tile == TILES[1]


# ---- recorded calls


CALLS = """
import numpy as np
import cupy_flash
for length in (20, 21, 24, 24, 100):
    q = np.ones((1, length, 2, 8), np.float32)
    out, vjp = cupy_flash.attention_vjp(q, q, q, causal=True, window=(5, 0), softcap=2.0, dropout=0.1, seed=3)
vjp(out)
slopes, documents, cache = np.ones(2, np.float32), np.zeros((1, 100), np.int32), np.ones((2, 64, 2, 8), np.float32)
cupy_flash.attention(q, q, q, score_mod=lambda score, b, h, i, j: score - slopes[h] * (i - j))
cupy_flash.attention(q, q, q, mask_mod=lambda b, h, i, j: documents[b, i] == documents[b, j])
cupy_flash.attention_jvp(q, q, q, q)
for split_size in (None, 64):
    cupy_flash.attention_with_kv_cache(np.ones((2, 1, 2, 8), np.float32), cache, cache, split_size=split_size)
bounds = np.array([0, 40, 100], np.int32)
cupy_flash.attention_varlen(q[0], q[0], q[0], bounds, bounds, 60, 60, alibi_slopes=np.ones(2, np.float32))
"""


def test_recorded_calls(tmp_path):
    """Each process writes one line per bucket; a call that a Trial cannot represent is recorded with the reason."""
    file = tmp_path / "calls.json"
    environment = os.environ | {"CUPY_FLASH_RECORD": str(file)}
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", CALLS], cwd=Path(cupy_flash.__file__).parents[1], env=environment, check=True
        )
    assert len(file.read_text().splitlines()) == 2 * 10
    shared = dict(dtype="float32", head_dim=8, head_dim_v=8, heads=2, kv_heads=2)
    forward = Trial(
        **shared, q_len=20, kv_len=20, causal="bottom_right", window=(5, 0), options=("softcap", "dropout"),
        backward=False,
    )  # fmt: skip
    longer = replace(forward, q_len=100, kv_len=100)
    packed = Trial(**shared, batch=2, q_len=60, kv_len=60, options=("alibi_slopes",), packed=True, backward=False)
    trials, not_replayed = recorded(file)
    *others, mod, cache, last = trials
    assert [*others, last] == [
        forward, replace(forward, q_len=21, kv_len=21), longer, replace(longer, backward=True), packed
    ]  # fmt: skip
    assert mod.captured == ((2,),) and "array0[h] * real((q - kv))" in str(mod)
    assert replace(mod, mods="", captured=()) == Trial(**shared, q_len=100, kv_len=100, backward=False)
    decode = Trial(**shared, batch=2, q_len=1, kv_len=64, causal="bottom_right", backward=False)
    assert cache == replace(decode, cache=CacheTrial())
    assert [(each.reason.partition(",")[0], "mask_mod" in each.call) for each in not_replayed] == [
        ("its mask_mod reads arrays", True), ("tune measures no JVP", False),
        ("with split_size its tile does not depend on measurements", False)
    ]  # fmt: skip
    results = tuning.Results(AMPERE, (), 0, "", not_replayed)
    assert "recorded calls that cannot be made again and are not measured: 3" in str(results)
    assert [each["reason"] for each in results.as_json()["not_replayed"]] == [each.reason for each in not_replayed]
    for trial in trials:
        assert tuning.find_candidates(tuning.Task("candidates", "simulator", trial=trial)).tiles


# ---- replayed calls


def ones(*shape):
    return np.ones(shape, np.float16)


def call(options=None, layout="bshd", **kwargs):
    """Return the problem and operands of a plain call with these options."""
    q = ones(2, 40, 2, 16) if layout == "bshd" else ones(2, 2, 40, 16)
    return pose("attention", (q, q, q), Options(**options or {}, layout=layout, backend="simulator", **kwargs))


def call_on_cache(q, *caches, **options):
    return pose_with_cache(q, *caches, CacheOptions(**options, backend="simulator"))


def call_of_latent(saved=False, **options):
    """Return the problem and operands of a call with values inside keys, or of its backward."""
    q, out, lse = ones(2, 40, 40, 16), ones(2, 40, 40, 8), np.ones((2, 40, 40), np.float32)
    settings = Options(head_dim_v=8, backend="simulator", **options)
    return pose("attention", (q, q, None), settings, None, Saved(out, out, lse, None) if saved else None)


CACHE, POOL, BHSD_POOL = (ones(*shape) for shape in ((3, 64, 2, 16), (12, 16, 2, 16), (12, 2, 16, 16)))
V_CACHE, V_POOL = CACHE.copy(), POOL.copy()  # an append to one array for both K and V is refused
TABLE = np.arange(12, dtype=np.int32).reshape(3, 4)
SLOPES, PLACES, BOUNDS = np.ones(2, np.float32), np.arange(40), np.array([0, 10, 40], np.int32)
PAGES = dict(block_table=TABLE, cache_seqlens=30)
NEW, TOKENS = dict(k=ones(3, 2, 2, 16), v=ones(3, 2, 2, 16)), dict(k=ones(5, 2, 16), v=ones(5, 2, 16))
REPLAYED = {
    "score_mod": lambda: call(score_mod=lambda s, b, h, i, j: s - SLOPES[h] * (i - j)),
    "score_mod-indices": lambda: call(score_mod=lambda s, b, h, i, j: s * 0.25 + PLACES[i] // 3, causal=True),
    "mask_mod": lambda: call(layout="bhsd", mask_mod=lambda b, h, i, j: (i - j < 7) & (j <= i)),
    "both": lambda: call(
        score_mod=lambda s, b, h, i, j: np.tanh(s / 3) * 3, mask_mod=lambda b, h, i, j: i % 5 >= j % 5
    ),
    "contiguous": lambda: call_on_cache(ones(3, 1, 4, 16), CACHE, CACHE),
    "append-rotary": lambda: call_on_cache(
        ones(3, 2, 4, 16), CACHE, V_CACHE, cache_seqlens=5, window=(20, 0), softcap=3.0, rotary_cos=ones(64, 4),
        rotary_sin=ones(64, 4), rotary_interleaved=False, **NEW,
    ),
    "slots": lambda: call_on_cache(
        ones(3, 2, 4, 16), POOL, V_POOL, **PAGES, **NEW, slots=np.arange(6), mask=np.ones((1, 1, 2, 2), bool),
        causal=False,
    ),
    "packed": lambda: call_on_cache(
        ones(5, 4, 16), POOL, V_POOL, **PAGES, **TOKENS, cu_seqlens_q=np.array([0, 1, 3, 5], np.int32), max_seqlen_q=2,
        sink=ones(4), alibi_slopes=np.ones(4, np.float32),
    ),
    "packed-slots": lambda: call_on_cache(
        ones(5, 4, 16), POOL, V_POOL, **PAGES, **TOKENS, cu_seqlens_q=np.array([0, 1, 3, 5], np.int32), max_seqlen_q=2,
        slots=np.arange(5),
    ),
    "bhsd": lambda: call_on_cache(ones(3, 4, 2, 16), BHSD_POOL, BHSD_POOL, **PAGES, layout="bhsd"),
    "values-inside-keys": lambda: call_of_latent(causal=True, sink=ones(40)),
    "values-inside-keys-backward": lambda: call_of_latent(saved=True, layout="bhsd", softcap=3.0),
    "values-inside-keys-packed": lambda: pose(
        "attention_varlen", (ones(40, 2, 16), ones(40, 2, 16), None), Options(head_dim_v=8, backend="simulator"),
        Packed(BOUNDS, BOUNDS, 30, 30),
    ),
    "values-inside-keys-of-fp8": lambda: pose(
        "attention", (*[ones(2, 40, 2, 64).astype(named_dtype(FP8))] * 2, None),
        Options(head_dim_v=32, backend="simulator:sm_90a", k_descale=np.ones((2, 2), np.float32)),
    ),
    "decode-of-values-inside-keys": lambda: call_on_cache(ones(3, 1, 4, 16), POOL, None, head_dim_v=8, **PAGES),
    "append-of-values-inside-keys": lambda: call_on_cache(
        ones(3, 2, 4, 16), CACHE, None, head_dim_v=12, cache_seqlens=5, k=ones(3, 2, 2, 16), rotary_cos=ones(64, 4),
        rotary_sin=ones(64, 4),
    ),
    "packed-slots-of-values-inside-keys": lambda: call_on_cache(
        ones(5, 4, 16), POOL, None, head_dim_v=8, **PAGES, k=ones(5, 2, 16), slots=np.arange(5),
        cu_seqlens_q=np.array([0, 1, 3, 5], np.int32), max_seqlen_q=2,
    ),
    "small-pool": lambda: call_on_cache(ones(3, 1, 4, 16), POOL[:5], POOL[:5], **(PAGES | dict(block_table=TABLE % 5))),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLAYED)
def test_a_recorded_call_is_replayed(name):
    """A record, written to JSON and read back, states a call of the same bucket, with the same kernels and
    measurements.
    """
    problem, operands = REPLAYED[name]()
    trial = Trial.of(json.loads(json.dumps(recorded_line(problem, operands))))
    again, _ = tuning._posed(problem.backend, trial, None)
    assert tune_key(again.problem) == tune_key(problem)
    assert str(again.problem.mask) == str(problem.mask) and again.problem.shared_kv == problem.shared_kv
    assert ("values inside keys" in str(trial)) == problem.shared_kv
    if problem.cache is not None:
        assert again.problem.cache[5:7] == problem.cache[5:7]  # slots and rotary


NOT_REPLAYED = {
    "statistics": lambda: call(statistics=("max",), return_lse=True),
    "bias-without-gradient": lambda: backward_call(bias=ones(40, 40), bias_gradient=False),
    "captured-without-gradient": lambda: backward_call(
        score_mod=lambda s, b, h, i, j: s - SLOPES[h] * (i - j), captured_gradient=(False,)
    ),
}


def backward_call(bias_gradient=True, captured_gradient=None, **options):
    q, lse = ones(2, 40, 2, 16), np.ones((2, 2, 40), np.float32)
    saved = Saved(q, q, lse, None, bias_gradient, captured_gradient)
    return pose("attention", (q, q, q), Options(backend="simulator", **options), None, saved)


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_a_call_whose_record_would_state_another_problem_is_not_replayed(name):
    problem, operands = NOT_REPLAYED[name]()
    trial = Trial.of_call(problem, operands)
    again, _ = tuning._posed("simulator", trial, None)
    differing = {name for name in problem._fields if getattr(problem, name) != getattr(again.problem, name)}
    assert differing & {"statistics", "bias_gradient", "captured_gradient"}
    assert recorded_line(problem, operands).keys() == {"not_replayed", "call"}


def test_a_measurement_serves_backwards_that_ask_for_the_gradient_of_no_bias():
    """torch asks for the gradient of a bias only if there is one."""
    keys = [tune_key(backward_call(bias_gradient=asked)[0]) for asked in (False, True)]
    assert keys[0] == keys[1] and "bias_gradient" not in keys[0]["options"]
    assert "bias_gradient" in tune_key(backward_call(bias=ones(40, 40))[0])["options"]


def test_replayed_pages_fill_the_pool():
    """Five pages of 16 keys serve three sequences: each gets 80 // 3 keys, and no block table entry is beyond the
    pool.
    """
    problem, operands = REPLAYED["small-pool"]()
    made = replace(Trial.of_call(problem, operands), cache=CacheTrial(page=16, blocks=5)).call()
    assert made.options["cache_seqlens"].tolist() == [26] * 3 and made.options["block_table"].max() == 4


def test_a_call_that_a_trial_cannot_state_does_not_end_the_run(monkeypatch):
    def refuse(problem, operands):
        raise ValueError("no Trial has this")

    monkeypatch.setattr(Trial, "of_call", refuse)
    problem, operands = call()
    assert recorded_line(problem, operands) == {"not_replayed": "no Trial has this", "call": str(problem)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    ["score_mod", "append-rotary", "packed-slots", "values-inside-keys-backward", "append-of-values-inside-keys"],
)
def test_a_replayed_call_runs(name, monkeypatch):
    """The first and the last candidate agree; for a decode, the last is a tile that the prediction does not
    consider.
    """
    trial = Trial.of_call(*REPLAYED[name]())
    task_candidates = tuning.find_candidates(tuning.Task("candidates", "simulator", trial=trial))
    for engine, tile in (task_candidates.tiles[0], task_candidates.tiles[-1]):
        task = tuning.Task("tile", "simulator", trial=trial, engine=engine, tile=tile)
        assert tuning.measure(task, lambda step, seconds: None) > 100


def test_a_measurement_chooses_among_all_tiles_of_a_decode():
    """The prediction has a single tile per decode; a measured tile serves its bucket, except for calls with
    split_size.
    """
    decode = replace(CALL, dtype="float16", q_len=1, kv_len=64, causal=True, cache=CacheTrial(page=16))
    chosen, _ = tuning._posed("simulator", decode, None)
    task_candidates = tuning.find_candidates(tuning.Task("candidates", "simulator", trial=decode))
    assert (
        task_candidates.tiles[0] == task_candidates.default == ("mma_decode", repr(chosen.tile))
        and len(task_candidates.tiles) > 10
    )
    decodes = [name for engine, name in task_candidates.tiles if engine == "mma_decode"]
    assert {eval(name, {"Tile": mma_decode.Tile})[1:5:2] for name in decodes} == {
        (keys, rows) for keys in mma_decode.KEYS for rows in mma_decode.ROWS
    }
    measured = [
        Measured(*name, 10.0 - number) for number, name in enumerate(("mma_decode", tile) for tile in decodes[:5])
    ]
    measurements.store_tune(
        AMPERE, task_candidates.key, measurements.INSTRUCTIONS, measured, task_candidates.default, {}, True
    )
    forget_plans()
    assert repr(plan(chosen.problem, AMPERE).tile) == decodes[4]
    pieces = chosen.problem._replace(cache=chosen.problem.cache._replace(split_size=64))
    assert repr(plan(pieces, AMPERE).tile) == task_candidates.default[1]


def test_a_tune_of_values_inside_keys_may_choose_two_warpgroups():
    """The form for wgmma is a candidate with the results of the default, and the plan once it is the fastest."""
    hopper = named("sm_90a")
    trial = Trial(
        "float16", 160, 128, q_len=1, kv_len=144, heads=1, causal=True, backward=False, cache=CacheTrial(page=16),
        shared_kv=True,
    )  # fmt: skip
    found = tuning.find_candidates(tuning.Task("candidates", "simulator:sm_90a", trial=trial))
    warpgroups = [tile for tile in found.tiles if "tma=True" in tile[1]]
    task = tuning.Task("tile", "simulator:sm_90a", "mma_decode", trial, tile=warpgroups[0][1])
    assert found.default not in warpgroups and tuning.measure(task, lambda step, seconds: None) > 100
    chosen, _ = tuning._posed("simulator:sm_90a", trial, None)
    measured = [Measured(*warpgroups[0], 1.0), Measured(*found.default, 2.0)]
    measurements.store_tune(hopper, found.key, measurements.INSTRUCTIONS, measured, found.default, {}, True)
    forget_plans()
    tuned = plan(chosen.problem, hopper)
    assert not chosen.tile.tma and repr(tuned.tile) == warpgroups[0][1]
    assert "latent_decode" in {launch.function for launch in tuned.launches}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "head_dim"), [("sm_80", 256), ("sm_75", 64)])
def test_every_tile_of_a_decode_gives_the_results_of_the_default(arch, head_dim):
    trial = Trial("float16", head_dim, q_len=3, kv_len=160, causal=True, backward=False)
    task = tuning.Task("candidates", f"simulator:{arch}", trial=replace(trial, cache=CacheTrial(page=16, appended=3)))
    tiles = [tile for engine, tile in tuning.find_candidates(task).tiles if engine == "mma_decode"]
    amounts = [
        tuning.measure(task._replace(engine="mma_decode", tile=tile), lambda step, seconds: None) for tile in tiles
    ]
    assert len(amounts) == 4 and all(isinstance(amount, float) for amount in amounts), amounts


def test_the_command_decodes_on_a_kv_cache(capsys):
    arguments = dict(dtype="bfloat16", head_dim=64, head_dim_v=None, heads=None, kv_heads=8, batch=None, json=False)
    arguments |= dict(shared_kv=False)
    (decode,) = command.calls(**arguments, seqlens=(512,), causal=False, backward=False, decode=True, page=16)
    trial = Trial.of(decode)
    assert (trial.q_len, trial.kv_len, trial.batch, trial.cache) == (1, 512, 32, CacheTrial(page=16))
    inside = arguments | dict(head_dim=576, head_dim_v=512, shared_kv=True, heads=16, kv_heads=1)
    (latent,) = command.calls(**inside, seqlens=(512,), causal=False, backward=False, decode=True, page=16)
    assert Trial.of(latent).shared_kv and Trial.of(latent).call().v is None
    for wrong, message in (
        (["--decode", "--backward"], "--decode has no backward"),
        (["--page", "16"], "for --decode"),
    ):
        assert main(["tune", *wrong]) == 1
        assert message in capsys.readouterr().err


def test_a_file_without_calls(tmp_path, capsys):
    file = tmp_path / "calls.json"
    file.write_text('{"q_len": 5}\n\n{"q_len": "x"}\n')
    assert main(["tune", "--like", str(file)]) == 1
    assert f"{file}:3 states no call: q_len must be a whole number" in capsys.readouterr().err
    file.write_text('{"not_replayed": "it is a shard of a larger call", "call": "forward"}')
    assert main(["tune", "--like", str(file)]) == 1
    assert f"no call of {file} can be made again:\n- forward: it is a shard" in capsys.readouterr().err
    file.write_text("")
    assert main(["tune", "--like", str(file)]) == 1
    assert "there is no call to measure" in capsys.readouterr().err


LINES = {
    "5": "a call must be a mapping of names to values, not 5",
    '{"window": [[1], 2]}': "window must be None or (left, right) of whole numbers",
    '{"window": [-5, 0]}': "a side of window must be None or -1",
    '{"layout": "thd"}': 'layout must be "bshd" or "bhsd", not \'thd\'',
    '{"causal": "left"}': "causal must be False, True",
    '{"deterministic": 1}': "deterministic must be True or False, not 1",
    '{"backward": "no"}': "backward must be True or False, not 'no'",
    '{"head_dim_v": 0}': "head_dim_v must be a whole number",
    '{"q_len": 100000000000000000000}': "q_len must be a whole number of at least 1 and less than 2**31",
    '{"options": "mask"}': "options must be a list of names",
    '{"length": 5}': "a call has no field 'length'; the fields are dtype, head_dim",
    '{"cache": 5}': "cache must be a mapping of names to values, not 5",
    '{"backward": false, "cache": {"pages": 12}}': "cache has no field 'pages'; the fields are page, blocks",
    '{"backward": false, "cache": {"slots": true}}': "slots of the cache are for appended rows",
    '{"backward": false, "cache": {"appended": -1, "slots": 1}}': "appended of the cache must be a whole number of at",
    '{"shared_kv": 1}': "shared_kv must be True or False, not 1",
    '{"shared_kv": true}': "shared_kv needs head_dim_v, the numbers of a key that are its value",
    '{"shared_kv": true, "head_dim_v": 65}': "head_dim_v 65 must be at most head_dim 64",
    '{"shared_kv": true, "head_dim": "x", "head_dim_v": 65}': "head_dim must be a whole number of at least 1",
    '{"cache": {}}': "backward is not for calls on a KV cache",
    '{"mods": 5}': "mods must be a text, not 5",
    '{"mods": "system(0)"}': "mods is no text of a traced function",
    '{"mods": "arrays\\nnumbers\\nreal score\\nreal system 0\\nscore 1\\n"}': "system of 1 operands",
    '{"mods": "arrays\\nnumbers int\\nreal score\\nscore 0\\n"}': "mods is ",
    '{"mods": "arrays\\nnumbers\\nreal score\\nscore 0\\n", "captured": [[2]]}': "captured must be 0 shapes",
    '{"captured": [5]}': "captured must be a list of shapes",
    "[" * 100000: "recursion",
    b"\xff\xfe": "utf-",
}


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_an_invalid_line_of_a_record(line, tmp_path):
    file = tmp_path / "calls.json"
    file.write_bytes(b"{}\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match="states no call") as caught:
        recorded(file)
    assert str(caught.value).startswith(f"{file}:2 states no call: ") and LINES[line] in str(caught.value)


UNWRITABLE = """
import os, sys
import numpy as np
import cupy_flash
q = np.ones((1, 4, 1, 8), np.float32)
cupy_flash.attention(q, q, q)
os.chdir("/")
cupy_flash.attention(np.ones((1, 400, 1, 8), np.float32), *[q] * 2)
print("went on")
"""


@pytest.mark.parametrize("kind", ["missing", exhaustive("folder"), exhaustive("fifo"), "relative"])
def test_a_record_file_that_cannot_be_written(kind, tmp_path):
    """The call warns once, with the name of the variable, and goes on; a relative path refers to the folder of the
    first call.
    """
    file = dict(missing=tmp_path / "no" / "file", folder=tmp_path, fifo=tmp_path / "fifo", relative="calls.json")[kind]
    if kind == "fifo":
        os.mkfifo(file)
    root = str(Path(cupy_flash.__file__).parents[1])
    environment = os.environ | {"CUPY_FLASH_RECORD": str(file), "PYTHONPATH": root}
    command = [sys.executable, "-c", UNWRITABLE]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "went on\n"
    assert ran.stderr.count("RuntimeWarning: CUPY_FLASH_RECORD=") == (0 if kind == "relative" else 1)
    if kind == "relative":
        assert len(recorded(tmp_path / file)) == 2


# ---- arguments and interruptions


@pytest.mark.parametrize(
    ("shapes", "options", "error", "words"),
    [
        ([5], {}, TypeError, "a call must be a mapping of names to values, not 5"),
        ("abc", {}, TypeError, "shapes must be a list of calls"),
        (5, {}, TypeError, "shapes must be a list of calls"),
        ({"q_len": 5}, {}, TypeError, "shapes must be a list of calls"),
        ([{}], {"minutes": -1}, ValueError, "minutes must be a number above 0 or None, not -1"),
        ([{}], {"minutes": float("nan")}, ValueError, "minutes must be a number above 0"),
        ([{}], {"minutes": "x"}, TypeError, "minutes must be a number above 0 or None, not 'x'"),
        ([{}], {"backend": None}, TypeError, 'backend must be "cuda" or "simulator:ARCH", not None'),
        ([{}], {"backend": 5}, TypeError, 'backend must be "cuda" or "simulator:ARCH", not 5'),
    ],
)
def test_wrong_arguments(shapes, options, error, words):
    with pytest.raises(error, match=words.replace("(", "[(]")):
        cupy_flash.tune(shapes, **options)


def test_an_interrupted_command_says_that_it_resumes(monkeypatch, capsys):
    monkeypatch.setattr(tuning, "work", Card(amounts=[KeyboardInterrupt()] * 3))
    arguments = ["--dtype", "float32", "--head-dim", "16", "--heads", "1", "--batch", "1", "--seqlens", "24"]
    assert main(["tune", "--backend", "simulator", *arguments]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; run it again to resume"


def test_a_tune_that_cannot_store_measures_nothing(monkeypatch):
    def fail(device):
        raise PermissionError("the folder is closed")

    card = Card()
    monkeypatch.setattr(measurements, "_prepared", fail)
    with pytest.raises(OSError, match="the results cannot be stored: the folder is closed. Set CUPY_FLASH_CACHE_DIR"):
        run(card)
    assert card.calls == []


# ---- the command


def test_the_command(monkeypatch, capsys):
    card = Card()
    monkeypatch.setattr(tuning, "work", card)
    monkeypatch.setattr(card, "clock", Clock())
    arguments = ["tune", "--backend", "simulator", "--dtype", "float32", "--head-dim", "16", "--heads", "1"]
    arguments += ["--batch", "1", "--seqlens", "24,100"]
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["complete"] and [call["call"]["q_len"] for call in result["calls"]] == [24, 100]
    assert "1/2 forward float32" in printed.err
    assert main([*arguments, "--minutes", "1e-9"]) == 3
    assert "out of time, 2 of 2 calls left" in capsys.readouterr().out


def test_the_calls_of_the_command():
    given = dict(dtype="bfloat16", head_dim=128, head_dim_v=None, heads=None, kv_heads=4, batch=None, causal=True)
    given |= dict(shared_kv=False)
    calls = command.calls(**given, seqlens=(512, 32768), backward=True, decode=False, page=None, json=False)
    assert [(x["q_len"], x["batch"], x["heads"], x["backward"]) for x in calls] == [
        (512, 32, 16, False), (512, 32, 16, True), (32768, 1, 16, False), (32768, 1, 16, True)
    ]  # fmt: skip
    for call in calls:
        Trial.of(call)
