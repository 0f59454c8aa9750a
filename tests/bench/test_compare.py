"""Comparison with a previous run: planted regressions are named, and a different clock rate is not a regression."""

import json
import subprocess

import pytest
from sweeps import case, regime, result

from bench import compare
from bench.__main__ import main
from bench.results import ROOT

FULL, CAUSAL = regime(), regime(causal=True)
OLD = result(
    case(FULL, {"wgmma 1": 700.0, "wgmma 2": 690.0}, others={"SDPA cuDNN": 700.0}),
    case(CAUSAL, {"mma 1": 300.0, "wgmma 1": None}, others={"SDPA cuDNN": 600.0}),
)


def changed(**new):
    """Return a copy of the old run in which some cases have other speeds."""
    return result(
        *(
            case(each, *new[name]) if name in new else one
            for each, name, one in zip((FULL, CAUSAL), ("full", "causal"), OLD["cases"], strict=True)
        )
    )


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function that compares two results, and returns the exit status and the output of the command."""

    def both(old, new, *words):
        paths = tmp_path / "old.json", tmp_path / "new.json"
        for path, stored in zip(paths, (old, new), strict=True):
            path.write_text(json.dumps(stored))
        status = main(["compare", str(paths[1]), "--against", str(paths[0]), *words])
        return status, capsys.readouterr().out

    return both


@pytest.mark.parametrize(
    "new, worse",
    [
        (OLD, []),
        (changed(full=({"wgmma 1": 630.0},)), ["0.90 of the old speed, wgmma 1 -> wgmma 1"]),
        (changed(full=({"wgmma 1": 500.0, "wgmma 2": 690.0},)), []),  # no regression, because another tile is as fast
        (changed(full=({"wgmma 2": 600.0},)), ["0.86 of the old speed, wgmma 1 -> wgmma 2"]),
        (changed(full=({"wgmma 1": None},)), ["no longer measured"]),
        (changed(causal=({"mma 1": 280.0},)), ["0.93 of the old speed, mma 1 -> mma 1"]),
        (result(OLD["cases"][0]), []),  # no regression, because the new run did not reach the other case
    ],
    ids=["equal", "slower", "another-tile", "slower-tile", "gone", "causal", "fewer"],
)
def test_planted_regressions(new, worse, run):
    status, output = run(OLD, new)
    assert status == bool(worse)
    for words in worse:
        assert words in output
    assert f"{len(worse)} of ours slower by more than 5%" in output


def test_other_clocks_and_slower_others_are_no_regressions(run):
    cooler = [
        case(FULL, {"wgmma 1": 350.0, "wgmma 2": 345.0}, others={"SDPA cuDNN": 175.0}, matmul=400.0),
        case(CAUSAL, {"mma 1": 150.0}, others={"SDPA cuDNN": 300.0}, matmul=400.0),
    ]
    status, output = run(OLD, result(*cooler))
    assert status == 0 and "0.50" in output  # the other's speed
    assert run(OLD, result(*cooler[:1]), "--slower", "0")[0] == 0
    faster = changed(full=({"wgmma 1": 707.0},))
    assert run(faster, OLD)[0] == 0 and run(faster, OLD, "--slower", "0.005")[0] == 1


def test_results_of_the_cpu_compare_too(run):
    stored = json.loads((ROOT / "bench" / "results" / "cpu.json").read_text())
    assert run(stored, stored)[0] == 0
    slow = json.loads(json.dumps(stored))
    seconds = slow["backward"]["cases"][-1]["seconds"]["cupy_flash"]
    seconds["forward"] = [1.2 * (a + b) for a, b in zip(seconds["forward"], seconds["backward"], strict=True)]
    status, output = run(stored, slow)
    assert status == 1 and "on the CPU: 0." in output and "1 of ours slower" in output


def test_the_baseline_of_a_comparison(tmp_path, monkeypatch):
    """The baseline is the stored file of the same name, or its last commit; without either an error says what to do."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="there is no x.json in bench/results"):
        compare.before(tmp_path / "x.json")
    (results / "x.json").write_text('{"is": "committed"}')
    with pytest.raises(SystemExit, match="git has no HEAD:bench/results/x.json"):
        compare.before(results / "x.json")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (results / "x.json").write_text('{"is": "stored"}')
    assert compare.before(tmp_path / "x.json") == {"is": "stored"}
    assert compare.before(results / "x.json") == {"is": "committed"}
    with pytest.raises(SystemExit, match="the old file has no speeds"):
        compare.compare({"overhead": {}}, OLD, 0.05)
