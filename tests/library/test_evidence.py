"""Evidence: plans use engines that passed a check and tiles that were measured; invalid or foreign records are
ignored.
"""

import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import Case, posed
from forget import forget_plans
from processes import processes

import cupy_flash
from cupy_flash.__main__ import main
from cupy_flash.commands import info
from cupy_flash.device import Device, named
from cupy_flash.engines import simt
from cupy_flash.gpu import ahead
from cupy_flash.plan import measurements
from cupy_flash.plan.measurements import INSTRUCTIONS, SECONDS, Measured
from cupy_flash.plan.plan import candidates, last_of_bucket, plan, predicted, scales_of, tune_key
from cupy_flash.problem.records import Cache, UnsupportedError

HOPPER, AMPERE = named("sm_90a"), named("sm_80")
CARD = Device("cuda", "sm_90a", 132, 232448, "NVIDIA H200", "12.8")
SIZES = dict(q_len=1000, kv_len=1000, heads=8, kv_heads=8, head_dim=64, head_dim_v=64, causal=True)
HALF = posed(Case(dtype="bfloat16", **SIZES))[0].problem._replace(backend="simulator:sm_90a", aligned=True)
SINGLE = posed(Case(dtype="float32", **SIZES))[0].problem._replace(backend="simulator:sm_80")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Use a new cache folder without evidence."""
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_FLASH_EVIDENCE_DIR", raising=False)
    forget_plans()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget_plans()


def passed(device, engine, reason=None):
    paths = measurements.store_checks(device, {engine: (reason, [{"case": "a case", "verdict": "passed"}])})
    forget_plans()
    return paths[engine]


def measured(problem, device, *fastest, **changes):
    """Store measurements in which these (engine, tile) are the fastest, in order, and the planned tile the slowest."""
    bucket = last_of_bucket(problem)
    default = predicted(bucket, device)
    names = [*fastest, (default.engine, repr(default.tile))]
    tiles = [Measured(*name, 10.0 + number) for number, name in enumerate(names)]
    stored = measurements.store_tune(
        device, tune_key(bucket) | changes, INSTRUCTIONS, tiles, (default.engine, repr(default.tile)), {}, True
    )
    forget_plans()
    return stored.path


def slowest(problem, device, engine):
    """Return (engine, tile) with the largest predicted time, which a plan would not choose by prediction."""
    tile, _ = candidates(plan(problem, device), engine)[-1]
    return engine, repr(tile)


# ---- the plan


def test_an_engine_on_request_needs_a_passed_check_and_a_measurement():
    assert plan(HALF, HOPPER).engine == "mma"
    assert "no check has passed on this card yet (python -m cupy_flash check)" in plan(HALF, HOPPER).explain()
    tile = slowest(HALF, HOPPER, "wgmma")
    measured(HALF, HOPPER, tile)
    assert plan(HALF, HOPPER).engine == "mma"  # wgmma is faster, but has not passed a check
    passed(HOPPER, "wgmma")
    chosen = plan(HALF, HOPPER)
    assert (chosen.engine, repr(chosen.tile)) == tile
    text = chosen.explain()
    assert (
        "why        measured the fastest of 2 tiles in this bucket, 10 warp instructions, the predicted best 11" in text
    )
    assert "checked    wgmma passed on simulator (sm_90a)" in text and "measured   not yet" not in text
    elsewhere = HALF._replace(q_len=100)  # a problem of another bucket
    assert plan(elsewhere, HOPPER).engine == "mma"
    assert "checked, but not measured in this bucket" in plan(elsewhere, HOPPER).explain()
    assert plan(HALF, named("sm_90a")._replace(units=114)).engine == "mma"  # another card


def test_a_failed_check_disqualifies_an_engine_except_by_name():
    assert plan(HALF, HOPPER).engine == "mma"
    passed(HOPPER, "mma", "bfloat16, D 64: wrong, out: error 1")
    measured(HALF, HOPPER, slowest(HALF._replace(engine="mma"), HOPPER, "mma"))
    chosen = plan(HALF, HOPPER)
    assert chosen.engine == "simt"
    reason = "not mma    its check failed on simulator (bfloat16, D 64: wrong, out: error 1)"
    assert reason in chosen.explain()
    named_engine = plan(HALF._replace(engine="mma"), HOPPER)
    assert named_engine.engine == "mma" and "checked    mma failed, bfloat16, D 64: wrong" in named_engine.explain()
    passed(HOPPER, "simt", "all wrong")
    with pytest.raises(UnsupportedError, match="simt: its check failed on simulator"):
        plan(HALF, HOPPER)


def test_a_measured_tile_beats_a_predicted_one_in_its_bucket():
    name = slowest(SINGLE, AMPERE, "simt")
    by_prediction = plan(SINGLE, AMPERE)
    assert repr(by_prediction.tile) != name[1]
    measured(SINGLE, AMPERE, name)
    assert repr(plan(SINGLE, AMPERE).tile) == name[1]
    assert repr(plan(SINGLE._replace(engine="simt", scale=3.0), AMPERE).tile) == name[1]
    assert plan(SINGLE, AMPERE, by_prediction.tile) == by_prediction  # a tile that the caller passes is kept
    assert predicted(SINGLE, AMPERE).tile == by_prediction.tile
    others = (dict(kv_len=2000), dict(batch=64), dict(softcap=3.0), dict(backward=True), dict(deterministic=True))
    for other in (*others, dict(derivative="JVP", tangents=("q",))):
        assert plan(SINGLE._replace(**other), AMPERE).measured == "", other


def test_measured_tiles_that_are_not_legal_are_skipped():
    """Calls of a bucket share measurements although they may differ in alignment, so the fastest legal tile is
    chosen.
    """
    legal = slowest(SINGLE, AMPERE, "simt")
    measured(SINGLE, AMPERE, ("simt", "Tile(block_q=7, block_kv=7, threads=7)"), ("gone", "Tile()"), legal)
    assert repr(plan(SINGLE, AMPERE).tile) == legal[1]


def test_split_size_keeps_the_predicted_tile():
    from cupy_flash.plan.plan import _tune

    cache = Cache("bshd", SINGLE.dtype, blocks=1, page=None, appended=None, slots=False, rotary=None, split_size=None)
    problem = SINGLE._replace(cache=cache)
    measurements.store_tune(
        AMPERE, tune_key(problem), INSTRUCTIONS, [Measured("simt", "Tile()", 1.0)], ("simt", "Tile()"), {}, True
    )
    assert _tune(problem, AMPERE) is not None
    assert _tune(problem._replace(cache=cache._replace(split_size=64)), AMPERE) is None


def test_compile_builds_the_measured_tiles():
    """compile() must build the kernels of measured tiles, because a later graph capture cannot compile."""
    arguments = dict(dtype="float32", head_dim=64, causal=True, backward=False)
    card = AMPERE._replace(backend="cuda", card="NVIDIA A100", driver="12.8")
    before = ahead.launches(card, **arguments)
    tile = simt.Tile(block_q=64, block_kv=8, threads=64)
    assert tile in simt.tiles(SINGLE, AMPERE)
    assert not {launch.tile for launch in before} & {(64, 8, 64)}
    measured(SINGLE._replace(device="cuda:0", backend=None), card, ("simt", repr(tile)))
    assert (64, 8, 64) in {launch.tile for launch in ahead.launches(card, **arguments)}
    assert (64, 8, 64) not in {launch.tile for launch in ahead.launches(card, **arguments | dict(softcap=1.0))}


def test_the_first_plan_on_a_gpu_without_evidence_names_the_command(caplog):
    problem = HALF._replace(device="cuda:0", backend=None)
    with caplog.at_level(logging.INFO, "cupy_flash.evidence"):
        for q_len in (100, 1000):
            plan(problem._replace(q_len=q_len), CARD)
    assert caplog.messages == [
        "no evidence about the engines on NVIDIA H200 yet: python -m cupy_flash check finds out, once"
    ]
    caplog.clear()
    measurements.suggest.cache_clear()
    passed(CARD, "simt")
    with caplog.at_level(logging.INFO, "cupy_flash.evidence"):
        plan(problem, CARD)
        plan(SINGLE, AMPERE)
    assert caplog.messages == []
    measurements.suggest.cache_clear()


# ---- predictions refitted to a card

SMALL = posed(Case(dtype="float16", q_len=64, kv_len=64, heads=8, kv_heads=8, head_dim=64, head_dim_v=64))[0].problem
SMALL = SMALL._replace(device="cuda:0", aligned=True)  # simt is predicted to take 2.3 times as long as mma


def refit(problem=SMALL, unit=SECONDS, complete=True, spoil=None, **factors):
    """Store measurements of a bucket: the predicted time of each engine, multiplied by the engine's factor."""
    bucket = last_of_bucket(problem)
    best = {engine: candidates(predicted(bucket, CARD), engine)[0] for engine in factors}
    costs = {engine: each.cost for engine, (_, each) in best.items()}
    tiles = [Measured(engine, repr(tile), each.cost * factors[engine]) for engine, (tile, each) in best.items()]
    default = predicted(bucket, CARD)
    tune = measurements.store_tune(
        CARD, tune_key(bucket), unit, tiles, (default.engine, repr(default.tile)), costs, complete
    )
    if spoil is not None:
        rewritten(tune.path, spoil)
    forget_plans()
    return tune


