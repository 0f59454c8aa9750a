"""What runs unattended on a GPU, as far as it goes without one."""

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from functools import reduce
from types import SimpleNamespace

import numpy as np
import on_gpu as gpu_backend
import pytest
import sanitize
import test_fp8
import torch
from cases import planned
from conformance import on_gpu

from bench import gpu
from bench.results import ROOT
from cupy_flash.problem import Saved

TOOL = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in *{failing}*) exit 7 ;; esac
"""


@pytest.fixture
def machine(tmp_path):
    """Runs bench/on_gpu.sh where python3 and the tools of a GPU only write down how they are called."""
    calls, tools = tmp_path / "calls", tmp_path / "tools"
    tools.mkdir()

    def run(part, *, failing="nothing", names=("nvidia-smi", "python", "compute-sanitizer")):
        calls.write_text("")
        for name in ("nvidia-smi", "python", "compute-sanitizer"):
            (tools / name).unlink(missing_ok=True)
        for name in names:
            (tools / name).write_text(TOOL.format(failing=failing))
            (tools / name).chmod(0o755)
        out = tmp_path / "out"
        (out / "conformance").mkdir(parents=True, exist_ok=True)
        environment = dict(PATH=f"{tools}:{os.environ['PATH']}", CALLS=str(calls), PYTHON="python", OUT=str(out))
        environment["CONFORMANCE"] = str(tmp_path / "conformance")
        done = subprocess.run(
            ["bash", str(ROOT / "bench" / "on_gpu.sh"), part],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        steps = out / "steps.jsonl"
        return (
            done,
            calls.read_text().splitlines(),
            [json.loads(x) for x in steps.read_text().splitlines()] if steps.is_file() else [],
        )

    return run


def test_every_part_runs_once(machine):
    done, calls, steps = machine("all")
    assert done.returncode == 0, done.stderr
    names = [step["step"] for step in steps]
    assert names == [
        "peers",
        "conformance",
        "simulator",
        "gpu-tests",
        "half",
        "behaviour",
        "adapters",
        "simt",
        "overhead",
        "sweep-forward",
        "sweep-backward",
        "calls",
        *(f"{tool}-{engine}" for engine in ("simt", "mma", "wgmma", "fp8") for tool in ("memcheck", "synccheck")),
        "racecheck-simt",
        "racecheck-mma",
    ]
    assert {step["status"] for step in steps} == {0}
    assert any("bench.gpu peers" in call for call in calls) and any("--tool synccheck" in call for call in calls)
    # Four processes of pytest share their kernels, and none lets jax take the memory of the GPU.
    tests = [call for call in calls if "timeout_method=thread" in call]
    assert len(tests) == 4 and all(f"-n {os.sysconf('SC_NPROCESSORS_ONLN')}" in call for call in tests)
    again, calls, steps = machine("all")
    assert again.returncode == 0 and len(steps) == len(names)
    assert not [call for call in calls if not call.startswith(("nvidia-smi", "python -c import xdist"))]


def test_a_failed_step_is_told_and_run_again(machine):
    done, _, steps = machine("4", failing="bench.gpu")
    assert done.returncode == 1 and [step["status"] for step in steps] == [7, 0]
    done, calls, steps = machine("4")
    assert done.returncode == 0 and [step["status"] for step in steps] == [7, 0, 0]
    assert "bench.gpu simt" in "\n".join(calls) and "overhead" not in "\n".join(calls)


def test_without_a_gpu_it_says_so(machine):
    done, calls, steps = machine("1", failing="-L")
    assert done.returncode == 2 and "there is no GPU here" in done.stderr and not steps
    assert [call for call in calls if "bench" in call] == []


def test_bench_says_that_torch_finds_no_gpu(tmp_path):
    command = [sys.executable, "-m", "bench.gpu", "peers", "--out", str(tmp_path / "x.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (2, "bench: torch finds no GPU here")


@pytest.mark.parametrize(
    "regime, flops, name",
    [
        pytest.param(
            gpu.Regime("bfloat16", 128, 8192, False),
            4 * 2 * 16 * 8192**2 * 128,
            "forward bfloat16, D 128, full, 8192",
            id="full",
        ),
        pytest.param(
            gpu.Regime("bfloat16", 64, 4096, True, True),
            2.5 * 2 * 4 * 32 * 4096**2 * 64,
            "backward bfloat16, D 64, causal, 4096",
            id="causal-backward",
        ),
        pytest.param(
            gpu.Regime("bfloat16", 192, 8192, True, False, 128),
            2 * 10 * 8192**2 * 320,
            "forward bfloat16, D 192, Dv 128, causal, 8192",
            id="wide-keys",
        ),
    ],
)
def test_regimes_by_hand(regime, flops, name):
    assert (regime.flops, regime.name) == (flops, name)
    for regimes in gpu.REGIMES.values():  # a file knows its cases by their names
        assert len({regime.name for regime in regimes}) == len(regimes)


def test_a_run_goes_on_where_time_was_over(tmp_path, monkeypatch, capsys):
    """No regime begins that would end later, by the longest of those before; what a file has is not measured again."""
    clock, measured = [0.0], []

    def measure(regime):
        measured.append(regime.seqlen)
        clock[0] += 10 * len(measured)
        tflops = {"slow": 1.0, "fast": 2.0}
        return dict(
            regime=regime.name,
            tflops=tflops,
            milliseconds=dict.fromkeys(tflops, [1.0]),
            left_out={"other": "not installed"},
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("bench.results.gpu_name", lambda: "a large GPU")
    monkeypatch.setattr(gpu, "matmul", lambda: dict(tflops=700.0 + len(measured)))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    regimes = [gpu.Regime("bfloat16", 64, seqlen, True) for seqlen in (1, 2, 3, 4)]
    words = (regimes, measure, 45, tmp_path / "x.json", ["python -m bench", "forward", "--gpu"])
    assert gpu.run(*words) == 3 and measured == [1, 2]  # 30 s have passed, and the next may take 20
    told, complaint = capsys.readouterr()
    assert complaint == "out of time: 2 regimes are left, run again to go on\n"
    assert told.index("2.0 TFLOP/s, 1.000 ms: fast") < told.index("1.0 TFLOP/s, 1.000 ms: slow")
    assert "left out other: not installed" in told and "3 regimes are left, about 30 s" in told
    assert gpu.run(*words[:2], 1000, *words[3:]) == 0 and measured == [1, 2, 3, 4]
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored["command"] == "python -m bench forward --gpu"
    assert [case["matmul_tflops"] for case in stored["cases"]] == [700, 700, 702, 702]  # of the same process


def test_clock_and_power_of_the_samples():
    state = gpu.summary(["1980, 612.25\n", "1755, 698.50\n", "1800, [N/A]\n", "1830, 650.00\n", "cut"])
    assert state["samples"] == 3
    assert state["sm_clock_mhz"] == {"median": 1830, "least": 1755, "most": 1980}
    assert state["power_w"]["median"] == 650
    assert gpu.summary([]) == {"samples": 0}


def test_sanitized_calls_start_every_kernel():
    """And every kind of tile of Hopper's engine; the calls in fp8 are some of its tests."""
    kernels, constants = set(), set()
    for engine in sanitize.DTYPES:
        for _, case, words in sanitize.calls(engine):
            call = case.call()
            out, lse = np.zeros((*call.q.shape[:-1], call.v.shape[-1]), call.q.dtype), np.zeros_like(call.dlse)
            for saved in (None, Saved(call.dout, out, lse, call.dlse)):
                chosen, _ = planned(case, saved, "sm_90a", engine=engine, backend="simulator", **words)
                kernels |= {launch.kernel for launch in chosen.launches}
                constants |= {pair for launch in chosen.launches for pair in launch.constants}
    folder = ROOT / "kernels_cu"
    every = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.cu")}
    assert kernels == every - {"partials", "wgmma/forward_fp8", "wgmma/vt"}
    assert {(name, True) for name in ("PERSISTENT", "TAKE_TURNS", "PAIRED", "DQ_IN_BULK", "DQ_IN_ORDER")} <= constants
    assert set(sanitize.FP8) <= set(test_fp8.OPTIONS)


