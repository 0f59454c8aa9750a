"""python -m bench forward|backward --sweep on the simulator, with a fake clock."""

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu
from bench.__main__ import main
from bench.kernel_development import costs, marks, sweep
from bench.kernel_development.published import flash_attention_3
from bench.kernel_development.tables import block
from cupy_flash.plan.plan import candidates, plan


@pytest.fixture
def simulated(monkeypatch):
    """Return a sweep on a simulated H100 with two tiles per engine and one other implementation, which refuses.

    Yields the list of kernels that are compiled in advance.
    """
    compiled = []

    def refuse():
        raise RuntimeError("not for these heads")

    def submit(function, launch, arch):
        compiled.append(launch)
        failed = Future()
        failed.set_exception(RuntimeError("whoever calls this kernel is told"))
        return failed

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(sweep, "compilers", lambda: SimpleNamespace(submit=submit))
    monkeypatch.setattr(sweep, "others", lambda *of: {"another": refuse})
    monkeypatch.setattr(sweep, "candidates", lambda *chosen: candidates(*chosen)[:2])
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator:sm_90a")
    monkeypatch.setattr(gpu, "WARM_UP", 1)
    monkeypatch.setattr(gpu, "time_interleaved", lambda calls, announce: dict.fromkeys(calls, [2.0, 1.0, 4.0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return compiled


def tiny(backward, dtype="bfloat16", **more):
    return gpu.Regime(dtype, 256, 16, True, backward, tokens=16, **more)


def measured(regime, lost=None):
    return sweep.measure_tiles(regime, lost or {}, lambda step, seconds: None)


def test_every_tile_of_every_engine_is_measured(simulated):
    """The sweep requests wgmma, which otherwise never runs."""
    case = measured(tiny(backward=False))
    assert [launch.kernel for launch in simulated] == 2 * ["mma/forward"] + 2 * ["wgmma/forward"]
    assert [tile["engine"] for tile in case["tiles"]] == ["mma", "mma", "wgmma", "wgmma"]
    assert list(case["tflops"]) == [tile["name"] for tile in case["tiles"]]
    assert set(case["tflops"].values()) == {tiny(backward=False).flops / 2e9}
    assert case["left_out"] == {"another": "RuntimeError: not for these heads"}
    for first, second in (case["tiles"][:2], case["tiles"][2:]):
        assert 0 < first["predicted_ms"] <= second["predicted_ms"]
    # `python -m bench costs` finds the tiles of a record by their names.
    assert [row[1] for row in costs.choices([case]).rows] == ["mma", "wgmma"]
    assert {tuple(row[::4]) for row in costs.constants([case], {}).rows} == {("mma", "2"), ("wgmma forward", "2")}


def test_every_tile_of_a_backward_is_measured(simulated, monkeypatch):
    monkeypatch.setattr(sweep, "engines", lambda dtype: ("mma", "wgmma", "cpu"))
    case = measured(tiny(backward=True))
    assert list(case["tflops"]) == [tile["name"] for tile in case["tiles"]]
    assert {tile["engine"] for tile in case["tiles"]} == {"mma", "wgmma"} and case["regime"].startswith("backward")
    assert case["left_out"]["cpu"] == "the call goes to backend simulator"


@pytest.mark.parametrize("wrong", ["full", "NaN"])
def test_a_tile_of_another_attention_is_left_out(simulated, monkeypatch, wrong):
    """The second tile ignores the mask, or returns NaN."""

    def with_one_wrong(chosen, engine):
        first, (tile, second) = candidates(chosen, engine)[:2]
        if wrong == "full":
            second = plan(second.problem._replace(mask=second.problem.mask._replace(right=None)), second.device)
        else:
            second = second._replace(problem=second.problem._replace(scale=float("nan")))
        return [first, (tile, second)]

    monkeypatch.setattr(sweep, "engines", lambda dtype: ("mma",))
    monkeypatch.setattr(sweep, "candidates", with_one_wrong)
    case = measured(tiny(backward=False))
    first, second = (tile["name"] for tile in case["tiles"])
    assert list(case["tflops"]) == [first]
    assert case["left_out"][second] == f"result differs from {first}"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_results_of_tiles_are_compared_with_those_of_another(simulated, monkeypatch, backward):
    """If the first tile gives wrong results, it is the only tile left out."""

    def with_first_wrong(chosen, engine):
        (tile, wrong), *others = candidates(chosen, engine)[:2]
        return [(tile, wrong._replace(problem=wrong.problem._replace(scale=2.0))), *others]

    monkeypatch.setattr(sweep, "engines", lambda dtype: ("mma",))
    monkeypatch.setattr(sweep, "candidates", with_first_wrong)
    monkeypatch.setattr(sweep, "others", lambda *of: {"SDPA flash": gpu.others(*of)["SDPA flash"]})
    case = measured(tiny(backward))
    first, second = (tile["name"] for tile in case["tiles"])
    assert list(case["tflops"]) == ["SDPA flash", second]
    assert case["left_out"] == {first: "result differs from SDPA flash"}


def test_a_kind_that_is_lost_is_not_called(simulated):
    every = measured(tiny(backward=False))
    wgmma = [tile["name"] for tile in every["tiles"] if tile["engine"] == "wgmma"]
    case = measured(tiny(backward=False), {gpu.kind(name): "hangs" for name in wgmma})
    assert case["tiles"] == every["tiles"]
    assert list(case["tflops"]) == [name for name in every["tflops"] if name not in wgmma]
    assert {case["left_out"][name] for name in wgmma} == {"hangs"}


def test_gradients_in_one_order_and_fp8_have_no_others(simulated, monkeypatch):
    monkeypatch.setattr(sweep, "others", gpu.others)
    case = measured(tiny(backward=True, deterministic=True))
    assert case["regime"].endswith("deterministic") and case["deterministic"]
    assert not any("add_dq=True" in name for name in case["tflops"])  # atomic additions of dQ have no fixed order
    assert list(case["tflops"]) == [tile["name"] for tile in case["tiles"]] and not case["left_out"]
    case = measured(tiny(backward=False, dtype="float8_e4m3fn"))
    assert {tile["engine"] for tile in case["tiles"]} == {"wgmma"}
    assert list(case["tflops"]) == [tile["name"] for tile in case["tiles"]] and not case["left_out"]


def test_regimes_without_a_mark_do_not_wait_for_a_compiler(simulated, monkeypatch):
    flex = {"FlexAttention": lambda: None}
    monkeypatch.setattr(sweep, "others", lambda *of: dict(flex))
    assert "takes seconds to compile" in measured(tiny(backward=False))["left_out"]["FlexAttention"]
    monkeypatch.setattr(sweep, "MARKS", {tiny(backward=False): None})
    assert "FlexAttention" in measured(tiny(backward=False))["tflops"]


def test_regimes_with_a_mark_come_first():
    every = sweep.regimes(backward=False)
    names = [regime.name for regime in every]
    assert len(set(names)) == len(names) == 40 + 4  # two regimes of fp8, two of another length
    marked = [regime for regime in marks.MARKS if not regime.backward and regime.dtype != "float32"]
    assert every[: len(marked)] == marked and names[0] == "forward bfloat16, D 128, full, 16384"
    assert "forward float8_e4m3fn, D 128, causal, 16384" in names
    assert "forward bfloat16, D 192, Dv 128, causal, 512" in names
    assert "backward bfloat16, D 128, full, 16384, deterministic" in [
        each.name for each in sweep.regimes(backward=True)
    ]
    (one,) = sweep.regimes(True, "float16", [64], [2048], True)
    assert one == gpu.Regime("float16", 64, 2048, True, True)
    assert [each.name for each in sweep.regimes(False, "float32", [64], [1024], False)] == [
        "forward float32, D 64, full, 1024"
    ]
    assert sweep.engines("float16") == sweep.engines("bfloat16") == ("mma", "wgmma")
    assert sweep.engines("float32") == ("simt",) and sweep.engines("float8_e4m3fn") == ("wgmma",)


@pytest.mark.parametrize(
    "regime, tflops",
    [
        (gpu.Regime("bfloat16", 128, 16384, False), 648),
        (gpu.Regime("float16", 256, 4096, True), 612),
        (gpu.Regime("bfloat16", 64, 512, False, True), 272),
        (gpu.Regime("bfloat16", 64, 512, True, True), None),
        (gpu.Regime("bfloat16", 96, 4096, False), None),
        (gpu.Regime("bfloat16", 128, 4096, False, False, 64), None),
        (gpu.Regime("bfloat16", 128, 768, False), None),
        (gpu.Regime("float32", 128, 4096, False), None),
    ],
)
def test_published_figures(regime, tflops):
    assert flash_attention_3(regime) == tflops


def stored(causal, tflops):
    """Return a record in which the second mma tile, or the only wgmma tile, may be the fastest."""
    tiles = [
        dict(name=f"{engine} {size}", engine=engine, size=size, predicted_ms=1.0)
        for engine, size in (("mma", "64x64/128"), ("mma", "128x64/256"), ("wgmma", "128x128/384"))
    ]
    regime = gpu.Regime("bfloat16", 128, 4096, causal)
    return dict(regime=regime.name, **regime._asdict(), tiles=tiles, tflops=tflops, matmul_tflops=800.0)


def test_table():
    cases = [
        stored(True, {"SDPA cuDNN": 500.0, "mma 64x64/128": 250.0}),
        stored(
            False,
            {"SDPA flash": 350, "mma 64x64/128": 300.0, "mma 128x64/256": 320.0, "wgmma 128x128/384": 660.0},
        ),
        stored(False, {}) | dict(dtype="float16"),
    ]
    table, other = sweep.tables(cases)
    assert table.title == "Forward, bfloat16, TFLOP/s (median)" and "float16" in other.title
    columns = ["D", "mask", "S", "mma, best tile", "mma, the plan's", "wgmma, best tile", "wgmma, the plan's"]
    assert table.columns == [*columns, "SDPA flash", "SDPA cuDNN", "FA3 (published, H100)", "R_best", "R_mm"]
    plans, hoppers = "300 (64x64/128, 1 of 2)", "660 (128x128/384, 1 of 1)"
    best = "320 (128x64/256, 2 of 2)"
    assert table.rows[0] == ["128", "full", "4096", best, plans, hoppers, hoppers, "350", "-", "638", "1.89", "0.82"]
    plans, hoppers = "250 (64x64/128, 1 of 2)", "- (128x128/384, 1 of 1)"
    assert table.rows[1] == ["128", "causal", "4096", plans, plans, "-", hoppers, "-", "500", "579", "0.50", "0.31"]
    assert other.rows[0][-2:] == ["-", "-"]


def test_command(tmp_path, monkeypatch, capsys):
    """Options select the regimes; the printed table equals that of the file; without a GPU the command reports that."""
    assert main(["backward", "--sweep", "--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
    monkeypatch.setattr("bench.kernel_development.sweep_plot.plot", lambda result, path: False)
    runs = []

    def run(*arguments):
        runs.append(arguments)
        cases = [stored(False, {"mma 64x64/128": 300.0})]
        Path(arguments[3]).write_text(json.dumps(dict(command="python -m bench", device=dict(gpu="H"), cases=cases)))
        return 3

    monkeypatch.setattr(gpu, "run", run)
    words = ["forward", "--sweep", "--head-dim", "192", "--seqlens", "8192", "--causal", "--seconds", "60"]
    assert main([*words, "--out", str(tmp_path)]) == 3
    regimes, measured_by, seconds, out, command = runs[0]
    assert [regime.name for regime in regimes] == ["forward bfloat16, D 192, Dv 128, causal, 8192"]
    assert (measured_by, seconds, out) == (sweep.measure_tiles, 60, tmp_path / "sweep-forward.json")
    assert command[:3] == ["python -m bench", "forward", "--sweep"]
    assert "64x64/128" in capsys.readouterr().out
    (table,) = sweep.tables(json.loads(out.read_text())["cases"])
    assert block("sweep-forward", tmp_path) == f"`python -m bench` on H.\n\n{table.markdown()}"
    with pytest.raises(SystemExit, match="2"):
        main(["forward", "--sweep", "--gpu"])