def longer(length, problem=SMALL):
    """Return the plan for another length, in another bucket."""
    return plan(problem._replace(q_len=length, kv_len=length), CARD)


def test_an_engine_that_is_measured_faster_than_predicted_wins_in_other_buckets():
    assert longer(64).engine == longer(100).engine == "mma"
    before = longer(100).cost
    refit(simt=0.4, mma=1.0)
    assert longer(64).engine == "simt" and longer(64).measured
    chosen = longer(100)
    assert chosen.engine == "simt" and not chosen.measured
    text = chosen.explain()
    assert "refitted   to measurements on NVIDIA H200: simt x 0.4 (1 bucket), mma x 1 (1 bucket)" in text
    assert f"predicted time of all legal tiles, for the bucket's last lengths: {chosen.cost * 1e3:.3g} ms" in text
    assert f"not mma    its smallest predicted time is {before * 1e3:.3g} ms" in text
    # at this length simt is predicted to take 12 times as long
    assert chosen.cost < before and longer(1000).engine == "mma"
    # the default with which a tune compares ignores refits
    assert predicted(SMALL._replace(q_len=100, kv_len=100), CARD).engine == "mma"


def test_a_refit_is_the_median_of_the_buckets():
    for length, factor in ((64, 0.5), (100, 0.9), (300, 7.0)):
        refit(SMALL._replace(q_len=length, kv_len=length), simt=factor, mma=2.0)
    assert measurements.fits(CARD, "forward")["simt"] == (pytest.approx(0.9), 3)
    assert measurements.fits(CARD, "backward") == {} and measurements.fits(AMPERE, "forward") == {}
    assert "refitted" not in longer(100, SMALL._replace(backward=True)).explain()