REST = """
import os, sys, threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np

lost = []

def synchronize():
    if lost:
        raise RuntimeError("the context is lost")

sys.modules["cupy"] = SimpleNamespace(
    cuda=SimpleNamespace(runtime=SimpleNamespace(deviceSynchronize=synchronize))
)
from conformance import on_gpu

def fail(message, loses=False):
    lost.extend([message] * loses)
    raise ValueError(message)

def never_ends():
    threading.Event().wait()

on_gpu.LIMIT = 1
on_gpu.capability = lambda: 90
on_gpu.works = lambda capability: {
    "first": lambda: np.arange(3),
    "refused": lambda: fail("no such instruction"),
    "after.it": lambda: print("runs") or np.arange(4),
    "breaks": lambda: fail("illegal address", loses=True),
    "hangs": never_ends,
    "last": lambda: np.arange(5),
}
raise SystemExit(on_gpu.run_rest(Path(sys.argv[1])))
"""


def test_a_micro_kernel_that_breaks_its_process_costs_no_other_its_result(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(on_gpu, "capability", lambda: 90)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    command = (sys.executable, "-c", REST)
    assert on_gpu.main(tmp_path, command) == 1
    told = capfd.readouterr().out.splitlines()
    assert told == [
        "runs",
        f"3 micro-kernels ran: {tmp_path / 'sm_90.npz'}",
        "breaks: illegal address",
        "hangs: its process ended, or had to after 1 s",
        "refused: no such instruction",
    ]
    with np.load(tmp_path / "sm_90.npz") as stored:
        assert {name: len(stored[name]) for name in stored} == {"first": 3, "after_it": 4, "last": 5}
    on_gpu.main(tmp_path, command)
    assert "runs" not in capfd.readouterr().out  # again what has no result, and that alone


# Lines that only a GPU runs.
ONLY_ON_A_GPU = [
    *(ROOT / "tests" / "gpu").glob("*.py"),
    *(ROOT / "tests" / name for name in ("on_gpu.py", "sanitize.py", "conformance/on_gpu.py")),
    *(ROOT / "cupy_flash" / name for name in ("arrays.py", "device.py", "ahead.py", "backends/cuda.py")),
]


def names_of(library, text):
    """Every dotted name of a library in a Python text: `torch.cuda.Stream` of torch.cuda.Stream().cuda_stream."""
    for node in ast.walk(ast.parse(text)):
        words = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if words and isinstance(node, ast.Name) and node.id == library:
            yield ".".join(reversed(words))


@pytest.mark.parametrize("library", ["torch", *(["cupy"] if importlib.util.find_spec("cupy") else [])])
def test_every_name_that_only_a_gpu_would_miss_is_there(library):
    module = importlib.import_module(library)
    names = {name for path in ONLY_ON_A_GPU for name in names_of(library, path.read_text())}
    assert {"torch": "cuda.CUDAGraph", "cupy": "cuda.MemoryPool"}[library] in names
    for name in sorted(names):
        reduce(getattr, name.split("."), module)


def test_a_process_that_lost_its_gpu_leaves_the_tests_to_others(monkeypatch):
    class CUDARuntimeError(RuntimeError):
        pass

    def synchronize():
        raise CUDARuntimeError("an illegal memory access was encountered")

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, deviceSynchronize=synchronize)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with pytest.raises(CUDARuntimeError):  # alone it has to go on
        gpu_backend.leave_a_lost_gpu()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    with pytest.raises(CUDARuntimeError):
        gpu_backend.leave_a_lost_gpu()
    assert left == [1]
