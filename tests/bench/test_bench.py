"""The bench: its model against counts by hand, its timing, tiny runs of every section, and generated tables."""

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bench.__main__
from bench import implementations, memory, model, report, run, timing
from bench.__main__ import main
from bench.kernel_development.tables import regenerate
from bench.model import Case, Ceilings
from bench.report import Table

TINY = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--seqlens", "32,64", "--repeats", "2", "--threads", "1"]
CASE = Case(batch=2, heads=6, kv_heads=2, head_dim=16, seqlen=64, dtype="float32", causal=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the output folder of a full run, in which FlexAttention gets no time to compile: it would need a minute."""
    threads = torch.get_num_threads()
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementations, "FLEX_SECONDS", 0)
        assert main([*TINY, "--out", str(out)]) == 0
    torch.set_num_threads(threads)
    yield out


@pytest.fixture(scope="module")
def result(folder: Path) -> Any:
    return json.loads((folder / "all.json").read_text(encoding="utf-8"))


@pytest.fixture
def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide rich, matplotlib and torch."""
    find_spec = importlib.util.find_spec
    absent = ("rich", "matplotlib", "torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))


@pytest.mark.parametrize(
    "change, flops",
    [
        pytest.param({}, 2 * 6 * (2 * 64 * 64 * 16 + 2 * 64 * 64 * 16), id="two-products-per-query-head"),
        pytest.param({"causal": True}, 2 * 6 * 2 * 64 * 64 * 16, id="causal-is-half"),
        pytest.param({"kv_heads": 6}, 2 * 6 * 4 * 64 * 64 * 16, id="shared-heads-save-no-flops"),
        pytest.param({"dtype": "bfloat16"}, 2 * 6 * 4 * 64 * 64 * 16, id="whatever-the-dtype"),
    ],
)
def test_flops_by_hand(change: dict[str, Any], flops: int) -> None:
    case = replace(CASE, **change)
    assert model.forward_flops(case) == flops
    assert model.backward_flops(case) == 2.5 * flops


def test_bytes_by_hand() -> None:
    q, kv, lse = 2 * 6 * 64 * 16 * 4, 2 * 2 * 64 * 16 * 4, 2 * 6 * 64 * 4
    assert model.forward_bytes(CASE) == q + kv + kv + q + lse
    assert model.backward_bytes(CASE) == (q + kv + kv + q + q + lse) + (q + kv + kv)
    assert model.result_bytes(CASE, gradients=False) == q + lse
    assert model.result_bytes(CASE, gradients=True) == q + lse + q + kv + kv
    assert model.scores_bytes(CASE) == 2 * 6 * 64 * 64 * 4
    half = replace(CASE, dtype="float16")
    assert model.forward_bytes(half) == (q + kv + kv + q) // 2 + lse
    assert model.scores_bytes(half) == model.scores_bytes(CASE)


def test_roofline_is_the_slower_of_computing_and_moving() -> None:
    ceilings = Ceilings(flops_per_second=100.0, bytes_per_second=10.0)
    assert model.roofline_seconds(200.0, 10.0, ceilings) == 2.0
    assert model.roofline_seconds(200.0, 30.0, ceilings) == 3.0


def test_rounds_rotate_and_the_second_of_two_calls_counts() -> None:
    called: list[str] = []

    def call(name: str) -> int:
        called.append(name)
        return len(called)

    samples = timing.interleave({name: lambda name=name: call(name) for name in "abc"}, repeats=4)
    assert "".join(called) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"
    assert samples == {"a": [2, 12, 16, 20], "b": [4, 8, 18, 22], "c": [6, 10, 14, 24]}


def test_slow_call_sits_out_after_the_least_repeats() -> None:
    now = 0.0
    called = {"slow": 0, "quick": 0}

    def take(name: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        called[name] += 1

    calls = {"slow": lambda: take("slow", timing.SECONDS), "quick": lambda: take("quick", timing.SECONDS / 1000)}
    samples = timing.interleave(calls, repeats=20, clock=lambda: now)
    assert {name: len(taken) for name, taken in samples.items()} == {"slow": timing.LEAST_REPEATS, "quick": 20}
    assert called == {"slow": 1 + timing.LEAST_REPEATS, "quick": 2 * 20}  # a slow call is repeated in its first round


def test_a_call_beside_others_sits_out_earlier() -> None:
    now = 0.0

    def take() -> None:
        nonlocal now
        now += timing.SECONDS / 8

    samples = timing.interleave({"a": take, "b": take}, repeats=20, clock=lambda: now, beside=["b"])
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 8, "b": 3}


def test_a_ratio_is_the_median_of_those_of_rounds() -> None:
    seconds = {"cupy_flash": {"forward": [2.0, 9.0, 4.0], "backward": [2.0, 0.0, 5.0]}}
    seconds["SDPA flash"] = {"forward": [1.0, 9.0, 2.0, 7.0], "backward": [1.0, 0.0, 2.0, 7.0]}
    assert report.ratio({"seconds": seconds}, "cupy_flash", ("forward", "backward")) == 2.0
    assert report.ratio({"seconds": seconds}, "cupy_flash", ("forward",)) == 2.0


def test_result_says_what_ran_where(result: Any, folder: Path) -> None:
    assert result["command"] == f"python -m bench {' '.join(TINY)} --out {folder}"
    assert result["device"]["threads"] == 1
    assert {"cpu", "architecture", "cores", "load", "system", "gpu"} <= result["device"].keys()
    assert {"python", "numpy", "blas", "torch", "cupy_flash"} == result["versions"].keys()
    assert result["git"].keys() == {"commit", "dirty"}
    assert all(ceiling > 0 for ceiling in result["ceilings"].values())


@pytest.mark.parametrize(
    "section, stages", [("forward", {"forward"}), ("backward", {"forward", "backward"})], ids=["forward", "backward"]
)
def test_every_sample_of_every_case_is_kept(result: Any, section: str, stages: set[str]) -> None:
    records = result[section]["cases"]
    assert [(each["causal"], each["seqlen"]) for each in records] == [(False, 32), (False, 64), (True, 32), (True, 64)]
    for record in records:
        assert {"cupy_flash", "cupy_flash, torch", "standard", "SDPA flash", "SDPA math"} <= record["seconds"].keys()
        assert record["roofline_seconds"] > 0
        for seconds in record["seconds"].values():
            assert seconds.keys() == stages
            assert all(len(samples) == 2 and min(samples) > 0 for samples in seconds.values())


@pytest.mark.parametrize("section", ["forward", "backward"])
def test_every_implementation_computes_the_same_attention(result: Any, section: str) -> None:
    for record in result[section]["cases"]:
        assert record["errors"].keys() == ({"out"} if section == "forward" else {"dq", "dk", "dv"})
        for errors in record["errors"].values():
            assert errors.keys() == {run.LOW_PRECISION, *record["seconds"]}
            assert 0 < max(errors.values()) < 2 * errors[run.LOW_PRECISION] + 8 * np.finfo(np.float32).eps


def test_flex_attention_is_stopped_when_its_time_is_over(result: Any) -> None:
    assert result["forward"]["left_out"][implementations.FLEX_ATTENTION] == "did not compile within 0 s"
    assert result["backward"]["left_out"][implementations.FLEX_ATTENTION] == "has no backward on a CPU"


def test_every_section_has_its_plot(folder: Path) -> None:
    for section in ("forward", "backward", "memory"):
        assert (folder / f"{section}.png").read_bytes().startswith(b"\x89PNG")


def test_memory_of_a_point_is_that_of_its_own_process() -> None:
    case = replace(CASE, batch=1, heads=2, kv_heads=2, seqlen=1024)
    # Raise the peak memory of this process, which must not count as that of the measured child process.
    ballast = np.ones(2**28, np.uint8)
    forward, both = memory.measure("standard", case, threads=1)
    assert ballast[-1] == 1
    scores = model.scores_bytes(case)
    assert scores <= forward.allocated < 1.5 * scores
    assert 2 * scores <= both.allocated < 2.5 * scores
    assert forward.resident is None or 0.9 * scores < forward.resident < 2 * scores
    assert both.resident is None or 1.9 * scores < both.resident < 3 * scores
    assert both.bytes == max(both.allocated, both.resident or 0)
    ours, ours_both = memory.measure("cupy_flash", case, threads=1)
    assert max(ours.allocated, ours_both.allocated) < scores


def test_growth_exponent() -> None:
    lengths = np.array([512, 1024, 2048])
    assert memory.growth_exponent(lengths, 2**12 * lengths) == 1
    assert memory.growth_exponent(lengths, 2**12 * lengths**2) == 2
    assert memory.growth_exponent(lengths, [5, 0, 70]) == 0  # 5, 0 and 70 bytes are noise


def test_implementations_that_store_the_scores_are_left_out_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TIME_LIMIT", 2 * model.scores_bytes(CASE))
    monkeypatch.setattr(run, "present", lambda cases, training: (["cupy_flash", "standard"], {}))
    cases = [replace(CASE, seqlen=32), CASE]
    small, large = run.time_cases(cases, True, 1, Ceilings(1.0, 1.0), lambda step: None)["cases"]
    assert small["seconds"].keys() == {"cupy_flash", "standard"} and not small["left_out"]
    assert large["seconds"].keys() == {"cupy_flash"} and large["left_out"].keys() == {"standard"}
    (alone,) = run.time_cases([CASE], False, 1, Ceilings(1.0, 1.0), lambda step: None)["cases"]
    # a forward allocates half as much memory, so this case is within the limit
    assert alone["seconds"].keys() == {"cupy_flash", "standard"}


@pytest.mark.parametrize("command", ["forward", "backward", "memory"])
@pytest.mark.usefixtures("numpy_alone")
def test_runs_with_numpy_alone(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *TINY, "--causal", "--out", str(tmp_path)]) == 0
    output, announced = capsys.readouterr()
    assert re.search(r"^ +S +.*cupy_flash +standard", output, re.MULTILINE)
    assert "torch is not installed" in output
    assert output.endswith("\nPlots: none, as matplotlib is not installed\n")
    if command != "memory":
        assert re.search(r"^ *\d+ +yes .*\*[\d.]+", output, re.MULTILINE)  # the fastest of a row
    assert re.search(rf"^{command} 2/\d: S \d+", announced, re.MULTILINE)
    stored = json.loads((tmp_path / f"{command}.json").read_text(encoding="utf-8"))
    assert {record["causal"] for record in stored[command]["cases"]} == {True}
    assert [path.name for path in tmp_path.iterdir()] == [f"{command}.json"]


@pytest.mark.usefixtures("numpy_alone")
def test_says_that_a_gpu_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.results.gpu_name", lambda: "a large GPU")
    assert main(["forward", *TINY, "--out", str(tmp_path)]) == 0
    assert "The GPU, a large GPU, is not used" in capsys.readouterr().out


def test_forward_and_backward_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--gpu measures the regimes that the options select, or reports that there is no GPU."""
    words = ["backward", "--gpu", "--dtype", "bfloat16", "--head-dim", "128", "--seqlens", "512,1024"]
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
    calls = []
    monkeypatch.setattr("bench.gpu.run", lambda *arguments: calls.append(arguments) or 0)
    assert main([*words, "--causal", "--out", str(tmp_path)]) == 0
    (regimes, measured_by, _, out, command) = calls[0]
    assert [regime.name for regime in regimes] == [f"backward bfloat16, D 128, causal, {s}" for s in (512, 1024)]
    assert measured_by is bench.gpu.measure_others
    assert out == tmp_path / "gpu-backward.json" and command[:2] == ["python -m bench", "backward"]


def test_heads_must_be_a_multiple_of_kv_heads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["forward", "--heads", "8", "--kv-heads", "3"])
    assert "--heads 8 is not a multiple of --kv-heads 3" in capsys.readouterr().err


def test_table_in_plain_text_and_markdown() -> None:
    table = Table("Times", ["S", "ours"], [["512", "1.5"], ["1024", "-"]])
    assert table.plain() == "Times\n   S  ours\n 512   1.5\n1024     -"
    assert table.markdown() == "Times:\n\n| S | ours |\n| --: | --: |\n| 512 | 1.5 |\n| 1024 | - |"
    best = replace(table, best=frozenset([(0, 1)]))
    assert best.plain() == "Times\n   S  ours\n 512  *1.5\n1024     -"
    assert "| 512 | **1.5** |" in best.markdown()


def test_the_fastest_of_a_row_is_the_best_cell() -> None:
    stored = json.loads((Path(bench.__file__).parents[1] / "bench/results/cpu.json").read_text(encoding="utf-8"))
    for table in report.tables("backward", stored)[:2]:
        for number, row in enumerate(table.rows):
            times = [float(cell) for cell in row[2 : table.columns.index("over SDPA flash")] if cell != "-"]
            ((_, column),) = [cell for cell in table.best if cell[0] == number]
            assert float(row[column]) == min(times)


def test_a_wide_table_is_split_in_two() -> None:
    left, right = Table("A", ["S", "a", "b"], [["1", "2", "3"]]).split("b", "B")
    assert (left.title, left.columns, left.rows) == ("A", ["S", "a"], [["1", "2"]])
    assert (right.title, right.columns, right.rows) == ("B", ["S", "b"], [["1", "3"]])


@pytest.mark.parametrize("section", ["forward", "backward", "memory"])
def test_readme_tables_follow_the_results(section: str, result: Any, tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results"
    results.mkdir()
    (results / "small-box.json").write_text(json.dumps(result))
    name = f"small-box-{section}"
    readme.write_text(f"before\n<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->\nafter\n")
    command = ["tables", "--page", str(readme), "--results", str(results)]
    assert main([*command, "--check"]) == 1
    assert "old" in readme.read_text()
    assert main(command) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!--") and text.endswith("-->\nafter\n") and "old" not in text
    assert f"`{result['command']}` on {result['device']['cpu']}" in text
    assert re.search(r"^\| S \|.* cupy_flash \|.* standard \|", text, re.MULTILINE)
    assert main([*command, "--check"]) == 0

    result = json.loads(json.dumps(result))
    for record in result[section]["cases"]:
        if section == "memory":
            record["peaks"]["cupy_flash"]["forward"]["bytes"] = 3 * 2**30
        else:
            record["seconds"]["cupy_flash"] = {stage: [7.0, 9.0] for stage in record["seconds"]["cupy_flash"]}
    (results / "small-box.json").write_text(json.dumps(result))
    assert main([*command, "--check"]) == 1
    assert main(command) == 0
    assert ("| 3072.0 |" if section == "memory" else "| 8000 |") in readme.read_text()


@pytest.mark.parametrize(
    "text, message",
    [
        ("<!-- bench:cpu-forward -->\n", "no matching start or end"),
        ("<!-- bench:cpu-forward -->\n<!-- /bench:cpu-memory -->\n", "no matching start or end"),
        ("<!-- bench:none-forward -->\n<!-- /bench:none-forward -->\n", "has no none.json"),
        ("<!-- bench:cpu-overhead -->\n<!-- /bench:cpu-overhead -->\n", "cpu.json has no section 'overhead'"),
        ("<!-- bench:cpu-memory -->\n<!-- /bench:cpu-memory -->\n", "cpu.json has no section 'memory'"),
    ],
    ids=["unclosed", "crossed", "no-result", "no-such-section", "not-measured"],
)
def test_bad_marker_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text("{}")
    with pytest.raises(ValueError, match=re.escape(message)):
        regenerate(text, tmp_path)


def test_readme_is_up_to_date() -> None:
    assert main(["tables", "--check"]) == 0


def test_default_sizes_are_those_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr("bench.__main__._measure", lambda options, arguments: measured.append(options) or 0)
    assert main([]) == 0
    case = bench.__main__._shape(*measured)
    assert (case.batch, case.heads, case.kv_heads, case.head_dim, case.dtype) == (1, 8, 8, 64, "float32")
    assert bench.__main__.SEQLENS["forward"] == bench.__main__.SEQLENS["backward"] == (512, 1024, 2048, 4096)
    assert max(bench.__main__.SEQLENS["memory"]) == 8192