def test_an_engine_without_measurements_gets_the_mean_factor():
    refit(simt=4.0, mma=1.0)
    assert scales_of(SMALL, CARD, ("simt", "mma", "wgmma")) == pytest.approx({"simt": 4, "mma": 1, "wgmma": 2})


NO_REFIT = {
    "instructions": dict(unit=INSTRUCTIONS),
    "incomplete": dict(complete=False),
    "another-model": dict(spoil=lambda record: record.update(costs="0" * 64)),
}


@pytest.mark.parametrize("why", NO_REFIT)
def test_measurements_that_do_not_refit_predictions(why):
    tune = refit(simt=0.4, mma=1.0, **NO_REFIT[why])
    assert longer(100).engine == "mma" and "refitted" not in longer(100).explain()
    assert longer(64).engine == "simt"  # measurements still count in their own bucket
    ignored = f"ignored    {tune.path}: its predictions alone: they are of another cost model"
    assert (ignored in longer(100).explain()) == (why == "another-model")


def test_a_refit_does_not_apply_to_split_size():
    cache = Cache("bshd", SMALL.dtype, blocks=1, page=None, appended=None, slots=False, rotary=None, split_size=64)
    refit(simt=0.4, mma=1.0)
    assert scales_of(SMALL._replace(cache=cache), CARD, ("mma_decode",)) == {}
    assert scales_of(SMALL._replace(cache=cache._replace(split_size=None)), CARD, ("mma_decode",)) != {}


# ---- records that are ignored


def rewritten(path, change):
    """Change a record on disk and update its checksum."""
    record = json.loads(path.read_text())
    del record["sha256"]
    change(record)
    record["sha256"] = measurements._digest(record)
    path.write_text(json.dumps(record))


def truncate(path):
    path.write_bytes(path.read_bytes()[:100])


def flip(path):
    path.write_text(path.read_text().replace('"passed": true', '"passed": false').replace("10.0", "10.5"))


def card(**changes):
    return lambda path: rewritten(path, lambda record: record["card"].update(changes))


def stale(path):
    rewritten(path, lambda record: record.update(texts=dict.fromkeys(record["texts"], "0" * 64)))


def field(name, value):
    return lambda path: rewritten(path, lambda record: record.update({name: value}))


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def linked(path):
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


BAD = {
    "fifo": (fifo, "is not a regular file"),
    "link": (linked, "is not a regular file"),
    "no-card": (field("card", None), "its fields card are missing or wrong"),
    "no-date": (field("date", 5), "its fields date are missing or wrong"),
    "no-texts": (field("texts", {}), "its fields texts"),
    "a-number-as-text": (field("texts", 5), "its fields texts"),
    "truncated": (truncate, "it is damaged"),
    "changed": (flip, "it is damaged"),
    "no-json": (lambda path: path.write_text("{"), "it is damaged"),
    "a-list": (lambda path: path.write_text("[]"), "it is damaged"),
    "binary": (lambda path: path.write_bytes(b"\xff\x00"), "it is damaged"),
    "version": (lambda path: rewritten(path, lambda record: record.update(format=99)), "of another version"),
    "driver": (card(driver="11.4"), "another card or driver"),
    "card": (card(name="another card"), "another card or driver"),
    "text": (stale, "other kernel texts"),
    "open": (lambda path: path.chmod(0o666), "can be written by other users"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["check", "tune"])
def test_invalid_records_are_ignored(kind, bad):
    """A record that is ignored changes no plan, and explain() states the reason."""
    tile = slowest(HALF, HOPPER, "wgmma")
    paths = dict(check=passed(HOPPER, "wgmma"), tune=measured(HALF, HOPPER, tile))
    assert plan(HALF, HOPPER).engine == "wgmma"
    spoil, why = BAD[bad]
    spoil(paths[kind])
    forget_plans()
    chosen = plan(HALF, HOPPER)
    assert chosen.engine == "mma" and repr(chosen.tile) == repr(predicted(HALF, HOPPER).tile)
    (line,) = (line for line in chosen.explain().splitlines() if line.startswith("ignored"))
    assert str(paths[kind]) in line and why in line


AMOUNTS = ("1.0", float("nan"), float("inf"), 0, -1.0, 10**400, True, None)
FIELDS = {
    **{f"amount-{n}": ("tune", "measured", [["simt", "Tile()", amount]]) for n, amount in enumerate(AMOUNTS)},
    "measured": ("tune", "measured", 5),
    "measured-pair": ("tune", "measured", [["simt", "Tile()"]]),
    "key": ("tune", "key", {"another": "bucket"}),
    "default": ("tune", "default", "simt"),
    "complete": ("tune", "complete", None),
    "unit": ("tune", "unit", ["s"]),
    "predicted": ("tune", "predicted", {"simt": 0.0}),
    "costs": ("tune", "costs", None),
    "passed": ("check", "passed", "yes"),
    "reason": ("check", "reason", None),
    "cases": ("check", "cases", 5),
    "cases-of-numbers": ("check", "cases", [1, 2]),
}


@pytest.mark.parametrize("bad", FIELDS)
def test_records_with_a_wrong_field_are_ignored(bad, tmp_path, capsys):
    """The checksum is right, but a field is not: plans, info and report ignore the record and name the field."""
    kind, name, value = FIELDS[bad]
    path = passed(AMPERE, "simt") if kind == "check" else measured(SINGLE, AMPERE, slowest(SINGLE, AMPERE, "simt"))
    field(name, value)(path)
    forget_plans()
    why = f"its fields {name} are missing or wrong"
    assert f"ignored    {path}: {why}" in plan(SINGLE, AMPERE).explain()
    assert measurements.tunes(AMPERE) == [] and why in measurements.summary()[0]
    assert main(["report", "--out", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["ignored"] == {str(path): why}


def test_only_failed_verdicts_of_an_older_version_are_ignored():
    """A check of version 2 stored a missing dependency or an interrupt as a failure."""
    older = field("format", 2)
    tile = slowest(HALF, HOPPER, "wgmma")
    for path in (passed(HOPPER, "wgmma"), measured(HALF, HOPPER, tile)):
        older(path)
    forget_plans()
    assert plan(HALF, HOPPER).engine == "wgmma"
    older(failed := passed(HOPPER, "simt", "ImportError: NVRTC was not found"))
    forget_plans()
    why = "it is a failed verdict of an older version, whose reason may not be the kernels"
    chosen = plan(HALF._replace(engine="simt"), HOPPER)
    assert "checked    simt not yet" in chosen.explain() and f"ignored    {failed}: {why}" in chosen.explain()
    assert f"{failed.name} is ignored: {why}" in measurements.summary()[0]


def test_records_that_are_ignored_for_one_reason_share_a_line():
    paths = [measured(SINGLE, AMPERE, slowest(SINGLE, AMPERE, "simt")), passed(AMPERE, "simt"), passed(AMPERE, "mma")]
    for path in paths:
        stale(path)
    truncate(paths[2])
    forget_plans()
    lines = [line for line in plan(SINGLE, AMPERE).explain().splitlines() if line.startswith("ignored")]
    assert lines == [
        f"ignored    {paths[2]}: it is damaged, or of another version",
        f"ignored    2 records in {paths[0].parent}: it is about other kernel texts",
    ]


def test_only_files_that_exist_are_ignored(folder):
    passed(HOPPER, "mma").unlink()
    (folder / "evidence").chmod(0o777)
    forget_plans()
    assert "ignored" not in plan(HALF, HOPPER).explain()


@pytest.mark.parametrize("where", ["the cache folder", "the shared folder"])
def test_a_parent_that_others_can_write_to(where, folder, tmp_path, monkeypatch):
    path = passed(HOPPER, "wgmma")
    parent = folder
    if where == "the shared folder":
        parent = tmp_path / "shared"
        (folder / "evidence").rename(parent)
        monkeypatch.setenv("CUPY_FLASH_EVIDENCE_DIR", str(parent))
        path = parent / path.relative_to(folder / "evidence")
    forget_plans()
    assert measurements.check_of("wgmma", HOPPER).path == path
    parent.chmod(0o777)
    forget_plans()
    assert measurements.check_of("wgmma", HOPPER) is None
    assert f"{parent} can be written by other users" in measurements.ignored[path]


def test_measurements_without_the_default_are_ignored():
    """Without a measurement of the default tile, a record does not show that its fastest tile is faster than that."""
    path = measured(SINGLE, AMPERE, slowest(SINGLE, AMPERE, "simt"))
    rewritten(path, lambda record: record["measured"].pop())
    forget_plans()
    assert plan(SINGLE, AMPERE).measured == "" and "it has no default" in plan(SINGLE, AMPERE).explain()


def test_an_architecture_without_a_card_has_no_evidence():
    """compile(arch=...) and explain --arch plan for an architecture, not for a card."""
    somewhere = named("sm_90a", "cuda")
    assert somewhere.card == "" and measurements.check_of("wgmma", somewhere) is None
    passed(HOPPER, "wgmma")
    assert measurements.check_of("wgmma", somewhere) is None and measurements.tunes(somewhere) == []


def test_a_folder_that_cannot_hold_evidence(folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(OSError, match="the results cannot be stored: .* can be written by other users"):
        passed(HOPPER, "mma")


# ---- folders


def test_a_shared_folder_serves_where_the_own_one_has_no_record(folder, tmp_path, monkeypatch):
    tile, other = (repr(tile) for tile, _ in candidates(plan(SINGLE, AMPERE), "simt")[-2:])
    passed(AMPERE, "mma", "failed on the shared machine")
    measured(SINGLE, AMPERE, ("simt", tile))
    shared = tmp_path / "shared"
    (folder / "evidence").rename(shared)
    before = sorted((path, path.stat().st_mtime_ns) for path in shared.rglob("*"))
    forget_plans()
    assert plan(SINGLE, AMPERE).measured == ""
    monkeypatch.setenv("CUPY_FLASH_EVIDENCE_DIR", str(shared))
    forget_plans()
    assert repr(plan(SINGLE, AMPERE).tile) == tile and str(shared) in plan(SINGLE, AMPERE).explain()
    assert not measurements.check_of("mma", AMPERE).passed
    measured(SINGLE, AMPERE, ("simt", other))
    assert repr(plan(SINGLE, AMPERE).tile) == other
    assert [tune.path.is_relative_to(folder) for tune in measurements.tunes(AMPERE)] == [True]
    assert sorted((path, path.stat().st_mtime_ns) for path in shared.rglob("*")) == before


def run_both(program):
    """Run a program in two processes at once, with the arguments "first" and "second"."""
    commands = ([sys.executable, "-c", program, name] for name in ("first", "second"))
    with processes(*commands, cwd=Path(cupy_flash.__file__).parents[1], env=dict(os.environ)) as writers:
        assert [writer.wait() for writer in writers] == [0, 0]


STORE = """
import sys
from cupy_flash.plan import measurements
from cupy_flash.device import named
from cupy_flash.plan.measurements import Measured
for number in range(40):
    for key in ({"both": number}, {sys.argv[1]: number}):
        tiles = [Measured("simt", sys.argv[1], 1.0)]
        measurements.store_tune(named("sm_80"), key, "s", tiles, ("simt", sys.argv[1]), {}, True)
"""


@pytest.mark.exhaustive
def test_two_processes_that_store_at_once_lose_nothing(folder):
    run_both(STORE)
    stored = measurements.tunes(AMPERE)
    assert len(stored) == 120 and measurements.ignored == {}
    for name in ("first", "second"):
        assert sum(tune.measured[0].tile == name for tune in stored if name in tune.key) == 40
    assert not list(folder.rglob("publishing-*"))


ONE_BUCKET = """
import sys
from threading import Thread
from cupy_flash.plan import measurements
from cupy_flash.device import named
from cupy_flash.plan.measurements import Measured
def store(numbers):
    for number in numbers:
        tiles = [Measured("simt", "default", 1.0), Measured("simt", f"{sys.argv[1]} {number}", 1.0)]
        measurements.store_tune(named("sm_80"), {"bucket": 1}, "s", tiles, ("simt", "default"), {}, True)
threads = [Thread(target=store, args=(range(first, 12, 3),)) for first in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_processes_and_threads_that_tune_one_bucket_lose_nothing():
    run_both(ONE_BUCKET)
    (tune,) = measurements.tunes(AMPERE)
    assert len(tune.measured) == 25 and measurements.ignored == {}


def test_a_reader_sees_a_whole_record():
    """Records are replaced atomically: a reader that has opened the old record reads it to the end."""
    path = passed(HOPPER, "mma")
    old = path.read_bytes()
    with path.open("rb") as reader:
        assert passed(HOPPER, "mma", "another verdict") == path
        assert reader.read() == old != path.read_bytes()


def test_storing_fewer_measurements_keeps_the_others():
    key, tiles = {"bucket": 1}, [Measured("simt", name, amount) for name, amount in (("a", 3.0), ("b", 2.0))]
    measurements.store_tune(AMPERE, key, INSTRUCTIONS, tiles, ("simt", "a"), {}, True)
    stored = measurements.store_tune(AMPERE, key, INSTRUCTIONS, [Measured("simt", "a", 1.0)], ("simt", "a"), {}, False)
    assert stored.measured == (Measured("simt", "a", 1.0), Measured("simt", "b", 2.0)) and stored.complete
    assert measurements.tune_of(key, AMPERE) == stored
    other = measurements.store_tune(AMPERE, key, INSTRUCTIONS, [Measured("simt", "b", 5.0)], ("simt", "b"), {}, False)
    assert len(other.measured) == 1 and not other.complete  # those have another default tile


# ---- commands


def test_info_lists_the_evidence(capsys):
    assert info.run() == 0
    assert "none: python -m cupy_flash check" in capsys.readouterr().out
    passed(HOPPER, "wgmma")
    passed(HOPPER, "mma", "wrong")
    measured(SINGLE, AMPERE)
    stale(passed(AMPERE, "simt"))
    truncate(measured(SINGLE, AMPERE, queries=7))
    info.run()
    text = " ".join(capsys.readouterr().out.split())  # without the breaks of lines
    for words in ("wgmma passed 2", "mma failed 2", "1 bucket tuned", "check.simt.json is about other kernel texts",
                  "is ignored: it is damaged, or of another version"):  # fmt: skip
        assert words in text, words


def test_report_has_info_evidence_and_the_failed_case(tmp_path, capsys):
    failed = {"case": "float32, D 64", "verdict": "wrong", "reason": "out: error 1", "trial": {"head_dim": 64}}
    cases = [failed, {"case": "x", "verdict": "passed"}]
    measurements.store_checks(HOPPER, {"mma": ("float32, D 64: wrong", cases)})
    truncate(passed(HOPPER, "simt"))
    out = tmp_path / "report.json"
    assert main(["report", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 1 records, 1 ignored files, 1 failed cases\n"
    report = json.loads(out.read_text())
    assert report["failed"] == [failed] and len(report["evidence"]) == len(report["ignored"]) == 1
    assert any(line.startswith("cupy_flash ") for line in report["info"])
    assert main(["report", "--out", str(out)]) == 1  # the file exists already
    assert "File exists" in capsys.readouterr().err


def test_explain_of_arrays(capsys):
    """The public explain() states which measurement chose the tile."""
    name = slowest(SINGLE, AMPERE, "simt")
    measured(SINGLE._replace(q_len=20, kv_len=20, batch=1, heads=1, kv_heads=1), AMPERE, name)
    x = np.zeros((1, 20, 1, 64), np.float32)
    assert "measured the fastest of 2 tiles" in cupy_flash.explain(x, x, x, causal=True, backend="simulator")
